"""Triton's interpreter, repaired."""

from __future__ import annotations

import os
from functools import cache
from typing import Any


@cache
def repair() -> None:
    """Three faults: products of bfloat16 multiply its bits as integers, rounding to it cuts, and rounding to e4m3
    forgets the carry from the mantissa."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    plain = builder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype("uint32") << 16
        return interpreter.TensorHandle(bits.view("float32"), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain(self, widened(a), widened(b), *rest)

    cast = builder.cast_impl

    def cast_impl(self: Any, source: Any, kind: Any) -> Any:
        if source.dtype.scalar != tl.float32 or kind.scalar != tl.bfloat16:
            return cast(self, source, kind)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16)
        return interpreter.TensorHandle(rounded.view(torch.int16).numpy().view("uint16"), tl.bfloat16)

    convert = builder.create_fp_to_fp

    def create_fp_to_fp(self: Any, source: Any, kind: Any, rounding: Any) -> Any:
        if source.dtype.scalar != tl.float32 or kind.scalar != tl.float8e4nv:
            return convert(self, source, kind, rounding)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.float8_e4m3fn)
        return interpreter.TensorHandle(rounded.view(torch.uint8).numpy(), tl.float8e4nv)

    builder.create_dot, builder.cast_impl = create_dot, cast_impl
    builder.create_fp_to_fp = create_fp_to_fp

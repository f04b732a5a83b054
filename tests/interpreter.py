"""Triton's interpreter, repaired."""

from __future__ import annotations

import os
from functools import cache
from typing import Any


@cache
def repair() -> None:
    """Two faults with bfloat16: products multiply its bits as integers, and rounding to it cuts instead."""
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

    builder.create_dot, builder.cast_impl = create_dot, cast_impl

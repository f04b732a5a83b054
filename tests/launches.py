"""What a step would launch on a GPU outside the model's layers, counted on the CPU."""

from __future__ import annotations

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flash_dllm

SOURCE = Path(flash_dllm.__file__).parent
LAYERS = ("kernels/", "models/")
"""Where layers and head are computed, by other code than on a GPU."""
THIN = ("core/constants.py",)
"""Whose callers are counted instead."""
FREE = {
    "alias", "as_strided", "detach", "diagonal", "empty", "empty_like", "empty_strided", "expand", "lift_fresh",
    "new_empty", "permute", "_reshape_alias", "select", "slice", "split", "split_with_sizes", "squeeze", "t",
    "transpose", "unbind", "unfold", "unsqueeze", "_unsafe_view", "view",
}  # fmt: skip
"""Ops that launch nothing."""
MORE = {"sort": 3} | dict.fromkeys(("constant_pad_nd", "masked_fill", "scatter", "scatter_add", "topk"), 2)
"""Ops of several launches: copies of what they change, numbers that they sort along."""
WIDENING = {"sum": torch.int64, "cumsum": torch.int64, "cumprod": torch.int64, "prod": torch.int64}
"""Reductions that convert smaller integers in a launch of their own."""


def launches(func: Any, args: tuple[Any, ...]) -> int:
    """Kernels that an aten op launches on a GPU."""
    name = func.overloadpacket.__name__
    if name in FREE:
        return 0
    first = args[0] if args and isinstance(args[0], torch.Tensor) else None
    if name == "where" and len(args) == 3:
        # Operands of two types are converted first.
        return 1 + (args[1].dtype != args[2].dtype)
    if name in WIDENING and first is not None and not first.is_floating_point():
        return 1 + (first.dtype != WIDENING[name])
    return MORE.get(name, 1)


class LaunchCounter(TorchDispatchMode):
    """Counts launches by the line of ours that makes them, as ``file:line``; those of layers and head are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.by_line: Counter[str] = Counter()
        self.ops: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self.by_line.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # In inference mode ops that are made of others arrive whole.
        with self:
            parts = func.decompose(*args, **(kwargs or {}))
        if parts is not NotImplemented:
            return parts
        count = launches(func, args)
        line = _line() if count else None
        if line is not None:
            self.by_line[line] += count
            self.ops[f"{line} {func}"] += count
        return func(*args, **(kwargs or {}))


def _line() -> str | None:
    """Our innermost line, None where it is in a layer."""
    for frame, number in traceback.walk_stack(None):
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SOURCE):
            name = path.relative_to(SOURCE).as_posix()
            if name.startswith(LAYERS):
                return None
            if name not in THIN:
                return f"{name}:{number}"
    return "elsewhere"

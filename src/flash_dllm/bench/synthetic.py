"""Engines and requests that need no checkpoint: random weights of a named shape, random prompts, a fixed pace."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from flash_dllm.bench.forced import forced
from flash_dllm.bench.timing import BenchError
from flash_dllm.core.method import Method
from flash_dllm.core.state import Canvas
from flash_dllm.core.step import Vocabulary
from flash_dllm.engine.engine import Engine
from flash_dllm.engine.request import Request
from flash_dllm.kernels.choice import kernels_of
from flash_dllm.methods import build_method, split_name
from flash_dllm.models.config import SHAPES, ModelConfig
from flash_dllm.models.layers import Model, random_model
from flash_dllm.models.load import load_model, read_config, resolve

CPU_LIMIT = 300e6
"""Parameters above which a shape is not set up on the CPU: it would take minutes and most of the memory."""


@cache
def config_of(shape: str) -> ModelConfig:
    """The architecture of a named shape or of a checkpoint (bundled name, folder or hub id).

    Raises:
        BenchError: neither, or no masked diffusion model.
    """
    if shape in SHAPES:
        config = SHAPES[shape]
    elif "/" in shape or Path(shape).is_dir():
        config = read_config(resolve(shape, weights=False))
    else:
        raise BenchError(f"shape {shape!r} is not known; there are {', '.join(SHAPES)}, and checkpoints")
    if config.mask_id is None or config.causal:
        raise BenchError(f"shape {shape!r} is no masked diffusion model")
    return config


@dataclass(frozen=True)
class Setting:
    """A method on a shape.

    Attributes:
        shape: a name of :data:`flash_dllm.models.config.SHAPES` (random weights), or a checkpoint (its own).
        method: ``cache+decoding``, with the options of their constructors in ``options``.
        commits, accepts: the forced pace (tokens a step by confidence, drafts accepted a step); None lets the random
            weights decide, which commits one token a step where epsilon is 1.
        impl: forced implementation of every op, None for the op's own choice.
        eager: no captured graphs.
        gang: seat new requests only when every slot is free (no refill).
    """

    shape: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    commits: float | None = None
    accepts: float = 0.0
    impl: str | None = None
    eager: bool = False
    gang: bool = False

    @property
    def config(self) -> ModelConfig:
        return config_of(self.shape)

    def build(self) -> Method:
        """The method, at the forced pace if there is one."""
        cache, decoding = split_name(self.method)
        method = build_method(cache, decoding or "threshold", family=self.config.family, **self.options)
        return method if self.commits is None else forced(method, self.commits, self.accepts)

    def row(self) -> dict[str, Any]:
        """What a report says about it."""
        return {
            "shape": self.shape, "method": self.method, "options": self.options,
            "weights": "random" if self.shape in SHAPES else "loaded",
            "commit_per_step": self.commits, "accept_per_step": self.accepts if self.commits else None,
            "impl": self.impl or "auto", "eager": self.eager, "refill": not self.gang,
            "verify": self.method.endswith("+verify"),
        }  # fmt: skip


def weights(shape: str, dtype: torch.dtype, device: torch.device) -> Model:
    """Random weights of a named shape, or those of a checkpoint.

    Raises:
        BenchError: no such shape, or too large for the CPU.
    """
    config = config_of(shape)
    if device.type == "cpu" and config.n_parameters > CPU_LIMIT:
        raise BenchError(
            f"shape {shape!r} has {config.n_parameters / 1e9:.1f} billion parameters: measure it on a GPU, or a "
            "smaller shape here"
        )
    if shape in SHAPES:
        return random_model(config, dtype, device)
    return load_model(shape, None, dtype, str(device))


def engine_for(setting: Setting, model: Model, slots: int, positions: int) -> Engine:
    """An engine for ``slots`` canvases of up to ``positions``."""
    config = setting.config
    assert config.mask_id is not None
    method = setting.build()
    return Engine(
        model, method, Vocabulary(config.n_tokens, config.mask_id), slots=slots,
        positions=method.cache.positions(positions), kernels=kernels_of(setting.impl or "auto"),
        enforce_eager=setting.eager,
    )  # fmt: skip


def request(
    config: ModelConfig, name: str, prompt: int, answer: int, room: int, made: random.Random, **numbers: float
) -> Request:
    """A random prompt and ``room`` masked positions, of which the first ``answer`` are decoded."""
    assert config.mask_id is not None
    ids = [made.randrange(config.n_tokens - 8) for _ in range(prompt)] + [config.mask_id] * room
    masked = [False] * prompt + [True] * room
    given = {"stop_at_eos": False, "epsilon": 1.0, "pad": room - answer, **numbers}
    return Request(name, Canvas(ids, masked, (), given))

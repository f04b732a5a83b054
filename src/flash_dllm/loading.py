"""A checkpoint with all that belongs to it: weights, tokenizer and the defaults that its files name."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flash_dllm.methods.guide import vocabulary_map
from flash_dllm.models.config import ModelConfig, ModelError
from flash_dllm.models.layers import Model
from flash_dllm.models.load import Form, load_model, read_config, resolve
from flash_dllm.models.tokenizer import Tokenizer, load_generation_defaults, load_tokenizer, stop_ids
from flash_dllm.parallel import Team, check_split, join, split, with_sums
from flash_dllm.params import EngineArgs
from flash_dllm.quant import allocator, check_device, check_model

LOAD = 1800.0
"""Seconds for every rank to have read its part of a checkpoint."""
RANK_COMMAND = (sys.executable, "-m", "flash_dllm.tensor_parallel")
"""What rank 0 starts the others with."""


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory; several :class:`LLM` may share one. ``team``: the ranks that hold its other parts."""

    name: str
    model: Model
    tokenizer: Tokenizer | None
    stop_ids: tuple[int, ...]
    max_tokens: int | None
    team: Team | None = None

    @property
    def config(self) -> ModelConfig:
        return self.model.config


def pick_device(name: str) -> str:
    """``auto`` takes the CUDA GPU if there is one, else the CPU.

    Raises:
        ModelError: no such kind of device, or not on this machine.
    """
    here = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return "cuda" if here["cuda"] else "cpu"
    kind = name.partition(":")[0]
    if kind not in here:
        raise ModelError(f"device = {name!r}: unknown, only auto, {', '.join(here)}")
    if not here[kind]:
        raise ModelError(f"device = {name!r}: not available on this machine or in this build of torch")
    return name


def pick_dtype(name: str, device: str) -> str:
    """``auto`` is the checkpoint's own dtype, on the CPU float32, which gives the same answers everywhere."""
    return "float32" if name == "auto" and device.startswith("cpu") else name


def load(args: EngineArgs) -> Loaded:
    """Load weights and tokenizer.

    Raises:
        ModelError: the checkpoint is missing, broken, not supported or no masked diffusion model.
    """
    device = pick_device(args.device)
    folder = resolve(args.model, args.revision)
    model, team = _load_model(args, folder, device)
    if model.config.mask_id is None or model.config.causal:
        raise ModelError(
            f"{args.model}: a left-to-right model ({model.config.family}), not a masked diffusion model"
        )
    given = args.chat_template
    # Jinja that writes anything has a brace in it; the name of a file hardly ever does.
    template = given if given is None or "{" in given else Path(given)
    tokenizer = load_tokenizer(folder, template)
    defaults = load_generation_defaults(folder)
    max_tokens = defaults.get("max_new_tokens")
    if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
        raise ModelError(
            f"{folder / 'generation_config.json'}: max_new_tokens = {max_tokens!r}: must be positive"
        )
    return Loaded(args.model, model, tokenizer, stop_ids(model.config, tokenizer, defaults), max_tokens, team)


def _load_model(args: EngineArgs, folder: Path, device: str) -> tuple[Model, Team | None]:
    """The weights in the form that ``args`` asks for, and the ranks that share them."""
    dtype = pick_dtype(args.dtype, device)
    matrix = None
    if args.quantization is not None:
        matrix = partial(allocator, args.quantization)
        check_device(args.quantization, device)
    if args.tensor_parallel_size == 1:
        model = load_model(args.model, args.revision, dtype, device, form=Form(matrix))
        return _checked(model, args), None
    check_split(read_config(folder), args.tensor_parallel_size)
    team = join(args.tensor_parallel_size, device, RANK_COMMAND, options_text(args))
    try:
        form = Form(matrix, partial(split, ranks=team.group))
        model = load_model(args.model, args.revision, dtype, team.group.device, form=form)
        model = with_sums(_checked(model, args))
        team.ready(LOAD)
    except BaseException as exc:
        team.fail(exc)
        raise
    return model, team


def _checked(model: Model, args: EngineArgs) -> Model:
    if args.quantization is not None:
        check_model(args.quantization, model)
    return model


def options_text(args: EngineArgs) -> str:
    """Options as text, for the other ranks.

    Raises:
        ModelError: they hold an object, which cannot be handed to another process.
    """
    try:
        return args.model_dump_json()
    except ValueError as exc:
        raise ModelError(
            f"tensor_parallel_size={args.tensor_parallel_size}: options must be plain values ({exc})"
        ) from exc


def with_guide(loaded: Loaded, options: dict[str, Any]) -> dict[str, Any]:
    """``options`` with the guide's name replaced by its weights and, where the vocabularies differ, a map to its ids.

    Raises:
        ModelError: the guide is missing, broken or no left-to-right model.
    """
    name = options["guide"]
    guide = load_model(name, None, loaded.model.dtype, loaded.model.device)
    if not guide.config.causal:
        raise ModelError(f"guide={name!r}: a {guide.config.family} model, not a left-to-right one")
    options = {**options, "guide": guide}
    if guide.config.vocab_size != loaded.config.vocab_size and "guide_map" not in options:
        theirs, ours = load_tokenizer(resolve(name)), loaded.tokenizer
        if ours is None or theirs is None:
            raise ModelError(f"guide={name!r}: another vocabulary, and no tokenizer files to map it by")
        options["guide_map"] = vocabulary_map(
            ours.vocabulary(), theirs.vocabulary(), loaded.config.vocab_size
        )
    return options

"""A steady step reads nothing back to the host and keeps every tensor on its device.

Under ``FakeTensorMode`` a host read (``.item()``, ``nonzero``, ``if tensor``) raises. On the meta device, which stands
in for a GPU here, so does a tensor that was made on the CPU by mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_dllm.core.cache import KVCache
from flash_dllm.core.forward import Context
from flash_dllm.core.method import Method
from flash_dllm.core.state import State
from flash_dllm.core.step import Decoder, Vocabulary
from flash_dllm.core.types import Lanes
from flash_dllm.methods import CACHES, DECODINGS, MethodError, build_method
from flash_dllm.models.config import SHAPES, ModelConfig
from flash_dllm.models.layers import empty_model
from tests.tapes import nothing_from_the_host

SLOTS, POSITIONS = 3, 64
SHAPE_OF = {"llada": "llada-tiny-gqa", "dream": "dream-tiny"}


def pairs(wanted: Callable[[Method], bool]) -> list[tuple[str, str, str]]:
    """(family, cache, decoding) of every pair that is wanted."""
    found = []
    for family in SHAPE_OF:
        for cache in CACHES:
            for decoding in DECODINGS:
                try:
                    method = build_method(cache, decoding, family=family)
                except (MethodError, TypeError):
                    continue
                if wanted(method):
                    found.append((family, cache, decoding))
    return found


PAIRS = pairs(lambda method: method.graphable)
ASKED = [
    pair for pair in pairs(lambda method: method.recordable and not method.graphable)
    if pair[2] in ("threshold", "verify", "greedy", "entropy")
]  # fmt: skip


def decoder_of(
    config: ModelConfig, family: str, cache: str, decoding: str, device: str, **options: Any
) -> tuple[Decoder, int]:
    """A decoder of empty slots, with everything asked for that a request can ask for, and its candidates a slot."""
    model = empty_model(config, torch.float32, device)
    method = build_method(cache, decoding, family=family, **options)
    scratch = method.verifier.scratch() if method.verifier else 0
    kv = KVCache.allocate(config, SLOTS, POSITIONS, scratch, model.embed)
    state = State(SLOTS, POSITIONS, device=device)
    words = Vocabulary(config.vocab_size, config.mask_id or 0)
    decoder = Decoder(Context.build(model, kv, POSITIONS), state, method, words)
    decoder.hints.sampling = decoder.hints.suppress = decoder.hints.filters = method.verifier is None
    return decoder, method.schedule.width([32] * SLOTS, [16] * SLOTS)


def run_step(
    config: ModelConfig, family: str, cache: str, decoding: str, device: str, **options: Any
) -> None:
    """Two steps of a batch that mixes sweeping and running slots, on fake tensors."""
    with FakeTensorMode() if device == "cpu" else nullcontext():
        decoder, width = decoder_of(config, family, cache, decoding, device, **options)
        method = decoder.method
        for sweep in ([0, 1, 2], [1]):
            run = [s for s in range(SLOTS) if s not in sweep]
            record = decoder.step(Lanes(run, sweep, [8] * SLOTS, [40, 40, 44], width))
            assert record.take.device.type == device
        if not method.cache.steady:
            return
        for slots in (SLOTS, 2):
            lanes = Lanes(list(range(slots)), [], [0] * SLOTS, [POSITIONS] * SLOTS, width, exact=False)
            with nothing_from_the_host():
                decoder.step(lanes)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("family", "cache", "decoding"), ASKED)
def test_no_host_read_where_sweeps_were_asked_about(
    family: str, cache: str, decoding: str, device: str
) -> None:
    """What is recorded of the caches that are asked; the question itself is one host read before it."""
    with FakeTensorMode() if device == "cpu" else nullcontext():
        decoder, width = decoder_of(SHAPES[SHAPE_OF[family]], family, cache, decoding, device)
        for slots in (SLOTS, 2, 2):
            lanes = Lanes(
                list(range(slots)), [], [8] * SLOTS, [48] * SLOTS, width, exact=False, asked=True, fed=24
            )
            # As the runner does: what is made once is made before a step is recorded.
            for watch in (nullcontext, nothing_from_the_host):
                with watch():
                    record = decoder.step(lanes)
        assert record.take.device.type == device


def test_every_cache_whose_sweeps_follow_from_the_canvases_is_asked() -> None:
    """All but those that read back in the middle of a pass (elastic), or when one begins (dkv-greedy)."""
    assert {cache for _, cache, _ in ASKED} == {
        "prefix", "dual", "freecache", "dkv-decode", "dkv-prefill", "dkv-pd", "dllm-cache", "dynamic",
    }  # fmt: skip


def test_the_published_and_our_main_methods_are_graphable() -> None:
    names = {f"{cache}+{decoding}" for _, cache, decoding in PAIRS}
    assert names >= {"none+threshold", "flash+threshold", "flash+verify", "flash+branch", "none+branch"}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("family", "cache", "decoding"), PAIRS)
def test_no_host_read(family: str, cache: str, decoding: str, device: str) -> None:
    run_step(SHAPES[SHAPE_OF[family]], family, cache, decoding, device)


@pytest.mark.parametrize("views", ["paper", "leak-free", "branch"])
@pytest.mark.parametrize("cache", ["none", "flash"])
@pytest.mark.parametrize("family", SHAPE_OF)
def test_no_host_read_in_the_views(family: str, cache: str, views: str) -> None:
    run_step(SHAPES[SHAPE_OF[family]], family, cache, "verify", "meta", views=views)


def test_recorded_methods_are_among_them() -> None:
    steady = {
        f"{cache}+{decoding}" for family, cache, decoding in PAIRS
        if build_method(cache, decoding, family=family).cache.steady
    }  # fmt: skip
    assert steady >= {"flash+threshold", "flash+verify", "flash+branch", "flash+greedy"}


def test_a_host_read_is_caught() -> None:
    with FakeTensorMode(), pytest.raises(Exception, match="local_scalar_dense"):
        bool(torch.ones(3).sum() > 0)

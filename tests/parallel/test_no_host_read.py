"""A step of a rank reads nothing back to the host, so that it can be captured with its sums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_dllm.core.cache import KVCache
from flash_dllm.core.forward import Context
from flash_dllm.core.state import State
from flash_dllm.core.step import Decoder, Vocabulary
from flash_dllm.core.types import Lanes
from flash_dllm.methods import build_method
from flash_dllm.models.config import SHAPES
from flash_dllm.models.layers import empty_model
from flash_dllm.parallel import split, with_sums
from flash_dllm.quant import allocator

SLOTS, POSITIONS = 3, 64


class Lone:
    """One of two ranks; the other is not there."""

    rank, size = 1, 2

    def sum(self, x: Tensor) -> Tensor:
        return x + x

    def gather(self, x: Tensor) -> Tensor:
        return torch.stack([x, x])


@pytest.mark.parametrize("kind", [None, "int8", "fp8"])
@pytest.mark.parametrize(
    ("cache", "decoding"),
    [("none", "threshold"), ("flash", "threshold"), ("flash", "verify"), ("flash", "branch")],
)
def test_no_host_read(cache: str, decoding: str, kind: str | None) -> None:
    whole = SHAPES["dream-tiny"]
    with FakeTensorMode():
        config, shard = split(whole, Lone())
        model = with_sums(empty_model(config, torch.float32, "cpu", kind and allocator(kind, "cpu"), shard))
        method = build_method(cache, decoding, family="dream")
        scratch = method.verifier.scratch() if method.verifier else 0
        kv = KVCache.allocate(
            config, SLOTS, POSITIONS, scratch, model.embed, torch.float8_e4m3fn if kind else None
        )
        assert kv.keys[0].shape[2] == 1, "half of two heads"
        vocabulary = Vocabulary(whole.vocab_size, whole.mask_id or 0, (3,), (3, 4))
        state = State(SLOTS, POSITIONS)
        decoder = Decoder(Context.build(model, kv, POSITIONS), state, method, vocabulary)
        decoder.hints.sampling = decoder.hints.suppress = method.verifier is None
        width = method.schedule.width([32] * SLOTS, [16] * SLOTS)
        for sweep in ([0, 1, 2], [1]):
            run = [s for s in range(SLOTS) if s not in sweep]
            decoder.step(Lanes(run, sweep, [8] * SLOTS, [40, 40, 44], width))

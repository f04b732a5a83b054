"""Choosing a token from parts of the vocabulary gives what choosing from the whole does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from flash_dllm.core.noise import CounterNoise
from flash_dllm.kernels.head_confidence import HeadOut, HeadSpec, Sampling, confidence
from flash_dllm.kernels.ranks import VocabShard

from .threads import Hall, on_ranks

ROWS, VOCAB = 12, 101
SPECS: dict[str, dict[str, Any]] = {
    "argmax": {},
    "margin": {"measure": "margin"},
    "entropy": {"measure": "neg_entropy"},
    "wanted": {"wanted": torch.arange(ROWS) * 9},
    "suppressed": {"suppress": torch.arange(ROWS) % 4, "eos_ids": (3, 60), "quiet_ids": (3, 60, 97)},
    "few": {"n_tokens": 30, "mask_id": 7},
}


def draws(categorical: bool) -> Sampling:
    """Temperatures of which some are 0."""
    noise = CounterNoise()
    noise.begin(torch.arange(ROWS), torch.full((ROWS,), 5), VOCAB)
    warm = torch.arange(ROWS) % 3 * 0.6
    uniform = partial(noise.per_token, torch.arange(ROWS)[:, None])
    off = torch.ones(ROWS)
    return Sampling(warm, off, off.long() * 0, uniform, categorical=categorical, filters=False)


def whole_and_parts(logits: torch.Tensor, spec: HeadSpec, size: int) -> tuple[HeadOut, list[HeadOut], Hall]:
    hall = Hall(size)
    bounds = [VOCAB * r // size for r in range(size + 1)]

    def part(ranks: Any) -> HeadOut:
        shard = VocabShard(bounds[ranks.rank], bounds[ranks.rank + 1], ranks)
        return confidence(logits[:, shard.start : shard.stop], replace(spec, shard=shard))

    return confidence(logits, spec), on_ranks(size, part, hall), hall


def check(logits: torch.Tensor, spec: HeadSpec, size: int) -> Hall:
    whole, parts, hall = whole_and_parts(logits, spec, size)
    for part in parts:
        assert torch.equal(part.token, whole.token)
        for name in ("prob", "measure", "prob_wanted"):
            ours, theirs, first = (getattr(h, name) for h in (part, whole, parts[0]))
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert torch.equal(ours, first), f"ranks differ in {name}"
                torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-5)
    return hall


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("sampling", [None, False, True])
def test_parts_are_the_whole(name: str, size: int, sampling: bool | None) -> None:
    logits = 4 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(size))
    made = HeadSpec(**{"n_tokens": 97, "mask_id": 96, **SPECS[name]})
    hall = check(logits, made if sampling is None else replace(made, sampling=draws(sampling)), size)
    assert hall.sums == 0
    assert hall.largest <= 7, "numbers a row that are exchanged"


def test_ties_go_to_the_lower_token() -> None:
    logits = torch.zeros(ROWS, VOCAB)
    logits[:, [20, 70, 90]] = 3.0
    logits[5:, 20] = 0.0
    spec = HeadSpec(VOCAB, 96)
    check(logits, spec, 3)
    assert whole_and_parts(logits, spec, 3)[1][2].token.tolist() == [20] * 5 + [70] * (ROWS - 5)


@pytest.mark.parametrize("column", [0, 50, 100])
def test_a_row_that_is_not_finite_spoils_no_other(column: int) -> None:
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[4, column] = float("nan")
    whole, parts, _ = whole_and_parts(logits, HeadSpec(VOCAB, 96), 2)
    for part in parts:
        assert part.prob.isfinite().tolist() == [row != 4 for row in range(ROWS)]
        assert torch.equal(part.token[whole.prob.isfinite()], whole.token[whole.prob.isfinite()])


def test_filters_are_refused() -> None:
    spec = replace(HeadSpec(VOCAB, 96), sampling=replace(draws(False), filters=True))
    with pytest.raises(ValueError, match="top_p and top_k rank the whole vocabulary"):
        whole_and_parts(torch.zeros(ROWS, VOCAB), spec, 2)

"""Figure 1's analyses: attention by layer, and confidence against tokens that could be decoded early."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from flash_dllm.eval.recorded import Moment, Recording, concentration, early, record
from flash_dllm.llm import LLM
from flash_dllm.params import SamplingParams

MASK = 99


@pytest.fixture(scope="module")
def llm(chat_folder: Path) -> LLM:
    return LLM(chat_folder, cache="none", decoding="threshold", max_num_seqs=1, schedule="window")


@pytest.fixture(scope="module")
def recordings(llm: LLM) -> list[Recording]:
    params = SamplingParams(max_tokens=20, epsilon=0.9)
    return [record(llm, llm.job(text, params)) for text in ("the cat sat on", "1 + 2 = 3\nso")]


def test_a_recording_replays_the_decoding(llm: LLM, recordings: list[Recording]) -> None:
    params = SamplingParams(max_tokens=20, epsilon=0.9)
    output = llm.generate("the cat sat on", params)[0]
    kept = recordings[0]
    assert kept.final == output.canvas_ids and kept.first == len(output.prompt_token_ids)
    assert len(kept.moments) == output.outputs[0].steps
    ids = list(kept.moments[0].ids)
    assert ids[: kept.first] == output.prompt_token_ids and set(ids[kept.first :]) == {llm.mask_id}
    for moment in kept.moments:
        assert moment.ids == ids
        for position, token, confidence in moment.candidates:
            assert ids[position] == llm.mask_id and 0 < confidence <= 1
            if position in moment.committed:
                ids[position] = token
    assert ids == kept.final


def test_shares_grow_with_the_number_of_tokens_and_stay_below_one(
    llm: LLM, recordings: list[Recording]
) -> None:
    seen = concentration(llm.loaded.model, recordings, llm.mask_id, every=2, tops=(1, 2, 4))
    assert seen["decodings"] == 2 and seen["steps"] == sum(len(r.moments[::2]) for r in recordings)
    for kind in ("decoded", "answer"):
        assert len(seen[kind]["layers"]) == llm.loaded.config.n_layers
        for layer in [*seen[kind]["layers"], seen[kind]["even"]]:
            shares = list(layer.values())
            assert shares == sorted(shares) and shares[0] >= 0 and shares[-1] <= 1
    assert seen["answer"]["mean_tokens"] < seen["decoded"]["mean_tokens"]


def test_a_model_that_attends_evenly_shows_even_shares(llm: LLM, recordings: list[Recording]) -> None:
    """With queries of zero all keys get the same weight."""
    model = copy.deepcopy(llm.loaded.model)
    for layer in model.layers:
        layer.wqkv[: model.config.n_heads * model.config.head_dim] = 0
    seen = concentration(model, recordings, llm.mask_id, every=3, tops=(1, 2, 4))
    for kind in ("decoded", "answer"):
        for layer in seen[kind]["layers"]:
            assert layer == pytest.approx(seen[kind]["even"], abs=2e-3)


def test_what_masked_and_decoded_tokens_get_adds_up(llm: LLM, recordings: list[Recording]) -> None:
    """Against the plain forward's weights, summed the long way."""
    from flash_dllm.models.reference import forward

    moment = recordings[0].moments[3]
    one = [Recording([moment], recordings[0].final, recordings[0].first)]
    seen = concentration(llm.loaded.model, one, llm.mask_id, every=1, tops=(2,))
    weights: list[torch.Tensor] = []
    forward(llm.loaded.model, torch.tensor([moment.ids]), watch=lambda _, w: weights.append(w[0]))
    rows = [p for p, _, _ in moment.candidates]
    known = [i for i, token in enumerate(moment.ids) if token != llm.mask_id]
    for layer, weight in enumerate(weights):
        received = [float(weight[:, rows, i].mean()) for i in known]
        assert seen["decoded"]["layers"][layer]["all"] == pytest.approx(sum(received), abs=1e-3)
        assert seen["decoded"]["layers"][layer]["top 2"] == pytest.approx(
            sum(sorted(received)[-2:]), abs=1e-3
        )


def made(*steps: tuple[float, int, int]) -> Recording:
    """A recording whose steps have this confidence, and of so many waiting candidates so many right ones."""
    final = [7] * 40
    moments = []
    for confidence, right, waiting in steps:
        candidates = [(i, 7 if i < right else 8, confidence) for i in range(waiting)]
        moments.append(Moment([MASK] * 40, [*candidates, (39, 7, confidence)], frozenset({39})))
    return Recording(moments, final, 0)


def test_early_tokens_are_counted_among_those_that_wait() -> None:
    seen = early([made((0.5, 1, 4), (0.5, 3, 4), (0.9, 3, 6))], MASK)
    assert seen["by_count"] == [
        {"early": 1, "steps": 1, "confidence": 0.5},
        {"early": 3, "steps": 2, "confidence": 0.7},
    ]
    assert seen["share"] == pytest.approx(7 / 14) and seen["steps"] == 3


def test_token_by_token_a_sure_candidate_is_right() -> None:
    sure = Moment([MASK] * 4, [(0, 7, 0.9), (1, 7, 0.8), (2, 8, 0.2), (3, 7, 0.95)], frozenset({3}))
    seen = early([Recording([sure], [7] * 4, 0)], MASK)
    assert seen["by_token"]["value"] == pytest.approx(0.99, abs=0.01) and seen["by_token"]["interval"] is None


def test_correlations_of_known_data() -> None:
    rising = [made((0.1 * i, i, 10), (0.1 * i + 0.05, i + 1, 10)) for i in range(1, 8)]
    seen = early(rising, MASK)
    assert seen["pearson"]["value"] == pytest.approx(0.99, abs=0.02)
    low, high = seen["pearson"]["interval"]
    assert low <= seen["pearson"]["value"] <= high
    falling = [made((0.9 - 0.1 * i, i, 10)) for i in range(1, 8)]
    assert early(falling, MASK)["spearman"]["value"] == pytest.approx(-1.0)
    level = early([made((0.5, 2, 4)), made((0.5, 2, 4))], MASK)
    assert level["pearson"]["value"] == 0.0 and level["spearman"]["value"] == 0.0


def test_ranks_of_equal_values_are_shared() -> None:
    from flash_dllm.eval.recorded import _ranks

    assert _ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [2.5, 0.0, 2.5, 1.0]


def test_positions_that_were_never_decoded_do_not_count() -> None:
    recording = made((0.5, 2, 4))
    recording.final[0] = recording.final[3] = MASK
    seen = early([recording], MASK)
    assert seen["by_count"] == [{"early": 1, "steps": 1, "confidence": 0.5}] and seen["share"] == 0.5
    assert early([Recording([], [], 0)], MASK)["steps"] == 0

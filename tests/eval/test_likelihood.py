"""The Monte Carlo estimate against sums over every masking."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
import torch

from flash_dllm.eval.errors import EvalError
from flash_dllm.eval.likelihood import Likelihood
from flash_dllm.llm import LLM
from flash_dllm.models.reference import forward, shift_logits
from flash_dllm.params import SamplingParams

CONTEXT, TARGET = [7, 9, 12, 40], [33, 8, 21]


@pytest.fixture(scope="module", params=["llada", "dream"])
def llm(request: pytest.FixtureRequest, chat_folder: Path, golden_dir: Path) -> LLM:
    return LLM(chat_folder if request.param == "llada" else golden_dir / "dream-tiny")


def exact(llm: LLM, context: list[int], target: list[int]) -> float:
    """The expectation: over the number of masked tokens, and over which they are."""
    n = len(target)
    total = 0.0
    for count in range(1, n + 1):
        choices = list(combinations(range(n), count))
        for hidden in choices:
            ids = context + [llm.mask_id if i in hidden else token for i, token in enumerate(target)]
            logits = forward(llm.loaded.model, torch.tensor([ids]))
            if llm.loaded.config.shift:
                logits = shift_logits(logits)
            logs = logits[0, len(context) :].float().log_softmax(-1)
            total += sum(float(logs[i, target[i]]) for i in hidden) * n / count / len(choices) / n
    return total


def test_one_token_is_exact_with_any_number_of_samples(llm: LLM) -> None:
    wanted = exact(llm, CONTEXT, TARGET[:1])
    for samples in (1, 3):
        assert Likelihood(llm, samples).log_prob(CONTEXT, TARGET[:1]) == pytest.approx(wanted, abs=1e-4)


def test_the_estimate_comes_close_to_the_expectation(llm: LLM) -> None:
    wanted = exact(llm, CONTEXT, TARGET)
    found = Likelihood(llm, 600, batch=200).log_prob(CONTEXT, TARGET)
    assert found == pytest.approx(wanted, rel=0.1)


def test_numbers_of_masked_tokens_are_spread_evenly() -> None:
    noise = torch.Generator().manual_seed(0)
    for n, batch in ((4, 8), (10, 5), (3, 3)):
        counts = Likelihood._counts(n, batch, noise)
        assert counts.min() >= 1 and counts.max() <= n
        assert max(counts.bincount(minlength=n + 1)[1:]) <= -(-batch // n) + 1
        assert len(set(counts.tolist())) >= min(n, batch) - 1


def test_a_score_depends_on_nothing_but_the_request(llm: LLM) -> None:
    scorer = Likelihood(llm, 8, batch=4)
    first = scorer.log_prob(CONTEXT, TARGET)
    scorer.log_prob(CONTEXT, [5, 6])
    assert scorer.log_prob(CONTEXT, TARGET) == first
    assert Likelihood(llm, 8, batch=4, seed=1).log_prob(CONTEXT, TARGET) != first


def test_nothing_and_everything(llm: LLM) -> None:
    scorer = Likelihood(llm, 4)
    assert scorer.log_prob(CONTEXT, []) == 0.0 and scorer.is_greedy(CONTEXT, [])
    assert scorer.log_prob([], TARGET) < 0
    with pytest.raises(EvalError, match="max_model_len"):
        scorer.log_prob([1] * 4000, TARGET)
    with pytest.raises(EvalError, match="samples=0"):
        Likelihood(llm, 0)


def test_weights_that_are_not_whole_are_refused(chat_folder: Path) -> None:
    llm = LLM(chat_folder)
    llm.args = llm.args.model_copy(update={"tensor_parallel_size": 2})
    with pytest.raises(EvalError, match="tensor_parallel_size=2"):
        Likelihood(llm, 1).log_prob(CONTEXT, TARGET)


def test_greedy_is_what_the_engine_decodes(chat_folder: Path) -> None:
    llm = LLM(chat_folder, cache="none", decoding="greedy")
    params = SamplingParams(max_tokens=5, stop_at_eos=False, stop_token_ids=())
    target = llm.generate([CONTEXT], params)[0].canvas_ids[len(CONTEXT) :]
    scorer = Likelihood(llm, 1)
    assert scorer.is_greedy(CONTEXT, target)
    for index in range(5):
        changed = [*target[:index], (target[index] + 1) % 300, *target[index + 1 :]]
        assert not scorer.is_greedy(CONTEXT, changed)

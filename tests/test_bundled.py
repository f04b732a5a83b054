"""The bundled models: raw text starts as in training, the demo answers, and accuracy."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from flash_dllm import LLM, Gap, SamplingParams
from flash_dllm.bench.tiny import job_of
from flash_dllm.cli.demo import PROMPTS
from flash_dllm.models.tokenizer import load_tokenizer
from flash_dllm.train.card_text import GOALS, PARALLEL
from flash_dllm.train.evaluate import canvases
from flash_dllm.train.tasks import FAMILIES, make
from tests.commands import Run

FOLDER = Path(__file__).parent.parent / "src" / "flash_dllm" / "weights" / "tiny-llada"
needs_weights = pytest.mark.skipif(
    not (FOLDER / "model.safetensors").exists(), reason="the bundled weights are not trained yet"
)
BOS = 2


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM()


def test_raw_text_starts_with_bos_and_a_chat_has_one() -> None:
    tokenizer = load_tokenizer(FOLDER)
    assert tokenizer is not None
    assert tokenizer.encode("Hello", add_special=True)[0] == BOS
    talk = tokenizer.apply_chat([{"role": "user", "content": "Hello"}])
    assert talk[0] == BOS and talk.count(BOS) == 1


@needs_weights
def test_a_template_starts_with_bos_once(llm: LLM) -> None:
    for template in ("On Monday {{2}} sat.", [Gap(1), " sat."]):
        job = llm.job(template, SamplingParams(), template=True)
        assert job.ids[0] == BOS and job.ids.count(BOS) == 1


@needs_weights
@pytest.mark.slow
def test_the_demo_answers(run: Run) -> None:
    outcome = run("demo")
    assert outcome.code == 0, outcome.err
    assert all(prompt in outcome.out for prompt in PROMPTS)
    assert outcome.out.count(" tokens in ") == len(PROMPTS)
    chairs, function, letter = outcome.out.split("\n> ")[1:]
    assert "#### 53" in chairs and "return n > 12" in function
    assert "Clara" in letter and "library" in letter.partition("\n")[2]


@needs_weights
def test_a_task_starts_as_in_training(llm: LLM) -> None:
    samples = [make(family, seed, "dev") for family in ("gsm", "infill") for seed in range(12)]
    assert {bool(sample.gaps) for sample in samples} == {False, True}
    starts = canvases(samples, FOLDER, 64)
    for sample, start in zip(samples, starts, strict=True):
        assert list(job_of(llm, sample, SamplingParams(max_tokens=64)).ids) == start


# The bundled default answers 14 questions of each family, 154 in all: the first ones of its card. In two halves that
# need about two minutes of a core each, so that two cores have both in less than three.
EACH = 14
HALVES = ("gsm,letter,infill", "arith,list,convert,chat,fact,code,json,story")
MOST_SECONDS = 180


def test_the_halves_are_150_problems_of_all_families() -> None:
    assert sorted(",".join(HALVES).split(",")) == sorted(FAMILIES)
    assert EACH * len(FAMILIES) >= 150


@needs_weights
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("families", HALVES)
def test_the_default_model_is_as_good_as_its_card_asks(run: Run, tmp_path: Path, families: str) -> None:
    began = time.process_time()
    measured = _measured(run, tmp_path, "tiny-llada", EACH, "--families", families)
    assert time.process_time() - began < MOST_SECONDS
    assert measured["all"]["n"] == EACH * len(families.split(","))
    assert measured["all"]["accuracy"] >= GOALS["all"][1], measured
    if "gsm" in measured:
        assert measured["gsm"]["accuracy"] >= GOALS["gsm"][1], measured["gsm"]
        assert measured["gsm"]["tokens_per_forward"] >= PARALLEL[0]


@needs_weights
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_tiny_dream_on_its_own_tasks(run: Run, tmp_path: Path) -> None:
    measured = _measured(run, tmp_path, "tiny-dream", 6, "--split", "dev", "--seed-start", 500)
    assert measured["all"]["n"] == 66
    assert measured["all"]["accuracy"] >= 85.0, measured
    assert measured["gsm"]["accuracy"] >= 66.0, measured["gsm"]
    assert measured["gsm"]["tokens_per_forward"] > 1.8


def _measured(run: Run, tmp_path: Path, model: str, problems: int, *words: object) -> dict[str, Any]:
    """What eval-tiny reports by family, at threshold 0.9."""
    report = tmp_path / "report.json"
    outcome = run(
        "eval-tiny", "-m", f"flash-dllm/{model}", "--decoding", "threshold", "--epsilon", "0.9",
        "--device", "cpu", "--problems", problems, "--json", report, *words,
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    families: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))["families"]
    return families

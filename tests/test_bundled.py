"""The bundled model: raw text starts as in training, and it answers what the demo asks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flash_dllm import LLM, Gap, SamplingParams
from flash_dllm.cli.demo import PROMPTS
from flash_dllm.models.tokenizer import load_tokenizer
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
def test_the_demo_answers(run: Run) -> None:
    outcome = run("demo")
    assert outcome.code == 0, outcome.err
    assert all(prompt in outcome.out for prompt in PROMPTS)
    assert outcome.out.count(" tokens in ") == len(PROMPTS)


@needs_weights
@pytest.mark.slow
def test_its_own_tasks(run: Run, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    outcome = run("eval-tiny", "--problems", 6, "--split", "dev", "--seed-start", 500, "--json", report)
    assert outcome.code == 0, outcome.err
    families = json.loads(report.read_text())["families"]
    assert families["all"]["accuracy"] > 70
    assert families["all"]["tokens_per_forward"] > 2

"""Start-up, the other commands, and options that come from one source."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from flash_dllm.cli.fields import SKIP, flag
from flash_dllm.cli.root import COMMANDS
from flash_dllm.params import EngineArgs, SamplingParams
from tests.commands import Run

HEAVY = ("torch", "transformers", "pydantic", "rich", "tokenizers", "numpy")


def python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120)


def test_help_is_light() -> None:
    code = (
        "import sys\nsys.argv = ['flash-dllm', '--help']\n"
        "from flash_dllm.cli import main\n"
        "try:\n    main()\nexcept SystemExit as e:\n    assert e.code == 0\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = python(code)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0 and done.stderr.strip() == "[]"
    assert all(name in done.stdout for name in COMMANDS)
    # 0.1 s; processor time, so that a busy machine does not count.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_importing_the_package_is_light() -> None:
    done = python(f"import sys, flash_dllm; print([m for m in {HEAVY!r} if m in sys.modules])")
    assert done.stdout.strip() == "[]"
    assert python("import flash_dllm; flash_dllm.nope").stderr.strip().endswith("has no attribute 'nope'")
    names = python("import flash_dllm as f; print([getattr(f, n).__name__ for n in f.__all__] == f.__all__)")
    assert names.stdout.strip() == "True"


def test_python_dash_m() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flash_dllm", "nonsense"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1


def test_a_reader_that_goes_away(bare_folder: Path) -> None:
    command = f"{sys.executable} -m flash_dllm methods --json | head -c 10"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr and "Error" not in done.stderr


@pytest.mark.parametrize("command", ["generate", "chat", "demo", "compare", "eval-tiny"])
def test_every_field_has_its_flag(run: Run, command: str) -> None:
    text = run(command, "--help").out
    for model in (EngineArgs, SamplingParams):
        for name in model.model_fields:
            if name not in SKIP:
                assert f"{flag(name)} " in text, name


@pytest.mark.parametrize("command", [*COMMANDS, "train run"])
def test_every_command_has_help(run: Run, command: str) -> None:
    outcome = run(*command.split(), "--help")
    assert outcome.code == 0 and "Usage:" in outcome.out


def test_chat_from_a_pipe(run: Run, chat_folder: Path) -> None:
    outcome = run("chat", "-m", chat_folder, "-t", 5, stdin="hello\n\n/reset\nhello\n/quit\nnever\n")
    assert outcome.code == 0 and not outcome.err
    first, second = outcome.out[: len(outcome.out) // 2], outcome.out[len(outcome.out) // 2 :]
    assert first == second != ""


def test_a_turn_that_does_not_fit_costs_the_turn_only(run: Run, chat_folder: Path) -> None:
    outcome = run("chat", "-m", chat_folder, "-t", 5, stdin=f"{'word ' * 300}\nhello\n")
    assert outcome.code == 0 and "leaves no room" in outcome.err and outcome.out


def test_chat_without_a_template(run: Run, bare_folder: Path) -> None:
    outcome = run("chat", "-m", bare_folder, stdin="x\n")
    assert outcome.code == 2 and "no chat template" in outcome.err


def test_models(run: Run, chat_folder: Path) -> None:
    assert "GSAI-ML/LLaDA-8B-Instruct" in run("models").out
    facts = json.loads(run("models", chat_folder, "--json", "--max-num-seqs", 3, "--max-model-len", 100).out)
    assert facts["memory"]["total"] == sum(v for k, v in facts["memory"].items() if k != "total")
    assert facts["fits"] in (True, None) and facts["max_model_len"] == 100
    half = json.loads(run("models", chat_folder, "--json", "--device", "cpu", "--dtype", "bfloat16").out)
    usual = json.loads(run("models", chat_folder, "--json", "--device", "cpu").out)
    assert usual["compute_dtype"] == "float32" and usual["memory"]["weights"] == 2 * half["memory"]["weights"]
    text = run("models", chat_folder).out
    assert f"{facts['parameters']:,}" in text
    for words in (
        ("models", "./nope"),
        ("models", chat_folder, "--dtype", "int3"),
        ("models", chat_folder, "--max-model-len", 9999),
    ):
        outcome = run(*words)
        assert outcome.code == 2 and outcome.err.count("\n") == 1


def test_methods(run: Run) -> None:
    data = json.loads(run("methods", "--json").out)
    assert "threshold" in data["pairs"]["none"] and data["caches"][0]["name"] == "none"
    assert "arXiv 2505.22618" in run("methods").out
    assert run("methods", "--family", "gpt").code == 2


def test_doctor(run: Run) -> None:
    facts = json.loads(run("doctor", "--json").out)
    assert facts["torch"] and facts["device=auto"] in ("cpu", "cuda")
    assert "python" in run("doctor").out


def test_compare(run: Run, chat_folder: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "p.jsonl", tmp_path / "r.json"
    source.write_text('{"prompt": "1 + 2", "answer": "3"}\n{"prompt": "the cat"}\n')
    base = ("compare", "-m", chat_folder, "-t", 8, "--prompts", source)
    outcome = run(*base, "--methods", "none+threshold,none+greedy", "--json", out)
    assert outcome.code == 0, outcome.err
    report = json.loads(out.read_text())
    assert [m["method"] for m in report["methods"]] == ["none+threshold", "none+greedy"]
    for row in report["methods"]:
        assert row["prompts"] == 2 and row["nfe"] > 0 and row["rows"] > 0 and row["memory"] > 0
        assert row["accuracy"]["n"] == 1
    assert "none+greedy" in outcome.out and "Counting" in outcome.out
    for words in ((), ("--methods", "none+nonsense"), ("--methods", "none+greedy", "--epsilon", "0.5")):
        outcome = run(*base, *words)
        assert outcome.code == 2 and outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("12", "so 5 + 7 = 12.", True),
        ("12", "12 or 13", False),
        ("1,200", "it is 1200", True),
        ("-3", "x = -3", True),
        ("Blue", " blue\n", True),
        ("blue", "light blue", False),
        ("3", "none", False),
    ],
)
def test_matching_answers(answer: str, text: str, right: bool) -> None:
    from flash_dllm.cli.compare import matches

    assert matches(answer, text) is right


def test_nothing_reads_secrets_from_the_environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "FLASH_DLLM_MAX_TOKENS", "3")
    assert "3]" not in run("generate", "--help").out.split("--max-tokens")[1][:80]


def test_tune_needs_a_gpu(run: Run) -> None:
    done = run("tune", "--device", "cpu")
    assert done.code == 2 and "CUDA GPU; the device is cpu" in done.err

"""What README and docs/usage.md show runs as it is printed there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from flash_dllm import LLM, methods
from flash_dllm.methods.presets import PRESETS
from flash_dllm.params import EngineArgs, SamplingParams
from tests.commands import Run

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/usage.md", "docs/methods.md", "CONTRIBUTING.md", "docs/architecture.md")
QUICK = ("generate", "chat", "models", "methods", "doctor")
"""Commands that are run; the others (training, measuring) would take minutes."""


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", read(page), re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def commands(page: str) -> list[list[str]]:
    """The words of each ``flash-dllm`` command in the page's shell blocks, comments cut off."""
    lines = "".join(blocks(page, "sh")).replace("\\\n", " ").split("\n")
    parts = [part for line in lines for part in re.sub(r"\s#.*", "", line).split("; ")]
    return [words[1:] for part in parts if (words := shlex.split(part)) and words[0] == "flash-dllm"]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    folder = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)]+)\)", read(page)):
        if not target.startswith("http"):
            name, _, anchor = target.partition("#")
            assert (folder / name).exists(), target
            titles = re.findall(r"^#+ (.*)$", (folder / name).read_text(encoding="utf-8"), re.MULTILINE)
            assert not anchor or anchor in [t.lower().replace(" ", "-") for t in titles], target


def test_every_method_and_preset_is_described() -> None:
    text = read("docs/methods.md")
    for name in [*methods.CACHES, *methods.DECODINGS, *PRESETS]:
        assert f"`{name}`" in text, name


def test_usage_describes_every_option() -> None:
    text = read("docs/usage.md")
    for model in (EngineArgs, SamplingParams):
        for name in model.model_fields:
            assert f"`{name}`" in text or f"`--{name.replace('_', '-')}`" in text, name


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/usage.md"])
def test_commands_run(page: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text("\n".join(blocks("docs/usage.md", "json")), encoding="utf-8")
    Path("settings.yaml").write_text(blocks("docs/usage.md", "yaml")[0], encoding="utf-8")
    found = [w for w in commands(page) if w[0] in QUICK and not any("GSAI" in word for word in w)]
    assert len(found) >= 5
    for words in found:
        words = ["flash-dllm/tiny-dream" if word == "NAME" else word for word in words]
        outcome = run(*words, stdin="Hello\n/quit\n" if words[0] == "chat" else None)
        assert outcome.code == 0, (words, outcome.err)
        assert outcome.out or "--output" in words, words


def test_the_settings_are_options() -> None:
    names = {*EngineArgs.model_fields, *SamplingParams.model_fields}
    assert set(yaml.safe_load(blocks("docs/usage.md", "yaml")[0])) <= names


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/usage.md"])
def test_python_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), scope)
    assert isinstance(scope["llm"], LLM)


@pytest.mark.slow
def test_the_answers_in_the_readme_are_real(run: Run) -> None:
    shown = [block for block in blocks("README.md", "") if block.startswith("> ")]
    assert len(shown) == 3
    for block in shown:
        prompt, _, rest = block.removeprefix("> ").partition("\n")
        (answer,) = json.loads(run("generate", "--device", "cpu", "--json", prompt).out)["outputs"]
        tokens = len(answer["token_ids"])
        counted = f"[{tokens} tokens in {answer['nfe']} passes, {answer['tpf']:.2f} a pass, "
        text, bracket, _ = rest.partition("[")
        assert text.rstrip("\n") == answer["text"]
        assert not bracket or counted in rest


@pytest.mark.slow
def test_what_the_readme_says_of_committing_in_parallel(run: Run) -> None:
    text = read("README.md")
    prompt = "What is (111 - 47) + 40?"
    assert f"> {prompt}\n" in text
    for words, told in (
        ((), "28 tokens were committed in two"),
        (("--method", "none+greedy"), "104, in 32 passes"),
    ):
        (answer,) = json.loads(run("generate", "--device", "cpu", "--json", *words, prompt).out)["outputs"]
        assert told in text
        assert (len(answer["token_ids"]), answer["nfe"]) == ((28, 32) if words else (28, 2))
        assert answer["text"].endswith("= 104.") == bool(words)

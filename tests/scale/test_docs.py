"""The commands and links of the pages on scaling exist."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.commands import Run

ROOT = Path(__file__).parents[2]
PAGES = ("docs/scaling.md", "deploy/ray.md")


def commands(page: str) -> list[list[str]]:
    """The words of every ``flash-dllm`` line in a shell block."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").split("\n")
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("flash-dllm ")]


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_is_there(run: Run, page: str) -> None:
    found = commands(page)
    assert found
    helps: dict[tuple[str, ...], str] = {}
    for words in found:
        name = tuple(words[: 2 if words[0] in ("bench", "models") else 1])
        if name not in helps:
            helps[name] = run(*name, "--help").out
        for word in words:
            if word.startswith("-"):
                assert re.search(rf"(?<![\w-]){re.escape(word.partition('=')[0])}(?![\w-])", helps[name]), (
                    words
                )


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), target


def test_every_option_of_replicas_is_named() -> None:
    from flash_dllm.scale.replica_args import ReplicaArgs

    text = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
    for name in ReplicaArgs.model_fields:
        assert f"`--{name.replace('_', '-')}`" in text, name


def test_every_field_of_an_answer_is_named() -> None:
    import pyarrow

    from flash_dllm.scale.tables import _schema

    text = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
    for field in _schema(pyarrow):
        assert f"`{field.name}`" in text, field.name


def test_local_batches_and_plans_run_as_printed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow
    import pyarrow.parquet

    monkeypatch.chdir(tmp_path)
    rows = [{"id": "a", "prompt": "What is 12 + 7?"}]
    Path("prompts.jsonl").write_text(json.dumps(rows[0]) + "\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "prompts.parquet")
    steps = [{"method": "flash+verify", "batch": b, "prompt": 1000, "ms": 9, "wall_ms": 9 + b, "first_pass_ms": 40}
             for b in (1, 2, 4, 8, 16, 32)]  # fmt: skip
    Path("curve.json").write_text(json.dumps({"kind": "step", "rows": steps}))
    found = commands("docs/scaling.md")
    batches = [words for words in found if words[0] == "batch" and "--ray" not in words]
    plans = [words for words in found if words[0] == "plan"]
    assert len(batches) == len(plans) == 2
    for words in [*batches, *plans]:
        outcome = run(*words)
        assert outcome.code == 0, (words, outcome.err)
    assert json.loads(Path("answers.jsonl").read_text())["text"]

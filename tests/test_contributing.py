"""The methods that CONTRIBUTING.md and docs/methods.md show work as they are printed there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from flash_dllm import LLM, SamplingParams, methods

ROOT = Path(__file__).parent.parent
PARAMS = SamplingParams(max_tokens=16, stop_at_eos=False)


def add_printed(page: str, table: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Add the method that ``page`` shows (its file and its line of the table); returns the file."""
    text = (ROOT / page).read_text(encoding="utf-8")
    source, line = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    ((name, entry),) = eval("{" + line + "}", {"Entry": methods.Entry}).items()
    module = entry.where.split(":")[0].removeprefix("methods.")
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    monkeypatch.setitem(sys.modules, f"flash_dllm.methods.{module}", None)
    del sys.modules[f"flash_dllm.methods.{module}"]
    monkeypatch.setitem(table, name, entry)
    return source


def test_the_printed_decoding(chat_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_printed("CONTRIBUTING.md", methods.DECODINGS, tmp_path, monkeypatch)
    llm = LLM(chat_folder, decoding="top-share", share=0.25)
    answer = llm.generate("the cat", PARAMS)[0].outputs[0]
    assert len(answer.token_ids) == 16
    assert answer.nfe == 10, "a quarter of 16, of 12, of 9, then one at a time"


def test_the_printed_cache(chat_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = add_printed("docs/methods.md", methods.CACHES, tmp_path, monkeypatch)
    assert len(source.splitlines()) < 60
    prompts = ["the cat", "a", "on Monday"]
    plain = LLM(chat_folder)
    wanted = plain.generate(prompts, PARAMS)
    always = plain.with_method("recent", refresh=1).generate(prompts, PARAMS)
    assert [o.outputs[0].token_ids for o in always] == [o.outputs[0].token_ids for o in wanted]
    cached = plain.with_method("recent", keep=1).generate(prompts, PARAMS)
    for ours, all_rows in zip(cached, wanted, strict=True):
        assert ours.outputs[0].rows < all_rows.outputs[0].rows

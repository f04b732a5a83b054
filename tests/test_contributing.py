"""The method that CONTRIBUTING.md shows works as it is printed there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from flash_dllm import LLM, SamplingParams, methods

TEXT = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_printed_method(chat_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, line = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "top_share.py").write_text(source)
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    monkeypatch.setitem(sys.modules, "flash_dllm.methods.top_share", None)
    del sys.modules["flash_dllm.methods.top_share"]
    entry = eval("{" + line + "}", {"Entry": methods.Entry})
    monkeypatch.setitem(methods.DECODINGS, "top-share", entry["top-share"])
    llm = LLM(chat_folder, decoding="top-share", share=0.25)
    answer = llm.generate("the cat", SamplingParams(max_tokens=16, stop_at_eos=False))[0].outputs[0]
    assert len(answer.token_ids) == 16
    assert answer.nfe == 10, "a quarter of 16, of 12, of 9, then one at a time"

"""What a row asks for, and why a row is bad."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash_dllm.params import SamplingParams
from flash_dllm.scale.rows import BadRow, Row, row_of_line, row_of_record

DEFAULTS = SamplingParams(max_tokens=7, epsilon=0.8)


def parse(raw: Any) -> Row | BadRow:
    return row_of_line(json.dumps(raw).encode(), 3, "in.jsonl:3", DEFAULTS)


def test_a_row_and_its_options() -> None:
    row = parse({"id": 5, "prompt": "hi", "max_tokens": 9, "params": {"seed": 1}, "level": 2, "note": None})
    assert row == Row("5", "in.jsonl:3", "prompt", "hi", {"seed": 1, "max_tokens": 9}, {"level": 2})
    assert isinstance(row, Row)
    assert row.params(DEFAULTS) == SamplingParams(max_tokens=9, epsilon=0.8, seed=1)
    assert row_of_record(row.record(), 1, "in.jsonl:3", DEFAULTS) == row


def test_what_a_table_holds_as_text() -> None:
    talk = [{"role": "user", "content": "hi"}]
    row = row_of_record(
        {"id": None, "prompt": None, "messages": json.dumps(talk), "params": '{"n": 1}'}, 4, "w", DEFAULTS
    )
    assert row == Row("4", "w", "messages", talk, {"n": 1})
    assert parse({"prompt_token_ids": "[4, 5]"}).value == [4, 5]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"not json", "not a line of JSON"),
        (b'{"prompt": "a"', "not a line of JSON"),
        (b"[1]", "must be a JSON object, not list"),
        (b"\xff\xfe", "not valid UTF-8 (byte 0)"),
        (b"[" * 100_000, "not a line of JSON"),
        (b'{"id": "a"}', "needs exactly one of prompt, messages, prompt_token_ids, template; it has none"),
        (b'{"prompt": "a", "template": "b"}', "it has prompt and template"),
        (b'{"prompt": null}', "it has none"),
        (b'{"prompt": 3}', "prompt=3: must be text"),
        (b'{"messages": {"role": "user"}}', "must be a list"),
        (b'{"messages": "[oops"}', "messages: not JSON"),
        (b'{"id": 1.5, "prompt": "a"}', "id=1.5: must be text or a whole number"),
        (b'{"id": true, "prompt": "a"}', "id=True"),
        (b'{"prompt": "a", "params": {"max_token": 1}}', "unknown option 'max_token'"),
        (b'{"prompt": "a", "params": [1]}', "params=[1]: must be an object"),
        (b'{"prompt": "a", "max_tokens": 0}', "max_tokens=0: "),
        (b'{"prompt": "a", "temperature": "hot"}', "temperature='hot': "),
        (b'{"prompt": "a", "seed": 1, "params": {"seed": 1}}', "seed is given twice"),
        (b'{"prompt": "\\ud800"}', "text is not valid Unicode"),
        (b'{"prompt": "a", "note": "\\ud800"}', "text is not valid Unicode"),
    ],
)
def test_bad_rows(line: bytes, reason: str) -> None:
    bad = row_of_line(line, 3, "in.jsonl:3", DEFAULTS)
    assert isinstance(bad, BadRow) and reason in bad.reason and "\n" not in bad.reason, bad
    assert bad.where == "in.jsonl:3"


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(["id", "prompt", "messages", "params", "seed", "stop", "n", "template", "other"])


@given(
    st.binary(max_size=30) | st.dictionaries(names, plain, max_size=5).map(lambda v: json.dumps(v).encode())
)
def test_any_line_is_a_row_or_a_reason(line: bytes) -> None:
    """And a row that is one can be written and read again."""
    row = row_of_line(line, 1, "w", DEFAULTS)
    if isinstance(row, Row):
        again = row_of_line(json.dumps(row.record()).encode(), 1, "w", DEFAULTS)
        assert again == row
    else:
        assert row.reason
        json.dumps(row.record())

"""Rows of a batch: what a line or a record asks for, checked without a model.

A row has exactly one of ``KINDS``, and may have ``id`` and sampling options, either in an object ``params`` or beside
the prompt under the names of :class:`SamplingParams`. Every other field goes to the answer as ``metadata``. A value of
None is no value, as in a column that some rows leave empty.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from flash_dllm.errors import FlashDLLMError
from flash_dllm.params import SamplingParams

KINDS: dict[str, type] = {"prompt": str, "messages": list, "prompt_token_ids": list, "template": str}
"""What to answer, and the type that it has."""
OPTIONS = frozenset(SamplingParams.model_fields)


class RowError(FlashDLLMError):
    """A row that cannot be answered; the message says why."""


@dataclass(frozen=True)
class Row:
    """A row that may be answered. ``where`` names file and line, ``options`` the row's own sampling options."""

    id: str
    where: str
    kind: str
    value: Any
    options: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """The row's own options over those of the run. A template's gaps say how long it gets, not the run."""
        skip = {"max_tokens", "stop"} if self.kind == "template" else set()
        run = defaults.model_dump(exclude_unset=True, exclude=skip)
        return SamplingParams.model_validate({**run, **self.options})

    def record(self) -> dict[str, Any]:
        """The row as an input row again."""
        params = {"params": self.options} if self.options else {}
        return {"id": self.id, self.kind: self.value, **params, **self.metadata}


@dataclass(frozen=True)
class BadRow:
    """A row that is not answered: its reason, and what was read (text where it was no JSON)."""

    id: str
    where: str
    reason: str
    row: Any

    def record(self) -> dict[str, Any]:
        """As it goes into the side file."""
        return {"id": self.id, "where": self.where, "reason": self.reason, "row": self.row}


def reason_of(exc: BaseException) -> str:
    """One line that says what is wrong with a row."""
    if isinstance(exc, ValidationError):
        first = exc.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            return f"unknown option {name!r}"
        return f"{name}={first['input']!r}: {first['msg']}"
    text = " ".join(str(exc).split())
    return text if isinstance(exc, FlashDLLMError) else f"{type(exc).__name__}: {text}"


def row_of_line(line: bytes, number: int, where: str, defaults: SamplingParams) -> Row | BadRow:
    """A line of a JSON Lines file. Its id is its number, counted over all input, unless it names one."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as exc:
        shown = line.decode("utf-8", "backslashreplace").rstrip()
        return BadRow(str(number), where, f"not valid UTF-8 (byte {exc.start})", shown)
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as exc:
        return BadRow(str(number), where, f"not a line of JSON ({exc})", text.rstrip("\r\n"))
    return row_of_record(raw, number, where, defaults)


def row_of_record(raw: Any, number: int, where: str, defaults: SamplingParams) -> Row | BadRow:
    """A record, from JSON or from a row of a Parquet file."""
    id_ = str(number)
    try:
        if not isinstance(raw, Mapping):
            raise RowError(f"must be a JSON object, not {type(raw).__name__}")
        given = {str(name): value for name, value in raw.items() if value is not None}
        id_ = _id(given.pop("id", id_))
        row = _row(given, id_, where)
        row.params(defaults)
        # Found here once, instead of by every writer: JSON may spell half a character.
        json.dumps(row.record(), ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return BadRow(id_, where, "text is not valid Unicode (a lone surrogate)", raw)
    except RecursionError:
        return BadRow(id_, where, "nested too deeply", None)
    except (FlashDLLMError, ValidationError) as exc:
        return BadRow(id_, where, reason_of(exc), _plain(raw))
    return row


def _id(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RowError(f"id={value!r}: must be text or a whole number")
    return str(value)


def _row(given: dict[str, Any], id_: str, where: str) -> Row:
    kinds = [kind for kind in KINDS if kind in given]
    if len(kinds) != 1:
        found = f"it has {' and '.join(kinds)}" if kinds else "it has none"
        raise RowError(f"needs exactly one of {', '.join(KINDS)}; {found}")
    kind = kinds[0]
    value = given.pop(kind)
    # A table has no column of lists of objects without effort, so they may be JSON text there.
    value = _parsed(kind, value) if KINDS[kind] is list and isinstance(value, str) else _plain(value)
    if not isinstance(value, KINDS[kind]):
        wanted = "text" if KINDS[kind] is str else "a list"
        raise RowError(f"{kind}={value!r}: must be {wanted}")
    own = given.pop("params", {})
    own = _parsed("params", own) if isinstance(own, str) else own
    if not isinstance(own, Mapping):
        raise RowError(f"params={own!r}: must be an object")
    options = {str(name): _plain(option) for name, option in own.items() if option is not None}
    for name in OPTIONS & set(given):
        if name in options:
            raise RowError(f"{name} is given twice, in params and beside the prompt")
        options[name] = _plain(given.pop(name))
    return Row(id_, where, kind, value, options, _plain(given))


def _parsed(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise RowError(f"{name}: not JSON ({exc})") from exc


def _plain(value: Any) -> Any:
    """The value as JSON can hold it: a table's dates and decimals become text, NaN becomes null."""
    return json.loads(json.dumps(value, default=str), parse_constant=lambda name: None)

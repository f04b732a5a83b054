"""Reading prompts: an argument, a file or stdin; text or JSON Lines."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flash_dllm.cli.fields import UsageError
from flash_dllm.params import SamplingParams

KINDS = ("prompt", "messages", "prompt_token_ids", "template")


@dataclass
class Item:
    """One line of a JSON Lines file: what to answer, and what to hand through to the output."""

    id: str
    kind: str
    value: Any
    params: SamplingParams
    where: str
    rest: dict[str, Any] = field(default_factory=dict)


def read_text(path: Path | None) -> str:
    """A file, or stdin for None.

    Raises:
        UsageError: not UTF-8.
        OSError: not there.
    """
    data = sys.stdin.buffer.read() if path is None else path.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise UsageError(f"{path or 'stdin'}: not valid UTF-8 (byte {exc.start})") from exc


def single_prompt(argument: str | None, file: Path | None) -> str:
    """The prompt from the argument, the file or stdin, whichever there is."""
    if argument is not None and file is not None:
        raise UsageError("give a prompt or --file, not both")
    if argument is not None and argument != "-":
        return argument
    if file is None and argument is None and sys.stdin.isatty():
        raise UsageError("no prompt: give it as argument, with --file or on stdin")
    # An editor ends a file with a line break that nobody means.
    return read_text(file).removesuffix("\n")


def read_items(path: Path | None, params: SamplingParams) -> list[Item]:
    """The lines of a JSON Lines file. Each has one of ``KINDS`` and may have ``id`` and ``params``.

    Raises:
        UsageError: names file and line.
    """
    items: list[Item] = []
    seen: set[str] = set()
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path or 'stdin'}:{number}"
        item = _item(where, _object(where, line), str(number), params)
        if item.id in seen:
            raise UsageError(f"{where}: id {item.id!r} is there twice")
        seen.add(item.id)
        items.append(item)
    if not items:
        raise UsageError(f"{path or 'stdin'}: no prompts")
    return items


def _object(where: str, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as exc:
        raise UsageError(f"{where}: not a line of JSON ({exc})") from exc
    if not isinstance(value, dict):
        raise UsageError(f"{where}: must be a JSON object")
    return value


def _item(where: str, raw: dict[str, Any], number: str, params: SamplingParams) -> Item:
    kinds = [kind for kind in KINDS if kind in raw]
    if len(kinds) != 1:
        raise UsageError(f"{where}: needs exactly one of {', '.join(KINDS)}")
    own = raw.get("params", {})
    if not isinstance(own, dict):
        raise UsageError(f"{where}: params must be an object")
    merged = SamplingParams.model_validate({**params.model_dump(exclude_unset=True), **own})
    rest = {k: v for k, v in raw.items() if k not in ("id", "params", kinds[0])}
    return Item(str(raw.get("id", number)), kinds[0], raw[kinds[0]], merged, where, rest)


def finished_ids(path: Path) -> set[str]:
    """Ids of the answers in an output file of an earlier run; a last line that was cut off is removed."""
    if not path.exists():
        return set()
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        path.write_bytes(whole)
    done = set()
    for number, line in enumerate(whole.decode("utf-8").rstrip("\n").split("\n") if whole else [], 1):
        record = _object(f"{path}:{number}", line)
        if not isinstance(record.get("id"), str):
            raise UsageError(f"{path}:{number}: no id; is this an output file of an earlier run?")
        done.add(record["id"])
    return done

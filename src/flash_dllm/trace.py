"""The event log: what happened in every step, as JSON Lines, for players, plots and tests (docs/trace.md).

Line 1 is the header. Then, in order of time: ``request`` (a canvas was submitted), ``tokens`` (text of ids
not seen before), ``step`` (one step of one request) and ``end``. A position without a mark so far holds MASK.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

FORMAT = "flash-dllm-trace"
VERSION = 1
STATES = ("guess", "draft", "accepted", "rejected", "committed")
FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "header": {"format": str, "version": int, "model": str, "method": str, "params": dict, "device": str,
               "versions": dict, "mask_id": int},
    "request": {"request": str, "ids": list, "masked": list, "params": dict},
    "tokens": {"text": dict},
    "step": {"request": str, "slot": int, "step": int, "ms": (int, float), "passes": list, "marks": list},
    "end": {"request": str, "reason": str, "steps": int, "nfe": int, "rows": int, "seconds": (int, float),
            "ids": list},
}  # fmt: skip
"""Fields of each event, by its ``event``. ``passes`` and ``marks`` see :class:`TraceWriter`."""


class TraceError(ValueError):
    """A log that cannot be read; the message names file and line."""


def ranges(positions: Iterable[int]) -> list[list[int]]:
    """Sorted positions as [start, end) pairs, which keeps whole-canvas passes short."""
    out: list[list[int]] = []
    for position in positions:
        if out and out[-1][1] == position:
            out[-1][1] = position + 1
        else:
            out.append([position, position + 1])
    return out


class TraceWriter:
    """Writes a log.

    A pass has ``kind`` ("denoise" or "verify"), ``full`` (every position was recomputed), ``rows``
    (positions recomputed, as [start, end) pairs) and ``extra`` ([position, token, rank] of rows beside the
    canvas: views, branches, readers). A mark is ``[position, token, confidence, state]`` with a state of
    :data:`STATES`.

    Args:
        file: open text file, which the caller closes.
        header: fields of the header beside format and version.
        text: gives the text of one token id, or None to leave texts out.
    """

    def __init__(
        self, file: TextIO, header: dict[str, Any], text: Callable[[int], str] | None = None
    ) -> None:
        self._file, self._text = file, text
        self._named: set[int] = set()
        self._write("header", format=FORMAT, version=VERSION, **header)

    def request(self, request: str, ids: list[int], masked: list[int], params: dict[str, Any]) -> None:
        """A canvas was submitted: its ids, the positions to fill in, and its options."""
        self._name(ids)
        self._write("request", request=request, ids=ids, masked=ranges(masked), params=params)

    def step(
        self,
        request: str,
        slot: int,
        step: int,
        ms: float,
        passes: list[dict[str, Any]],
        marks: list[list[Any]],
    ) -> None:
        """A step of a request. ``ms`` is the time of the whole batch's step."""
        self._name(mark[1] for mark in marks)
        clean = [[p, t, round(c, 6) if math.isfinite(c) else None, s] for p, t, c, s in marks]
        self._write(
            "step", request=request, slot=slot, step=step, ms=round(ms, 3), passes=passes, marks=clean
        )

    def end(self, request: str, **fields: Any) -> None:
        """A request is finished; see :data:`FIELDS`."""
        self._write("end", request=request, **fields)

    def _name(self, ids: Iterable[int]) -> None:
        if self._text is None:
            return
        new = set(ids) - self._named
        self._named |= new
        if new:
            self._write("tokens", text={str(i): self._text(i) for i in sorted(new)})

    def _write(self, event: str, **fields: Any) -> None:
        # An option may be an object, such as a guide; its name will do.
        line = json.dumps(
            {"event": event, **fields},
            ensure_ascii=False,
            allow_nan=False,
            separators=(",", ":"),
            default=str,
        )
        self._file.write(line + "\n")
        self._file.flush()


@dataclass(frozen=True)
class Trace:
    """A log in memory."""

    header: dict[str, Any]
    events: list[dict[str, Any]]


def read_trace(path: str | Path) -> Trace:
    """Read a log.

    Raises:
        TraceError: not a log of this version, or broken: names the line and what is wrong with it.
    """
    lines = list(_lines(Path(path)))
    if not lines:
        raise TraceError(f"{path}: empty, not an event log")
    where, header = lines[0]
    if header["event"] != "header" or header.get("format") != FORMAT:
        raise TraceError(f"{where}: not an event log ({FORMAT})")
    if header.get("version") != VERSION:
        raise TraceError(
            f"{where}: version {header.get('version')!r} of the log; this program reads {VERSION}"
        )
    open_: set[str] = set()
    for where, event in lines:
        _check(where, event)
        _follow(where, event, open_)
    return Trace(header, [event for _, event in lines[1:]])


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise TraceError(f"{path}: cannot be read ({exc.strerror or exc})") from exc
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line:
            continue
        where = f"{path}:{number}"
        try:
            event = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as exc:
            raise TraceError(f"{where}: not a line of JSON; the log is broken or cut off here") from exc
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            raise TraceError(f"{where}: not an event")
        yield where, event


def _check(where: str, event: dict[str, Any]) -> None:
    kind = event["event"]
    if kind not in FIELDS:
        raise TraceError(f"{where}: unknown event {kind!r}; known: {', '.join(FIELDS)}")
    for name, kinds in FIELDS[kind].items():
        if name not in event:
            raise TraceError(f"{where}: {kind} without {name!r}")
        if not isinstance(event[name], kinds) or isinstance(event[name], bool):
            raise TraceError(f"{where}: {kind} with {name}={json.dumps(event[name])[:60]}")
    for mark in event.get("marks", ()):
        if not (isinstance(mark, list) and len(mark) == 4 and _is_mark(*mark)):
            raise TraceError(
                f"{where}: mark {json.dumps(mark)[:60]} is not [position, token, confidence, state]"
            )
    for seen in event.get("passes", ()):
        if not (
            isinstance(seen, dict)
            and isinstance(seen.get("kind"), str)
            and isinstance(seen.get("rows"), list)
        ):
            raise TraceError(f"{where}: pass {json.dumps(seen)[:60]} has no kind or rows")


def _is_mark(position: Any, token: Any, confidence: Any, state: Any) -> bool:
    whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (position, token))
    return whole and isinstance(confidence, int | float) and state in STATES


def _follow(where: str, event: dict[str, Any], open_: set[str]) -> None:
    """The order of a request's events: request, steps, end."""
    kind, request = event["event"], event.get("request")
    if kind == "request":
        if request in open_:
            raise TraceError(f"{where}: request {request!r} is there twice")
        open_.add(str(request))
    elif kind in ("step", "end") and request not in open_:
        raise TraceError(f"{where}: {kind} of request {request!r}, which is not open")
    if kind == "end":
        open_.discard(str(request))

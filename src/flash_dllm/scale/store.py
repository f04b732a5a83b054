"""Files and object stores of a batch: what is read, what is written, and what an earlier run has written.

A local JSON Lines file is appended to, a line an answer. Parquet files and objects of a store cannot be appended to:
there the output is a folder of numbered parts, each of which appears whole or not at all.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Protocol

from flash_dllm.params import SamplingParams
from flash_dllm.scale.extras import ScaleError
from flash_dllm.scale.rows import BadRow, Row, row_of_line, row_of_record
from flash_dllm.scale.tables import read_table, row_count, table_bytes

FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


@dataclass(frozen=True)
class Place:
    """A path on a filesystem. ``fs`` is fsspec's; ``format`` is None where the name has no known ending."""

    fs: Any
    path: str
    format: str | None
    local: bool

    @classmethod
    def of(cls, name: str) -> Place:
        """From a path or an address such as ``s3://bucket/rows.parquet``.

        Raises:
            ScaleError: no filesystem for such an address, or its package is not installed.
        """
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem

        try:
            fs, path = url_to_fs(name)
        except (ValueError, ImportError) as exc:
            raise ScaleError(f"{name}: {exc}") from exc
        return cls(fs, path, _format(path), isinstance(fs, LocalFileSystem))

    def beside(self, suffix: str) -> Place:
        """``answers.jsonl`` -> ``answers`` + suffix, in the same folder."""
        path = str(PurePosixPath(self.path).with_suffix("")) + suffix
        return Place(self.fs, path, _format(path), self.local)


def _format(path: str) -> str | None:
    return FORMATS.get(PurePosixPath(path).suffix)


class Source:
    """The rows of an input: one file, all files of a folder or those that a pattern names, in order of name.

    Raises:
        ScaleError: nothing there, or an ending that is neither JSON Lines nor Parquet.
    """

    def __init__(self, name: str) -> None:
        if not name:
            raise ScaleError("the input has no name")
        self.name, self.place = name, Place.of(name)
        fs, path = self.place.fs, self.place.path
        if fs.isdir(path):
            files = [f for f in fs.ls(path, detail=False) if not PurePosixPath(f).name.startswith((".", "_"))]
        else:
            files = [path] if fs.exists(path) else fs.glob(path)
        self.files = sorted(files)
        if not self.files:
            raise ScaleError(f"{name}: no such file")
        self.one = self.files == [path]

    def leave_out(self, written: Sequence[Place]) -> None:
        """Do not read what the batch itself writes, should it lie in the same folder.

        Raises:
            ScaleError: the input is one of them; nothing else is left; or a file has another ending than rows have.
        """
        mine = [p.path for p in written if type(p.fs) is type(self.place.fs)]
        own = [f for f in self.files if any(f == path or f.startswith(path + "/") for path in mine)]
        if own and self.one:
            raise ScaleError(
                f"{self.name}: the batch would write over its input; give the output another name"
            )
        self.files = [f for f in self.files if f not in own]
        if not self.files:
            raise ScaleError(f"{self.name}: no file of rows besides those that the batch writes")
        for file in self.files:
            if _format(file) is None:
                raise ScaleError(f"{file}: the name must end in {', '.join(FORMATS)}")

    def count(self) -> int:
        """Rows of all files, bad ones too."""
        total = 0
        for file in self.files:
            with self.place.fs.open(file, "rb") as data:
                if _format(file) == "parquet":
                    total += row_count(data, file)
                else:
                    total += sum(1 for line in data if line.strip())
        return total

    def rows(self, defaults: SamplingParams) -> Iterator[Row | BadRow]:
        """Every row, good or bad, in order. Lines that are empty are none."""
        number = 0
        for file in self.files:
            with self.place.fs.open(file, "rb") as data:
                if _format(file) == "parquet":
                    for index, record in enumerate(read_table(data, file), 1):
                        number += 1
                        yield row_of_record(record, number, f"{file}:{index}", defaults)
                    continue
                for index, line in enumerate(data, 1):
                    number += 1
                    if index == 1:
                        line = line.removeprefix(b"\xef\xbb\xbf")
                    if line.strip():
                        yield row_of_line(line, number, f"{file}:{index}", defaults)


class Writer(Protocol):
    """Where records go; each is kept once :meth:`flush` returned, for an appended file once it is written."""

    def write(self, record: dict[str, Any]) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class Lines:
    """Appends JSON lines to a local file; each is handed to the operating system at once."""

    def __init__(self, place: Place) -> None:
        os.makedirs(os.path.dirname(place.path) or ".", exist_ok=True)
        self._file = open(place.path, "ab")  # noqa: SIM115

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(line_of(record))
        self._file.flush()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Parts:
    """Writes parts of up to ``size`` records into a folder."""

    def __init__(self, place: Place, size: int) -> None:
        self.place, self.size = place, size
        self._held: list[dict[str, Any]] = []
        place.fs.makedirs(place.path, exist_ok=True)
        names = [PurePosixPath(p).stem for p in part_paths(place)]
        self._next = 1 + max((int(n.removeprefix("part-")) for n in names), default=-1)

    def write(self, record: dict[str, Any]) -> None:
        self._held.append(record)
        if len(self._held) >= self.size:
            self.flush()

    def flush(self) -> None:
        if not self._held:
            return
        jsonl = self.place.format == "jsonl"
        data = b"".join(map(line_of, self._held)) if jsonl else table_bytes(self._held)
        path = f"{self.place.path}/part-{self._next:06d}{PurePosixPath(self.place.path).suffix}"
        if self.place.local:
            # A store puts an object whole; a file is made whole by its name.
            half = f"{self.place.path}/.half"
            with open(half, "wb") as file:
                file.write(data)
            os.replace(half, path)
        else:
            self.place.fs.pipe_file(path, data)
        self._next += 1
        self._held.clear()

    def close(self) -> None:
        self.flush()


def open_writer(place: Place, part_size: int) -> Writer:
    """The writer for a place."""
    return Lines(place) if place.local and place.format == "jsonl" else Parts(place, part_size)


def line_of(record: dict[str, Any]) -> bytes:
    """A JSON line. Half a character, which only a bad row has, is escaped."""
    try:
        return json.dumps(record, ensure_ascii=False).encode("utf-8") + b"\n"
    except UnicodeEncodeError:
        return json.dumps(record).encode("ascii") + b"\n"


def part_paths(place: Place) -> list[str]:
    """Parts of a folder, in order; names that are no parts are refused.

    Raises:
        ScaleError: the folder holds something else.
    """
    place.fs.invalidate_cache()
    if not place.fs.exists(place.path):
        return []
    suffix = PurePosixPath(place.path).suffix
    found = []
    for path in sorted(place.fs.ls(place.path, detail=False)):
        name = PurePosixPath(path).name
        if name.startswith("."):
            continue
        if not (name.startswith("part-") and name.endswith(suffix) and name[5 : -len(suffix)].isdigit()):
            raise ScaleError(f"{path}: is no part of an earlier run's output")
        found.append(path)
    return found


def finished_ids(place: Place, begun: bool = True) -> set[str]:
    """Ids of the answers that an earlier run wrote; a last line that was cut off is removed.

    Args:
        begun: a batch has left its settings beside it. Where none has, a file without a whole line is not touched.

    Raises:
        ScaleError: what is there is not the output of a batch.
    """
    if not place.fs.exists(place.path):
        return set()
    if place.local and place.format == "jsonl":
        if os.path.isdir(place.path):
            raise ScaleError(f"{place.path}: is a folder; the output here is a file")
        # Whatever is no batch's output is left as it is.
        ids = set(_ids_of_lines(place, [place.path]))
        if not ids and not begun and os.path.getsize(place.path):
            raise ScaleError(f"{place.path}: no output of a batch; it would be written over")
        _drop_torn_line(place.path)
        return ids
    if place.fs.isfile(place.path):
        raise ScaleError(f"{place.path}: is a file; the output here is a folder of parts")
    if place.format == "jsonl":
        return set(_ids_of_lines(place, part_paths(place)))
    done: set[str] = set()
    for path in part_paths(place):
        with place.fs.open(path, "rb") as data:
            done.update(record["id"] for record in read_table(data, path, ["id"]))
    return done


def _drop_torn_line(path: str) -> None:
    with open(path, "r+b") as file:
        size = end = file.seek(0, io.SEEK_END)
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            if (found := file.read(end - start).rfind(b"\n")) >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            file.truncate(end)


def _ids_of_lines(place: Place, paths: Sequence[str]) -> Iterator[str]:
    for path in paths:
        with place.fs.open(path, "rb") as data:
            for number, line in enumerate(data, 1):
                if not line.endswith(b"\n"):
                    return  # cut off while it was written
                try:
                    id_ = json.loads(line)["id"]
                except (ValueError, TypeError, KeyError) as exc:
                    raise ScaleError(f"{path}:{number}: no answer of an earlier run") from exc
                if not isinstance(id_, str):
                    raise ScaleError(f"{path}:{number}: id={id_!r} is no answer's id")
                yield id_

"""The event log: what is written can be read, and a broken log says where it is broken."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from flash_dllm import LLM, SamplingParams
from flash_dllm.trace import TraceError, TraceWriter, ranges, read_trace


@pytest.fixture
def log(chat_folder: Path, tmp_path: Path) -> tuple[Path, list[list[int]]]:
    llm = LLM(chat_folder, max_num_seqs=2)
    path = tmp_path / "log.jsonl"
    with llm.tracing(path):
        outputs = llm.generate(["the cat", "so", "naïve ☃"], SamplingParams(max_tokens=10))
    llm.generate("not logged", SamplingParams(max_tokens=2))
    return path, [o.canvas_ids for o in outputs]


def test_the_log_replays_to_the_answers(log: tuple[Path, list[list[int]]]) -> None:
    trace = read_trace(log[0])
    assert trace.header["method"].startswith("none") and trace.header["device"] == "cpu"
    canvases: dict[str, list[int]] = {}
    for event in trace.events:
        if event["event"] == "request":
            canvases[event["request"]] = list(event["ids"])
            start, end = event["masked"][0]
            assert end == len(event["ids"]) and set(event["ids"][start:]) == {trace.header["mask_id"]}
        elif event["event"] == "step":
            assert event["ms"] > 0
            for position, token, confidence, state in event["marks"]:
                assert 0 <= confidence <= 1
                if state in ("committed", "accepted"):
                    canvases[event["request"]][position] = token
        elif event["event"] == "end":
            assert canvases[event["request"]] == event["ids"]
    assert list(canvases.values()) == log[1]


def test_every_token_has_its_text(log: tuple[Path, list[list[int]]]) -> None:
    trace = read_trace(log[0])
    named = {int(i) for e in trace.events if e["event"] == "tokens" for i in e["text"]}
    assert {t for canvas in log[1] for t in canvas} <= named


def test_passes_say_which_rows_they_recomputed(log: tuple[Path, list[list[int]]]) -> None:
    steps = [e for e in read_trace(log[0]).events if e["event"] == "step"]
    assert all(
        p["kind"] == "denoise" and p["full"] and p["rows"][0][0] == 0 for s in steps for p in s["passes"]
    )


def test_confidences_that_are_no_numbers() -> None:
    file = io.StringIO()
    header = {"model": "m", "method": "x", "params": {}, "device": "cpu", "versions": {}, "mask_id": 1}
    TraceWriter(file, header).step("0", 0, 0, 1.0, [], [[3, 4, float("nan"), "guess"]])
    assert json.loads(file.getvalue().splitlines()[1])["marks"] == [[3, 4, None, "guess"]]


def test_ranges() -> None:
    assert ranges([]) == []
    assert ranges([0, 1, 2, 5, 7, 8]) == [[0, 3], [5, 6], [7, 9]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [], "empty"),
        (lambda lines: lines[1:], ":1: not an event log"),
        (lambda lines: [lines[0].replace('"version":1', '"version":2'), *lines[1:]], ":1: version 2"),
        (lambda lines: [*lines[:3], lines[3][:20]], ":4: not a line of JSON"),
        (lambda lines: [*lines[:3], "[1]"], ":4: not an event"),
        (lambda lines: [*lines, '{"event":"dance"}'], "unknown event 'dance'"),
        (lambda lines: [*lines, '{"event":"end","request":"9-9"}'], "end without 'reason'"),
        (lambda lines: [lines[0], *[x for x in lines[1:] if '"event":"request"' not in x]], "not open"),
        (lambda lines: [x.replace('"guess"', '"maybe"') for x in lines], "maybe"),
        (lambda lines: [x.replace('"slot":', '"slot":"a","x":') for x in lines], "slot"),
        (lambda lines: [x.replace('"kind":"denoise"', '"kind":3') for x in lines], "kind"),
    ],
)
def test_broken_logs(log: tuple[Path, list[list[int]]], tmp_path: Path, change: object, message: str) -> None:
    lines = log[0].read_text().splitlines()
    broken = tmp_path / "broken.jsonl"
    broken.write_text("\n".join(change(lines)))  # type: ignore[operator]
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(broken)
    assert "\n" not in str(caught.value) and str(broken) in str(caught.value)


def test_unreadable_logs(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(TraceError, match=":1: not a line"):
        read_trace(tmp_path / "bytes.jsonl")


@pytest.mark.parametrize(
    "mark", [["p", 1, 0.5, "guess"], [1, -2, 0.5, "guess"], [1, 2, "c", "guess"], [1, 2, 3]]
)
def test_marks_that_are_none(log: tuple[Path, list[int]], mark: list[object], tmp_path: Path) -> None:
    lines = log[0].read_text(encoding="utf-8").splitlines()
    number = next(i for i, line in enumerate(lines) if json.loads(line)["event"] == "step")
    lines[number] = json.dumps({**json.loads(lines[number]), "marks": [mark]})
    broken = tmp_path / "log.jsonl"
    broken.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(TraceError, match=rf"log\.jsonl:{number + 1}: mark"):
        read_trace(broken)


def test_a_line_nested_without_end_is_an_error_of_the_log(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("[" * 100_000)
    with pytest.raises(TraceError, match=r"log\.jsonl:1"):
        read_trace(path)

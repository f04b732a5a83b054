"""Open-loop load: Poisson arrivals, what is counted, and servers that fail."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from flash_dllm import LLM
from flash_dllm.bench.serve import Target, arrivals, measure_serve
from flash_dllm.bench.timing import BenchError
from tests.commands import Run
from tests.serve.support import live, service_of

WAIT = 120.0


def sse(*events: Any) -> bytes:
    return b"".join(
        b"data: " + (e if isinstance(e, bytes) else json.dumps(e).encode()) + b"\n\n" for e in events
    )


def piece(text: str | None, finish: str | None = None) -> dict[str, Any]:
    return {
        "choices": [{"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": finish}]
    }


USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 7}}
GOOD = sse(piece("a"), piece("b"), piece(None, "stop"), USAGE, b"[DONE]")


@contextmanager
def server(
    answer: Callable[[dict[str, Any]], tuple[int, bytes]],
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server whose answers are ``answer(body)``; gives its url and the bodies that it got."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, json.dumps({"data": [{"id": "the-model"}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append({"path": self.path, **body})
            self._send(*answer(body))

        def _send(self, code: int, data: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{made.server_address[1]}", bodies
    finally:
        made.shutdown()
        thread.join(WAIT)
        made.server_close()


def test_arrivals_are_poisson() -> None:
    times = arrivals(50.0, 4000, seed=3)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.05)
    # Exponential gaps: standard deviation equals the mean, and 1 - 1/e of them lie below it.
    assert (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.06)
    assert sum(g < mean for g in gaps) / len(gaps) == pytest.approx(0.632, abs=0.03)
    assert times == sorted(times) == arrivals(50.0, 4000, seed=3) != arrivals(50.0, 4000, seed=4)
    assert arrivals(float("inf"), 3, 0) == [0.0, 0.0, 0.0]
    for rate in (0.0, -1.0, float("nan")):
        with pytest.raises(BenchError, match="rate="):
            arrivals(rate, 1, 0)


def test_what_a_good_server_gives() -> None:
    with server(lambda body: (200, GOOD)) as (url, bodies):
        target = Target(url + "/v1/", max_tokens=9, extra={"epsilon": 0.8}, timeout=WAIT)
        row = measure_serve(target, ["one", "two"], float("inf"), 5)
    assert (row["requests"], row["failed"], row["model"], row["answer_tokens"]) == (5, 0, "the-model", 35)
    assert row["tokens_per_second"] == pytest.approx(35 / row["seconds"], rel=0.01)
    assert 0 <= row["first_token_s"]["p50"] <= row["last_token_s"]["p50"] <= row["seconds"]
    assert sorted(b["messages"][0]["content"] for b in bodies) == ["one", "one", "one", "two", "two"]
    asked = bodies[0]
    assert asked["path"] == "/v1/chat/completions" and asked["stream"] is True
    assert (asked["max_tokens"], asked["epsilon"], asked["model"]) == (9, 0.8, "the-model")


def test_text_completions_and_no_usage() -> None:
    data = sse({"choices": [{"index": 0, "text": "hello", "finish_reason": "length"}]}, b"[DONE]")
    with server(lambda body: (200, data)) as (url, bodies):
        row = measure_serve(Target(url, "mine", chat=False, timeout=WAIT), ["p"], float("inf"), 2)
    assert bodies[0]["path"] == "/v1/completions" and bodies[0]["prompt"] == "p"
    assert (row["failed"], row["answer_tokens"], row["tokens_per_second"]) == (0, None, None)
    assert row["requests_per_second"] > 0


@pytest.mark.parametrize(
    ("code", "data", "words"),
    [
        (500, b"no", "status 500: no"),
        (200, sse({"error": {"message": "engine died"}}), "engine died"),
        (200, sse(b"[DONE]"), "without any token"),
        (200, b"data: {broken\n\n", "JSONDecodeError"),
    ],
)
def test_failures_are_counted_and_named(code: int, data: bytes, words: str) -> None:
    def answer(body: dict[str, Any]) -> tuple[int, bytes]:
        return (code, data) if body["messages"][0]["content"] == "bad" else (200, GOOD)

    with server(answer) as (url, _):
        row = measure_serve(Target(url, timeout=WAIT), ["bad", "good"], float("inf"), 4)
    assert row["failed"] == 2 and words in row["errors"][0]
    assert row["answer_tokens"] == 14


def test_no_server_and_no_prompts() -> None:
    with server(lambda body: (200, GOOD)) as (url, _):
        pass
    with pytest.raises(BenchError, match="/v1/models"):
        measure_serve(Target(url), ["p"], 1.0, 1)
    with pytest.raises(BenchError, match="no prompts"):
        measure_serve(Target(url), [], 1.0, 1)


def test_the_command_against_the_real_server(run: Run, chat_folder: Path, tmp_path: Path) -> None:
    llm = LLM(chat_folder, max_num_seqs=2, device="cpu")
    file, prompts, picture = tmp_path / "serve.json", tmp_path / "prompts.txt", tmp_path / "serve.svg"
    prompts.write_text("the cat sat\n\nthe dog ran\n")
    with live(service_of(llm)) as made:
        words = ("--rates", "50,inf", "--requests", "4", "--prompts", prompts, "-t", "8", "--field", "seed=3")
        outcome = run("bench", "serve", "--url", made.url, *words, "--json", file, "--plot", picture)
    assert outcome.code == 0, outcome.err
    report = json.loads(file.read_text())
    assert report["kind"] == "serve" and report["synthetic"] is False
    assert [(r["rate"], r["failed"], r["requests"]) for r in report["rows"]] == [(50.0, 0, 4), (None, 0, 4)]
    assert all(r["answer_tokens"] is not None and r["last_token_s"]["p99"] > 0 for r in report["rows"])
    assert picture.exists() and "all at once" in outcome.out


def test_a_refused_request_shows_in_the_exit_code(run: Run, chat_folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the cat sat\n")
    llm = LLM(chat_folder, max_num_seqs=2, device="cpu")
    with live(service_of(llm)) as made:
        words = ("--rates", "inf", "--requests", "2", "--prompts", prompts, "--field", "colour=red")
        outcome = run("bench", "serve", "--url", made.url, *words)
    assert outcome.code == 1 and "colour" in outcome.err

"""The front over engines, and an engine's replica, without Ray's processes."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.requests import Request

from flash_dllm import LLM, SamplingParams
from flash_dllm.scale.extras import ScaleError
from flash_dllm.scale.front import REPLICA, RETRIED, EngineReplica, Front
from flash_dllm.scale.replicas import ReplicaArgs, application, check
from tests.commands import Run
from tests.scale.cluster import LONG, WAIT, serve_args


class LostError(Exception):
    """Stands for a replica that died."""


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flash_dllm.scale.front.is_lost", lambda exc: isinstance(exc, LostError))


class Handle:
    """A deployment's handle whose calls give the messages of ``calls``, one list after the other."""

    def __init__(self, *calls: list[Any]) -> None:
        self.calls, self.asked, self.cancelled = list(calls), 0, 0
        self.answer = self

    def options(self, stream: bool) -> Handle:
        assert stream
        return self

    def remote(self, scope: dict[str, Any], body: bytes) -> Any:
        self.asked += 1
        handle, messages = self, self.calls.pop(0)

        class Stream:
            def __aiter__(self) -> AsyncIterator[Any]:
                return self._give()

            async def _give(self) -> AsyncIterator[Any]:
                for message in messages:
                    if isinstance(message, Exception):
                        raise message
                    yield message

            def cancel(self) -> None:
                handle.cancelled += 1

        return Stream()


def start(status: int = 200, kind: bytes = b"application/json") -> dict[str, Any]:
    headers = [(b"content-type", kind), (b"content-length", b"99")]
    return {"type": "http.response.start", "status": status, "headers": headers, "replica": "r"}


def part(text: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text, "more_body": more}


def ask(handle: Handle, body: bytes = b"{}", max_body: int = 100) -> tuple[int, dict[str, str], bytes]:
    """The front's response: status, headers, body."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def silent() -> Any:
        await asyncio.Event().wait()

    async def call() -> tuple[int, dict[str, str], bytes]:
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/x",
            "query_string": b"",
            "headers": [],
            "client": None,
        }
        response = await Front(handle, max_body)(Request(scope, receive))
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await response({**scope, "asgi": {"spec_version": "2.4"}}, silent, send)
        headers = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], headers, b"".join(m.get("body", b"") for m in sent[1:])

    return asyncio.run(call())


def test_a_whole_answer_is_tried_twice(no_ray: None) -> None:
    handle = Handle(
        [start(), part(b"ha", True), LostError()], [start(201), part(b"whole ", True), part(b"answer")]
    )
    status, headers, body = ask(handle)
    assert (status, body, handle.asked) == (201, b"whole answer", 2)
    assert headers["content-length"] == "12" and headers[RETRIED] == "1" and headers[REPLICA] == "r"


def test_two_lost_replicas_are_an_error(no_ray: None) -> None:
    handle = Handle([LostError()], [start(), LostError()])
    status, headers, body = ask(handle)
    assert status == 503 and headers["retry-after"] == "1" and handle.asked == 2
    assert json.loads(body)["error"]["code"] == "replica_lost"


def test_a_stream_of_which_nothing_was_sent_is_tried_again(no_ray: None) -> None:
    events = b"text/event-stream"
    handle = Handle([start(200, events), LostError()], [start(200, events), part(b"a", True), part(b"b")])
    assert ask(handle)[2] == b"ab" and handle.asked == 2


def test_a_stream_that_breaks_ends_with_an_error_event(no_ray: None) -> None:
    handle = Handle(
        [start(200, b"text/event-stream; charset=utf-8"), part(b"data: 1\n\n", True), LostError()]
    )
    status, _, body = ask(handle)
    lines = [line for line in body.decode().split("\n") if line]
    assert status == 200 and handle.asked == 1 and handle.cancelled == 1
    assert lines[0] == "data: 1" and lines[2] == "data: [DONE]"
    assert json.loads(lines[1].removeprefix("data: "))["error"]["code"] == "replica_lost"


def test_other_errors_are_not_retried(no_ray: None) -> None:
    handle = Handle([ValueError("a bug")])
    with pytest.raises(ValueError, match="a bug"):
        ask(handle)
    assert handle.asked == 1


def test_a_body_that_is_too_long_goes_nowhere(no_ray: None) -> None:
    handle = Handle()
    status, _, body = ask(handle, body=b"x" * 101)
    assert status == 413 and json.loads(body)["error"]["code"] == "body_too_long" and handle.asked == 0


@pytest.fixture
def engine(chat_folder: Path) -> Iterator[EngineReplica]:
    made = EngineReplica(serve_args(chat_folder).model_dump(mode="json"))
    yield made
    made.service.close()


def scope(path: str) -> dict[str, Any]:
    headers = [("content-type", "application/json")]
    return {"method": "POST", "path": path, "query": "", "headers": headers, "client": None}


async def answer(engine: EngineReplica, path: str, body: Any) -> list[dict[str, Any]]:
    return [message async for message in engine.answer(scope(path), json.dumps(body).encode())]


def test_an_engine_answers_as_its_application(engine: EngineReplica, chat_folder: Path) -> None:
    body = {"model": "tiny", "prompt": "the cat", "max_tokens": 9}
    messages = asyncio.run(answer(engine, "/v1/completions", body))
    assert messages[0]["status"] == 200 and messages[0]["replica"] == ""
    text = json.loads(b"".join(m["body"] for m in messages[1:]))["choices"][0]["text"]
    greedy = LLM(chat_folder, cache="none", decoding="greedy")
    assert text == greedy.generate("the cat", SamplingParams(max_tokens=9))[0].text
    assert asyncio.run(answer(engine, "/v1/completions", {**body, "model": "other"}))[0]["status"] == 404


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_its_slot(engine: EngineReplica, stream: bool) -> None:
    async def hang_up() -> None:
        body = {"model": "tiny", "prompt": "the cat", "max_tokens": LONG, "stream": stream}
        call = engine.answer(scope("/v1/completions"), json.dumps(body).encode())
        first = asyncio.ensure_future(anext(call))
        while not engine.service.unfinished:
            await asyncio.sleep(0.001)
        if stream:
            assert (await first)["status"] == 200
        else:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        await call.aclose()
        for _ in range(int(WAIT / 0.01)):
            if not engine.service.unfinished:
                break
            await asyncio.sleep(0.01)
        assert not engine.service.unfinished, "its answer is still being decoded"

    asyncio.run(hang_up())
    # A slot that was freed early has decoded nothing to the end.
    assert 'outcome="ok"' not in engine.service.metrics.text().decode()


def test_health_is_that_of_the_engine(engine: EngineReplica, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.check_health()
    engine.service._die("on purpose")
    with pytest.raises(RuntimeError, match="on purpose"):
        engine.check_health()
    left: list[int] = []

    class LeftError(Exception):
        pass

    def leave(code: int) -> None:
        left.append(code)
        raise LeftError

    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(LeftError):
        asyncio.run(answer(engine, "/v1/completions", {"model": "tiny", "prompt": "the cat"}))
    assert left == [70]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"max_replicas": 2}, "max_replicas goes with replicas"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas=2 is less than replicas=3"),
        ({"replicas": 3, "target_ongoing_requests": 2}, "target_ongoing_requests goes with max_replicas"),
        ({"replicas": 0}, "greater than or equal to 1"),
    ],
)
def test_wrong_replicas(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ReplicaArgs.model_validate(values)


def test_what_replicas_cannot_do(run: Run, chat_folder: Path) -> None:
    with pytest.raises(ScaleError, match="tensor_parallel_size=2"):
        check(serve_args(chat_folder, tensor_parallel_size=2))
    with pytest.raises(ScaleError, match="otel"):
        check(serve_args(chat_folder, otel=True))
    outcome = run("serve", chat_folder, "--max-replicas", 2)
    assert outcome.code == 2 and "max_replicas goes with replicas" in outcome.err


def test_the_deployment(chat_folder: Path) -> None:
    """Fixed replicas, or between two bounds; a GPU each, if there are GPUs."""

    def engines(replicas: ReplicaArgs, on_gpu: bool = False) -> Any:
        front = application(serve_args(chat_folder), replicas, on_gpu)._bound_deployment
        return front.init_args[0]._bound_deployment

    fixed = engines(ReplicaArgs(replicas=3))
    assert fixed.num_replicas == 3 and fixed.ray_actor_options["num_cpus"] == 1
    assert engines(ReplicaArgs(replicas=3), on_gpu=True).ray_actor_options["num_gpus"] == 1
    scaled = engines(ReplicaArgs(replicas=1, max_replicas=4))._deployment_config.autoscaling_config
    assert (scaled.min_replicas, scaled.max_replicas, scaled.target_ongoing_requests) == (1, 4, 2)

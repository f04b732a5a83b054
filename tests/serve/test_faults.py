"""Clients that hang up, steps that raise, logits that are no numbers, engines that are beyond repair."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
import torch

from flash_dllm import LLM, SamplingParams
from flash_dllm.methods import CACHES, DECODINGS, MethodError, build_method
from flash_dllm.serve.lane import EngineDeadError, Lane
from flash_dllm.serve.metrics import Metrics
from tests.serve.support import (
    MODEL,
    WAIT,
    Live,
    Stepper,
    in_background,
    live,
    service_of,
    together,
    twin,
    until,
)
from tests.serve.test_limits import BODY, outcomes, post

MATES = ("the cat", "1 + 2 =", "so", "ein Öl")
BAD = "naïve"
"""Prompt whose requests the tests let fail."""


@pytest.fixture
def held(offline: LLM) -> Iterator[tuple[Live, Stepper]]:
    llm = twin(offline, slots=1)
    stepper = Stepper(llm)
    with live(service_of(llm)) as server:
        yield server, stepper
        stepper.open()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("canvas", [False, True])
def test_a_client_that_hangs_up_frees_its_slot(
    held: tuple[Live, Stepper], stream: bool, canvas: bool
) -> None:
    server, stepper = held
    scheduler = server.service.llms["none+threshold"].engine.scheduler
    options = {"stop_at_eos": False, **({"stream": "canvas"} if canvas and stream else {})}
    body = {**BODY, "max_tokens": 40, "stream": stream, "diffusion": options}
    host, port = server.url.removeprefix("http://").split(":")
    connection = _raw_post(host, int(port), body)
    until(lambda: stepper.waiting)
    stepper.allow(1)
    until(lambda: stepper.waiting)
    assert scheduler.busy == [0]
    connection.close()
    until(lambda: outcomes(server).get("disconnected") == 1)
    before = stepper.done
    thread, found = in_background(lambda: post(server, max_tokens=2))
    stepper.allow(1)
    # The step that was about to run when the client left is the only one that it still takes.
    until(lambda: server.service.unfinished == 1)
    until(lambda: stepper.waiting)
    assert stepper.done - before <= 2
    (seated,) = [r for r in scheduler.seated if r is not None]
    assert len(seated.canvas.ids) < 30, "the slot is the next client's"
    stepper.open()
    thread.join(WAIT)
    assert found[0].status_code == 200


def _raw_post(host: str, port: int, body: dict[str, Any]) -> Any:
    import json
    import socket

    raw = json.dumps(body).encode()
    made = socket.create_connection((host, port), timeout=WAIT)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}"
    made.sendall(head.encode() + b"\r\n\r\n" + raw)
    return made


def test_a_client_that_hangs_up_in_the_queue(held: tuple[Live, Stepper]) -> None:
    server, stepper = held
    first, found = in_background(lambda: post(server))
    until(lambda: stepper.waiting)
    host, port = server.url.removeprefix("http://").split(":")
    _raw_post(host, int(port), BODY).close()
    until(lambda: outcomes(server).get("disconnected") == 1)
    stepper.open()
    first.join(WAIT)
    assert found[0].status_code == 200
    until(lambda: server.service.unfinished == 0)


class Faults:
    """Makes an engine's steps raise while a slot holds a canvas with given tokens."""

    def __init__(self, llm: LLM, error: Callable[[], Exception], prompt: str = BAD) -> None:
        assert llm.tokenizer is not None
        self.llm, self.error = llm, error
        self.token = llm.tokenizer.encode(prompt)[-1]
        self.active = True
        self.raised = 0
        self.ready: Callable[[], bool] = lambda: int(llm.engine.state.step.max()) >= 3
        self._plain = llm.engine.decoder.step
        llm.engine.decoder.step = self._step  # type: ignore[method-assign]

    def _step(self, lanes: Any) -> Any:
        record = self._plain(lanes)
        seated = [r for r in self.llm.engine.scheduler.seated if r is not None]
        # After the step, so that half of its work is done when it raises.
        if self.active and self.ready() and any(self.token in r.canvas.ids for r in seated):
            self.raised += 1
            raise self.error()
        return record


def ask(server: Live, prompt: str, stream: bool) -> tuple[str, list[int]]:
    """Text and tokens of an answer."""
    made = server.client().completions.create(
        model=MODEL, prompt=prompt, max_tokens=20, stream=stream, temperature=0.8, seed=5,
        extra_body={"diffusion": {"stop_at_eos": False, "skip_special_tokens": False}},
    )  # fmt: skip
    if not stream:
        return made.choices[0].text, made.choices[0].diffusion["token_ids"]
    text = ""
    for chunk in made:
        text += chunk.choices[0].text
    return text, chunk.choices[0].diffusion["token_ids"]


def oom() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize(
    ("error", "said"), [(oom, "out of memory"), (lambda: RuntimeError("shapes"), "RuntimeError")]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_breaks_a_step_fails_alone(
    offline: LLM, error: Callable[[], Exception], said: str, stream: bool
) -> None:
    params = SamplingParams(
        max_tokens=20, stop_at_eos=False, skip_special_tokens=False, temperature=0.8, seed=5
    )
    expected = [out.outputs[0] for out in offline.generate(MATES, params)]
    llm = twin(offline, slots=5)
    stepper, faults = Stepper(llm), Faults(llm, error)
    with live(service_of(llm)) as server:
        prompts = (*MATES[:2], BAD, *MATES[2:])
        found = together(server, stepper, [lambda p=p: ask(server, p, stream) for p in prompts])
        mates = [*found[:2], *found[3:]]
        assert mates == [(answer.text, answer.token_ids) for answer in expected]
        failure = found[2]
        assert isinstance(failure, openai.APIError) and said in str(failure)
        if not stream:
            assert isinstance(failure, openai.InternalServerError)
            assert failure.response.headers["x-should-retry"] == "false"
        assert faults.raised >= 2, "it was tried again, alone"
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert ask(server, MATES[0], stream) == mates[0], "the engine goes on"
        assert outcomes(server) == {"ok": 5.0, "error": 1.0}
        assert llm.engine.idle and not server.service.unfinished


def test_a_fault_that_does_not_come_back_costs_nobody_an_answer(offline: LLM) -> None:
    """Streams go on where they were: what was sent is not sent again."""
    llm = twin(offline, slots=5)
    service = service_of(llm)
    seated = service.lanes["none+threshold"].seated

    def once() -> Exception:
        faults.active = False
        return oom()

    stepper, faults = Stepper(llm), Faults(llm, once)
    faults.ready = lambda: sum(bool(answer.sent) for _, answer in seated.values()) >= 2
    params = SamplingParams(
        max_tokens=20, stop_at_eos=False, skip_special_tokens=False, temperature=0.8, seed=5
    )
    prompts = (*MATES, BAD)
    expected = [out.outputs[0] for out in twin(offline).generate(prompts, params)]
    with live(service) as server:
        found = together(server, stepper, [lambda p=p: ask(server, p, True) for p in prompts])
        assert found == [(a.text, a.token_ids) for a in expected]
    assert faults.raised == 1


def test_a_stream_whose_second_run_differs_ends_with_an_error(offline: LLM) -> None:
    """As on a GPU in low precision: better an error than a text that no run gave."""
    llm = twin(offline, slots=1)
    service = service_of(llm)
    seated = service.lanes["none+threshold"].seated

    def once() -> Exception:
        faults.active = False
        ((_, answer),) = seated.values()
        answer.sent = "other " + answer.sent
        return oom()

    faults = Faults(llm, once, MATES[3])
    faults.ready = lambda: any(answer.sent for _, answer in seated.values())
    with live(service) as server:
        with pytest.raises(openai.APIError, match="differs"):
            ask(server, MATES[3], True)
        assert service.unfinished == 0 and llm.engine.idle


def test_canvas_streams_begin_again_after_a_fault(offline: LLM) -> None:
    llm = twin(offline, slots=1)
    faults = Faults(llm, oom)
    plain = faults.error

    def once() -> Exception:
        faults.active = False
        return plain()

    faults.error = once
    with live(service_of(llm)) as server:
        stream = server.client().completions.create(
            model=MODEL, prompt=BAD, max_tokens=12, stream=True,
            extra_body={"diffusion": {"stop_at_eos": False, "stream": "canvas"}},
        )  # fmt: skip
        events = [c.choices[0].diffusion for c in stream]
    kinds = [e.get("event", "end") for e in events]
    assert kinds.count("start") == 2 and faults.raised == 1
    last = len(kinds) - 1 - kinds[::-1].index("start")
    again = [e["step"] for e in events[last + 1 : -1]]
    assert again == list(range(1, len(again) + 1)) and len(again) == events[-1]["steps"]


def test_non_finite_logits_fail_alone(offline: LLM) -> None:
    """A token whose embedding is not a number poisons its own request, in its slot, and nothing afterwards."""
    llm = twin(offline, slots=3)
    assert llm.tokenizer is not None
    token = llm.tokenizer.encode(BAD)[-1]
    with torch.inference_mode():
        embed = llm.loaded.model.embed
        before = embed[token].clone()
        with live(service_of(llm)) as server:
            mates = [ask(server, p, False) for p in MATES]
            embed[token] = float("nan")
            try:
                asked = [lambda p=p: ask(server, p, False) for p in (BAD, *MATES)]
                failure, *found = together(server, Stepper(llm), asked)
                assert isinstance(failure, openai.InternalServerError) and "non-finite" in str(failure)
                assert found == mates
                assert [ask(server, p, False) for p in MATES] == mates, "no slot is left poisoned"
            finally:
                embed[token] = before
            assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_beyond_repair_answers_everybody(offline: LLM, stream: bool) -> None:
    llm = twin(offline, slots=2)
    stepper = Stepper(llm)
    with live(service_of(llm)) as server:
        calls = [in_background(lambda: post(server, stream=stream)) for _ in range(5)]
        until(lambda: server.service.unfinished == 5)
        assert httpx.get(f"{server.url}/health").status_code == 200

        def broken(lanes: Any) -> Any:
            raise RuntimeError("device-side assert triggered")

        stepper._plain = broken
        stepper.open()
        for thread, _ in calls:
            thread.join(WAIT)
        for _, found in calls:
            if stream:
                assert found[0].status_code == 200 and '"error"' in found[0].text
            else:
                assert found[0].status_code in (500, 503)
        until(lambda: server.service.state == "failed")
        health = httpx.get(f"{server.url}/health")
        assert health.status_code == 503 and health.json()["status"] == "failed"
        assert "harmless" in health.json()["reason"]
        assert httpx.get(f"{server.url}/ready").status_code == 503
        late = post(server)
        assert late.status_code == 503 and late.json()["error"]["code"] == "engine_dead"
        assert server.service.unfinished == 0


def test_an_engine_that_cannot_be_cleared_is_beyond_repair(offline: LLM) -> None:
    llm = twin(offline, slots=2)
    Faults(llm, oom)

    def reset() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    llm.engine.reset = reset  # type: ignore[method-assign]
    with live(service_of(llm)) as server:
        reply = post(server, prompt=BAD)
        assert reply.status_code == 503 and "engine has failed" in reply.json()["error"]["message"]
        assert httpx.get(f"{server.url}/health").status_code == 503


def test_a_fault_in_the_thread_itself_answers_everybody(offline: LLM) -> None:
    llm = twin(offline, slots=1)
    stepper = Stepper(llm)
    service = service_of(llm)
    with live(service) as server:
        calls = [in_background(lambda: post(server)) for _ in range(3)]
        until(lambda: service.unfinished == 3)

        def report() -> None:
            raise AssertionError("a bug")

        service.lanes["none+threshold"]._report = report  # type: ignore[method-assign]
        stepper.open()
        for thread, found in calls:
            thread.join(WAIT)
            assert found[0].status_code == 503
        assert httpx.get(f"{server.url}/health").status_code == 503


def test_closing_answers_everybody(offline: LLM) -> None:
    llm = twin(offline, slots=1)
    stepper = Stepper(llm)
    service = service_of(llm)
    with live(service) as server:
        calls = [in_background(lambda: post(server)) for _ in range(3)]
        until(lambda: service.unfinished == 3)
        closing = threading.Thread(target=service.close)
        closing.start()
        stepper.open()
        for thread, found in calls:
            thread.join(WAIT)
            assert found[0].status_code in (200, 503)
        closing.join(WAIT)
        assert service.state == "closed" and service.unfinished == 0


def pairs() -> list[tuple[str, str]]:
    """Every cache and decoding that goes together, for LLaDA; a guide would be another model."""
    found = []
    for cache in CACHES:
        for decoding in DECODINGS:
            if decoding == "guided":
                continue
            try:
                build_method(cache, decoding, family="llada")
            except MethodError:
                continue
            found.append((cache, decoding))
    return found


@pytest.mark.parametrize("pair", pairs()[::4], ids="+".join)
def test_the_probe_tells_good_engines_from_bad(offline: LLM, pair: tuple[str, str]) -> None:
    cache, decoding = pair
    changes = {"cache": cache, "decoding": decoding, "max_num_seqs": 2}
    llm = LLM.from_args(offline.args.model_copy(update=changes), offline.loaded)
    lane = Lane("x", llm, Metrics(), lambda count: None)
    lane._probe()
    assert llm.engine.idle

    def broken(lanes: Any) -> Any:
        raise RuntimeError

    llm.engine.decoder.step = broken  # type: ignore[method-assign]
    with pytest.raises(EngineDeadError):
        lane._probe()

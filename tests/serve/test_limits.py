"""The key, bounded queues, deadlines, limits, draining, metrics and logs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from flash_dllm import LLM
from flash_dllm.serve.app import Limits, create_app
from flash_dllm.serve.service import Service
from tests.serve.support import MODEL, WAIT, Live, Stepper, in_background, live, service_of, twin, until

BODY: dict[str, Any] = {
    "model": MODEL,
    "prompt": "the cat",
    "max_tokens": 8,
    "diffusion": {"stop_at_eos": False},
}


@pytest.fixture
def held(offline: LLM) -> Iterator[tuple[Live, Stepper]]:
    """A server with one slot and room for one more answer, whose engine stands still."""
    llm = twin(offline, slots=1)
    stepper = Stepper(llm)
    with live(service_of(llm, max_queue=1, timeout=60.0)) as server:
        yield server, stepper
        stepper.open()


def post(server: Live, **changes: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json={**BODY, **changes}, timeout=WAIT)


def outcomes(server: Live) -> dict[str, float]:
    found = {}
    for family in server.service.metrics.registry.collect():
        for sample in family.samples:
            if sample.name == "flash_dllm_requests_total":
                found[sample.labels["outcome"]] = sample.value
    return found


def test_a_full_queue_answers_429(held: tuple[Live, Stepper]) -> None:
    server, stepper = held
    waiting = [in_background(lambda: post(server)) for _ in range(2)]
    until(lambda: server.service.unfinished == 2)
    refused = post(server)
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["Retry-After"]) <= 60
    assert refused.json()["error"]["code"] == "queue_full"
    with pytest.raises(openai.RateLimitError):
        server.client().completions.create(model=MODEL, prompt="x", stream=True)
    too_many = post(server, n=3, temperature=1.0)
    assert too_many.status_code == 400, "this would never fit, so trying again is no use"
    stepper.open()
    for thread, found in waiting:
        thread.join(WAIT)
        assert found[0].status_code == 200
    assert post(server).status_code == 200
    assert outcomes(server) == {"ok": 3.0, "busy": 2.0, "refused": 1.0}


def test_the_official_client_waits_and_tries_again(held: tuple[Live, Stepper]) -> None:
    server, stepper = held
    waiting = [in_background(lambda: post(server)) for _ in range(2)]
    until(lambda: server.service.unfinished == 2)
    patient = server.client().with_options(max_retries=4)
    thread, found = in_background(lambda: patient.completions.create(model=MODEL, prompt="x", max_tokens=4))
    until(lambda: outcomes(server).get("busy", 0) >= 1)
    stepper.open()
    for other, _ in waiting:
        other.join(WAIT)
    thread.join(WAIT)
    assert found[0].usage.completion_tokens <= 4


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_ends_a_request(held: tuple[Live, Stepper], stream: bool) -> None:
    server, stepper = held
    thread, found = in_background(lambda: post(server, stream=stream, diffusion={"timeout": 0.05}))
    until(lambda: stepper.waiting or found)
    if not found:  # seated before its time was up: a deadline is looked at between steps
        threading.Event().wait(0.1)
        stepper.allow(1)
    thread.join(WAIT)
    (reply,) = found
    if stream:
        assert (
            reply.status_code == 200
            and "deadline_exceeded" in reply.text
            and reply.text.endswith("[DONE]\n\n")
        )
    else:
        assert reply.status_code == 408 and reply.json()["error"]["code"] == "deadline_exceeded"
        assert reply.headers["x-should-retry"] == "false"
    assert server.service.unfinished == 0
    stepper.open()
    assert post(server).status_code == 200
    assert outcomes(server) == {"deadline": 1.0, "ok": 1.0}


def test_the_servers_own_deadline(offline: LLM) -> None:
    with live(service_of(twin(offline), timeout=1e-6)) as server:
        reply = post(server)
        assert reply.status_code == 408, reply.text


def test_draining_finishes_what_runs_and_refuses_the_rest(held: tuple[Live, Stepper]) -> None:
    server, stepper = held
    thread, found = in_background(lambda: post(server, stream=True))
    until(lambda: server.service.unfinished == 1)
    assert httpx.get(f"{server.url}/ready").status_code == 200
    assert [httpx.head(f"{server.url}/{name}").status_code for name in ("health", "ready")] == [200, 200]
    server.service.drain()
    refused = post(server)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
    assert "Retry-After" in refused.headers
    assert httpx.get(f"{server.url}/ready").status_code == 503
    assert httpx.get(f"{server.url}/health").json()["status"] == "draining"
    assert not server.service.wait_idle(0)
    stepper.open()
    thread.join(WAIT)
    assert found[0].status_code == 200 and found[0].text.endswith("[DONE]\n\n")
    assert server.service.wait_idle(WAIT)


def test_the_key(offline: LLM) -> None:
    with live(service_of(twin(offline)), api_key="s3cret-ü") as server:
        url = f"{server.url}/v1/completions"
        wrong: tuple[dict[str, bytes], ...] = (
            {}, {"Authorization": b"Bearer s3cret"}, {"Authorization": b"Basic s3cret-\xc3\xbc"},
            {"Authorization": b"\xff\xfe"},
        )  # fmt: skip
        for headers in wrong:
            reply = httpx.post(url, json=BODY, headers=headers)
            assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key"
            assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 401
        right = {"Authorization": "Bearer s3cret-ü".encode()}
        assert httpx.post(url, json=BODY, headers=right, timeout=WAIT).status_code == 200
        for path in ("health", "ready", "metrics"):
            assert httpx.get(f"{server.url}/{path}").status_code == 200
        with pytest.raises(openai.AuthenticationError):
            server.client("wrong").models.list()


def test_the_key_of_an_application_that_is_mounted(offline: LLM) -> None:
    """Ray Serve and others put it below a prefix, which must not get anybody past the key."""
    service = service_of(twin(offline))
    outer = Starlette(routes=[Mount("/below", create_app(service, api_key="k"))])
    with TestClient(outer) as client:
        assert client.get("/below/health").status_code == 503, "the outer application starts nothing"
        assert client.get("/below/v1/models").status_code == 401
        assert client.get("/below//v1/models").status_code in (401, 404)
        right = {"Authorization": "Bearer k"}
        assert client.get("/below/v1/models", headers=right).status_code == 200
        service.start()
        assert client.post("/below/v1/completions", json=BODY, headers=right).status_code == 200
        assert client.post("/below/v1/completions", json=BODY).status_code == 401
    service.close()


def test_limits_of_body_and_answers(offline: LLM) -> None:
    with live(service_of(twin(offline)), limits=Limits(max_body=2000, max_answers=2)) as server:
        reply = post(server, prompt="x" * 3000)
        assert reply.status_code == 413 and reply.json()["error"]["code"] == "body_too_long"

        def pieces() -> Iterator[bytes]:
            for _ in range(100):
                yield b" " * 100

        chunked = httpx.post(f"{server.url}/v1/completions", content=pieces(), timeout=WAIT)
        assert chunked.status_code == 413
        assert post(server, prompt=["a", "b", "c"]).status_code == 400
        assert post(server, prompt=["a", "b"]).status_code == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"3", b"\xff\xfe", b'{"model": NaN}', b"[" * 5000,
     b'{"model": "\\ud800", "prompt": "x"}',
     b'{"model": "tiny", "prompt": "\\ud800"}', b'{"model": "tiny", "prompt": "x", "\\ud800": 1}',
     b'{"model": "tiny", "prompt": [' + b"9" * 5000 + b"]}", b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
     b'{"model": "tiny", "prompt": "x", "diffusion": {"timeout": Infinity}}',
     b'{"model": "tiny", "prompt": "x", "diffusion": {"method": "\\ud800"}}',
     b'{"model": "tiny", "prompt": "x", "seed": 1e400}', b'{"model": "tiny", "prompt": "x", "max_tokens": 1e30}'],
)  # fmt: skip
def test_broken_bodies_are_400(offline: LLM, body: bytes, shared: Live) -> None:
    headers = {"content-type": "application/json"}
    reply = httpx.post(f"{shared.url}/v1/completions", content=body, headers=headers, timeout=WAIT)
    assert reply.status_code in (400, 404), reply.text
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "body", [b"{", b"[" * 5000, b"\xff\xfe", b'{"prompt": "\xe9"}', b'{"prompt": [' + b"9" * 5000 + b"]}"]
)
def test_a_body_that_is_no_json_is_called_so(body: bytes, shared: Live) -> None:
    headers = {"content-type": "application/json"}
    before = outcomes(shared).get("refused", 0.0)
    reply = httpx.post(f"{shared.url}/v1/completions", content=body, headers=headers, timeout=WAIT)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_json")
    assert outcomes(shared)["refused"] == before + 1


@pytest.fixture(scope="module")
def shared(offline: LLM) -> Iterator[Live]:
    with live(service_of(twin(offline))) as server:
        yield server


def test_pages_methods_and_paths_that_do_not_exist(shared: Live) -> None:
    assert httpx.get(f"{shared.url}/v1/nothing").status_code == 404
    assert httpx.get(f"{shared.url}/v1/completions").status_code == 405
    assert httpx.get(f"{shared.url}/v1/nothing").json()["error"]["type"] == "invalid_request_error"


def test_logs_hold_no_prompts_unless_asked(
    offline: LLM, shared: Live, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "the cat ☃ 31415"
    caplog.set_level(logging.DEBUG)
    assert post(shared, prompt=secret, user="u-1").status_code == 200
    assert post(shared, prompt=secret, diffusion={"gamma": 1.0}).status_code == 400
    assert post(shared, prompt=secret, stop=5).status_code == 400
    assert "'u-1'" in caplog.text and "outcome='ok'" in caplog.text
    assert "31415" not in caplog.text and "☃" not in caplog.text
    with live(service_of(twin(offline)), log_prompts=True) as server:
        assert post(server, prompt=secret).status_code == 200
    assert secret in caplog.text


def test_metrics_count_what_happens(offline: LLM) -> None:
    with live(service_of(twin(offline))) as server:
        replies = [post(server), post(server, stream=True), post(server, gamma=1)]
        assert [r.status_code for r in replies] == [200, 200, 400]
        text = httpx.get(f"{server.url}/metrics").text
    values = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line[0] != "#"
    }

    def value(name: str, labels: str = '{method="none+threshold"}') -> float:
        return values[f"flash_dllm_{name}{labels}"]

    usage = replies[0].json()["usage"]
    facts = replies[0].json()["choices"][0]["diffusion"]
    assert value("requests_total", '{endpoint="/v1/completions",outcome="ok"}') == 2
    assert value("requests_total", '{endpoint="/v1/completions",outcome="refused"}') == 1
    assert value("answer_tokens_total") == 2 * usage["completion_tokens"]
    assert value("prompt_tokens_total") == 2 * usage["prompt_tokens"]
    assert value("forward_passes_sum") == 2 * usage["nfe"]
    assert value("tokens_per_forward_count") == value("queue_seconds_count") == 2
    assert value("time_to_first_text_seconds_count") == 1
    assert value("rows_recomputed_total") == 2 * facts["rows"]
    steps = [value("step_seconds_count", f'{{kind="{k}",method="none+threshold"}}') for k in ("sweep",)]
    assert sum(steps) == 2 * usage["steps"]  # without a cache every step recomputes everything
    assert value("slots") == 2 and value("slots_busy") == 0 and value("answers_waiting", "") == 0
    assert value("cache_bytes") == server.service.llms["none+threshold"].engine.decoder.ctx.kv.nbytes
    assert value("healthy", "") == 1
    assert value("request_seconds_count", '{endpoint="/v1/completions"}') == 2


def test_each_app_counts_for_itself(offline: LLM) -> None:
    first, second = service_of(twin(offline)), service_of(twin(offline))
    with live(first) as a, live(second) as b:
        post(a)
        assert outcomes(a) == {"ok": 1.0} and outcomes(b) == {}


def test_spans(offline: LLM) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from flash_dllm.serve.tracing import Spans

    exporter = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with live(service_of(twin(offline)), spans=Spans(provider.get_tracer("test"))) as server:
        url = f"{server.url}/v1/completions"
        body = {**BODY, "prompt": "the secret cat", "user": "u-1"}
        assert httpx.post(url, json=body, headers={"traceparent": parent}, timeout=WAIT).status_code == 200
        assert post(server, diffusion={"gamma": 1.0}).status_code == 400
    good, bad = exporter.get_finished_spans()
    assert good.name == "POST /v1/completions" and good.attributes is not None and good.parent is not None
    assert f"{good.parent.trace_id:032x}" == parent.split("-")[1]
    with provider.get_tracer("outer").start_as_current_span("outer") as outer:
        Spans(provider.get_tracer("test")).begin("/x", {"traceparent": parent}).end("ok", {})
    inner = exporter.get_finished_spans()[2]
    assert inner.parent is not None and inner.parent.span_id == outer.get_span_context().span_id
    assert good.attributes["flash_dllm.outcome"] == "ok" and good.attributes["flash_dllm.answer_tokens"] == 8
    assert good.attributes["flash_dllm.user"] == "u-1"
    assert "secret" not in str(dict(good.attributes))
    assert bad.attributes is not None and bad.attributes["flash_dllm.outcome"] == "refused"


def test_static_pages(offline: LLM, tmp_path: Any) -> None:
    (tmp_path / "index.html").write_text("<p>hello")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.js").write_text("1")
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "models").write_text("shadow")
    (tmp_path.parent / "outside.txt").write_text("secret")
    with live(service_of(twin(offline)), static_dir=tmp_path, api_key="k") as server:
        assert httpx.get(server.url).text == "<p>hello"
        assert httpx.get(f"{server.url}/sub/a.js").text == "1"
        assert httpx.get(f"{server.url}/sub/").status_code == 404, "no listing"
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        for path in ("/../outside.txt", "/%2e%2e/outside.txt", "/sub/..%2f..%2foutside.txt"):
            assert httpx.get(server.url + path).status_code == 404


def test_a_service_needs_no_server(offline: LLM) -> None:
    """The application may be mounted elsewhere: starting and closing belong to it."""
    service = Service({"only": twin(offline)})
    app = create_app(service)
    assert app.state.service is service and service.state == "new"
    service.start()
    service.start()
    assert service.state == "ready"
    service.close()
    assert service.state == "closed" and not service.healthy

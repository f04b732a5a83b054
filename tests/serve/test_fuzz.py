"""Requests made up from the OpenAPI document: none ends in a 5xx, and what is wrong is refused."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import checks

from flash_dllm import LLM
from flash_dllm.params import SamplingParams
from flash_dllm.serve.app import Limits
from flash_dllm.serve.protocol import TOP_LEVEL, CompletionRequest, Diffusion
from tests.serve.support import MODEL, WAIT, Live, live, service_of

CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]


@pytest.fixture(scope="module")
def server(offline: LLM) -> Iterator[Live]:
    """Short canvases and few answers a request, so that an example takes milliseconds."""
    changes: dict[str, Any] = {"max_model_len": 48, "max_num_seqs": 4}
    llms = [
        LLM.from_args(offline.args.model_copy(update={**changes, "cache": cache}), offline.loaded)
        for cache in (None, "dual")
    ]
    with live(service_of(*llms), limits=Limits(max_answers=4)) as running:
        yield running


OPERATIONS = [
    ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"), ("GET", "/health"), ("GET", "/ready"), ("GET", "/metrics"),
]  # fmt: skip


def test_every_operation_is_tried(server: Live) -> None:
    paths = server.app.openapi()["paths"]
    assert {(m.upper(), path) for path, item in paths.items() for m in item} == set(OPERATIONS)


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=lambda value: value)
def test_made_up_requests(server: Live, method: str, path: str, mode: schemathesis.GenerationMode) -> None:
    operation = schemathesis.openapi.from_dict(server.app.openapi())[path][method]
    wrong = mode is schemathesis.GenerationMode.NEGATIVE
    if wrong and method == "GET":
        pytest.skip("there is nothing to get wrong")

    @settings(max_examples=40 if method == "POST" else 3, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        case.call_and_validate(base_url=server.url, checks=CHECKS, timeout=WAIT)

    check()


def test_after_all_that_the_server_works(server: Live) -> None:
    """Runs last: nothing of the requests above is left."""
    assert server.service.state == "ready" and server.service.unfinished == 0
    for llm in server.service.llms.values():
        assert llm.engine.idle and llm.engine.scheduler.free == llm.engine.slots
    reply = httpx.post(
        f"{server.url}/v1/completions", json={"model": MODEL, "prompt": "so", "max_tokens": 4}, timeout=WAIT
    )
    assert reply.status_code == 200


OPTION = {
    "epsilon": st.floats(0.01, 1), "temperature": st.floats(0, 2), "top_p": st.floats(0.01, 1),
    "top_k": st.integers(0, 400), "seed": st.integers(0, 2**62 - 1), "max_tokens": st.integers(1, 60),
    "n": st.integers(1, 3), "stop": st.lists(st.text(min_size=1, max_size=3), max_size=3),
    "block_length": st.integers(1, 40), "steps": st.integers(1, 40), "cfg_scale": st.floats(0, 3),
    "eos": st.sampled_from(["keep", "suppress_logits", "suppress_confidence"]), "stop_at_eos": st.booleans(),
    "skip_special_tokens": st.booleans(), "stop_token_ids": st.lists(st.integers(0, 400), max_size=9),
    "method": st.sampled_from(["none+threshold", "dual+threshold"]), "gamma": st.floats(0.1, 2),
}  # fmt: skip


@settings(max_examples=120, suppress_health_check=list(HealthCheck))
@given(
    prompt=st.one_of(st.text(max_size=20), st.lists(st.integers(0, 330), max_size=20)),
    options=st.lists(st.sampled_from(sorted(OPTION)), max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: OPTION[name] for name in names})
    ),
    stream=st.booleans(),
)
def test_valid_values_in_any_combination(
    server: Live, prompt: Any, options: dict[str, Any], stream: bool
) -> None:
    """Closer to what works than made-up requests are: an answer, or a 400; streams end as they should."""
    diffusion = {name: value for name, value in options.items() if name not in TOP_LEVEL}
    top = {name: value for name, value in options.items() if name in TOP_LEVEL}
    body = {"model": MODEL, "prompt": prompt, "stream": stream, "diffusion": diffusion, **top}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=WAIT)
    assert reply.status_code in (200, 400), reply.text
    if reply.status_code == 200 and stream:
        *chunks, end = [line.removeprefix("data: ") for line in reply.text.split("\n") if line[:5] == "data:"]
        assert end == "[DONE]" and '"error"' not in reply.text
        ends = [json.loads(c)["choices"][0]["finish_reason"] for c in chunks]
        assert len([e for e in ends if e]) == options.get("n", 1)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(raw=st.binary(max_size=80))
def test_bytes_that_are_no_request(server: Live, raw: bytes) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=WAIT)
    connection.request("POST", "/v1/chat/completions", raw, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    assert reply.status in (400, 404), reply.read()
    connection.close()


def test_every_option_of_the_library_has_a_field() -> None:
    """SamplingParams is the one source: what is added there can be asked for over HTTP."""
    fields = set(CompletionRequest.model_fields) | set(Diffusion.model_fields)
    assert set(SamplingParams.model_fields) <= fields
    for name, field in SamplingParams.model_fields.items():
        if name != "logprobs":
            owner = CompletionRequest if name in TOP_LEVEL else Diffusion
            assert owner.model_fields[name].description == field.description

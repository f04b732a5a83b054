"""Two replicas on Ray Serve: the same answers, and a replica that is killed under load."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from flash_dllm import LLM, SamplingParams
from flash_dllm.scale.front import REPLICA, RETRIED
from flash_dllm.scale.replicas import NAME, ReplicaArgs, deploy
from tests.commands import Run
from tests.scale.cluster import LONG, WAIT, serve_args, workers

pytestmark = pytest.mark.slow
REQUESTS = 24
ENGINE = "ServeReplica:flash-dllm:engine"


@pytest.fixture(scope="module")
def served(cluster: None, chat_folder: Path) -> Iterator[str]:
    """Two replicas; gives their address."""
    from ray import serve

    port = deploy(serve_args(chat_folder, port=0), ReplicaArgs(replicas=2))
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()


def running() -> int:
    """Engine replicas that Ray Serve calls running."""
    from ray import serve

    states = serve.status().applications[NAME].deployments["engine"].replica_states
    return int(states.get("RUNNING", 0))


def settled() -> bool:
    """Wait until there are two replicas again."""
    pause = threading.Event()
    for _ in range(int(WAIT / 0.1)):
        if running() == 2 and len(workers(ENGINE)) == 2:
            return True
        pause.wait(0.1)
    return False


def request(url: str, index: int, stream: bool) -> httpx.Response:
    body = {"model": "tiny", "prompt": f"the cat {index}", "max_tokens": LONG, "stream": stream}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT, trust_env=False)


def test_replicas_answer_as_one_server(served: str, chat_folder: Path) -> None:
    client = openai.OpenAI(base_url=f"{served}/v1", api_key="none", max_retries=0, timeout=WAIT)
    greedy = LLM(chat_folder, cache="none", decoding="greedy")
    talk = [{"role": "user", "content": "the dog"}]
    wanted = greedy.chat(talk, SamplingParams(max_tokens=12))[0].text
    whole = client.chat.completions.create(model="tiny", messages=talk, max_tokens=12)  # type: ignore[arg-type]
    assert whole.choices[0].message.content == wanted
    stream = client.chat.completions.create(model="tiny", messages=talk, max_tokens=12, stream=True)  # type: ignore[call-overload]
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == wanted
    assert len(chunks) > 2
    with pytest.raises(openai.BadRequestError, match="gamma"):
        client.chat.completions.create(model="tiny", messages=talk, extra_body={"gamma": 0.5})  # type: ignore[arg-type]
    assert httpx.get(f"{served}/health", trust_env=False).json()["status"] == "ready"
    with ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(lambda i: request(served, i, stream=False), range(8)))
    assert len({r.headers[REPLICA] for r in seen}) == 2, "the load was not divided"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_is_noticed(served: str, stream: bool) -> None:
    """Through proxy, front and engine: the engine counts one more that was disconnected."""
    before = disconnected(served)
    # 6,400 steps: nobody is done with that when the client leaves.
    body = {
        "model": "tiny",
        "prompt": "the cat",
        "max_tokens": LONG,
        "n": 64,
        "temperature": 1.0,
        "stream": stream,
    }
    with (
        httpx.Client(trust_env=False, timeout=WAIT if stream else 0.5) as client,
        contextlib.suppress(httpx.ReadTimeout),
        client.stream("POST", f"{served}/v1/completions", json=body) as response,
    ):
        next(response.iter_lines())
        assert stream
    pause = threading.Event()
    for _ in range(int(WAIT / 0.1)):
        if disconnected(served) > before:
            return
        pause.wait(0.1)
    raise AssertionError("nobody told the engine")


def disconnected(url: str) -> int:
    """Answers that nobody waited for, over both replicas, each of which answers for itself."""
    found: dict[str, int] = {}
    for _ in range(200):
        response = httpx.get(f"{url}/metrics", timeout=WAIT, trust_env=False)
        counts = re.findall(r'requests_total{.*outcome="disconnected"} (\d+)', response.text)
        found[response.headers[REPLICA]] = sum(map(int, counts))
        if len(found) == 2:
            return sum(found.values())
    raise AssertionError("only one replica is ever asked")


def test_a_killed_replica_loses_no_request(served: str, chat_folder: Path) -> None:
    """Under load: whole answers are all there and right, streams end whole or with an error event."""
    assert settled()
    victim = workers(ENGINE)[0]
    first = threading.Event()

    def send(index: int) -> httpx.Response:
        response = request(served, index, stream=index % 4 == 3)
        first.set()
        return response

    with ThreadPoolExecutor(REQUESTS) as pool:
        sent = [pool.submit(send, index) for index in range(REQUESTS)]
        assert first.wait(WAIT)
        os.kill(victim, signal.SIGKILL)
        seen = [future.result(WAIT) for future in sent]
    greedy = LLM(chat_folder, cache="none", decoding="greedy")
    prompts = [f"the cat {index}" for index in range(REQUESTS)]
    wanted = [out.text for out in greedy.generate(prompts, SamplingParams(max_tokens=LONG))]
    for index, response in enumerate(seen):
        assert response.status_code == 200, response.text
        if index % 4 != 3:
            assert response.json()["choices"][0]["text"] == wanted[index]
            continue
        events = [
            line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")
        ]
        assert events[-1] == "[DONE]"
        parts = [json.loads(event) for event in events[:-1]]
        text = "".join(p["choices"][0]["text"] for p in parts if p.get("choices"))
        if "error" in parts[-1]:
            assert parts[-1]["error"]["code"] == "replica_lost" and wanted[index].startswith(text)
        else:
            assert text == wanted[index]
    assert any(r.headers[RETRIED] == "1" for r in seen), "no request was on the replica that died"
    assert settled(), "the replica was not replaced"


def test_a_model_that_is_not_there(served: str, run: Run, tmp_path: Path) -> None:
    """Last, since it takes the running application's place."""
    outcome = run(
        "serve", tmp_path / "nowhere", "--replicas", 2, "--device", "cpu", "--port", served.rpartition(":")[2]
    )
    assert outcome.code == 2 and "nowhere" in outcome.err and outcome.err.count("\n") == 1, outcome.err

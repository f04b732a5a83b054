"""A replica that is killed under load: what becomes of the requests.

    python benchmarks/replicas.py --output benchmarks/results/replicas-cpu.json

Two replicas of a bundled model on a Ray cluster of this machine, an open-loop Poisson load of which every fourth
request is a stream, and one replica killed in the middle of it. Every answer is compared with that of ``LLM``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from flash_dllm import LLM, SamplingParams
from flash_dllm.bench.ablations import problem_set
from flash_dllm.bench.facts import facts
from flash_dllm.bench.serve import arrivals
from flash_dllm.bench.stats import quantiles
from flash_dllm.scale.front import REPLICA, RETRIED
from flash_dllm.scale.ray_batch import RayArgs, connect
from flash_dllm.scale.replicas import NAME, ReplicaArgs, deploy
from flash_dllm.serve.args import ServeArgs

MODEL, TOKENS, SLOTS = "flash-dllm/tiny-dream", 48, 4


@dataclass
class Seen:
    """One request: when it was due and done (seconds since the start), and how it ended."""

    due: float
    done: float
    stream: bool
    end: str
    retried: bool
    replica: str


def send(url: str, prompt: str, wanted: str, due: float, began: float, stream: bool) -> Seen:
    """A request at its time."""
    time.sleep(max(0.0, began + due - time.monotonic()))
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": TOKENS,
        "stream": stream,
    }
    try:
        response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300, trust_env=False)
        end = ending(response, wanted, stream)
        headers: Any = response.headers
    except httpx.HTTPError as exc:
        end, headers = f"lost: {type(exc).__name__}", {}
    retried = headers.get(RETRIED, "0") != "0"
    return Seen(due, time.monotonic() - began, stream, end, retried, headers.get(REPLICA, ""))


def ending(response: httpx.Response, wanted: str, stream: bool) -> str:
    """``right``, ``wrong``, ``error event``, or the status."""
    if response.status_code != 200:
        return f"lost: status {response.status_code}"
    if not stream:
        return "right" if response.json()["choices"][0]["message"]["content"] == wanted else "wrong"
    lines = [x.removeprefix("data: ") for x in response.text.split("\n") if x.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    if lines[-1:] != ["[DONE]"]:
        return "lost: the stream was cut"
    text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e.get("choices"))
    if "error" in events[-1]:
        return "error event" if wanted.startswith(text) else "wrong"
    return "right" if text == wanted else "wrong"


def kill_one(replica: str) -> None:
    import ray

    ray.kill(ray.get_actor(f"SERVE_REPLICA::{NAME}#engine#{replica}", namespace="serve"))


def running() -> int:
    from ray import serve

    return int(serve.status().applications[NAME].deployments["engine"].replica_states.get("RUNNING", 0))


def replaced(began: float) -> float:
    """Seconds since the start at which two replicas run again, after it was noticed that one does not."""
    lacking = False
    for _ in range(6000):
        lacking = lacking or running() < 2
        if lacking and running() == 2:
            return time.monotonic() - began
        time.sleep(0.05)
    raise SystemExit("the replica was not replaced")


def load(url: str, options: argparse.Namespace, texts: list[str], wanted: list[str]) -> dict[str, Any]:
    """The load, the kill and what was seen."""
    times = arrivals(options.rate, options.requests, 0)
    count = len(texts)
    with ThreadPoolExecutor(options.requests + 1) as pool:
        victim = send(url, texts[0], wanted[0], 0.0, time.monotonic(), False).replica
        began = time.monotonic()
        sent = [
            pool.submit(send, url, texts[i % count], wanted[i % count], due, began, i % 4 == 3)
            for i, due in enumerate(times)
        ]
        threading.Event().wait(times[options.requests // 3])
        killed = time.monotonic() - began
        kill_one(victim)
        back = pool.submit(replaced, began)
        seen = [future.result() for future in sent]
        again = back.result()
    whole, streams = [s for s in seen if not s.stream], [s for s in seen if s.stream]
    hit = [s for s in seen if s.due < killed < s.done]

    def latency(some: list[Seen]) -> dict[str, float]:
        return {k: round(v, 3) for k, v in quantiles([s.done - s.due for s in some]).items()} if some else {}

    return {
        "requests": len(seen), "whole": len(whole), "streams": len(streams), "rate": options.rate,
        "killed_at_s": round(killed, 3), "outstanding_at_kill": len(hit), "replaced_at_s": round(again, 3),
        "retried": sum(s.retried for s in seen),
        "lost": sum("lost" in s.end for s in seen), "lost_how": sorted({s.end for s in seen if "lost" in s.end}),
        "error_events": sum(s.end == "error event" for s in streams), "wrong": sum(s.end == "wrong" for s in seen),
        "right": sum(s.end == "right" for s in seen), "latency_s": latency(seen),
        "latency_of_retried_s": latency([s for s in seen if s.retried]),
    }  # fmt: skip


def main() -> None:
    import ray
    from ray import serve

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--rate", type=float, default=8.0)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    texts = [sample.messages[-1][1] for sample in problem_set("gsm", 24, 0) if sample.messages]
    llm = LLM(MODEL, device="cpu", max_num_seqs=SLOTS)
    talks = [[{"role": "user", "content": text}] for text in texts]
    wanted = [out.text for out in llm.chat(talks, SamplingParams(max_tokens=TOKENS), use_tqdm=False)]
    args = ServeArgs.model_validate(
        {"model": MODEL, "served_model_name": "m", "device": "cpu", "port": 0, "max_num_seqs": SLOTS}
    )
    with tempfile.TemporaryDirectory(prefix="fd", dir="/tmp", ignore_cleanup_errors=True) as folder:
        init = {"num_cpus": 2, "object_store_memory": 100 * 2**20, "_temp_dir": folder}
        connect(ray, RayArgs(address="local", init=init))
        port = deploy(args, ReplicaArgs(replicas=2))
        found = load(f"http://127.0.0.1:{port}", options, texts, wanted)
        serve.shutdown()
        ray.shutdown()
    report = {
        "kind": "replicas", **facts("cpu", torch.float32, synthetic=False), "ray": ray.__version__, "model": MODEL,
        "method": llm.method.name, "max_tokens": TOKENS, "slots": SLOTS, "replicas": 2,
        "note": "two replicas on one machine of two cores, shared with other programs: no figure of speed", **found,
    }  # fmt: skip
    options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found))


if __name__ == "__main__":
    main()

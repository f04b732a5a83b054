"""Soak test of ``flash-dllm serve``: many clients, random hang-ups, mixed lengths, wrong requests in between.

    python benchmarks/soak.py --seconds 60 --clients 200 --json benchmarks/results/soak-cpu.json

Starts the server as a process of its own, on a free port of loopback. Every answer at temperature 0 is compared with
the one that the same request got alone before. Ends with exit code 1 if a request was lost, an answer differs, a slot
is not free afterwards or the server's memory grew by more than ``--grow`` MiB after the warm-up.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

PROMPTS = (
    "What is 12 + 7?", "Name three fruits.", "Write a letter from Leo to Clara about a new job.", "naïve ☃",
    "There are 4 rows of 12 chairs. Karl removes 15 old chairs and brings 20 new ones. How many chairs are there now?",
)  # fmt: skip
LENGTHS = (4, 8, 16, 32, 64)
MODEL = "soak"
HANG_UP, WRONG, CHAT, STREAM = 0.25, 0.05, 0.5, 0.5
"""Shares of the requests: those whose client hangs up, those with an error in them, chats, streams."""
QUEUE = 150
"""Answers that may wait: fewer than there are clients, so that some are told to come back (429)."""
SHARES = (("p50", 0.5), ("p99", 0.99))
GIVE_UP = 300.0
"""Seconds after which a request without an answer counts as lost."""


class Server:
    """``flash-dllm serve`` as a process."""

    def __init__(self, model: str, slots: int, log: Path) -> None:
        command = [sys.executable, "-m", "flash_dllm", "serve", model, "--port", "0", "--max-num-seqs", str(slots),
                   "--max-model-len", "256", "--max-queue", str(QUEUE), "--served-model-name", MODEL]  # fmt: skip
        self.log = log
        with open(log, "wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file)
        self.url = ""

    async def ready(self) -> None:
        while True:
            if self.process.poll() is not None:
                raise SystemExit(self.log.read_text())
            found = re.search(r"on (http://127\.0\.0\.1:\d+)", self.log.read_text())
            if found:
                self.url = found[1]
                return
            await asyncio.sleep(0.1)

    def resident(self) -> float:
        """Resident memory in MiB."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", text)
        assert found is not None
        return int(found[1]) / 1024


def body_of(prompt: str, length: int, chat: bool, stream: bool) -> tuple[str, dict[str, Any]]:
    """Path and body of a request whose answer is known."""
    body: dict[str, Any] = {"model": MODEL, "max_tokens": length, "stream": stream}
    if chat:
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": prompt}]}
    return "/v1/completions", {**body, "prompt": prompt}


def text_of(reply: dict[str, Any]) -> str:
    choice = reply["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


class Client:
    """One client: asks, and asks again, until time is up."""

    def __init__(self, index: int, http: httpx.AsyncClient, known: dict[Any, str], seen: Seen) -> None:
        self.http, self.known, self.seen = http, known, seen
        self.dice = random.Random(index)
        self.end = 0.0

    async def run(self, end: float) -> None:
        self.end = end
        while time.monotonic() < end:
            self.seen.count["requests"] += 1
            try:
                await asyncio.wait_for(self._one(), GIVE_UP)
            except Exception as exc:
                self.seen.lose(f"{type(exc).__name__}: {exc}")

    async def _one(self) -> None:
        dice = self.dice
        key = (dice.choice(PROMPTS), dice.choice(LENGTHS), dice.random() < CHAT)
        stream, hangs_up = dice.random() < STREAM, dice.random() < HANG_UP
        path, body = body_of(*key, stream)
        if dice.random() < WRONG:
            reply = await self.http.post(path, json={**body, "n": 3, "logit_bias": {"1": 2}})
            self.seen.expect(reply.status_code == 400, "wrong", f"{reply.status_code} for a wrong request")
        elif hangs_up:
            await self._hang_up(path, body)
        elif stream:
            await self._stream(path, body, self.known[key])
        else:
            await self._whole(path, body, self.known[key])

    async def _hang_up(self, path: str, body: dict[str, Any]) -> None:
        """Leave at some moment of the answer, or before it."""
        patience = self.dice.choice((0.0, 0.01, 0.1, 1.0))
        try:
            async with asyncio.timeout(patience), self.http.stream("POST", path, json=body) as reply:
                async for _ in reply.aiter_bytes():
                    if self.dice.random() < 0.5:
                        break
        except TimeoutError:
            pass
        self.seen.count["disconnects"] += 1

    async def _whole(self, path: str, body: dict[str, Any], known: str) -> None:
        began = time.monotonic()
        reply = await self.http.post(path, json=body)
        if reply.status_code == 429:
            await self._later(reply)
            return
        assert reply.status_code == 200, reply.text
        found = reply.json()
        self.seen.answer(text_of(found), known, time.monotonic() - began, found["choices"][0]["diffusion"])

    async def _stream(self, path: str, body: dict[str, Any], known: str) -> None:
        began, text, last = time.monotonic(), "", ""
        facts: dict[str, Any] = {}
        async with self.http.stream("POST", path, json=body) as reply:
            if reply.status_code == 429:
                await self._later(reply)
                return
            assert reply.status_code == 200
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    assert "error" not in chunk, chunk
                    choice = chunk["choices"][0]
                    facts = choice.get("diffusion", {})
                    text += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
                last = line or last
        assert last == "data: [DONE]", "a stream was cut off"
        self.seen.answer(text, known, time.monotonic() - began, facts)

    async def _later(self, reply: httpx.Response) -> None:
        self.seen.count["busy"] += 1
        wait = float(reply.headers["Retry-After"]) * self.dice.random()
        await asyncio.sleep(max(0.0, min(wait, self.end - time.monotonic())))


class Seen:
    """What all clients saw."""

    def __init__(self) -> None:
        self.count: collections.Counter[str] = collections.Counter()
        self.seconds: dict[str, list[float]] = {"latency": [], "queue": [], "decode": [], "rest": []}
        self.errors: list[str] = []

    def expect(self, true: bool, name: str, error: str) -> None:
        if true:
            self.count[name] += 1
        else:
            self.lose(error)

    def answer(self, text: str, known: str, seconds: float, facts: dict[str, Any]) -> None:
        queue, decode = facts["queued_seconds"], facts["decode_seconds"]
        times = {"latency": seconds, "queue": queue, "decode": decode, "rest": seconds - queue - decode}
        for name, value in times.items():
            self.seconds[name].append(value)
        self.expect(text == known, "answers", f"{text!r} in place of {known!r}")

    def lose(self, error: str) -> None:
        self.count["errors"] += 1
        self.errors.append(error[:300])

    def percentile(self, name: str, share: float) -> float:
        found = sorted(self.seconds[name])
        return round(found[min(len(found) - 1, int(share * len(found)))], 3) if found else 0.0


async def soak(model: str, seconds: float, clients: int, slots: int) -> dict[str, Any]:
    """Run it; the report says what happened."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(model, slots, Path(folder) / "log")
        try:
            await server.ready()
            return await _soak(server, model, seconds, clients, slots)
        finally:
            if server.process.poll() is None:
                server.process.kill()
            server.process.wait()


async def _soak(server: Server, model: str, seconds: float, clients: int, slots: int) -> dict[str, Any]:
    seen = Seen()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=server.url, timeout=GIVE_UP, limits=limits) as http:
        known = {}
        for key in [(p, n, c) for p in PROMPTS for n in LENGTHS for c in (False, True)]:
            path, body = body_of(*key, False)
            known[key] = text_of((await http.post(path, json=body)).json())
        began = time.monotonic()
        tasks = [
            asyncio.create_task(Client(i, http, known, seen).run(began + seconds)) for i in range(clients)
        ]
        memory = []
        while not all(task.done() for task in tasks):
            memory.append(round(server.resident(), 1))
            await asyncio.wait(tasks, timeout=seconds / 20)
        ran = time.monotonic() - began
        left = await _left(http)
    server.process.terminate()
    code = await asyncio.to_thread(server.process.wait, GIVE_UP)
    done = seen.count
    return {
        "command": "python benchmarks/soak.py " + " ".join(sys.argv[1:]),
        "model": model, "device": f"cpu, {len(os.sched_getaffinity(0))} cores", "clients": clients, "slots": slots,
        "max_queue": QUEUE,
        "seconds": round(ran, 1), "requests": done["requests"], "answers": done["answers"],
        "disconnects": done["disconnects"], "refused_400": done["wrong"], "busy_429": done["busy"],
        "errors": done["errors"], "first_errors": seen.errors[:5],
        **{f"{name}_{key}_s": seen.percentile(name, share) for name in seen.seconds for key, share in SHARES},
        "memory_mib": {"start": memory[0], "after_warm_up": memory[len(memory) // 4], "end": memory[-1]},
        "left": left, "exit_code": code,
        "versions": versions(),
        "counting": "answers: complete and equal to the answer alone; latency: of those, from request to last byte; "
        "queue and decode: its parts as the server says; rest: what is left, on both sides; memory: resident set "
        "of the server process, warm-up is the first quarter",
    }  # fmt: skip


async def _left(http: httpx.AsyncClient) -> dict[str, float]:
    """Slots and queue of the server once nobody asks any more; hang-ups may take a step to be seen."""
    found: dict[str, float] = {}
    for _ in range(100):
        text = (await http.get("/metrics")).text
        found = {
            name: sum(
                float(v) for v in re.findall(rf"^flash_dllm_{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
            )
            for name in ("slots_busy", "answers_waiting", "healthy", "engine_faults_total")
        }
        if not found["slots_busy"] and not found["answers_waiting"]:
            break
        await asyncio.sleep(0.1)
    return found


def versions() -> dict[str, str]:
    from importlib.metadata import version

    names = ("flash-dllm", "torch", "fastapi", "uvicorn", "starlette", "httpx")
    return {**{name: version(name) for name in names}, "python": platform.python_version()}


def faults(report: dict[str, Any], grow: float) -> list[str]:
    """What must not have happened."""
    memory, left = report["memory_mib"], report["left"]
    found = {
        "errors": report["errors"] > 0,
        "no answers": report["answers"] == 0,
        "no disconnects": report["disconnects"] == 0,
        "slots not free": left["slots_busy"] > 0 or left["answers_waiting"] > 0,
        "not healthy": left["healthy"] != 1,
        "exit code": report["exit_code"] != 0,
        f"memory grew by more than {grow:g} MiB": memory["end"] - memory["after_warm_up"] > grow,
    }
    return [name for name, true in found.items() if true]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="flash-dllm/tiny-dream")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument(
        "--grow", type=float, default=48.0, help="MiB that the server may grow after the warm-up"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = asyncio.run(soak(args.model, args.seconds, args.clients, args.slots))
    text = json.dumps(report, indent=1, ensure_ascii=False)
    print(text)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(text + "\n", encoding="utf-8")
    wrong = faults(report, args.grow)
    if wrong:
        print("soak:", "; ".join(wrong), file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

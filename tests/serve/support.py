"""Live servers on loopback, in a thread of this process or as a process of their own."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import uvicorn
from fastapi import FastAPI

from flash_dllm import LLM
from flash_dllm.serve.app import create_app
from flash_dllm.serve.service import Service

WAIT = 120.0
"""Seconds after which a test gives up: far more than anything takes."""
MODEL = "tiny"


class Live:
    """A server that answers at ``url``."""

    def __init__(self, url: str, service: Service, app: FastAPI) -> None:
        self.url, self.service, self.app = url, service, app

    def client(self, api_key: str = "none") -> openai.OpenAI:
        """The official client, without retries, so that a test sees each answer."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=WAIT)


@contextmanager
def live(service: Service, **options: Any) -> Iterator[Live]:
    """Serve in a thread until the end of the block."""
    app = create_app(service, **options)
    door = socket.socket()
    door.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [door]}, daemon=True)
    thread.start()
    # The socket takes connections from here on, answered or not: no need to wait for the server.
    door.listen(512)
    try:
        yield Live(f"http://127.0.0.1:{door.getsockname()[1]}", service, app)
    finally:
        server.should_exit = True
        thread.join(WAIT)
        assert not thread.is_alive()
        door.close()


def service_of(*llms: LLM, **options: Any) -> Service:
    """A service whose methods are named as the engines' methods are."""
    return Service({llm.method.name: llm for llm in llms}, models=(MODEL,), **options)


def twin(llm: LLM, slots: int | None = None) -> LLM:
    """Another engine on the same weights."""
    args = llm.args if slots is None else llm.args.model_copy(update={"max_num_seqs": slots})
    return LLM.from_args(args, llm.loaded)


class Stepper:
    """Holds an engine still: each step waits for a permit, or for :meth:`open`."""

    def __init__(self, llm: LLM) -> None:
        self.done = 0
        self.waiting = False
        self._permits = 0
        self._free = False
        self._change = threading.Condition()
        self._plain = llm.engine.decoder.step
        llm.engine.decoder.step = self._step  # type: ignore[method-assign]

    def _step(self, lanes: Any) -> Any:
        with self._change:
            self.waiting = True
            self._change.wait_for(lambda: self._free or self._permits > 0, WAIT)
            self.waiting = False
            self._permits -= 1
        try:
            return self._plain(lanes)
        finally:
            with self._change:
                self.done += 1
                self._change.notify_all()

    def allow(self, steps: int) -> None:
        """Let ``steps`` steps through and wait until they are done."""
        with self._change:
            goal = self.done + steps
            self._permits = steps
            self._change.notify_all()
            assert self._change.wait_for(lambda: self.done >= goal, WAIT)

    def open(self) -> None:
        """From now on nothing waits."""
        with self._change:
            self._free = True
            self._change.notify_all()


def in_background(call: Any) -> tuple[threading.Thread, list[Any]]:
    """Run a call in a thread; its result or error is put into the list."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as exc:
            found.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def together(server: Live, stepper: Stepper, calls: Sequence[Any]) -> list[Any]:
    """The results of calls whose requests are all there before the engine's second step.

    Clients start when the machine lets them: without this, one may have its answer before another has asked.
    """
    running = [in_background(call) for call in calls]
    until(lambda: server.service.unfinished == len(calls), "every request is there")
    stepper.open()
    for thread, _ in running:
        thread.join(WAIT)
    return [found[0] for _, found in running]


def until(true: Any, what: str = "") -> None:
    """Wait for a condition that another thread will make true."""
    pause = threading.Event()
    for _ in range(int(WAIT / 0.01)):
        if true():
            return
        pause.wait(0.01)
    raise AssertionError(f"never came true: {what}")


class Process:
    """``flash-dllm serve`` as a process of its own."""

    def __init__(self, folder: Path, *words: object, log: Path, port: int = 0, **env: str) -> None:
        self.log = log
        command = [sys.executable, "-m", "flash_dllm", "serve", folder, *words, "--port", port]
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                stdout=file,
                stderr=file,
                env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            )
        self.port = self._port()
        self.url = f"http://127.0.0.1:{self.port}"

    def _port(self) -> int:
        found: list[str] = []

        def listening() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            found[:] = re.findall(r"on http://127\.0\.0\.1:(\d+)", self.log.read_text())
            return bool(found)

        until(listening, "the server listens")
        return int(found[-1])

    def client(self, api_key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=WAIT)

    def stop(self) -> None:
        """However it stands."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT)

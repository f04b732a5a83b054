"""Lines of JSON between rank 0 and the others, beside the sums: orders one way, reports the other.

A connection also tells who is alive: the system closes it when a process dies, whatever it died of, and keep-alive
probes notice a machine that is gone.
"""

from __future__ import annotations

import collections
import contextlib
import hmac
import json
import os
import queue
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from .errors import RankError

GRACE = 15.0
"""Seconds in which a rank that waits for a dead one must get free; then its process ends itself."""
HELLO = 10.0
"""Seconds for whoever connects to say who it is."""
Message = dict[str, Any]


class Line:
    """One connection."""

    def __init__(self, made: socket.socket) -> None:
        made.settimeout(HELLO)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._socket, self._file, self._lock = made, made.makefile("rb"), threading.Lock()

    def send(self, message: Message) -> None:
        """Raises OSError if the other end is gone."""
        data = json.dumps(message).encode() + b"\n"
        with self._lock:
            self._socket.sendall(data)

    def read(self) -> Message | None:
        """The next message; None when the other end is gone."""
        try:
            text = self._file.readline()
            return json.loads(text) if text.endswith(b"\n") else None
        except (OSError, ValueError):
            return None

    def trust(self) -> None:
        """Wait for messages as long as it takes, from here on."""
        self._socket.settimeout(None)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Liveness:
    """Whether all ranks are there; what to do when one is not.

    Attributes:
        lost: why the ranks cannot go on, or None.
        closing: the end is wanted; nothing that happens from here on is a loss.
        abort, leave: break off this rank's own sum, from any thread; leave the group, so that others' sums break.
    """

    patience = 5.0
    """Seconds for the reason to come after a sum has broken."""

    def __init__(self) -> None:
        self.lost: str | None = None
        self.closing = False
        self.abort: Callable[[], None] = lambda: None
        self.leave: Callable[[], None] = lambda: None
        self._inside = 0
        self._changed = threading.Condition()

    def lose(self, reason: str) -> None:
        """A rank is gone: break off what waits for it, and end this process if that does not help."""
        with self._changed:
            if self.lost is not None or self.closing:
                return
            self.lost = reason
            self._changed.notify_all()
        # Before the sums are broken off: that may wait for good itself.
        timer = threading.Timer(GRACE, self._give_up)
        timer.daemon = True
        timer.start()
        self.abort()

    def _give_up(self) -> None:
        if self._inside and not self.closing:
            print(
                f"flash-dllm: error: {self.lost}; this process, stuck in a sum, ends",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)

    def check(self) -> None:
        """Raises RankError if a rank is gone."""
        if self.lost is not None:
            raise RankError(self.lost)

    def __enter__(self) -> None:
        self.check()
        self._inside += 1

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: Any) -> None:
        self._inside -= 1
        if kind is None:
            self.check()
        elif issubclass(kind, Exception) and not issubclass(kind, RankError):
            # A broken sum and a closed connection are two signs of the same death; the second says whose.
            with self._changed:
                self._changed.wait_for(lambda: self.lost is not None, timeout=self.patience)
            if self.lost is not None:
                raise RankError(self.lost) from value


class Hub(Liveness):
    """Rank 0's end: a line to every other rank.

    Args:
        store: where the address is published.
        size: ranks, this one included.
        host: address to listen at.
        processes: those that this process started, by rank; their exit says more than a closed line.
        timeout: seconds for all to come.
        options: what the others must have been started with.

    Raises:
        RankError: a rank did not come, died on the way, or has other options.
    """

    def __init__(
        self, store: Any, size: int, host: str, processes: dict[int, subprocess.Popen[bytes]], timeout: float
    ) -> None:
        super().__init__()
        self.processes = processes
        self.lines: dict[int, Line] = {}
        self._ready: set[int] = set()
        self._dropped: collections.deque[int] = collections.deque()
        token = secrets.token_hex(16)
        with socket.create_server((host, 0)) as server:
            store.set("control", json.dumps([host, server.getsockname()[1], token]))
            server.settimeout(0.2)
            self._accept(server, size, token, time.monotonic() + timeout)
        for rank, line in self.lines.items():
            threading.Thread(target=self._listen, args=(rank, line), daemon=True).start()

    def _accept(self, server: socket.socket, size: int, token: str, deadline: float) -> None:
        while len(self.lines) < size - 1:
            for rank, process in self.processes.items():
                if process.poll() is not None:
                    raise RankError(
                        f"rank {rank} {_ended(process)} before it was ready; see its message above"
                    )
            if time.monotonic() > deadline:
                missing = sorted(set(range(1, size)) - set(self.lines))
                raise RankError(f"rank {missing[0]} did not come in time; were {size} processes started?")
            try:
                made, _ = server.accept()
            except TimeoutError:
                continue
            line = Line(made)
            hello = line.read() or {}
            if hmac.compare_digest(str(hello.get("token")), token) and 0 < int(hello["rank"]) < size:
                line.trust()
                self.lines[int(hello["rank"])] = line
            else:
                line.close()

    def _listen(self, rank: int, line: Line) -> None:
        while (message := line.read()) is not None:
            if "failed" in message:
                return self.fail(f"rank {rank}: {message['failed']}")
            with self._changed:
                self._ready.add(rank)
                self._changed.notify_all()
        process = self.processes.get(rank)
        if not self.closing:
            self.fail(f"rank {rank} {_ended(process) if process else 'is gone'}")

    def fail(self, reason: str) -> None:
        """The ranks cannot go on: tell all of them why."""
        for line in self.lines.values():
            with contextlib.suppress(OSError):
                line.send({"stop": reason})
        self.lose(reason)

    def check(self) -> None:
        super().check()
        if self.closing:
            raise RankError("the ranks of this model were closed")

    def send(self, message: Message) -> None:
        """To every rank.

        Raises:
            RankError: one is gone.
        """
        self.check()
        drops = [{"engine": self._dropped.popleft(), "drop": True} for _ in range(len(self._dropped))]
        for rank, line in self.lines.items():
            try:
                for each in (*drops, message):
                    line.send(each)
            except OSError:
                self.fail(f"rank {rank} is gone")
                self.check()

    def drop(self, key: int) -> None:
        """The engine of this key is not used any more; told with the next message, since this may run at any time."""
        self._dropped.append(key)

    def wait_ready(self, timeout: float) -> None:
        """Wait until every rank has said that it is ready.

        Raises:
            RankError: one is gone, or not ready in time.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.lost or len(self._ready) == len(self.lines), timeout)
        self.check()
        if len(self._ready) < len(self.lines):
            raise RankError(f"rank {min(set(self.lines) - self._ready)} was not ready after {timeout:g} s")

    def close(self) -> None:
        """Let the others go, and end those that do not."""
        self.closing = True
        for line in self.lines.values():
            with contextlib.suppress(OSError):
                line.send({"quit": self.lost or ""})
        end_all(list(self.processes.values()))
        for line in self.lines.values():
            line.close()


class Spoke(Liveness):
    """Another rank's end: orders from rank 0, in a queue that ends with None.

    Args:
        store: where rank 0 published its address.
        rank: of this process.
    """

    patience = 1.0

    def __init__(self, store: Any, rank: int, timeout: float) -> None:
        super().__init__()
        host, port, token = json.loads(store.get("control"))
        self.line = Line(socket.create_connection((host, port), timeout=timeout))
        self.line.send({"token": token, "rank": rank})
        self.line.trust()
        self.orders: queue.Queue[Message | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        try:
            while (message := self.line.read()) is not None:
                if "stop" in message:
                    self.lose(str(message["stop"]))
                    break
                if "quit" in message:
                    self.closing = True
                    break
                self.orders.put(message)
            else:
                self.lose("rank 0 is gone")
        finally:
            self.orders.put(None)

    def report(self, message: Message) -> None:
        """To rank 0, if it is still there."""
        with contextlib.suppress(OSError):
            self.line.send(message)


def end_all(processes: Sequence[subprocess.Popen[bytes]], timeout: float = 10.0) -> None:
    """Wait for processes to end; kill those that do not in time."""
    deadline = time.monotonic() + timeout
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ended(process: subprocess.Popen[bytes]) -> str:
    """How a process ended, as the predicate of a sentence."""
    try:
        code = process.wait(5)
    except subprocess.TimeoutExpired:
        return "closed its connection"
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

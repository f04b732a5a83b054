"""Runs programs that a model wrote, each in a process of its own with limits and without a network."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flash_dllm.errors import FlashDLLMError

CHILD = Path(__file__).with_name("sandbox_child.py")
WALL = 10
"""Seconds on the clock for each second of processor time, since other programs may keep the processor busy."""
ISOLATION = {
    "namespaces": "own Linux namespaces: no network, own processes, read-only file system but for a folder in memory",
    "hook": "no namespaces on this machine: sockets and new processes are refused by an audit hook of the interpreter, "
    "which a program that looks for a way around can evade; files are not protected",
}
"""What keeps a program in, in words, for reports."""


class SandboxError(FlashDLLMError):
    """The machine cannot run programs in the way that was asked for."""


@dataclass(frozen=True)
class Verdict:
    """How a program ended: ``passed``, ``failed`` (an exception, in ``detail``), or ``stopped`` (a limit, an exit)."""

    state: str
    detail: str = ""

    @property
    def passed(self) -> bool:
        """The program ran to its end without an exception."""
        return self.state == "passed"


@dataclass(frozen=True)
class Limits:
    """What one program may use: seconds of processor time, bytes of memory (address space), bytes of one file."""

    seconds: int = 3
    memory: int = 1 << 30
    file_size: int = 1 << 24


@cache
def isolation() -> str:
    """``namespaces`` where this machine can make them, else ``hook`` (see :data:`ISOLATION`)."""
    return "hook" if _start("pass", Limits(), "namespaces").state == "unavailable" else "namespaces"


def run_program(program: str, limits: Limits | None = None, mode: str | None = None) -> Verdict:
    """Run Python source to its end.

    Args:
        program: source; it passes if it ends without an exception, ``sys.exit`` included.
        limits: default :class:`Limits`.
        mode: ``namespaces`` or ``hook``; by default what :func:`isolation` gives.

    Raises:
        SandboxError: ``mode`` is not available here.
    """
    verdict = _start(program, limits or Limits(), mode or isolation())
    if verdict.state == "unavailable":
        raise SandboxError(f"mode={mode!r}: this machine makes no namespaces ({verdict.detail})")
    return verdict


def pass_rate(references: Sequence[str], predictions: Sequence[Sequence[str]]) -> float:
    """Share of all candidates that pass: the mean over problems of pass@1.

    Args:
        references: tests of each problem.
        predictions: candidate programs of each problem; a candidate is run with the tests after it.
    """
    rates = []
    for test, candidates in zip(references, predictions, strict=True):
        passed = [run_program(f"{candidate}\n{test}").passed for candidate in candidates]
        rates.append(sum(passed) / len(passed))
    return sum(rates) / len(rates)


def _start(program: str, limits: Limits, mode: str) -> Verdict:
    try:
        source = program.encode("utf-8")
    except UnicodeEncodeError as error:
        return Verdict("failed", f"not valid Unicode: {error}")
    with tempfile.TemporaryDirectory(prefix="flash-dllm-") as folder:
        read, write = os.pipe()
        values = (folder, limits.memory, limits.seconds, limits.file_size, write, mode)
        child = subprocess.Popen(
            [sys.executable, "-I", str(CHILD), *map(str, values)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(write,),
            start_new_session=True,
            cwd=folder,
            env={"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": folder, "OMP_NUM_THREADS": "1"},
        )
        os.close(write)
        try:
            child.communicate(source, timeout=limits.seconds * WALL)
            late = False
        except subprocess.TimeoutExpired:
            late = True
        finally:
            _end(child)
        with os.fdopen(read, "rb") as pipe:
            said = b"" if late else pipe.read(4096)
    state, _, detail = said.decode("utf-8", "replace").partition("\n")
    if state in ("passed", "failed", "unavailable"):
        return Verdict(state, detail)
    return Verdict(
        "stopped", f"after {limits.seconds * WALL} s" if late else "by a limit, a signal or an exit"
    )


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the process and what it left running in its group."""
    if child.poll() is None or os.name == "posix":
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            child.kill()
    child.wait()

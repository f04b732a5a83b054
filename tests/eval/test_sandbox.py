"""Programs run apart, with limits, and without a network."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from flash_dllm.eval.metric import SandboxedCodeEval
from flash_dllm.eval.sandbox import ISOLATION, Limits, SandboxError, isolation, pass_rate, run_program

ONE_SECOND = Limits(seconds=1)


@pytest.fixture(params=["namespaces", "hook"])
def mode(request: pytest.FixtureRequest) -> str:
    if request.param == "namespaces" and isolation() != "namespaces":
        pytest.skip("this machine makes no namespaces")
    return str(request.param)


@pytest.mark.parametrize("program", ["assert 1 + 1 == 2", "", "print('to nowhere')", "x = 'ü☃'"])
def test_a_program_that_ends_passes(program: str, mode: str) -> None:
    assert run_program(program, mode=mode).state == "passed"


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("assert False, 'no'", "AssertionError: no"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("def f(:", "SyntaxError"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("x = 'a' * (1 << 40)", "MemoryError"),
        ("input()", "EOFError"),
        ("\x00", ""),
    ],
)
def test_a_program_that_raises_fails(program: str, said: str, mode: str) -> None:
    verdict = run_program(program, mode=mode)
    assert verdict.state == "failed" and said in verdict.detail


def test_text_that_is_not_unicode_fails(mode: str) -> None:
    assert run_program("x = '\ud800'", mode=mode).state == "failed"


@pytest.mark.parametrize(
    "program", ["import os; os._exit(0)", "while True: pass", "import os; os.kill(os.getpid(), 9)"]
)
def test_a_program_that_does_not_end_by_itself_is_stopped(program: str, mode: str) -> None:
    assert run_program(program, ONE_SECOND, mode).state == "stopped"


def test_no_network(mode: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)"
        assert run_program(program, mode=mode).state == "failed"


def test_it_may_write_in_its_own_folder_which_is_gone_afterwards(mode: str) -> None:
    program = (
        "import os\nopen('x', 'w').write('a')\nassert open('x').read() == 'a'\nraise OSError(os.getcwd())"
    )
    verdict = run_program(program, mode=mode)
    folder = Path(verdict.detail.removeprefix("OSError: "))
    assert folder.is_absolute() and not folder.exists()


def test_it_may_write_nowhere_else(tmp_path: Path) -> None:
    if isolation() != "namespaces":
        pytest.skip("this machine makes no namespaces")
    target = tmp_path / "x"
    verdict = run_program(f"open({str(target)!r}, 'w').write('a')", mode="namespaces")
    assert verdict.state == "failed" and "Read-only" in verdict.detail and not target.exists()


def test_it_cannot_make_the_file_system_writable_again() -> None:
    if isolation() != "namespaces":
        pytest.skip("this machine makes no namespaces")
    program = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "assert libc.mount(None, b'/', None, 32 | 4096, None) != 0, 'remounted'"
    )
    assert run_program(program, mode="namespaces").state == "passed"


def test_what_it_leaves_running_ends_with_it(tmp_path: Path) -> None:
    """A child that outlives its parent holds the verdict's pipe open, so the call would not return."""
    program = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)"
    if isolation() != "namespaces":
        pytest.skip("this machine makes no namespaces")
    assert run_program(program, mode="namespaces").state == "passed"


def test_the_hook_refuses_new_processes() -> None:
    for program in (
        "import os; os.fork()",
        "import os; os.system('true')",
        "import subprocess as s; s.run(['true'])",
    ):
        verdict = run_program(program, mode="hook")
        assert verdict.state == "failed" and "not allowed here" in verdict.detail


def test_a_way_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_dllm.eval import sandbox

    unavailable = sandbox.Verdict("unavailable", "unshare: Operation not permitted")
    monkeypatch.setattr(sandbox, "_start", lambda *_: unavailable)
    with pytest.raises(SandboxError, match="namespaces"):
        run_program("pass", mode="namespaces")
    isolation.cache_clear()
    assert isolation() == "hook"
    isolation.cache_clear()


def test_reports_have_words_for_both_ways() -> None:
    assert set(ISOLATION) == {"namespaces", "hook"}


def test_the_rate_is_the_mean_over_problems() -> None:
    tests = ["assert f() == 1", "assert g() == 2"]
    candidates = [["def f(): return 1", "def f(): return 0"], ["def g(): return 2"]]
    assert pass_rate(tests, candidates) == 0.75


def test_the_metric_is_what_the_harness_calls() -> None:
    scores, _ = SandboxedCodeEval().compute(
        references=["assert f() == 1"], predictions=[["def f(): return 1"]], k=[1]
    )
    assert scores == {"pass@1": 1.0}
    with pytest.raises(ValueError, match="pass@1"):
        SandboxedCodeEval().compute(references=[], predictions=[], k=[1, 10])

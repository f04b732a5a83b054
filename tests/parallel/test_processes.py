"""Ranks as processes that rank 0 starts, over gloo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flash_dllm import LLM, SamplingParams
from flash_dllm.engine.request import RequestError
from flash_dllm.parallel import ParallelError, RankError
from flash_dllm.parallel.launch import Place

PROMPTS = [[5, 9, 300, 41], [7] * 17, [1, 2, 3, 4, 5, 6, 7, 8, 9]]
FULL = SamplingParams(max_tokens=12, stop_at_eos=False)
LONG = 120.0
"""Seconds after which a busy machine is no excuse."""


def answers(llm: LLM, *params: SamplingParams) -> list[Any]:
    out = llm.generate(PROMPTS, list(params) if len(params) > 1 else (params or (FULL,))[0], use_tqdm=False)
    return [[(a.token_ids, a.nfe, a.steps) for a in o.outputs] for o in out]


def follower(llm: LLM) -> subprocess.Popen[bytes]:
    assert llm.loaded.team is not None
    return llm.loaded.team.control.processes[1]  # type: ignore[union-attr]


def start(folder: Path, **options: Any) -> LLM:
    return LLM(folder, dtype="float32", device="cpu", tensor_parallel_size=2, max_num_seqs=2, **options)


@pytest.fixture
def gqa(golden_dir: Path) -> Iterator[LLM]:
    llm = start(golden_dir / "llada-tiny-gqa")
    yield llm
    llm.close()


SLOW = (pytest.param(name, marks=pytest.mark.slow) for name in ("llada-tiny", "llada-tiny-gqa"))


@pytest.mark.parametrize("folder", ["dream-tiny", *SLOW])
def test_the_tokens_of_one_rank(golden_dir: Path, folder: str) -> None:
    """One start, many cases: methods, sampling, suppression, guidance, several answers, streams, aborts."""
    one = LLM(golden_dir / folder, dtype="float32", device="cpu", max_num_seqs=2)
    two = start(golden_dir / folder)
    process = follower(two)
    try:
        for method in (
            ("none", "threshold"),
            ("dual", "threshold"),
            ("flash", "threshold"),
            ("flash", "verify"),
            ("none", "branch"),
        ):
            assert answers(two.with_method(*method)) == answers(one.with_method(*method)), method
        greedy = ("none", "entropy" if folder.startswith("dream") else "greedy")
        warm = FULL.model_copy(update={"temperature": 0.7, "seed": 3, "n": 2})
        plain = FULL.model_copy(update={"eos": "suppress_logits"})
        more = plain if folder.startswith("dream") else FULL.model_copy(update={"cfg_scale": 1.0})
        ones, twos = one.with_method(*greedy), two.with_method(*greedy)
        assert answers(twos, warm, plain, more) == answers(ones, warm, plain, more)
        assert len(answers(twos, warm)[0]) == 2
        stream = twos.stream(PROMPTS[0], warm.model_copy(update={"n": 1}))
        next(stream), stream.close()  # the request is dropped half way
        assert answers(twos) == answers(ones)
        with pytest.raises(RequestError, match=r"top_p=0\.9 with tensor_parallel_size=2: it ranks the whole"):
            answers(twos, warm.model_copy(update={"top_p": 0.9}))
        with pytest.raises(ParallelError, match="one tensor-parallel model at a time"):
            start(golden_dir / folder)
        assert answers(twos) == answers(ones), "what was refused has changed nothing"
        for cache, decoding, why in (
            ("elastic", "threshold", "cache='elastic' compares the attention of all heads"),
            ("none", "adaptive", "decoding='adaptive' compares whole distributions"),
        ):
            with pytest.raises(ParallelError, match=f"tensor_parallel_size=2: {why}"):
                two.with_method(cache, decoding)
    finally:
        two.close()
    assert process.poll() == 0, "the other rank ends by itself"
    with pytest.raises(RankError, match="closed"):
        answers(two)


def test_a_rank_that_is_killed(gqa: LLM) -> None:
    answers(gqa)
    follower(gqa).kill()
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 1 was killed by signal 9"):
        answers(gqa)
    with pytest.raises(RankError, match="rank 1 was killed by signal 9"):
        answers(gqa)
    assert time.monotonic() - began < LONG


def test_a_rank_that_is_killed_in_a_step(gqa: LLM) -> None:
    """It is stopped first, so that rank 0 waits in a sum when it dies."""
    stream = gqa.stream(PROMPTS[0], FULL)
    next(stream)
    process = follower(gqa)
    process.send_signal(signal.SIGSTOP)
    killer = subprocess.Popen(["sh", "-c", f"sleep 1; kill -9 {process.pid}"])
    try:
        with pytest.raises(RankError, match="rank 1 was killed by signal 9"):
            list(stream)
    finally:
        killer.wait(LONG)


@pytest.mark.slow
def test_a_rank_that_fails(golden_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """An order that no follower knows, a checksum that does not agree, and a step that fails on rank 0 alone."""

    def unknown(llm: LLM) -> None:
        llm.engine.link.order("dance", 1)  # type: ignore[attr-defined]

    def other(llm: LLM) -> None:
        llm.engine.link._check += 1  # type: ignore[attr-defined]

    def broken(llm: LLM) -> None:
        def step(lanes: Any) -> None:
            raise ZeroDivisionError("of all things")

        llm.engine.decoder.step = step  # type: ignore[assignment]

    for fault, ours, theirs in (
        (unknown, "rank 1: ValueError: order 'dance' is not known", "rank 1 ends: ValueError: order 'dance'"),
        (other, "rank 1: RankError: what ended in the last step", "rank 1 ends: what ended in the last step"),
        (broken, "rank 0 failed .ZeroDivisionError: of all things.", "rank 1 ends: rank 0 failed"),
    ):
        llm = start(golden_dir / "llada-tiny")
        try:
            answers(llm)
            fault(llm)
            for _ in range(2):
                with pytest.raises(RankError, match=ours):
                    answers(llm)
            assert follower(llm).wait(LONG) == 1
            assert theirs in capfd.readouterr().err
        finally:
            llm.close()


@pytest.mark.slow
def test_a_rank_that_hangs(golden_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flash_dllm.parallel.group.STALL", 5.0)
    llm = start(golden_dir / "llada-tiny")
    try:
        follower(llm).send_signal(signal.SIGSTOP)
        with pytest.raises(RankError, match=r"rank 0 failed .*[Tt]ime"):
            answers(llm)
    finally:
        llm.close()
    assert follower(llm).poll() == -signal.SIGKILL


LONE = """
import os, sys
from flash_dllm import LLM
llm = LLM(sys.argv[1], device="cpu", dtype="float32", tensor_parallel_size=2)
llm.generate([[5, 6]], use_tqdm=False)
print(llm.loaded.team.control.processes[1].pid, flush=True)
{end}
"""


@pytest.mark.parametrize(
    ("end", "says"),
    [("os.kill(os.getpid(), 9)", "rank 1 ends: rank 0 is gone"), ("", ""), ("raise SystemExit(3)", "")],
)
def test_rank_0_ends(golden_dir: Path, end: str, says: str) -> None:
    """However it ends, the others end too, and complain only if it died."""
    done = subprocess.run(
        [sys.executable, "-c", LONE.format(end=end), str(golden_dir / "llada-tiny")],
        capture_output=True, text=True, timeout=LONG, check=False,
    )  # fmt: skip
    # The pipe of stderr is closed when the last of them has ended, so both have by now.
    pid = int(done.stdout)
    with pytest.raises(ProcessLookupError):
        for _ in range(600):
            os.kill(pid, 0)
            time.sleep(0.1)
    assert [line for line in done.stderr.splitlines() if line] == (
        [f"flash-dllm: error: {says}"] if says else []
    )


def test_refusals_before_anything_starts(
    golden_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from ..checkpoints import write_checkpoint

    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("a process was started"))
    folder = golden_dir / "llada-tiny-gqa"
    for size, why in ((3, "the model's 4 heads"), (8, "the model's 4 heads")):
        with pytest.raises(ParallelError, match=f"tensor_parallel_size={size}: does not divide {why}"):
            LLM(folder, device="cpu", tensor_parallel_size=size)
    six = write_checkpoint(tmp_path / "six", d_model=48, n_heads=6, n_kv_heads=2)
    with pytest.raises(
        ParallelError, match="size=3: does not divide the model's 2 heads of keys and values, nor"
    ):
        LLM(six, device="cpu", tensor_parallel_size=3)
    odd = write_checkpoint(tmp_path / "odd", mlp_hidden_size=47)
    with pytest.raises(ParallelError, match="size=2: does not divide the feed-forward width of 47"):
        LLM(odd, device="cpu", tensor_parallel_size=2)
    with pytest.raises(ValueError, match="options must be plain values"):
        LLM(folder, device="cpu", tensor_parallel_size=2, guide=object())
    for names in (
        {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1"},
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
    ):
        for name, value in names.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(
            ParallelError, match=rf"size=2: the launcher started {names['WORLD_SIZE']} processes"
        ):
            LLM(folder, device="cpu", tensor_parallel_size=2)
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(ParallelError, match="RANK='one'"):
        Place.from_environment()


def test_a_rank_that_cannot_load(
    golden_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its message is on stderr, and rank 0 says which rank it was."""
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setattr(
        "flash_dllm.loading.RANK_COMMAND", (sys.executable, "-c", "raise SystemExit('no torch here')")
    )
    with pytest.raises(RankError, match="rank 1 ended with exit code 1 before it was ready"):
        start(golden_dir / "llada-tiny")
    assert "no torch here" in capfd.readouterr().err

"""Two machines with a GPU each, played by two processes that share one: NCCL over sockets, with captured steps.

NCCL takes a GPU once a machine. Each process says that it is a machine of its own, as under ``torchrun --nnodes 2``, so
that all that NCCL does between machines runs: its sums inside graphs, and its end.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flash_dllm import LLM, SamplingParams

from .test_gpu import PROMPTS

pytestmark = pytest.mark.gpu
FULL = SamplingParams(max_tokens=16, stop_at_eos=False, stop_token_ids=())
METHODS = (("flash", "verify"), ("dual", "threshold"), ("flash", "branch"), ("none", "threshold"))
GIVEN_UP = 60.0
"""Seconds for a process to end after the other one died: twice what it needs where its last sum must be broken off."""

COMMON = """
import json, sys
from flash_dllm import LLM, SamplingParams
folder, dtype, more = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
llm = LLM(folder, dtype=dtype, device=more.pop("device", "cuda"), max_num_seqs=2, tensor_parallel_size=2, **more)
full = SamplingParams(max_tokens=16, stop_at_eos=False, stop_token_ids=())
"""
ANSWERS = (
    COMMON
    + """
prompts, methods = json.loads(sys.argv[4]), json.loads(sys.argv[5])
for method in methods:
    ours = llm.with_method(*method)
    ours.warm_up()
    for _ in range(2):
        done = ours.generate(prompts, full, use_tqdm=False)
        answers = [[o.outputs[0].token_ids, o.outputs[0].nfe] for o in done]
        print(json.dumps([method, answers, ours.engine.runner.played]))
llm.close()
"""
)
ENDLESS = (
    COMMON
    + """
while True:
    llm.generate([[5, 9, 300, 41]], full, use_tqdm=False)
    print("done", flush=True)
"""
)


@contextmanager
def ranks(script: str, *words: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes of a launch over two machines, rank 0 first; none is left behind."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    try:
        for rank in range(2):
            place = {
                "RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port, "NCCL_HOSTID": f"machine-{rank}", "NCCL_SOCKET_IFNAME": "lo",
                "NCCL_IB_DISABLE": 1, "NCCL_DEBUG": "WARN",
            }  # fmt: skip
            environment = os.environ | {name: str(value) for name, value in place.items()}
            command = [sys.executable, "-c", script, *words]
            pipe = subprocess.PIPE
            started.append(subprocess.Popen(command, env=environment, text=True, stdout=pipe, stderr=pipe))
        yield started
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.communicate()


def decode(folder: Path, dtype: str, methods: Any, **options: Any) -> Mapping[tuple[str, str], list[Any]]:
    """Each round of answers and the steps played, by method; both processes must end by themselves."""
    words = (str(folder), dtype, json.dumps(options), json.dumps(PROMPTS), json.dumps(methods))
    # Both at once: one whose pipe is full would keep the other.
    with ranks(ANSWERS, *words) as started, ThreadPoolExecutor(2) as pool:
        told = [text.result() for text in [pool.submit(p.communicate, timeout=240) for p in started]]
    assert [p.returncode for p in started] == [0, 0], told
    out = told[0][0]
    rounds: dict[tuple[str, str], list[Any]] = {}
    for line in out.splitlines():
        if line.startswith("["):
            (cache, decoding), answers, played = json.loads(line)
            rounds.setdefault((cache, decoding), []).append((answers, played))
    return rounds


@pytest.mark.parametrize("folder", ["llada-tiny", "llada-tiny-gqa", "dream-tiny"])
def test_the_tokens_of_one_process(golden_dir: Path, folder: str) -> None:
    methods = METHODS if folder == "llada-tiny" else METHODS[:2]
    rounds = decode(golden_dir / folder, "float32", methods)
    one = LLM(golden_dir / folder, dtype="float32", device="cuda", max_num_seqs=2)
    for method in methods:
        alone = one.with_method(*method)
        alone.warm_up()
        for answers, played in rounds[method]:
            done = alone.generate(PROMPTS, FULL, use_tqdm=False)
            assert answers == [[o.outputs[0].token_ids, o.outputs[0].nfe] for o in done], method
            assert played == alone.engine.runner.played, (method, "captured or not, on both alike")
            assert played > 0 or method[0] == "none", method


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantised(golden_dir: Path, kind: str) -> None:
    method = ("flash", "threshold")
    rounds = decode(golden_dir / "llada-tiny", "bfloat16", [method], quantization=kind)
    for answers, played in rounds[method]:
        assert [len(ids) for ids, _ in answers] == [16] * 3 and played > 0


@pytest.mark.parametrize("dead", [0, 1])
def test_a_process_that_is_killed(golden_dir: Path, dead: int) -> None:
    """The other one ends, with the reason, though graphs hold sums over both."""
    options = json.dumps({"cache": "flash", "decoding": "threshold"})
    with ranks(ENDLESS, str(golden_dir / "llada-tiny"), "bfloat16", options) as started:
        assert started[0].stdout is not None
        # NCCL says its version first.
        assert "done\n" in iter(started[0].stdout.readline, "")
        started[dead].kill()
        began = time.monotonic()
        _, said = started[1 - dead].communicate(timeout=GIVEN_UP)
        assert started[1 - dead].returncode not in (0, None)
        assert f"rank {dead} is gone" in said, said
        print(f"ended {time.monotonic() - began:.1f} s after rank {dead}")

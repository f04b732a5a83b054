"""Two GPUs, over NCCL, with captured steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flash_dllm import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
PROMPTS = [[5, 9, 300, 41], [7] * 17, [1, 2, 3, 4, 5, 6, 7, 8, 9]]
FULL = SamplingParams(max_tokens=24, stop_at_eos=False, stop_token_ids=())


def answers(llm: LLM) -> list[Any]:
    return [(o.outputs[0].token_ids, o.outputs[0].nfe) for o in llm.generate(PROMPTS, FULL, use_tqdm=False)]


@pytest.mark.parametrize("folder", ["llada-tiny", "llada-tiny-gqa", "dream-tiny"])
def test_the_tokens_of_one_gpu(golden_dir: Path, folder: str) -> None:
    one = LLM(golden_dir / folder, dtype="float32", device="cuda", max_num_seqs=2)
    two = LLM(golden_dir / folder, dtype="float32", device="cuda", max_num_seqs=2, tensor_parallel_size=2)
    try:
        for method in (
            ("none", "threshold"),
            ("dual", "threshold"),
            ("flash", "threshold"),
            ("flash", "verify"),
        ):
            ours, theirs = two.with_method(*method), one.with_method(*method)
            for _ in range(2):
                assert answers(ours) == answers(theirs), method
            assert ours.engine.runner.played == theirs.engine.runner.played, "captured or not, on both alike"
    finally:
        two.close()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantised(golden_dir: Path, kind: str) -> None:
    two = LLM(
        golden_dir / "llada-tiny", dtype="bfloat16", device="cuda", tensor_parallel_size=2, quantization=kind,
        cache="flash", decoding="threshold",
    )  # fmt: skip
    try:
        assert [len(ids) for ids, _ in answers(two)] == [24] * 3
    finally:
        two.close()


KILLED = """
import sys
from flash_dllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="bfloat16", device="cuda", tensor_parallel_size=2)
stream = llm.stream([5, 9, 300], SamplingParams(max_tokens=200, stop_at_eos=False, stop_token_ids=()))
next(stream)
llm.loaded.team.control.processes[1].kill()
list(stream)
"""


def test_a_rank_that_is_killed(golden_dir: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(golden_dir / "llada-tiny")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "rank 1 was killed by signal 9" in done.stderr

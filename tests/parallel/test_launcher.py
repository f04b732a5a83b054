"""Ranks that torchrun starts, and the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
TORCHRUN = (
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"
)  # fmt: skip
COMMAND = ("-m", "flash_dllm", "generate", "--device", "cpu", "--dtype", "float32", "-t", "12")


def run(*words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(words), input=text, capture_output=True, text=True, timeout=240, check=False)


def test_generate(chat_folder: Path, tmp_path: Path) -> None:
    """The same answers by one rank, by two that the command starts, and by two that torchrun starts."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("the cat", "1 + 2 =", "a")))
    seen = []
    for index, (start, size) in enumerate(
        (
            ((sys.executable,), "1"),
            ((sys.executable,), "2"),
            ((*TORCHRUN, "--no-python", sys.executable), "2"),
        )
    ):
        out = tmp_path / f"{index}.jsonl"
        words = ("-m", str(chat_folder), "--file", str(prompts), "--output", str(out))
        done = run(*start, *COMMAND, *words, "--tensor-parallel-size", size)
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        assert len(lines) == 3, "one process writes"
        seen.append([(r["text"], r["nfe"]) for r in (line.get("outputs", [line])[0] for line in lines)])
    assert seen[0] == seen[1] == seen[2]


def test_the_wrong_number_of_processes(golden_dir: Path) -> None:
    words = (*COMMAND, "-m", str(golden_dir / "llada-tiny"), "--tensor-parallel-size", "4", "hi")
    done = run(*TORCHRUN, "--no-python", sys.executable, *words)
    assert done.returncode != 0
    said = done.stderr.count("tensor_parallel_size=4: the launcher started 2 processes (WORLD_SIZE=2)")
    assert said >= 1, "torchrun may end the second before it has spoken"


OTHER = """
import os, sys
from flash_dllm import LLM
llm = LLM(sys.argv[1], device="cpu", dtype="float32", tensor_parallel_size=2, seed=int(os.environ["RANK"]))
"""


def test_other_options_on_another_rank(chat_folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(OTHER)
    done = run(*TORCHRUN, str(script), str(chat_folder))
    assert done.returncode != 0
    assert "rank 1 was started with" in done.stderr


TWICE = """
import sys
from flash_dllm import LLM, SamplingParams
from flash_dllm.parallel import ParallelError
llm = LLM(sys.argv[1], device="cpu", dtype="float32", tensor_parallel_size=2)
print("only rank 0 comes here:", llm.generate([[5, 6]], SamplingParams(max_tokens=4), use_tqdm=False)[0].outputs[0].nfe)
llm.close()
try:
    LLM(sys.argv[1], device="cpu", dtype="float32", tensor_parallel_size=2)
except ParallelError as exc:
    print(exc)
"""


def test_a_script(chat_folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TWICE)
    done = run(*TORCHRUN, str(script), str(chat_folder))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("only rank 0 comes here: ") == 1
    assert "a launch runs one tensor-parallel model" in done.stdout


MOVING = """
import json, sys
from flash_dllm import LLM, SamplingParams
from flash_dllm.core.step import Decoder
from flash_dllm.engine.runner import Runner

class Again:
    def __init__(self, step):
        self.play = step
        recorded.append(self)
    def drop(self):
        recorded.remove(self)

def move(self, source, target):
    moves.append((source, target))
    plain(self, source, target)

moves, recorded, plain = [], [], Decoder.move
Decoder.move = move
Runner.for_device = classmethod(lambda cls, decoder, eager: cls(decoder, Again))
llm = LLM(sys.argv[1], device="cpu", dtype="float32", tensor_parallel_size=int(sys.argv[2]), cache="flash",
          decoding="threshold", max_num_seqs=6, max_model_len=64, track=5, lookahead=3, window=4)
prompts = [[5 + i, 9, 300, 41] for i in range(6)]
params = [SamplingParams(max_tokens=n, epsilon=1.0, stop_at_eos=False) for n in (3, 4, 20, 5, 3, 24)]
done = llm.generate(prompts, params, use_tqdm=False)
print("answers:", json.dumps([[moves], [(o.outputs[0].token_ids, o.outputs[0].nfe) for o in done]]))
assert recorded
llm.close()
assert not recorded or int(sys.argv[2]) == 1, "what is recorded goes before the ranks part"
"""


def test_ranks_move_canvases_together_over_gloo(golden_dir: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(MOVING)
    said = []
    for start, size in (((sys.executable,), "1"), (TORCHRUN, "2")):
        done = run(*start, str(script), str(golden_dir / "llada-tiny-gqa"), size)
        assert done.returncode == 0, done.stderr
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("answers: ")]
        said.append(json.loads(line.removeprefix("answers: ")))
    assert said[0] == said[1] and len(said[0][0][0]) > 1

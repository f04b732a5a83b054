"""Training data made beside the training: worker processes write packed batches as files in memory.

Plain processes and files instead of `multiprocessing`: no start method, no queue, no thread. The loader takes
one batch from each worker in turn, so the order depends on the number of workers only.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from flash_dllm.train.tasks import Sample, mixture
from flash_dllm.train.tokenizer import EOS, load_tokenizer

# Divisors of the recipes' tokens a step, so that every batch has exactly as many.
BUCKETS = (96, 128, 160, 192, 256, 384, 512, 1024)
MASKABLE = 1 << 13
_CHUNK = 256
# Room for the response: a canvas as decoders use it. With a snug canvas for most samples a model learns to
# read the answer's length off the canvas, and goes on calculating until a longer one is full.
_ROOM = ((0.25, 0), (0.55, 128), (0.90, 192), (1.0, 256))


@dataclass(frozen=True, slots=True)
class Source:
    """What workers make: `tokens` a batch, samples from seed `first` on, `free_form` of them in the pre-
    training form.
    """

    tokens: int
    tokenizer: str
    first: int = 0
    free_form: float = 0.05


Row = tuple[list[int], list[int]]


def encode(samples: list[Sample], tokenizer_path: Path) -> list[Row]:
    """Token ids and the positions the objective may hide (EOS padding not included), for each sample."""
    return encode_with(samples, load_tokenizer(tokenizer_path))


def encode_with(samples: list[Sample], tokenizer: Tokenizer) -> list[Row]:
    """As `encode`, with a tokenizer at hand."""
    encode_batch = tokenizer.encode_batch_fast
    prompts = encode_batch([s.prompt_text for s in samples], add_special_tokens=False)
    answers = encode_batch([s.answer_text + s.stop for s in samples], add_special_tokens=False)
    rows: list[Row] = []
    for sample, prompt, answer in zip(samples, prompts, answers, strict=True):
        head, tail = prompt.ids, answer.ids
        if sample.gaps:
            spans = tokenizer.encode(sample.answer_text, add_special_tokens=False).offsets
            hidden = [
                len(head) + i
                for i, (a, b) in enumerate(spans)
                if any(a < end and b > start for start, end in sample.gaps)
            ]
            rows.append((head + tail, hidden))
        else:
            rows.append((head + tail, list(range(len(head), len(head) + len(tail)))))
    return rows


class Packer:
    """Sorts encoded samples into buckets and gives out full batches."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.waiting: dict[int, list[NDArray[np.int16]]] = {length: [] for length in BUCKETS}

    def add(self, row: Row, padded: bool, draw: float, free_form: bool) -> NDArray[np.int16] | None:
        """Places one sample; returns int16 [tokens / T, T] when that fills a batch.

        `padded`: EOS padding is part of the response (not for canvases). `draw` in [0, 1) picks the bucket.
        Samples that fit no bucket are dropped.
        """
        ids, hidden = row
        room = next(size for edge, size in _ROOM if draw < edge)
        wanted = max(len(ids), min(hidden[0] + room, BUCKETS[-1])) if padded else len(ids)
        length = next((bucket for bucket in BUCKETS if bucket >= wanted), 0)
        if not length:
            return None
        line = np.full(length, EOS + MASKABLE if padded else EOS, dtype=np.int16)
        line[: len(ids)] = ids
        if free_form:
            line[1 : len(ids)] += MASKABLE
        else:
            line[hidden] += MASKABLE
        waiting = self.waiting[length]
        waiting.append(line)
        if len(waiting) < self.source.tokens // length:
            return None
        batch = np.stack(waiting)
        waiting.clear()
        return batch


def batches(source: Source, worker: int, workers: int) -> Iterator[NDArray[np.int16]]:
    """Endless packed batches of one worker; sample seeds are `first + worker + k * workers`, each used
    once.
    """
    tokenizer = load_tokenizer(Path(source.tokenizer))
    packer = Packer(source)
    rng = np.random.default_rng((source.first, worker))
    seed = source.first + worker
    while True:
        samples = [mixture(seed + i * workers) for i in range(_CHUNK)]
        seed += _CHUNK * workers
        draws = rng.random((_CHUNK, 2))
        for sample, row, (fit, form) in zip(samples, encode_with(samples, tokenizer), draws, strict=True):
            batch = packer.add(row, not sample.gaps, float(fit), bool(form < source.free_form))
            if batch is not None:
                yield batch


def _room() -> Path | None:
    """Where batches wait: memory if there is a file system for it, else the default temporary folder."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else None


class Loader:
    """Starts the workers and hands out their batches in turn. `close` ends them.

    A worker renames each batch to its final name when it is complete and stops `depth` files ahead of the
    reader. No threads: a reader thread would compete with the training loop for the interpreter at each
    partial read of a pipe.
    """

    def __init__(self, source: Source, workers: int, depth: int = 12) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="flash-dllm-data-", dir=_room()))
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "CUDA_VISIBLE_DEVICES": "",
        }
        fixed = [json.dumps(asdict(source)), str(self.folder), str(depth), str(workers)]
        command = [sys.executable, "-m", "flash_dllm.train.data", *fixed]
        self.processes = [subprocess.Popen([*command, str(i)], env=environment) for i in range(workers)]
        self.waited = 0

    def __iter__(self) -> Iterator[NDArray[np.int16]]:
        for number in count():
            for worker, process in enumerate(self.processes):
                path = _batch_path(self.folder, worker, number)
                self.waited += not path.exists()
                while not path.exists():
                    if process.poll() is not None and not path.exists():
                        raise RuntimeError(f"data worker {worker} ended with status {process.returncode}")
                    time.sleep(0.002)
                batch = np.load(path)
                path.unlink()
                yield batch

    def close(self) -> None:
        """Ends the workers this loader started and removes what they made."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _batch_path(folder: Path, worker: int, number: int) -> Path:
    return folder / f"{worker}-{number}.npy"


def serve(source: Source, folder: Path, depth: int, workers: int, worker: int) -> None:
    """A worker's life: writes batches as files until it is ended or the folder goes away."""
    parent = os.getppid()
    for number, batch in enumerate(batches(source, worker, workers)):
        partial = folder / f"{worker}.partial.npy"
        while number >= depth and _batch_path(folder, worker, number - depth).exists():
            if os.getppid() != parent:
                return
            time.sleep(0.005)
        try:
            np.save(partial, batch)
            partial.rename(_batch_path(folder, worker, number))
        except FileNotFoundError:
            return


if __name__ == "__main__":
    serve(Source(**json.loads(sys.argv[1])), Path(sys.argv[2]), *map(int, sys.argv[3:6]))

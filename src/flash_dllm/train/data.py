"""Training data made beside the training: worker processes write packed batches to their standard output.

Plain pipes instead of `multiprocessing`: no shared memory, no start method, and a full pipe makes a worker
wait. The loader takes one batch from each worker in turn, so the order depends on the number of workers only.
"""

from __future__ import annotations

import json
import os
import queue
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from flash_dllm.train.tasks import Sample, mixture
from flash_dllm.train.tokenizer import EOS, load_tokenizer

# Divisors of the recipes' tokens a step, so that every batch has exactly as many.
BUCKETS = (96, 128, 160, 192, 256, 384, 512, 1024)
MASKABLE = 1 << 13
_HEADER = struct.Struct("<II")
_CHUNK = 256
# Room for the response: most samples get the smallest bucket, others a canvas as decoders use it.
_ROOM = ((0.80, 0), (0.97, 160), (1.0, 256))


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


class Loader:
    """Starts the workers and hands out their batches in turn. `close` ends them."""

    def __init__(self, source: Source, workers: int, depth: int = 12) -> None:
        self.queues: list[queue.Queue[NDArray[np.int16] | None]] = [
            queue.Queue(depth) for _ in range(workers)
        ]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [sys.executable, "-m", "flash_dllm.train.data", json.dumps(asdict(source)), str(workers)]
        self.processes = [
            subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, env=environment)
            for i in range(workers)
        ]
        self.closing = threading.Event()
        self.waited = 0
        for process, target in zip(self.processes, self.queues, strict=True):
            threading.Thread(target=self._read, args=(process.stdout, target), daemon=True).start()

    def _read(self, pipe: BinaryIO, target: queue.Queue[NDArray[np.int16] | None]) -> None:
        while not self.closing.is_set():
            header = pipe.read(_HEADER.size)
            if len(header) < _HEADER.size:
                break
            rows, length = _HEADER.unpack(header)
            body = pipe.read(rows * length * 2)
            if len(body) < rows * length * 2:
                break
            self._put(target, np.frombuffer(body, dtype=np.int16).reshape(rows, length))
        self._put(target, None)

    def _put(self, target: queue.Queue[NDArray[np.int16] | None], item: NDArray[np.int16] | None) -> None:
        while not self.closing.is_set():
            try:
                return target.put(item, timeout=0.5)
            except queue.Full:
                continue

    def __iter__(self) -> Iterator[NDArray[np.int16]]:
        live = list(self.queues)
        while live:
            for source in list(live):
                self.waited += source.empty()
                batch = source.get()
                if batch is None:
                    live.remove(source)
                    continue
                yield batch
        raise RuntimeError("all data workers have ended")

    def close(self) -> None:
        """Ends the workers this loader started."""
        self.closing.set()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


def serve(source: Source, workers: int, worker: int) -> None:
    """A worker's life: writes length-prefixed batches to standard output until the reader goes away."""
    out = sys.stdout.buffer
    try:
        for batch in batches(source, worker, workers):
            out.write(_HEADER.pack(*batch.shape) + batch.tobytes())
    except BrokenPipeError:
        os._exit(0)


if __name__ == "__main__":
    serve(Source(**json.loads(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]))

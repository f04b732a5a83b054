"""Packed batches: buckets, flags, each sample once, and the worker processes that make them."""

from __future__ import annotations

import shutil
import time

import numpy as np
import pytest

from flash_dllm.train.data import BUCKETS, MASKABLE, Loader, Packer, Source, batches, encode
from flash_dllm.train.recipes import RECIPES
from flash_dllm.train.tasks import make, mixture
from flash_dllm.train.tokenizer import BOS, EOS, bundled_folder, load_tokenizer

FOLDER = bundled_folder()
SOURCE = Source(tokens=1024, tokenizer=str(FOLDER))


def test_buckets_divide_the_tokens_of_a_step() -> None:
    for name in ("tiny-llada", "tiny-dream", "tiny-guide"):
        assert all(RECIPES[name].tokens % bucket == 0 for bucket in BUCKETS)


def test_batches_have_one_bucket_and_flag_responses_only() -> None:
    stream = batches(Source(1024, str(FOLDER), free_form=0.0), 0, 1)
    for _ in range(30):
        batch = next(stream)
        assert batch.dtype == np.int16
        assert batch.shape[1] in BUCKETS and batch.shape[0] == 1024 // batch.shape[1]
        assert (batch[:, 0] == BOS).all()
        assert ((batch & (MASKABLE - 1)) < 2048).all()
        assert (batch >= MASKABLE).any(1).all()


def test_a_row_is_its_prompt_then_its_flagged_response() -> None:
    sample = make("gsm", 3, "train", shots=0)
    (row,) = encode([sample], FOLDER)
    line = Packer(Source(96, str(FOLDER))).add(row, True, 0.0, False)
    line = line if line is not None else Packer(Source(256, str(FOLDER))).add(row, True, 0.99, False)
    assert line is not None
    flags, ids = line[0] >= MASKABLE, (line[0] & (MASKABLE - 1)).tolist()
    tokenizer = load_tokenizer(FOLDER)
    start = int(flags.argmax())
    assert flags[start:].all()
    assert tokenizer.decode(ids[:start], skip_special_tokens=False) == sample.prompt_text
    response = tokenizer.decode(ids[start:], skip_special_tokens=False)
    assert response.startswith(sample.answer_text + sample.stop)
    assert set(ids[len(row[0]) :]) <= {EOS}


def test_a_canvas_flags_its_gaps_only() -> None:
    samples = [s for s in (make("infill", seed, "train") for seed in range(40)) if s.gaps]
    tokenizer = load_tokenizer(FOLDER)
    for sample, (ids, hidden) in zip(samples, encode(samples, FOLDER), strict=True):
        shown = [sample.answer_text[a:b] for a, b in sample.gaps]
        assert tokenizer.decode([ids[i] for i in hidden]) == "".join(shown)


def test_prompts_reach_four_hundred_tokens_and_samples_fit_the_canvas() -> None:
    rows = encode([mixture(seed) for seed in range(4000)], FOLDER)
    lengths = [len(ids) for ids, _ in rows]
    assert max(hidden[0] for _, hidden in rows) > 400
    assert sum(length > BUCKETS[-1] for length in lengths) == 0


def test_workers_share_the_seeds_without_overlap() -> None:
    def lines(worker: int) -> set[bytes]:
        stream = batches(SOURCE, worker, 2)
        return {row.tobytes() for _ in range(20) for row in next(stream)}

    one, two = lines(0), lines(1)
    assert len(one & two) <= 2  # short questions may repeat by chance
    assert lines(0) == one


def test_loader_gives_the_workers_batches_in_turn() -> None:
    loader = Loader(SOURCE, workers=2)
    try:
        got = [batch for batch, _ in zip(loader, range(6), strict=False)]
    finally:
        loader.close()
    expected = [batches(SOURCE, worker, 2) for worker in range(2)]
    for i, batch in enumerate(got):
        np.testing.assert_array_equal(batch, next(expected[i % 2]))
    assert all(process.poll() is not None for process in loader.processes)
    assert not loader.folder.exists()


def test_a_worker_that_ended_raises_once_its_batches_are_used_up() -> None:
    loader = Loader(Source(SOURCE.tokens, str(FOLDER / "nowhere")), workers=1)
    try:
        with pytest.raises(RuntimeError, match="data worker 0 ended with status 1"):
            next(iter(loader))
    finally:
        loader.close()
    loader = Loader(SOURCE, workers=1)
    try:
        stream = iter(loader)
        first = next(stream)
        loader.processes[0].kill()
        loader.processes[0].wait()
        left = len(list(loader.folder.glob("0-*.npy")))
        with pytest.raises(RuntimeError, match="data worker 0 ended with status -9"):
            for _ in range(left + 1):
                next(stream)
    finally:
        loader.close()
    assert first.size == SOURCE.tokens and not loader.folder.exists()


def test_a_worker_stops_ahead_of_the_reader_and_ends_with_its_folder() -> None:
    loader = Loader(SOURCE, workers=1, depth=3)
    try:
        stream = iter(loader)
        for _ in range(4):
            next(stream)
        deadline = time.monotonic() + 20
        while len(list(loader.folder.glob("0-*.npy"))) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)
        assert len(list(loader.folder.glob("0-*.npy"))) == 3
        shutil.rmtree(loader.folder)
        assert loader.processes[0].wait(20) == 0
    finally:
        loader.close()

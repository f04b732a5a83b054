"""Objective, schedule, optimiser state, export, and one short training run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from flash_dllm.train.checkpoint import load_state, quantize_rows, save_state
from flash_dllm.train.export import export, round_to_int8
from flash_dllm.train.model import Shape, StackedTransformer
from flash_dllm.train.objective import MASKABLE, corrupt, loss_of
from flash_dllm.train.optim import Optimizer, Rates, orthogonalise
from flash_dllm.train.recipes import RECIPES, Recipe
from flash_dllm.train.sample import decode
from flash_dllm.train.schedule import Clock, Curve
from flash_dllm.train.tokenizer import EOS, EOT, MASK, bundled_folder
from flash_dllm.train.trainer import Options, Trainer

SHAPES = {
    "llada": Shape("llada", 32, 2, 2, 2, 48),
    "dream": Shape("dream", 32, 2, 4, 2, 48, eps=1e-6),
    "qwen2": Shape("qwen2", 32, 2, 4, 2, 48, eps=1e-6),
}


def packed(rows: int = 8, length: int = 32, prompt: int = 10) -> torch.Tensor:
    ids = torch.randint(6, 2048, (rows, length), generator=torch.Generator().manual_seed(0))
    ids[:, prompt:] += MASKABLE
    return ids.to(torch.int16)


def test_masks_are_stratified_and_weigh_one_over_p() -> None:
    batch = packed(rows=200, length=128, prompt=28)
    out = corrupt(batch, 0, False, 200 * 128, torch.Generator().manual_seed(1))
    masked = out.ids == MASK
    assert not masked[:, :28].any()
    rate = masked[:, 28:].float().mean(1)
    expected = (torch.arange(200) + 0.5) / 200
    assert (rate - expected).abs().mean() < 0.05
    used = out.weights > 0
    assert int(used.sum()) == int(masked.sum())
    # E[sum of 1 / p over hidden tokens] is the number of maskable tokens.
    assert out.weights.sum() == pytest.approx(1.0, abs=0.05)
    rows = out.rows[used]
    assert masked.reshape(-1)[rows].all()
    assert torch.equal((batch & (MASKABLE - 1)).reshape(-1)[rows].long(), out.targets[used])


def test_shifted_and_causal_objectives_read_the_row_before() -> None:
    batch = packed()
    ids = (batch & (MASKABLE - 1)).long()
    out = corrupt(batch, 1, True, batch.numel(), torch.Generator())
    used = out.weights > 0
    assert torch.equal(out.ids, ids)
    assert torch.equal(ids.reshape(-1)[out.rows[used] + 1], out.targets[used])
    assert out.weights.sum() == pytest.approx(1.0)


def test_tokens_beyond_the_capacity_are_dropped() -> None:
    out = corrupt(packed(), 0, False, 20, torch.Generator().manual_seed(1))
    assert out.rows.shape == (20,) and (out.weights > 0).all()


@pytest.mark.parametrize("layout", SHAPES)
def test_loss_and_gradient_equal_the_plain_computation(layout: str) -> None:
    shape = SHAPES[layout]
    model = StackedTransformer(shape)
    out = corrupt(packed(), shape.shift, shape.causal, 8 * 32, torch.Generator().manual_seed(1))
    loss, entropy = loss_of(model, out)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    used = out.weights > 0
    rows = model.logits(out.ids).reshape(-1, shape.vocab)[out.rows[used] + shape.shift]
    losses = torch.nn.functional.cross_entropy(rows, out.targets[used], reduction="none")
    plain = (losses * out.weights[used]).sum()
    plain.backward()
    assert loss.item() == pytest.approx(plain.item(), rel=1e-5)
    assert entropy.item() == pytest.approx(losses.mean().item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-3, atol=1e-6)


def test_a_stage_ends_on_time_and_stages_join() -> None:
    now = [100.0]
    first = Clock(60.0, 10.0, (0.0, 0.55), now=lambda: now[0])
    now[0] += 20.0
    first.begin()
    assert first.progress() == 0.0
    steps = 0
    while not first.over():
        now[0] += 0.3
        steps += 1
    assert 99 <= steps <= 101 and first.elapsed < 50.4
    assert first.progress() == pytest.approx(0.55)
    curve = Curve()
    factors = [curve.factor(p / 100, 500, False) for p in range(101)]
    assert factors[0] == 1.0 and factors[25] == pytest.approx(1.0) and factors[100] == 0.0
    assert factors == sorted(factors, reverse=True)
    assert curve.factor(0.5, 0, True) > curve.factor(0.5, 0, False) > 0
    for recipe in RECIPES.values():
        spans = [recipe.stages[name] for name in sorted(recipe.stages)]
        plan, later = spans[:2], spans[2:]
        assert plan[0][0] == 0.0 and plan[-1][1] == 1.0
        assert all(a[1] == b[0] for a, b in pairwise(plan))
        # Continuing a finished model restarts inside the plan, where the rates are no longer the highest.
        assert all(recipe.curve.flat < start < stop == 1.0 for start, stop in later)


def test_orthogonalise_gives_singular_values_near_one() -> None:
    stack = torch.randn(3, 24, 64, generator=torch.Generator().manual_seed(0))
    for x in (stack, stack.mT):
        values = torch.linalg.svdvals(orthogonalise(x).float())
        assert values.min() > 0.5 and values.max() < 1.4


@pytest.mark.parametrize("layout", SHAPES)
def test_a_resumed_run_continues_as_the_saved_one(layout: str, tmp_path: Path) -> None:
    shape = SHAPES[layout]

    def update(model: StackedTransformer, optimizer: Optimizer, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        loss_of(model, corrupt(packed(), shape.shift, shape.causal, 256, generator))[0].backward()
        optimizer.step(1.0)

    model = StackedTransformer(shape)
    optimizer = Optimizer(model, Rates())
    for seed in range(5):
        update(model, optimizer, seed)
    save_state(tmp_path, optimizer.tensors(), {"steps": optimizer.steps})
    runs = []
    for seed in (1, 2):
        other = StackedTransformer(shape, seed=seed)
        resumed = Optimizer(other, Rates())
        tensors, meta = load_state(tmp_path)
        resumed.load(tensors, meta["steps"])
        for name, tensor in optimizer.tensors().items():
            limit = 1 / 127 if name.startswith("momentum.") else 2**-8
            error = (resumed.tensors()[name] - tensor).abs().max()
            assert error <= limit * tensor.abs().max() + 1e-12, name
        update(other, resumed, 9)
        runs.append(resumed)
    assert runs[0].steps == 6
    for name, tensor in runs[0].tensors().items():
        assert torch.equal(tensor, runs[1].tensors()[name]), name
    with pytest.raises(ValueError, match="does not fit"):
        runs[0].load({"master.embed": tensor}, 1)
    with pytest.raises(FileNotFoundError, match="no training state"):
        load_state(tmp_path / "nowhere")


def test_a_finished_state_starts_moments_anew_from_its_weights(tmp_path: Path) -> None:
    shape = SHAPES["llada"]

    def update(optimizer: Optimizer, seed: int) -> None:
        batch = corrupt(packed(), 0, False, 256, torch.Generator().manual_seed(seed))
        loss_of(optimizer.model, batch)[0].backward()
        optimizer.step(1.0)

    def weights(optimizer: Optimizer) -> dict[str, torch.Tensor]:
        return {n: t.clone() for n, t in optimizer.tensors().items() if n.startswith("master.")}

    done = Optimizer(StackedTransformer(shape), Rates())
    for seed in range(5):
        update(done, seed)
    save_state(tmp_path, weights(done), {"steps": done.steps})
    tensors, meta = load_state(tmp_path)
    resumed = Optimizer(StackedTransformer(shape, seed=2), Rates())
    update(resumed, 7)  # leaves moments that loading must clear
    assert not resumed.load(tensors, meta["steps"])
    assert (resumed.steps, resumed.fresh_at) == (5, 5)
    for name, parameter in resumed.model.named_parameters():
        assert torch.equal(parameter, tensors[f"master.{name}"])
    # The same update as that of a new optimizer on these weights: bias correction starts anew as well.
    fresh = Optimizer(StackedTransformer(shape), Rates())
    fresh.load(tensors, 0)
    for optimizer in (resumed, fresh):
        update(optimizer, 9)
    for name, tensor in weights(resumed).items():
        assert torch.equal(tensor, weights(fresh)[name]) and not torch.equal(tensor, tensors[name]), name
    # Saved with its moments before the end, it goes on with the right bias correction.
    again = Optimizer(StackedTransformer(shape), Rates())
    assert again.load(resumed.tensors(), resumed.steps, resumed.fresh_at)
    for optimizer in (resumed, again):
        update(optimizer, 11)
    for name, tensor in weights(resumed).items():
        assert torch.equal(tensor, weights(again)[name]), name


@pytest.mark.parametrize("layout", SHAPES)
def test_an_exported_model_gives_the_trained_logits(layout: str, tmp_path: Path) -> None:
    from flash_dllm.models.load import load_model
    from flash_dllm.models.reference import forward, shift_logits

    model = StackedTransformer(SHAPES[layout], seed=4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    masters = {name: p.detach() for name, p in model.named_parameters()}
    export(SHAPES[layout], masters, tmp_path, bundled_folder())
    with torch.no_grad():
        for name, value in round_to_int8(masters).items():
            model.get_parameter(name).copy_(value)
    loaded = load_model(tmp_path, dtype=torch.float32, device="cpu")
    ids = torch.randint(6, 2048, (2, 40))
    raw = forward(loaded, ids)
    raw = shift_logits(raw) if SHAPES[layout].shift else raw
    torch.testing.assert_close(raw, model.logits(ids), rtol=1e-4, atol=1e-4)


def test_rows_of_int8_are_within_half_a_step() -> None:
    weight = torch.randn(5, 40)
    values, scale = quantize_rows(weight)
    assert values.dtype == torch.int8
    assert ((values * scale[:, None] - weight).abs() <= scale[:, None] / 2 + 1e-7).all()


def test_the_decoder_fills_blocks_in_order_and_stops_at_the_end_of_the_answer() -> None:
    answer = [10, 11, 12, 13, 14, EOT]

    def forward(ids: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*ids.shape, 2048)
        for position in range(ids.shape[1]):
            token = answer[position - 3] if 3 <= position < 3 + len(answer) else EOS
            logits[:, position, token] = 20.0 if position % 2 else 5.0
        return logits

    (row,) = decode(forward, [[2, 4, 5] + [MASK] * 16], 4, 0.9, 24, torch.device("cpu"))
    assert row.ids == answer[:-1] and row.tokens == 6
    # Block 1: two sure ones, then two single ones; block 2: its sure ones, then position 8 (the stop token).
    assert row.passes == 5
    with pytest.raises(TimeoutError):
        decode(forward, [[2, MASK]], 4, 0.9, 8, torch.device("cpu"), until=time.monotonic() - 1)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The data worker needs a core too, and OpenMP threads that share one wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
def test_half_a_minute_of_training_lowers_the_loss_and_its_model_loads(tmp_path: Path) -> None:
    from flash_dllm.models.load import load_model

    recipe = RECIPES["smoke"]
    options = Options("A", 25.0, tmp_path, time.monotonic(), device="cpu", workers=1)
    report = Trainer(recipe, options).run()
    lines = [json.loads(line) for line in (tmp_path / "loss.jsonl").read_text().splitlines()]
    assert lines[-1]["masked_nll"] < 0.8 * lines[0]["masked_nll"]
    assert report["steps"] > 20
    assert load_model(tmp_path / "export", dtype=torch.float32, device="cpu") is not None


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_finished_model_trains_on(tmp_path: Path) -> None:
    """By a clock that a step moves by a tenth of a second: 100 steps a stage on any machine."""
    recipe = replace(RECIPES["smoke"], reserve=1.0, eval_samples=1, log_every=1)

    def stage(name: str, resume: Path | None = None) -> tuple[list[dict[str, float]], dict[str, Any]]:
        start = time.monotonic()
        options = Options(name, 11.0, tmp_path / name, start, resume=resume, device="cpu", workers=1)
        trainer = Trainer(recipe, options)
        done = trainer.optimizer.steps
        trainer.clock.now = lambda: start + 0.1 * (trainer.optimizer.steps - done)
        trainer.run()
        lines = (tmp_path / name / "loss.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines], load_state(tmp_path / name)[1]

    first, one = stage("B")
    second, two = stage("C", tmp_path / "B")
    assert second[0]["step"] == one["steps"] + 1 and two["fresh_at"] == one["steps"] < two["steps"]
    # A whole warm-up, as at the beginning, from the weights it had reached.
    assert second[0]["factor"] == first[0]["factor"] < 0.01
    assert second[0]["masked_nll"] < first[0]["masked_nll"] - 0.5


def test_an_unknown_stage_is_refused(tmp_path: Path) -> None:
    recipe: Recipe = RECIPES["smoke"]
    with pytest.raises(ValueError, match="'D'"):
        Trainer(recipe, Options("D", 10.0, tmp_path, time.monotonic(), device="cpu"))


@pytest.mark.parametrize("layout", SHAPES)
def test_training_goes_on_from_an_exported_model(layout: str, tmp_path: Path) -> None:
    shape = SHAPES[layout]
    first = Optimizer(StackedTransformer(shape, seed=3), Rates())
    export(shape, first.masters, tmp_path, bundled_folder())
    tensors, meta = load_state(tmp_path)
    second = Optimizer(StackedTransformer(shape, seed=4), Rates())
    assert not second.load(tensors, meta["steps"])
    rounded = round_to_int8(first.masters)
    for name, master in second.masters.items():
        assert torch.allclose(master, rounded[name].float(), atol=1e-6), name

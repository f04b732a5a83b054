"""Canvases that move to lower slots, so that a smaller recorded step serves: nobody can tell from an answer.

On the CPU a tape runs its step again (:class:`tests.test_runner.Again`). After every move the keys and values of all
free slots are poisoned, the one that was left included.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_dllm.core.cache import KVCache
from flash_dllm.core.forward import Context
from flash_dllm.core.noise import Noise
from flash_dllm.core.state import Canvas, State
from flash_dllm.core.step import Decoder, StepRecord, Vocabulary
from flash_dllm.core.types import Candidates, Draft
from flash_dllm.engine.engine import Engine
from flash_dllm.engine.observe import slot_steps
from flash_dllm.engine.request import Finished, Request
from flash_dllm.engine.runner import MOVES, Key, Runner
from flash_dllm.llm import LLM
from flash_dllm.methods import build_method
from flash_dllm.methods.fast_dllm import Threshold
from flash_dllm.models.config import SHAPES
from flash_dllm.models.layers import Model, empty_model
from flash_dllm.params import SamplingParams

from .test_runner import FAMILIES, METHODS, Again, engine, facts, models, request

SLOTS = 9
LENGTHS = (5, 20, 9, 2, 30, 14, 4, 26, 11)
"""Of a full batch: the low slots are free long before the high ones."""


class Watched:
    """An engine whose steps are recorded, and what it did: its moves, and the slots of each step that was played."""

    def __init__(self, one: Engine, poison: bool = True) -> None:
        self.engine, self.poison = one, poison
        self.moves: list[tuple[int, int]] = []
        self.tenants: list[Request | None] = []
        self.played: list[tuple[int, list[int]]] = []
        one.runner = Runner(one.decoder, Again)
        self._move, one.decoder.move = one.decoder.move, self.move  # type: ignore[method-assign]
        self._steady, one.runner._steady = one.runner._steady, self.steady  # type: ignore[method-assign]

    def move(self, source: int, target: int) -> None:
        seated = self.engine.scheduler.seated
        assert seated[source] is not None and seated[target] is None and target < source
        self._move(source, target)
        self.moves.append((source, target))
        self.tenants.append(seated[source])
        kv, free = self.engine.decoder.ctx.kv, [s for s, r in enumerate(seated) if r is None and s != target]
        if self.poison:
            for tensor in (*kv.keys, *kv.values):
                tensor[[source, *free]] = float("nan")

    def steady(self, key: Key) -> StepRecord:
        self.played.append((key.slots, self.engine.scheduler.busy))
        return self._steady(key)


def waves(one: Engine, model: Model, sizes: Sequence[int], **numbers: Any) -> dict[str, Finished]:
    """Batches one after the other: each comes in a step after the last has come down to four canvases."""
    done: dict[str, Finished] = {}
    for wave, size in enumerate(sizes):
        while len(one.scheduler.busy) > 4:
            done |= {f.request.id: f for f in one.step()}
        done |= {f.request.id: f for f in one.step()}
        for index in range(size):
            length = LENGTHS[(index + wave) % len(LENGTHS)]
            given = {name: value(index) if callable(value) else value for name, value in numbers.items()}
            one.add(request(f"{wave}-{index}", length, model, seed=100 * wave + index, **given))
    while not one.idle:
        done |= {f.request.id: f for f in one.step()}
    return done


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS, ids=lambda m: "-".join(map(str, (m[1], *m[2].values()))))
def test_a_move_changes_no_answer(family: str, method: tuple[str, str, dict[str, Any]], late: bool) -> None:
    model = models(family)
    plain = waves(engine(model, family, method, SLOTS), model, (9, 8, 12), gamma=0.2)
    seen = Watched(engine(model, family, method, SLOTS, late=late))
    moved = waves(seen.engine, model, (9, 8, 12), gamma=0.2)
    assert facts(moved) == facts(plain) and len(plain) == 29
    assert all(done.error is None for done in moved.values())
    assert {n: (f.passes, f.unbounded) for n, f in moved.items()} == {
        n: (f.passes, f.unbounded) for n, f in plain.items()
    }
    for name, done in moved.items():
        assert done.log_probs == pytest.approx(plain[name].log_probs, abs=1e-4)
        assert done.bound == pytest.approx(plain[name].bound, abs=1e-4)
    waved = {mover.id[0] for mover in seen.tenants if mover is not None}
    assert len(waved) > 1, "in more than one wave, so a newcomer has taken a slot that was left"


@pytest.mark.parametrize("decoding", ["threshold", "greedy"])
def test_drawn_tokens_and_numbers_of_each_request_move_along(decoding: str) -> None:
    """Temperatures, thresholds and paces that differ from slot to slot, and random numbers."""
    model = models("dream")
    method = ("flash", decoding, {"track_by": "random"})
    numbers = {
        "temperature": lambda i: 0.3 * (i % 4),
        "epsilon": lambda i: 0.2 + 0.1 * (i % 5),
        "steps": lambda i: 3 + 5 * (i % 4),
        "stop_at_eos": lambda i: i % 2,
    }
    plain = facts(waves(engine(model, "dream", method, SLOTS), model, (9, 9), **numbers))
    seen = Watched(engine(model, "dream", method, SLOTS, late=True))
    assert facts(waves(seen.engine, model, (9, 9), **numbers)) == plain
    assert len(seen.moves) > 2


@pytest.mark.parametrize("late", [False, True])
def test_the_smallest_graph_that_holds_them_plays(late: bool) -> None:
    model = models("llada")
    seen = Watched(engine(model, "llada", METHODS[0], SLOTS, late=late))
    waves(seen.engine, model, (9,))
    live = sorted({(len(busy), slots) for slots, busy in seen.played})
    smallest = {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 6: 8, 7: 8, 8: 8, 9: 9}
    assert {slots for _, slots in live} >= {1, 4, 8}
    assert all(slots == smallest[count] for count, slots in live)
    # No move without need: one lands below the graph that plays next, and comes from above it.
    assert 0 < len(seen.moves) < len(LENGTHS)


def test_which_canvases_move() -> None:
    model = models("llada")
    runner = Runner(engine(model, "llada", METHODS[0], 40).decoder, Again)
    assert runner.moves([3, 9, 17, 30, 31]) == [(31, 0), (30, 1), (17, 2), (9, 4)]
    assert runner.moves([31]) == [(31, 0)]
    assert runner.moves(list(range(1, 13))) == [(12, 0)], "twelve slots have a graph of their own"
    assert runner.moves(list(range(13, 26))) == [(25 - i, i) for i in range(MOVES)], (
        "the rest in the next step"
    )
    for stays in ([0, 2, 3], [0, 4, 5, 6, 7], list(range(40)), list(range(1, 34))):
        assert runner.moves(stays) == []
    assert Runner(runner.decoder, None).moves([31]) == [], "nothing is recorded"
    swept = Engine(
        model, build_method("none", "threshold", family="llada"), Vocabulary(512, 511), slots=8, positions=48
    )
    assert Runner(swept.decoder, Again).moves([7]) == []


def test_nobody_moves_in_a_step_that_sweeps() -> None:
    """A smaller graph would do for the two, but the newcomer's first step is not played."""
    model = models("llada")
    seen = Watched(engine(model, "llada", METHODS[0], 4))
    one = seen.engine
    for name, length in (("a", 2), ("b", 2), ("c", 2), ("d", 30)):
        one.add(request(name, length, model, epsilon=1.0))
    for _ in range(2):
        one.step()
    assert one.scheduler.busy == [3]
    one.add(request("e", 4, model, epsilon=1.0))
    one.step()
    assert one.scheduler.busy == [0, 3] and not seen.moves
    one.step()
    assert seen.moves == [(3, 1)] and one.scheduler.slot_of("d") == 1


def test_guided_canvases_stay() -> None:
    model = models("llada")

    def guided(name: str, length: int) -> Request:
        made = request(name, length, model, cfg_scale=1.5)
        hidden = [model.config.mask_id or 0] * len(made.canvas.ids)
        made.shadow = Canvas(hidden, made.canvas.masked, made.canvas.stop_ids, made.canvas.numbers)
        return made

    answers = []
    for watched in (False, True):
        one = engine(model, "llada", ("flash", "greedy", {}), 8)
        seen = Watched(one) if watched else None
        for index, length in enumerate((3, 5, 4)):
            one.add(request(f"r{index}", length, model))
        one.add(guided("g", 12))
        one.add(request("long", 25, model))
        done: dict[str, Finished] = {}
        while not one.idle:
            done |= {f.request.id: f for f in one.step()}
            if seen and "g" not in done:
                assert one.scheduler.slot_of("g") == 3 and one.scheduler.partner == {3: 4} and not seen.moves
        answers.append(facts(done))
        assert seen is None or [source for source, _ in seen.moves] == [5]
    assert answers[0] == answers[1] and len(answers[0]) == 5


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("other", [False, True])
def test_a_request_is_dropped_right_after_its_move(late: bool, other: bool) -> None:
    """Where reads are late, the step before the move is still to be read then; a newcomer takes a slot at once."""
    model = models("llada")
    plain = facts(waves(engine(model, "llada", METHODS[3], SLOTS), model, (9,)))
    seen = Watched(engine(model, "llada", METHODS[3], SLOTS, late=late))
    one = seen.engine
    for index, length in enumerate(LENGTHS):
        one.add(request(f"0-{index}", length, model, seed=index))
    done: dict[str, Finished] = {}
    while not seen.moves:
        done |= {f.request.id: f for f in one.step()}
    mover = seen.tenants[0]
    assert mover is not None
    stays = next(r for r in one.scheduler.seated if r is not None and r not in seen.tenants)
    dropped = stays.id if other else mover.id
    assert one.abort(dropped) and not one.abort(dropped)
    one.add(request("0-1" if dropped != "0-1" else "0-4", 20 if dropped != "0-1" else 30, model, seed=1))
    one.scheduler.queue[-1].id = "new"
    while not one.idle:
        done |= {f.request.id: f for f in one.step()}
    assert set(done) == {*plain, "new"} - {dropped}
    new = done.pop("new")
    assert facts(done) == {name: fact for name, fact in plain.items() if name != dropped}
    assert new.error is None and len(new.ids) in (28, 38)


def test_a_fault_of_a_former_tenant_is_nobody_elses() -> None:
    """The step before the move is read after it, and there the slot had somebody whose numbers broke."""
    model = models("llada")
    wanted = run_alone(model, "d")
    seen = Watched(engine(model, "llada", METHODS[0], 2, late=True))
    one = seen.engine
    for name in ("a", "d"):
        one.add(request(name, 20, model))
    one.step(), one.step()
    for tensor in one.decoder.ctx.kv.values:
        tensor[0] = float("nan")
    one.step()
    assert one._launched[-1].bad.tolist() == [True, False]
    one.abort("a")
    done: dict[str, Finished] = {}
    while not one.idle:
        done |= {f.request.id: f for f in one.step()}
    assert seen.moves == [(1, 0)] and facts(done) == wanted


def run_alone(model: Model, name: str) -> dict[str, tuple[Any, ...]]:
    one, done = engine(model, "llada", METHODS[0], 1), {}
    one.add(request(name, 20, model))
    while not one.idle:
        done |= {f.request.id: f for f in one.step()}
    return facts(done)


@pytest.mark.parametrize("late", [False, True])
def test_what_is_settled_so_far_follows_the_request(late: bool) -> None:
    """Partial results after every step are those of the request itself, one step late or not."""
    model = models("llada")
    plain = waves(engine(model, "llada", METHODS[0], SLOTS), model, (9,), stop_at_eos=0)
    seen = Watched(engine(model, "llada", METHODS[0], SLOTS, late=late))
    one, parts = seen.engine, {}
    for index, length in enumerate(LENGTHS):
        one.add(request(f"0-{index}", length, model, seed=index, stop_at_eos=0))
    followed = 0
    while not one.idle:
        moves = len(seen.moves)
        one.step()
        for mover in seen.tenants[moves:]:
            assert mover is not None
            slot = one.scheduler.slot_of(mover.id)
            followed += slot is not None and bool(one.answer_prefix(slot))
        for name in plain:
            slot = one.scheduler.slot_of(name)
            if slot is None:
                continue
            done, now, first = plain[name], one.answer_prefix(slot), plain[name].request.canvas.first
            assert now == done.ids[first : first + len(now)]
            assert len(now) >= len(parts.get(name, []))
            parts[name] = now
    assert followed and len(seen.moves) > 3


def test_a_watched_step_names_the_slot_that_it_ran_in() -> None:
    model = models("llada")
    seen = Watched(engine(model, "llada", METHODS[0], SLOTS))
    one = seen.engine
    last: dict[str, int] = {}
    slots: dict[str, set[int]] = {}
    settled: list[tuple[str, list[int]]] = []

    def look(watched: Engine, record: StepRecord) -> None:
        for step in slot_steps(watched, record):
            assert watched.scheduler.slot_of(step.request_id) == step.slot
            assert step.step == last.get(step.request_id, -1) + 1, "steps of one request, none of another"
            last[step.request_id] = step.step
            slots.setdefault(step.request_id, set()).add(step.slot)
            settled.append((step.request_id, watched.answer_prefix(step.slot)))

    one.observer = look
    done = waves(one, model, (9, 9))
    assert {name: step + 1 for name, step in last.items()} == {n: f.steps for n, f in done.items()}
    assert sum(len(each) > 1 for each in slots.values()) >= 2
    for name, now in settled:
        first = done[name].request.canvas.first
        assert now == done[name].ids[first : first + len(now)]


def test_a_stream_follows_its_request_while_others_drive_the_engine(chat_folder: Path) -> None:
    llm = LLM(
        chat_folder, device="cpu", max_num_seqs=4, max_model_len=96, cache="flash", decoding="threshold",
        window=4, lookahead=4, track=6,
    )  # fmt: skip
    params = SamplingParams(max_tokens=40, stop_at_eos=False, epsilon=0.99)
    alone = llm.generate("the cat", params)[0].text
    seen, scheduler = Watched(llm.engine), llm.engine.scheduler

    def others(length: int) -> None:
        for index in range(3):
            hidden = [llm.mask_id] * length
            masked = [False, False, *[True] * length]
            llm.loop.engine.add(
                Request(
                    f"other-{length}-{index}", Canvas([70 + index, 80, *hidden], masked, (), {"epsilon": 1.0})
                )
            )

    others(1)
    stream = llm.stream("the cat", params)
    events = [next(stream)]
    assert scheduler.busy == [3]
    # Its steps pile up meanwhile, the first of them in the slot that somebody else has now.
    others(30)
    scheduler.queue.pop()
    llm.loop.step()
    assert scheduler.busy == [0, 1, 3]
    llm.engine.abort("other-30-0"), llm.engine.abort("other-30-1")
    llm.loop.step()
    assert seen.moves == [(3, 0)]
    others(31)
    for _ in range(8):
        llm.loop.step()
    assert scheduler.seated[3] is not None and scheduler.seated[3].id == "other-31-2"
    events += list(stream)
    assert "".join(event.text for event in events) == alone
    assert any(event.text for event in events[1:-1])
    assert [event.step for event in events[:-1]] == list(range(1, len(events)))


class Counts(Threshold):
    """Keeps a number a slot of its own: how many steps its canvas has seen."""

    said = True

    def bind(self, ctx: Context, state: State, vocabulary: Vocabulary) -> None:
        self.count = torch.zeros(state.slots, dtype=torch.int64, device=state.device)

    def slot_tensors(self) -> tuple[Tensor, ...] | None:
        return (self.count,) if self.said else super().slot_tensors()

    def commit(self, state: State, cand: Candidates, draft: Draft, noise: Noise) -> Tensor:
        self.count.copy_(
            torch.where(state.running, torch.where(state.step == 0, 1, self.count + 1), self.count)
        )
        return super().commit(state, cand, draft, noise)

    def notes(self, slot: int) -> dict[str, float]:
        return {"count": int(self.count[slot])}


@pytest.mark.parametrize("said", [True, False])
def test_what_a_part_keeps_by_slot_moves_along_or_nobody_does(said: bool) -> None:
    model = models("llada")
    seen = Watched(counting(model, said))
    done = waves(seen.engine, model, (9, 9))
    assert {n: f.notes["count"] for n, f in done.items()} == {n: f.steps for n, f in done.items()}
    assert bool(seen.moves) == said
    if not said:
        with pytest.raises(
            ValueError, match=r"method flash\+threshold has canvases that stay in their slots"
        ):
            Decoder.move(seen.engine.decoder, 1, 0)


def counting(model: Model, said: bool) -> Engine:
    rule = Counts()
    rule.said = said
    one = engine(model, "llada", METHODS[0], SLOTS)
    method = one.method
    method.rule = rule
    return Engine(model, method, one.vocabulary, slots=SLOTS, positions=48)


def test_everything_of_a_slot_moves_and_nothing_stays() -> None:
    state, fresh = State(4, 6), State(4, 6)
    tensors = {name: x for name, x in vars(state).items() if isinstance(x, Tensor)}
    by_slot = {name: x for name, x in tensors.items() if x.shape[0] == 4 and name != "slot_order"}
    by_slot |= {f"num.{name}": x for name, x in state.num.items()}
    assert len(by_slot) > 40, "grids with and without the spare column, lines, numbers, stop tokens"
    for number, x in enumerate(by_slot.values(), 1):
        if x.dtype == torch.bool:
            x.copy_(torch.tensor([True, False, True, False]).view(4, *[1] * (x.dim() - 1)).expand(x.shape))
        else:
            x.copy_((torch.arange(x.numel()) % 97 + number).view(x.shape))
    before = {name: x.clone() for name, x in by_slot.items()}
    state.move(2, 1)
    empty = {name: getattr(fresh, name) for name in by_slot if "." not in name}
    empty |= {f"num.{name}": x for name, x in fresh.num.items()}
    for name, x in by_slot.items():
        assert torch.equal(x[1], before[name][2]), name
        assert torch.equal(x[[0, 3]], before[name][[0, 3]]), f"other slots keep their {name}"
        assert torch.equal(x[2], empty[name][2]), f"slot 2 is free but for {name}"


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("decoding", ["threshold", "verify", "branch"])
def test_a_move_reads_nothing_back(decoding: str, device: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=device == "meta"):
        model = empty_model(SHAPES["dream-tiny"], torch.float32, device)
        method = build_method("flash", decoding, family="dream")
        kv = KVCache.allocate(model.config, 3, 64, 4, model.embed)
        state = State(3, 64, device=device)
        decoder = Decoder(Context.build(model, kv, 64), state, method, Vocabulary(512, 0))
        decoder.move(2, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_keys_and_values_move_with_their_scratch(dtype: torch.dtype) -> None:
    one = engine(models("llada"), "llada", METHODS[3], 3, kv_dtype=dtype)
    kv = one.decoder.ctx.kv
    for tensor in (*kv.keys, *kv.values):
        tensor.copy_(torch.randn(tensor.shape))
    before = [t.float() for t in (*kv.keys, *kv.values)]
    assert kv.base > 1
    one.decoder.move(2, 0)
    for tensor, old in zip((*kv.keys, *kv.values), before, strict=True):
        assert torch.equal(tensor.float()[0], old[2]) and torch.equal(tensor.float()[1], old[1])

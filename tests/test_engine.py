"""The engine by itself, on token ids: seats, refills, aborts, guidance, stops, randomness, failures, memory.

Complaints about other engines (numbered rows of a survey of issue trackers) that have a test here: 3, 8 (a
batch changes no answer), 4, 34 (nobody waits for the slowest: a slot is refilled at once), 13, 19 (early
end), 16 (only answer tokens count), 17, 18 (what becomes of EOS), 21 (a knob does something or is refused), 28
(a bad request never stops the engine), 39 (logits of the candidates alone), 47 (temperature 0 by default).
tests/test_pairs.py has 1, 2, 5, 6, 7, 9, 26, 29, 38, 41 and 46; tests/test_streaming.py 33; the goldens 40.
"""

from __future__ import annotations

import gc
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_dllm.core.method import Rule
from flash_dllm.core.noise import CounterNoise
from flash_dllm.core.state import Canvas, State
from flash_dllm.core.step import StepRecord, Vocabulary
from flash_dllm.core.types import MASKED, NEVER, Candidates, Draft, Lanes, Phase
from flash_dllm.engine.engine import Engine
from flash_dllm.engine.request import Finished, Request, RequestError
from flash_dllm.kernels.head_confidence import HeadSpec, Sampling, confidence
from flash_dllm.methods import SCHEDULES, build_method
from flash_dllm.methods.dream import transfer_count
from flash_dllm.methods.flash_reference import reference
from flash_dllm.methods.llada import scheduled_count
from flash_dllm.models.layers import Model
from flash_dllm.params import SamplingParams

from .goldens.harness import EOS, EOT, MASK, VOCAB, golden_model
from .methods.invariants import one_layer

NUMBERS = {"stop_at_eos": False, "epsilon": 0.5, "block_length": 8}


@pytest.fixture(scope="module")
def model(golden_dir: Path) -> Model:
    return golden_model(golden_dir / "llada-tiny")


@pytest.fixture(scope="module")
def small(model: Model) -> Model:
    """The first layer alone."""
    return one_layer(model)


def make_engine(
    model: Model, slots: int = 2, positions: int = 48, method: str = "none+threshold", **options: Any
) -> Engine:
    cache, decoding = method.split("+")
    built = build_method(cache, decoding, family=model.config.family, **options)
    return Engine(model, built, Vocabulary(VOCAB, MASK, (EOS,), (EOS, EOT)), slots=slots, positions=positions)


def ask(
    name: str, prompt: list[int], length: int, stops: tuple[int, ...] = (EOS,), **numbers: Any
) -> Request:
    values = {**NUMBERS, **numbers}
    masked = [False] * len(prompt) + [True] * length
    shadow = None
    if values.get("cfg_scale", 0) > 0:
        shadow = Canvas([MASK] * len(masked), masked, stops, values)
    return Request(name, Canvas([*prompt, *[MASK] * length], masked, stops, values), shadow)


def finish(engine: Engine) -> dict[str, Finished]:
    ended: dict[str, Finished] = {}
    for _ in range(20000):
        if engine.idle:
            return ended
        ended.update({f.request.id: f for f in engine.step()})
    raise AssertionError("the engine does not come to an end")


def alone(model: Model, request: Request, method: str = "none+threshold", **options: Any) -> Finished:
    engine = make_engine(model, request.slots_needed, method=method, **options)
    engine.add(replace(request))
    return finish(engine)[request.id]


def some(count: int, seed: int = 1) -> list[tuple[list[int], int]]:
    rng = random.Random(seed)
    return [
        ([rng.randrange(480) for _ in range(rng.randint(1, 20))], rng.randint(1, 20)) for _ in range(count)
    ]


def test_an_empty_queue(model: Model) -> None:
    engine = make_engine(model)
    assert engine.idle and engine.step() == [] and engine.step() == []
    assert engine.totals.steps == 0 and not engine.abort("nobody")


def test_sixty_four_requests_through_one_slot(small: Model) -> None:
    requests = [ask(str(i), *case) for i, case in enumerate(some(64))]
    answers = []
    for slots in (1, 7):
        engine = make_engine(small, slots)
        for request in requests:
            engine.add(replace(request))
        answers.append(finish(engine))
        assert engine.totals.finished == 64 and engine.totals.rows == sum(
            f.rows for f in answers[-1].values()
        )
    assert all(answers[0][r.id].ids == answers[1][r.id].ids for r in requests)


def test_arrival_order_and_late_arrivals_change_nothing(model: Model) -> None:
    requests = [ask(str(i), *case, temperature=0.8, seed=i) for i, case in enumerate(some(6))]
    expected = {r.id: alone(model, r).ids for r in requests}
    for order in (requests, requests[::-1]):
        engine, ended = make_engine(model, 3), {}
        for request in order:
            engine.add(replace(request))
            ended.update({f.request.id: f for f in engine.step()})
        ended.update(finish(engine))
        assert {name: done.ids for name, done in ended.items()} == expected


def test_a_slot_is_refilled_in_the_step_after_it_is_free(small: Model) -> None:
    engine = make_engine(small, 2)
    engine.add(ask("long", [1, 2, 3], 30, epsilon=1.0))
    for index in range(4):
        engine.add(ask(f"short{index}", [4, 5], 2, epsilon=1.0))
    order = []
    while not engine.idle:
        order += [(f.request.id, engine.totals.steps) for f in engine.step()]
    assert order == [*((f"short{i}", 2 * i + 2) for i in range(4)), ("long", 30)]


def test_a_canvas_may_fill_the_slot_but_not_more(model: Model) -> None:
    engine = make_engine(model, 1, 16)
    engine.add(ask("fits", [7] * 15, 1))
    engine.add(ask("masks", [7], 15))
    assert {len(f.ids) for f in finish(engine).values()} == {16}
    for bad, message in (
        (ask("a", [7] * 15, 2), "17 positions"),
        (Request("b", Canvas([1, 2], [False, False])), "no masked position"),
        (ask("c", [VOCAB], 1), f"token id {VOCAB}"),
        (ask("d", [-1], 1), "token id -1"),
        (ask("e", [1], 1, tuple(range(9))), "9 stop token ids"),
        (ask("f", [1], 1, cfg_scale=1.0), "two slots"),
        (Request("g", ask("g", [1], 1).canvas, stop_strings=("x",)), "tokenizer"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.add(bad)
    assert engine.idle
    engine.add(ask("still", [7], 3))
    assert finish(engine)["still"].error is None


@pytest.mark.parametrize("method", ["none+threshold", "flash+threshold", "dual+threshold", "none+branch"])
def test_abort_in_every_phase(model: Model, method: str) -> None:
    options = {"window": 8} if method in ("flash+threshold", "none+branch") else {}
    first, second, third = (
        ask(str(i), *case, epsilon=0.95)
        for i, case in enumerate([([5] * 9, 20), ([6] * 4, 24), ([8, 9], 12)])
    )
    expected = alone(model, third, method, **options).ids
    for steps in (0, 1, 2, 5):
        engine = make_engine(model, 1, method=method, **options)
        engine.add(replace(first))
        engine.add(replace(second))
        for _ in range(steps):
            engine.step()
        assert engine.abort("1") and not engine.abort("1")
        assert engine.abort("0") and engine.idle
        assert engine.state.phase.tolist() == [Phase.FREE] and not engine.state.masked.any()
        engine.add(replace(third))
        assert finish(engine)["2"].ids == expected
        assert not engine.abort("2") and engine.totals.aborted == 2


def test_abort_of_a_guided_request_frees_both_slots(model: Model) -> None:
    engine = make_engine(model, 3)
    engine.add(ask("plain", [1, 2], 12, epsilon=1.0))
    engine.add(ask("guided", [3, 4], 12, cfg_scale=1.0, epsilon=1.0))
    engine.add(ask("waits", [5], 12, cfg_scale=1.0, epsilon=1.0))
    engine.step()
    assert len(engine.scheduler.busy) == 3
    assert engine.abort("guided") and len(engine.scheduler.busy) == 1
    ended = finish(engine)
    assert set(ended) == {"plain", "waits"} and engine.scheduler.partner == {}
    assert ended["waits"].ids == alone(model, ask("w", [5], 12, cfg_scale=1.0, epsilon=1.0)).ids


@pytest.mark.parametrize("method", ["none+threshold", "flash+threshold", "none+greedy"])
def test_guided_and_plain_requests_in_odd_slots(model: Model, method: str) -> None:
    options = {"window": 8, "track": 4, "lookahead": 4} if method.startswith("flash") else {}
    requests = [
        ask(str(i), *case, cfg_scale=(i % 3) * 0.75, steps=case[1], temperature=i % 2 * 0.5, seed=i)
        for i, case in enumerate(some(9, seed=4))
    ]
    expected = {r.id: alone(model, r, method, **options) for r in requests}
    for slots in (2, 3, 5):
        engine = make_engine(model, slots, method=method, **options)
        for request in requests:
            engine.add(replace(request))
        ended = finish(engine)
        for request in requests:
            ours, theirs = ended[request.id], expected[request.id]
            assert (ours.ids, ours.nfe, ours.rows) == (theirs.ids, theirs.nfe, theirs.rows)
            assert ours.nfe == ours.steps * request.slots_needed


@pytest.mark.parametrize("method", ["none+verify", "flash+branch", "dual+freedave", "dual+threshold"])
def test_guidance_is_refused_where_it_does_not_work(model: Model, method: str) -> None:
    with pytest.raises(RequestError, match="no classifier-free guidance"):
        make_engine(model, method=method).add(ask("a", [1], 4, cfg_scale=1.0))


def test_a_stop_token_at_the_first_position_gives_an_empty_answer(model: Model) -> None:
    plain = alone(model, ask("a", [5, 6, 7], 12))
    first = plain.ids[3]
    done = alone(model, ask("b", [5, 6, 7], 12, (first,), stop_at_eos=True))
    assert (done.reason, done.stop_reason, done.end) == ("stop", first, 3)
    assert done.steps <= plain.steps
    kept = alone(model, ask("c", [5, 6, 7], 12, (first,), stop_at_eos=False))
    assert kept.reason == "length" and kept.ids == plain.ids and kept.end == 3


def test_the_first_of_several_stop_tokens_ends_the_answer(model: Model) -> None:
    # All positions are committed in one step, so the stop tokens do not change what is decoded.
    at_once = {"epsilon": 1e-6, "block_length": 16}
    plain = alone(model, ask("a", [5, 6, 7], 16, **at_once))
    answer = plain.ids[3:]
    for stops in ((answer[9], answer[4]), (answer[4], 3, answer[12]), tuple(answer[4:12])):
        stops = tuple(dict.fromkeys(stops))
        where = min(answer.index(s) for s in stops if s in answer)
        done = alone(model, ask("b", [5, 6, 7], 16, stops, stop_at_eos=True, **at_once))
        assert (done.end, done.stop_reason, done.ids) == (3 + where, answer[where], plain.ids)
        done = alone(model, ask("c", [5, 6, 7], 16, stops, epsilon=1.0, stop_at_eos=True))
        assert not {*done.ids[3 : done.end]} & {*stops, MASK}
        assert (done.ids[done.end : done.end + 1] == [done.stop_reason]) == (done.reason == "stop")


def test_an_early_end_is_early(model: Model) -> None:
    plain = alone(model, ask("a", [5, 6, 7], 40, epsilon=1.0))
    done = alone(model, ask("b", [5, 6, 7], 40, (plain.ids[5],), epsilon=1.0, stop_at_eos=True))
    assert done.nfe <= 8 < plain.nfe == 40


def test_eos_policies(model: Model) -> None:
    requests = [ask(str(s), [1, 2, 3], 16, suppress=s) for s in range(4)]
    engine = make_engine(model, 4)
    for request in requests:
        engine.add(replace(request))
    ended = finish(engine)
    assert EOS in ended["0"].ids and EOS not in ended["1"].ids
    assert EOS not in ended["3"].ids and EOT not in ended["3"].ids
    assert all(ended[r.id].ids == alone(model, r).ids for r in requests)


def test_a_mixture_of_all_kinds_of_randomness(model: Model) -> None:
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "seed": 2},
        {"temperature": 5.0, "top_k": 3}, {"temperature": 2.0, "top_p": 0.3},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 2**62 - 1},
        {"temperature": 100.0}, {"temperature": 1e-30}, {"suppress": 2, "temperature": 1.0},
    ]  # fmt: skip
    for folder_model, method in (
        (model, "none+threshold"),
        (model, "none+random"),
        (model, "flash+threshold"),
    ):
        requests = [ask(str(i), [9, 8, 7], 12, steps=12, **kind) for i, kind in enumerate(kinds)]
        engine = make_engine(folder_model, 4, method=method)
        for request in requests:
            engine.add(replace(request))
        ended = finish(engine)
        for request in requests:
            assert ended[request.id].ids == alone(folder_model, request, method).ids
        assert ended["1"].ids != ended["2"].ids
        assert all(MASK not in f.ids for f in ended.values())


def test_temperature_is_zero_by_default_and_close_to_zero_is_like_zero(
    model: Model, golden_dir: Path
) -> None:
    assert SamplingParams().temperature == 0
    dream = golden_model(golden_dir / "dream-tiny")
    for one, method in ((model, "none+threshold"), (dream, "none+entropy")):
        plain = alone(one, ask("a", [5, 6, 7], 12, steps=12), method)
        for filters in ({}, {"top_p": 0.9}):
            cold = alone(one, ask("b", [5, 6, 7], 12, steps=12, temperature=1e-38, **filters), method)
            assert cold.error is None
            assert MASK not in cold.ids
            if one is model:
                assert cold.ids == plain.ids


def test_a_filter_of_one_request_takes_nothing_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.Tensor.cumsum
    # Rounding may carry a sum of probabilities past 1 well before its end.
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda x, dim: plain(x, dim) * (1 + 1e-6))
    logits = torch.tensor([[9.0, 1.0, 0.0, -9.0, -12.0]])

    def drawn(filters: bool) -> int:
        sampling = Sampling(
            torch.ones(1), torch.ones(1), torch.zeros(1, dtype=torch.int64),
            lambda n: torch.tensor([[1e-9] * (n - 1) + [1 - 1e-16]], dtype=torch.float64), filters=filters,
        )  # fmt: skip
        return int(confidence(logits, HeadSpec(5, 1, sampling=sampling)).token)

    assert drawn(True) == drawn(False) == 4


def test_only_the_candidates_are_read(small: Model) -> None:
    records: list[StepRecord] = []
    engine = make_engine(small, 1, 40)
    engine.observer = lambda _, record: records.append(record)
    engine.add(ask("a", [1, 2, 3], 32, epsilon=1.0))
    finish(engine)
    assert all(r.passes[0].hidden.shape[:2] == (1, 8) for r in records)


def test_counts_are_of_answers_and_of_passes_that_read_them(small: Model) -> None:
    engine = make_engine(small, 2)
    engine.add(ask("a", [1] * 20, 6, epsilon=1.0))
    engine.add(ask("b", [2], 3, epsilon=1.0))
    ended = finish(engine)
    assert [(ended[n].nfe, ended[n].rows, ended[n].by_confidence) for n in "ab"] == [
        (6, 6 * 26, 6),
        (3, 3 * 4, 3),
    ]
    assert sorted(p for p in ended["a"].passes if p) == [1, 2, 3, 4, 5, 6]


def test_a_window_that_is_used_up_has_no_drift() -> None:
    from flash_dllm.methods.flash import FlashCache

    policy, state = FlashCache(refresh_on_drift=0.3), State(1, 8)
    state.load(0, Canvas([1] + [99] * 7, [False] + [True] * 7))
    lanes = Lanes([0], [], [1], [8], 2)

    def drifted(prob: float, positions: list[int], commit: bool) -> bool:
        pos = torch.tensor([positions])
        cand = Candidates(pos, torch.ones_like(pos, dtype=torch.bool))
        chance = torch.full(pos.shape, prob)
        take = cand.valid & commit
        state.commit(pos, pos, chance, take)
        policy.observe(state, lanes, StepRecord(state.step, cand, Draft(pos, chance, chance), take, []))
        state.end_step(torch.zeros(1, dtype=torch.bool))
        due = policy.due(state)
        assert due is not None
        return bool(due[0])

    assert not drifted(0.9, [1, 2], False)
    assert not drifted(0.9, [1, 2], True)  # nothing stays, so nothing has fallen
    assert drifted(0.4, [3, 4], False)
    assert not drifted(0.4, [3, 4], False)
    state.load(0, Canvas([1] + [99] * 7, [False] + [True] * 7))
    assert not drifted(0.01, [1, 2], False)  # a new request


def test_what_a_layer_moved_belongs_to_the_request(model: Model) -> None:
    engine = make_engine(model, 2, method="dynamic+threshold", budget="paper")
    for name in "ab":
        engine.add(ask(name, [1, 2, 3], 12, epsilon=1.0))
    for _ in range(4):
        engine.step()
    moved = engine.method.cache.moved  # type: ignore[attr-defined]
    assert bool((moved.sum(0) > 0).all())
    engine.abort("a")
    engine.add(ask("c", [1, 2, 3], 12))
    for slot, request in engine.scheduler.admit():
        with torch.inference_mode():
            engine._seat(slot, request)
    moved = engine.method.cache.moved  # type: ignore[attr-defined]
    assert bool((moved[:, 0] == 0).all()) and bool((moved[:, 1].sum() > 0).all())


def test_padding_of_the_reference_preset_is_no_answer(model: Model) -> None:
    method = reference(EOS)
    engine = Engine(model, method, Vocabulary(VOCAB, MASK, (EOS,), (EOS, EOT)), slots=2, positions=64)
    for index, (prompt, length) in enumerate(some(4, seed=9)):
        engine.add(ask(str(index), prompt, length, stop_at_eos=True, gamma=0.8))
    for done in finish(engine).values():
        asked = len(done.request.canvas.ids) - int(done.request.canvas.numbers["pad"])
        assert done.end <= asked and MASK not in done.ids[: done.end]


# Rules by themselves: a canvas, a schedule, random drafts.

DREAM = ("origin", "maskgit_plus", "entropy", "topk_margin")
RULES = [
    *((r, s) for r in ("threshold", "factor", "greedy", "random") for s in ("blocks", "window")),
    *((r, s) for r in ("quota", *DREAM) for s in ("whole", "blocks")),
]


def rule_of(name: str) -> Rule:
    return build_method("none", name, family="dream" if name in DREAM else "llada").rule


def most(name: str, state: State, masks: int, open_: torch.Tensor) -> int:
    """The budget of a step: the most that a rule may commit."""
    if name in ("greedy", "random"):
        return int(scheduled_count(state)[0])
    if name in DREAM[1:]:
        return int(transfer_count(state, open_)[0])
    return masks


@pytest.mark.parametrize(("name", "schedule"), RULES)
def test_rules_keep_to_what_they_may_commit(name: str, schedule: str) -> None:
    rule = rule_of(name)

    @settings(max_examples=12, deadline=None, database=None)
    @given(
        masked=st.lists(st.booleans(), min_size=1, max_size=20).filter(any),
        block=st.integers(1, 24), steps=st.integers(1, 20), seed=st.integers(0, 2**31), stop=st.booleans(),
        epsilon=st.floats(0.01, 1.0),
    )  # fmt: skip
    def check(masked: list[bool], block: int, steps: int, seed: int, stop: bool, epsilon: float) -> None:
        made = torch.Generator().manual_seed(seed)
        length = len(masked)
        state, noise = State(1, 24), CounterNoise()
        numbers = {
            "block_length": block,
            "steps": steps,
            "epsilon": epsilon,
            "stop_at_eos": stop,
            "seed": seed,
        }
        state.load(0, Canvas([99 if m else 5 for m in masked], masked, (0, 1), numbers))
        plan = SCHEDULES[schedule](6) if schedule == "window" else SCHEDULES[schedule]()
        first = masked.index(True)
        for _ in range(200):
            cand = plan.candidates(state, plan.width([length - first], [block]))
            limit, before = int(state.limit[0]), state.committed_at.clone()
            ids = state.ids.clone()
            noise.begin(state.num["seed"], state.step, length)
            prob = torch.rand(cand.pos.shape, generator=made)
            token = torch.randint(0, 9, cand.pos.shape, generator=made)
            masks, open_ = int(cand.valid.sum()), cand.valid.sum(1)
            budget = most(name, state, masks, open_)
            take = rule.commit(state, cand, Draft(token, prob, prob.clone()), noise) & cand.valid
            taken = cand.pos[take].tolist()
            assert len(set(taken)) == len(taken) <= budget
            assert name in DREAM or taken
            assert all(before[0, p] == MASKED and p < limit for p in taken)
            if schedule == "blocks":
                assert len({(p - first) // block for p in cand.pos[cand.valid].tolist()}) == 1
            state.commit(cand.pos, token, prob, take)
            untouched = before != MASKED
            assert torch.equal(ids[untouched], state.ids[untouched])
            state.end_step(plan.done(state))
            if int(state.phase[0]) == Phase.DONE:
                break
        assert int(state.phase[0]) == Phase.DONE
        end = min(int(state.stop_pos[0]), length) if stop and int(state.stop_pos[0]) < NEVER else length
        assert not state.masked[0, :end].any()

    check()


def resident() -> int:
    """Bytes of this process in memory, 0 where the system does not say."""
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if file.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["none+threshold", "flash+branch"])
def test_memory_is_flat_over_ten_thousand_requests(small: Model, method: str) -> None:
    options = {"window": 4, "branches": 2, "track": 4, "lookahead": 0} if method != "none+threshold" else {}
    engine = make_engine(small, 64, 8, method, **options)
    sizes = []
    for part in range(10):
        for index in range(1000):
            engine.add(ask(f"{part}-{index}", [index % 480], 1 + index % 3, epsilon=1e-6))
        finish(engine)
        gc.collect()
        sizes.append((len(gc.get_objects()), resident(), engine.decoder.ctx.kv.nbytes))
    assert engine.totals.finished == 10000
    objects, memory, cache = (list(column) for column in zip(*sizes, strict=True))
    assert objects[-1] - objects[1] < 1000
    assert memory[-1] - memory[1] < 16 * 2**20
    assert len(set(cache)) == 1

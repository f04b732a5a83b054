"""Choosing, noise, state and schedules: small properties that everything rests on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_dllm.core.method import Blocks, Whole, Window, at_least_best, prefix_true
from flash_dllm.core.noise import CounterNoise, TorchCPUNoise, counter_uniform
from flash_dllm.core.select import highest, leftmost, rank_of
from flash_dllm.core.state import Canvas, State
from flash_dllm.core.types import MASKED, Phase
from flash_dllm.core.visibility import canvas_view, set_interval

flags = st.lists(st.booleans(), min_size=1, max_size=20)
# Few different keys, so that ties are common.
keys = st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 3.0]), min_size=1, max_size=20)


@given(flags, st.integers(1, 25))
def test_leftmost(row: list[bool], n: int) -> None:
    pos, valid = leftmost(torch.tensor([row]), n)
    expected = [i for i, flag in enumerate(row) if flag][:n]
    assert pos[0][valid[0]].tolist() == expected
    assert pos.shape == (1, n)


@given(st.data())
def test_highest_breaks_ties_to_the_lower_position(data: st.DataObject) -> None:
    key = data.draw(keys)
    row = data.draw(st.lists(st.booleans(), min_size=len(key), max_size=len(key)))
    n = data.draw(st.integers(1, len(key)))
    pos, valid = highest(torch.tensor([key]), torch.tensor([row]), n)
    expected = sorted((i for i, flag in enumerate(row) if flag), key=lambda i: (-key[i], i))[:n]
    assert pos[0][valid[0]].tolist() == expected


@given(st.data())
def test_rank_of_is_the_inverse_of_sorting(data: st.DataObject) -> None:
    key = data.draw(keys)
    row = data.draw(st.lists(st.booleans(), min_size=len(key), max_size=len(key)))
    rank = rank_of(torch.tensor([key]), torch.tensor([row]))[0].tolist()
    expected = sorted((i for i, flag in enumerate(row) if flag), key=lambda i: (-key[i], i))
    assert [rank[i] for i in expected] == list(range(len(expected)))
    assert sorted(rank) == list(range(len(key)))


@given(st.data())
def test_at_least_best_adds_one_where_there_is_one(data: st.DataObject) -> None:
    key = data.draw(keys)
    size = {"min_size": len(key), "max_size": len(key)}
    take, valid = (torch.tensor([data.draw(st.lists(st.booleans(), **size))]) for _ in range(2))
    out = at_least_best(take & valid, torch.tensor([key]), valid)
    assert bool(out.any()) == bool(valid.any())
    assert not (out & ~valid).any() and bool((out >= (take & valid)).all())


@given(flags)
def test_prefix_true(row: list[bool]) -> None:
    size = row.index(False) if False in row else len(row)
    assert prefix_true(torch.tensor([row]))[0].tolist() == [i < size for i in range(len(row))]


@settings(max_examples=50)
@given(st.integers(0, 2**62), st.integers(0, 1000), st.integers(0, 1000))
def test_counter_noise_does_not_depend_on_the_batch(seed: int, step: int, pos: int) -> None:
    alone, batch = CounterNoise(), CounterNoise()
    alone.begin(torch.tensor([seed]), torch.tensor([step]), 5)
    batch.begin(torch.tensor([7, seed]), torch.tensor([3, step]), 500)
    one = alone.per_token(torch.tensor([[pos]]), 11)
    two = batch.per_token(torch.tensor([[1, 2], [pos, 9]]), 11)
    assert torch.equal(one[0], two[2])
    assert torch.equal(
        alone.per_position(torch.tensor([[pos]]), torch.ones(1, 1, dtype=torch.bool))[0],
        batch.per_position(torch.tensor([[4], [pos]]), torch.ones(2, 1, dtype=torch.bool))[1],
    )


def test_counter_noise_is_uniform_and_uncorrelated() -> None:
    i = torch.arange(200_000)
    for words in ((i, torch.zeros_like(i)), (torch.zeros_like(i), i), (i // 500, i % 500)):
        u = counter_uniform(*words)
        assert float(u.min()) > 0 and float(u.max()) < 1
        assert float(u.mean()) == pytest.approx(0.5, abs=4e-3)
        assert float(u.var()) == pytest.approx(1 / 12, abs=2e-3)
        lagged = torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1]
        assert abs(float(lagged)) < 0.01
        assert len(u.unique()) == len(u)


def test_published_noise_is_torchs_own_sequence() -> None:
    noise = TorchCPUNoise(5, 7)
    noise.begin(torch.zeros(1), torch.zeros(1), 4)
    made = torch.Generator().manual_seed(5)
    drawn = torch.rand((1, 4), generator=made)[0]
    pos = torch.tensor([[3, 1]])
    assert torch.equal(noise.per_position(pos, pos > 0), drawn[pos])
    full = torch.rand((1, 4, 7), generator=made, dtype=torch.float64)[0]
    assert torch.equal(noise.per_token(pos, 6), full[[3, 1], :6])


def loaded(*lengths: tuple[int, int], block: int = 4) -> State:
    state = State(len(lengths), 24)
    for slot, (prompt, answer) in enumerate(lengths):
        masked = [False] * prompt + [True] * answer
        state.load(slot, Canvas([1] * (prompt + answer), masked, (9,), {"block_length": block}))
    return state


def test_commit_writes_only_what_is_taken() -> None:
    state = loaded((3, 5), (2, 6))
    pos, token = torch.tensor([[3, 4], [2, 3]]), torch.tensor([[7, 8], [9, 6]])
    state.commit(pos, token, torch.full((2, 2), 0.5), torch.tensor([[True, False], [True, True]]))
    assert state.ids[0, 3:5].tolist() == [7, 1] and state.ids[1, 2:4].tolist() == [9, 6]
    assert state.masked.sum(1).tolist() == [4, 4]
    assert int(state.stop_pos[1]) == 2 and int(state.limit[1]) == 2 and int(state.limit[0]) == 8
    state.end_step(~state.wanted.any(1))
    assert state.phase.tolist() == [Phase.RUN, Phase.DONE]


def test_a_cleared_slot_remembers_nothing() -> None:
    state = loaded((3, 5))
    for grid in ("score", "draft_prob", "log_prob", "fresh"):
        getattr(state, grid).fill_(1)
    state.commit(
        torch.tensor([[3]]), torch.tensor([[9]]), torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)
    )
    state.bound.fill_(0.5)
    state.clear(0)
    fresh = State(1, 24)
    for name, value in vars(fresh).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(state, name), value), name
    assert all(torch.equal(state.num[name], value) for name, value in fresh.num.items())


def test_a_canvas_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="25 positions"):
        State(1, 24).load(0, Canvas([1] * 25, [True] * 25))


def test_windows_slide_and_blocks_wait() -> None:
    state = loaded((3, 8))
    window, blocks = Window(4), Blocks()
    assert window.candidates(state, 4).pos[0].tolist() == [3, 4, 5, 6]
    assert blocks.candidates(state, 4).pos[0].tolist() == [3, 4, 5, 6]
    some = torch.tensor([[3, 5]])
    state.commit(some, some, torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool))
    assert window.candidates(state, 4).pos[0].tolist() == [4, 6, 7, 8]
    cand = blocks.candidates(state, 4)
    assert cand.pos[0][cand.valid[0]].tolist() == [4, 6]
    rest = torch.tensor([[4, 6]])
    state.commit(rest, rest, torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool))
    assert blocks.candidates(state, 4).pos[0].tolist() == [7, 8, 9, 10]
    assert int(state.block[0]) == 1 and int(state.blocks[0]) == 2


def test_nothing_past_a_committed_stop_token_is_a_candidate() -> None:
    state = loaded((3, 8))
    stop = torch.tensor([[6]])
    state.commit(stop, torch.tensor([[9]]), torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool))
    for schedule in (Window(6), Blocks(), Whole()):
        cand = schedule.candidates(state, 6)
        assert set(cand.pos[0][cand.valid[0]].tolist()) == {3, 4, 5}
    state.num["stop_at_eos"][0] = False
    cand = Window(9).candidates(state, 9)
    assert set(cand.pos[0][cand.valid[0]].tolist()) == {3, 4, 5, 7, 8, 9, 10}


def test_intervals_leave_the_trash_place_unseen() -> None:
    state = loaded((3, 5), (2, 2))
    view = canvas_view(state, base=5, places=29)
    assert (view.hi > view.lo).sum(1).tolist() == [8, 4]
    place = torch.tensor([[1, 7], [2, 8]])
    set_interval(view, place, 1, torch.tensor([2, 3]), torch.tensor([[True, True], [False, True]]))
    assert view.hi[0, [1, 7]].tolist() == [2, 3] and view.lo[0, [1, 7]].tolist() == [1, 1]
    assert view.hi[1, 2] == 0 and view.hi[1, 8] == 3
    assert not (view.hi[:, 0] > view.lo[:, 0]).any()


def test_marks_are_ordered() -> None:
    state = loaded((1, 2))
    assert state.known[0, :3].tolist() == [True, False, False]
    assert int((state.committed_at == MASKED).sum()) == 2 and int(state.inside.sum()) == 3


def test_a_number_that_no_request_has_is_refused() -> None:
    state = State(2, 8)
    with pytest.raises(ValueError, match="'epsilom'"):
        state.load(1, Canvas([1, 2], [False, True], (), {"epsilom": 0.5}))
    assert state.phase.tolist() == [Phase.FREE, Phase.FREE]


def test_a_slot_gets_its_numbers_and_loses_them() -> None:
    state = State(3, 8)
    empty = {name: line.clone() for name, line in state.num.items()}
    state.load(
        1, Canvas([1, 2, 3], [False, True, True], (7, 9), {"epsilon": 0.5, "top_k": 4, "stop_at_eos": False})
    )
    assert state.num["epsilon"].tolist() == pytest.approx([0.9, 0.5, 0.9])
    assert state.num["top_k"].tolist() == [0, 4, 0] and state.num["stop_at_eos"].tolist() == [
        True,
        False,
        True,
    ]
    assert state.total.tolist() == [0, 3, 0] and state.phase[1] == Phase.SWEEP
    assert state.stop_ids[1].tolist()[:3] == [7, 9, -1]
    state.clear(1)
    assert all(torch.equal(state.num[name], line) for name, line in empty.items())
    assert state.phase.sum() == Phase.FREE and state.total.sum() == 0 and (state.stop_ids == -1).all()

"""Engines on ranks: the tokens of one rank, and the same state on all of them, bit for bit."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from flash_dllm.core.state import Canvas, State
from flash_dllm.core.step import Vocabulary
from flash_dllm.engine.engine import Engine
from flash_dllm.engine.leading import FollowingEngine, LeadingEngine, from_json, to_json, unsplit
from flash_dllm.engine.request import Finished, Request
from flash_dllm.methods import build_method
from flash_dllm.models.layers import Model
from flash_dllm.models.load import Form, load_model
from flash_dllm.quant import allocator

from ..goldens.harness import EOS, EOT, MASK, golden_model
from ..test_moves import Watched
from ..test_pairs import N_TOKENS, POSITIONS, accepted, make_cases
from .threads import Hall, ThreadRanks, on_ranks, part_of

FAMILIES = ("llada-tiny", "llada-tiny-gqa", "dream-tiny")
METHODS = [
    ("none", "threshold", {}),
    ("dual", "threshold", {}),
    ("flash", "threshold", {"track": 5, "lookahead": 3, "window": 4}),
    ("flash", "verify", {"track": 5, "window": 4, "search": 3, "verify_rows": 8}),
    ("none", "branch", {}),
    ("dllm-cache", "greedy", {"kp": 3, "kr": 2}),
]


def decode(model: Model, method: tuple[str, str, dict[str, Any]], slots: int = 3) -> tuple[list[Any], State]:
    """Answers to odd canvases, and the state that is left."""
    cache, decoding, options = method
    built = build_method(cache, decoding, family=model.config.family, **options)
    vocabulary = Vocabulary(N_TOKENS, MASK, (EOS,), (EOS, EOT))
    engine = Engine(model, built, vocabulary, slots=slots, positions=POSITIONS)
    cases = make_cases(f"{cache}+{decoding}", decoding, 3)
    for index, canvas in enumerate(cases):
        canvas.numbers["temperature"] = 0.5 * (index % 2) * ("temperature" in built.options)
        engine.add(Request(str(index), canvas))
    ended: dict[str, Finished] = {}
    while not engine.idle:
        ended.update({f.request.id: f for f in engine.step()})
    assert all(f.error is None for f in ended.values())
    return [(f.ids, f.passes, f.nfe, f.rows) for _, f in sorted(ended.items())], engine.state


def tensors(state: State) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(state).items() if isinstance(value, torch.Tensor)}


def check(folder: Path, method: tuple[str, str, dict[str, Any]], size: int) -> None:
    wanted, _ = decode(golden_model(folder), method)
    results = on_ranks(size, lambda ranks: decode(part_of(folder, ranks), method))
    for answers, state in results:
        assert answers == wanted
        for name, value in tensors(state).items():
            first = tensors(results[0][1])[name]
            assert torch.equal(value.nan_to_num(), first.nan_to_num()), f"ranks differ in state.{name}"


@pytest.mark.parametrize("folder", FAMILIES)
@pytest.mark.parametrize("method", METHODS, ids=lambda m: "+".join(m[:2]))
def test_two_ranks(golden_dir: Path, folder: str, method: tuple[str, str, dict[str, Any]]) -> None:
    check(golden_dir / folder, method, 2)


def test_more_ranks_than_heads_of_keys(golden_dir: Path) -> None:
    check(golden_dir / "llada-tiny-gqa", METHODS[3], 4)
    check(golden_dir / "dream-tiny", ("dllm-cache", "threshold", {"kp": 3, "kr": 2}), 4)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("folder", ["llada-tiny-gqa", "dream-tiny"])
def test_every_pair(golden_dir: Path, folder: str) -> None:
    family = "dream" if folder.startswith("dream") else "llada"
    ran = 0
    for cache, decoding in accepted(family):
        if decoding == "guided" or unsplit(build_method(cache, decoding, family=family)):
            continue
        check(golden_dir / folder, (cache, decoding, {}), 2)
        ran += 1
    assert ran > 60


def test_a_rank_holds_its_part(golden_dir: Path) -> None:
    folder = golden_dir / "dream-tiny"
    whole = golden_model(folder)
    for rank, part in enumerate(on_ranks(4, lambda ranks: part_of(folder, ranks))):
        assert (part.config.n_heads, part.config.n_kv_heads, part.config.d_ffn) == (1, 1, 64)
        assert torch.equal(part.head, whole.head[128 * rank : 128 * (rank + 1)])
        dim, ours, theirs = whole.config.head_dim, part.layers[1], whole.layers[1]
        q = slice(dim * rank, dim * (rank + 1))
        k = slice(dim * (4 + rank // 2), dim * (5 + rank // 2))
        v = slice(dim * (6 + rank // 2), dim * (7 + rank // 2))
        rows = torch.cat([theirs.wqkv[r] for r in (q, k, v)])
        assert torch.equal(ours.wqkv, rows)
        assert torch.equal(ours.bqkv, torch.cat([theirs.bqkv[r] for r in (q, k, v)]))
        assert torch.equal(ours.wo.local, theirs.wo[:, q])
        ffn = slice(64 * rank, 64 * (rank + 1))
        gate, up = theirs.w_gate_up.chunk(2)
        assert torch.equal(ours.w_gate_up, torch.cat([gate[ffn], up[ffn]]))
        assert torch.equal(ours.w_down.local, theirs.w_down[:, ffn])
        rest = sum(t.numel() for t in (part.embed, part.norm)) + 4 * 2 * 128
        assert part.n_parameters - rest < 0.3 * (whole.n_parameters - rest)


def test_sums_a_pass(golden_dir: Path) -> None:
    """Two sums a layer; Flash-Cache adds one for its score; the head exchanges once."""
    for method, more in ((METHODS[0], 0), (METHODS[2], 1)):
        hall = Hall(2)

        def work(ranks: ThreadRanks, method: Any = method) -> int:
            answers, _ = decode(part_of(golden_dir / "llada-tiny", ranks), method, slots=1)
            return sum(nfe for _, _, nfe, _ in answers)

        (passes, _) = on_ranks(2, work, hall)
        assert hall.sums == passes * (2 * 4 + more)
        assert hall.gathers == passes


def test_tied_heads_and_odd_vocabularies(tmp_path: Path) -> None:
    from ..checkpoints import write_checkpoint

    folder = write_checkpoint(tmp_path, text=False, weight_tying=True)
    whole = load_model(folder)
    assert whole.config.vocab_size % 2
    parts = on_ranks(2, lambda ranks: part_of(folder, ranks))
    assert [p.head.shape[0] for p in parts] == [
        whole.config.vocab_size // 2,
        whole.config.vocab_size // 2 + 1,
    ]
    assert torch.equal(torch.cat([p.head for p in parts]), whole.embed)
    moved = parts[1].to(dtype=torch.bfloat16)
    assert moved.head.data_ptr() == moved.embed[moved.shard.start :].data_ptr(), "a tied head shares memory"
    assert moved.n_parameters == parts[1].n_parameters


def test_quantised_parts(golden_dir: Path) -> None:
    """A rank scales its own columns of the output and down projections; everything else is the same numbers."""
    folder = golden_dir / "llada-tiny"
    for kind in ("int8", "fp8"):
        whole = load_model(folder, form=Form(lambda d, k=kind: allocator(k, d)))
        parts = on_ranks(2, lambda ranks, k=kind: part_of(folder, ranks, matrix=lambda d: allocator(k, d)))
        layer, rows = whole.layers[0], 64
        for rank, part in enumerate(parts):
            ours = part.layers[0]
            assert torch.equal(
                ours.wqkv[:rows].dequantize(), layer.wqkv[rows * rank : rows * (rank + 1)].dequantize()
            )
            assert {t.dtype for t in ours.wo.storages()} == {t.dtype for t in layer.wo.storages()}
            for name in ("wo", "w_down"):
                exact = getattr(golden_model(folder).layers[0], name).chunk(2, 1)[rank]
                loss = (getattr(ours, name).local.dequantize() - exact).abs().amax()
                whole_loss = (getattr(layer, name).dequantize().chunk(2, 1)[rank] - exact).abs().amax()
                assert loss <= 1.05 * whole_loss
        assert len({f.name for f in fields(ours)}) == 7


class Wire:
    """What rank 0 says, through JSON, to a follower in another thread."""

    def __init__(self) -> None:
        self.messages: queue.Queue[str | None] = queue.Queue()
        self.orders: list[Any] = []
        self.ended: list[Any] = []

    def order(self, *order: Any) -> None:
        self.orders.append(order)

    @contextmanager
    def together(self, name: str) -> Iterator[Any]:
        self.messages.put(json.dumps([*self.orders, (name, None)]))
        self.orders = []
        yield self.ended.append


def engine_of(kind: type[Engine], model: Model, slots: int = 2, **options: Any) -> Any:
    method = build_method("flash", "threshold", family=model.config.family, track=5, lookahead=3, window=4)
    vocabulary = Vocabulary(N_TOKENS, MASK, (EOS,), (EOS, EOT))
    return kind(model, method, vocabulary, slots=slots, positions=POSITIONS, **options)


def drive(engine: LeadingEngine) -> None:
    """Adds, aborts, warm-ups and watchers that come and go; with late reads these decide when a slot is refilled."""
    assert list(engine.warm_up()) == []
    for index, canvas in enumerate(make_cases("led", "threshold", 9)):
        engine.add(Request(str(index), canvas, stop_strings=()))
    for count in range(200):
        if count == 4:
            engine.observer = lambda _, record: None
        if count == 9:
            engine.observer = None
        if count == 6:
            assert engine.abort("1") or engine.abort("2") or engine.abort("3")
            assert not engine.abort("nobody")
        engine.step()
        if engine.idle:
            return
    raise AssertionError("the engine does not come to an end")


@pytest.mark.parametrize("late", [False, True])
def test_followers_do_as_rank_0(golden_dir: Path, late: bool) -> None:
    wire = Wire()

    def work(ranks: ThreadRanks) -> Any:
        model = part_of(golden_dir / "llada-tiny-gqa", ranks)
        if ranks.rank == 0:
            leader = engine_of(LeadingEngine, model, late=late)
            leader.link = wire
            try:
                drive(leader)
            finally:
                wire.messages.put(None)
            return leader.state, wire.ended
        follower, ended = engine_of(FollowingEngine, model, late=late), []
        while (message := wire.messages.get(timeout=120)) is not None:
            ended.append(follower.obey(json.loads(message)))
        return follower.state, ended

    (ours, ended), (theirs, followed) = on_ranks(2, work)
    assert json.loads(json.dumps(ended)) == followed
    assert len([f for step in ended for f in step]) == 8, "one was aborted"
    for name, value in tensors(ours).items():
        assert torch.equal(value.nan_to_num(), tensors(theirs)[name].nan_to_num()), name


def crowd(engine: Any, seen: Watched | None = None) -> dict[str, Any]:
    """Two crowds of seven; where canvases move, one of the movers is dropped right after."""
    done: dict[str, Any] = {}
    dropped = False
    for start in (0, 7):
        for index, canvas in enumerate(make_cases("crowd", "threshold", 14)[start : start + 7], start):
            canvas.numbers["epsilon"] = 1.0
            engine.add(Request(str(index), canvas))
        while len(engine.scheduler.busy) > 1 or engine.scheduler.queue:
            done |= {f.request.id: (f.ids, f.steps, f.nfe, f.rows) for f in engine.step()}
            if seen is not None and seen.tenants and not dropped:
                mover = seen.tenants[0]
                assert mover is not None
                dropped = engine.abort(mover.id)
    while not engine.idle:
        done |= {f.request.id: (f.ids, f.steps, f.nfe, f.rows) for f in engine.step()}
    return done


@pytest.mark.parametrize("late", [False, True])
def test_ranks_move_canvases_together(golden_dir: Path, late: bool) -> None:
    folder, wire = golden_dir / "llada-tiny-gqa", Wire()
    wanted = crowd(engine_of(Engine, golden_model(folder), slots=7))

    def work(ranks: ThreadRanks) -> Any:
        model = part_of(folder, ranks)
        if ranks.rank == 0:
            leader = engine_of(LeadingEngine, model, slots=7, late=late)
            seen = Watched(leader)
            leader.link = wire
            try:
                return crowd(leader, seen), seen.moves, leader.state, wire.ended
            finally:
                wire.messages.put(None)
        follower, ended = engine_of(FollowingEngine, model, slots=7, late=late), []
        seen = Watched(follower)
        while (message := wire.messages.get(timeout=120)) is not None:
            ended.append(follower.obey(json.loads(message)))
        return None, seen.moves, follower.state, ended

    (answers, moves, ours, ended), (_, theirs_moves, theirs, followed) = on_ranks(2, work)
    (dropped,) = set(wanted) - set(answers)
    assert answers == {name: answer for name, answer in wanted.items() if name != dropped}
    assert moves == theirs_moves and len(moves) > 3
    assert json.loads(json.dumps(ended)) == followed
    for name, value in tensors(ours).items():
        assert torch.equal(value.nan_to_num(), tensors(theirs)[name].nan_to_num()), name


def test_a_request_through_json() -> None:
    shadow = Canvas([1, 2], [False, True])
    request = Request(
        "a", Canvas([5, MASK], [False, True], (EOS,), {"epsilon": 0.5, "seed": 2**61}), shadow, ("x",)
    )
    again = from_json(json.loads(json.dumps(to_json(request))))
    assert (again.id, again.canvas, again.shadow, again.stop_strings) == ("a", request.canvas, shadow, ("x",))
    with pytest.raises(ValueError, match="order 'dance' is not known"):
        FollowingEngine.obey(None, [("dance", 1)])  # type: ignore[arg-type]

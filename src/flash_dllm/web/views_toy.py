"""Who sees whom in a verify pass: the engine's own rows and intervals on a small window, and the path of the leak."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import torch

from flash_dllm.core.cache import KVCache
from flash_dllm.core.forward import Context
from flash_dllm.core.state import Canvas, State
from flash_dllm.core.types import Candidates, Draft, Lanes, Plan
from flash_dllm.methods import build_method
from flash_dllm.methods.verify import VIEWS, FlashVerify
from flash_dllm.models.config import SHAPES
from flash_dllm.models.layers import empty_model

KNOWN, WINDOW, DRAFTS = 2, 4, 3
MASK = 31


@dataclass(frozen=True)
class Line:
    """A row of the pass (``row`` is its index) or a key of the cache that no row of the pass writes (-1).

    ``kind``: context, original, draft, mask or copy; ``k`` counts drafts from 0, for a copy the drafts it holds.
    ``token``: the draft's number from 1, 0 for MASK, -1 for a known token.
    """

    kind: str
    pos: int
    k: int
    token: int
    row: int


@dataclass(frozen=True)
class Matrix:
    """Visibility of a verify pass.

    Attributes:
        rows: queries, in order; ``keys``: what they may see.
        sees: [rows][keys].
        judges: row of the mask view of each draft.
        leaks: for each draft the shortest way on which it reaches its own judge, as indices into ``rows``, first
            the draft's row; empty where there is none at any depth.
    """

    rows: list[Line]
    keys: list[Line]
    sees: list[list[bool]]
    judges: list[int]
    leaks: list[list[int]]


def matrix(views: str) -> Matrix:
    """The verify pass of one step with ``DRAFTS`` drafts over a window of ``WINDOW`` masks, over no cache.

    Without a cache every other position is a row as well, so that a leak through the context would show.
    """
    plan, state, base, drafts = _plan(views)
    places = _places(views, plan, state, base, drafts)
    lo, hi = plan.view.lo[0], plan.view.hi[0]
    rows = [line for line in places.values() if line.row >= 0]
    keys = [line for place, line in places.items() if hi[place] > lo[place]]
    at = {id(line): place for place, line in places.items()}
    rank = plan.rows.rank
    sees = [[bool(lo[at[id(key)]] <= rank[row.row] < hi[at[id(key)]]) for key in keys] for row in rows]
    order = {line.row: i for i, line in enumerate(rows)}
    judges = [order[int(plan.reads[0, k])] for k in range(len(drafts))]
    leaks = [_leak(rows, keys, sees, judge, k) for k, judge in enumerate(judges)]
    return Matrix(rows, keys, sees, judges, leaks)


def _plan(views: str) -> tuple[Plan, State, int, list[int]]:
    """The plan of the verify pass; the last window position is the most confident, then leftwards."""
    shape = replace(SHAPES["llada-tiny"], n_layers=1, vocab_size=32, mask_id=MASK)
    model = empty_model(shape, torch.float32)
    method = build_method("none", "verify", family="llada", views=views, search=DRAFTS, window=WINDOW)
    verifier = method.verifier
    assert isinstance(verifier, FlashVerify)
    n = KNOWN + WINDOW
    kv = KVCache.allocate(shape, 1, n, verifier.room(WINDOW), model.embed)
    state = State(1, n)
    state.load(0, Canvas([1] * KNOWN + [MASK] * WINDOW, [i >= KNOWN for i in range(n)]))
    pos = torch.arange(KNOWN, n)[None]
    cand = Candidates(pos, torch.ones(1, WINDOW, dtype=torch.bool))
    prob = 0.5 + 0.05 * torch.arange(WINDOW)[None]
    draft = Draft(10 + torch.arange(WINDOW)[None], prob, prob)
    lanes = Lanes([0], [], [KNOWN], [n], WINDOW)
    taken = torch.zeros(1, WINDOW, dtype=torch.bool)
    ctx = Context.build(model, kv, n)
    search, plan = verifier.expand(state, lanes, cand, draft, taken, method.cache, ctx)
    return plan, state, kv.base, search.pos[0].tolist()


def _places(views: str, plan: Plan, state: State, base: int, drafts: list[int]) -> dict[int, Line]:
    """What each key place holds: rows in the order of the pass, then keys that only the cache holds."""
    rows = plan.rows
    number = {pos: k for k, pos in enumerate(drafts)}
    out: dict[int, Line] = {}
    for row in rows.valid.nonzero().flatten().tolist():
        pos, place, token = int(rows.pos[row]), int(rows.place[row]), int(rows.token[row])
        shown = number[pos] + 1 if token != MASK and pos in number else -1 if token != MASK else 0
        if place >= base:
            kind, k = ("original" if pos in number else "context"), number.get(pos, -1)
        elif views == "branch":
            kind, k = "copy", int(rows.rank[row]) - 1
        else:
            kind, k = ("mask" if token == MASK else "draft"), number[pos]
        out[place] = Line(kind, pos, k, shown, row)
    hi = plan.view.hi[0]
    for pos in range(state.positions):
        if base + pos not in out and hi[base + pos] > 0:
            out[base + pos] = Line("original", pos, number.get(pos, -1), 0, -1)
    return out


def _leak(rows: list[Line], keys: list[Line], sees: list[list[bool]], judge: int, k: int) -> list[int]:
    """Shortest way from a row that holds draft ``k`` to its judge, one layer a hop."""
    column = {line.row: i for i, line in enumerate(keys) if line.row >= 0}
    queue: deque[list[int]] = deque([[judge]])
    seen = {judge}
    while queue:
        way = queue.popleft()
        for other, line in enumerate(rows):
            reads = line.row in column and sees[way[0]][column[line.row]]
            if not reads or other in seen:
                continue
            if line.token == k + 1:
                return [other, *way]
            seen.add(other)
            queue.append([other, *way])
    return []


def matrices() -> dict[str, Matrix]:
    """All views."""
    return {views: matrix(views) for views in VIEWS}

"""Everything that changes while canvases are decoded, as tensors indexed by slot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .constants import where
from .types import GIVEN, MASKED, NEVER, OUTSIDE, Phase

NUMBERS: dict[str, tuple[torch.dtype, float]] = {
    "epsilon": (torch.float32, 0.9),
    "gamma": (torch.float32, 0.8),
    "rule": (torch.int64, 0),
    "factor": (torch.float32, 1.0),
    "temperature": (torch.float32, 0.0),
    "top_p": (torch.float32, 1.0),
    "top_k": (torch.int64, 0),
    "alg_temp": (torch.float32, 0.0),
    "t_end": (torch.float32, 1e-3),
    "cfg_scale": (torch.float32, 0.0),
    "seed": (torch.int64, 0),
    "steps": (torch.int64, 1),
    "block_length": (torch.int64, 32),
    "suppress": (torch.int64, 0),
    "stop_at_eos": (torch.bool, True),
    "pad": (torch.int64, 0),
}
"""Per-request numbers: name -> (dtype, value of an empty slot). Tensors, so that a captured graph reads them."""
_COUNTS = (
    "nfe", "step", "block_step", "rows", "first", "total", "end", "block_masks", "by_confidence", "by_verify",
    "unbounded",
)  # fmt: skip
_LINES: tuple[tuple[str, torch.dtype, float], ...] = (
    ("phase", torch.int64, Phase.FREE),
    *((name, torch.int64, 0) for name in _COUNTS),
    ("stop_pos", torch.int64, NEVER),
    ("block", torch.int64, -1),
    ("blocks", torch.int64, 1),
    ("bound", torch.float32, 0.0),
    ("running", torch.bool, False),
    *((name, dtype, value) for name, (dtype, value) in NUMBERS.items()),
)
"""One number a slot: name, dtype, value of an empty slot. Those of a dtype lie in one tensor, a line each, so that a
request enters with one copy a dtype, and neighbours change in one launch."""


def lines(packed: Mapping[torch.dtype, Tensor]) -> dict[str, Tensor]:
    """The lines by name, views of ``packed``: a tensor [lines of the dtype, S] for each dtype."""
    named, taken = {}, dict.fromkeys(packed, 0)
    for name, dtype, _ in _LINES:
        named[name] = packed[dtype][taken[dtype]]
        taken[dtype] += 1
    return named


@dataclass(frozen=True)
class Canvas:
    """What a request puts into a slot (host side).

    Attributes:
        ids: token ids of the whole canvas, MASK where something is to be filled in.
        masked: the positions to fill in.
        stop_ids: tokens that end the answer.
        numbers: entries of :data:`NUMBERS`.
    """

    ids: list[int]
    masked: list[bool]
    stop_ids: tuple[int, ...] = ()
    numbers: dict[str, float] = field(default_factory=dict)

    @property
    def first(self) -> int:
        return self.masked.index(True)


class State:
    """The slots of a running engine; all tensors live on ``device`` and are updated in place.

    [S, L]: ``ids`` int64; ``committed_at`` int32, the step at which a position was committed
    (:data:`GIVEN`, :data:`MASKED` or :data:`OUTSIDE` otherwise); ``fresh`` bool, committed and not recomputed
    since; ``score`` float32, attention score of the last pass; ``draft_token`` int64 and ``draft_prob`` float32;
    ``log_prob`` float32 and ``pass_at`` int32 of each commit.
    [L]: ``order``, positions 0 .. L-1.
    [S]: ``phase``, ``running`` bool (the slot takes part in a pass: it sweeps or runs), ``step``, ``nfe``, ``rows``
    (rows recomputed), ``first``, ``total``, ``end`` (the length without padding), ``stop_pos`` (first committed stop
    token), ``blocks``, ``block``, ``block_step``, ``block_masks`` (how many blocks, the current one,
    steps spent in it, masks it started with), ``bound`` (certificate so far), ``by_confidence``, ``by_verify`` and
    ``unbounded`` (tokens by how they were committed, and those of groups without a bound) and the numbers of
    :data:`NUMBERS`.
    """

    phase: Tensor
    step: Tensor
    nfe: Tensor
    rows: Tensor
    first: Tensor
    total: Tensor
    end: Tensor
    running: Tensor
    stop_pos: Tensor
    block: Tensor
    blocks: Tensor
    block_step: Tensor
    block_masks: Tensor
    bound: Tensor
    by_confidence: Tensor
    by_verify: Tensor
    unbounded: Tensor

    def __init__(self, slots: int, positions: int, stop_width: int = 8, device: str | torch.device = "cpu"):
        self.slots, self.positions = slots, positions
        self.device = torch.device(device)

        def grid(dtype: torch.dtype, value: float) -> Tensor:
            # One spare column takes the writes of entries that are not selected.
            return torch.full((slots, positions + 1), value, dtype=dtype, device=self.device)

        self._ids = grid(torch.int64, 0)
        # What a commit stamps on its position lies together: the slot's passes so far and the step.
        self.stamps = torch.stack([grid(torch.int32, 0), grid(torch.int32, OUTSIDE)])
        self._pass_at, self._committed_at = self.stamps[0], self.stamps[1]
        self._fresh = grid(torch.bool, False)
        self._score = grid(torch.float32, 0.0)
        self._draft_token = grid(torch.int64, 0)
        self._draft_prob = grid(torch.float32, 0.0)
        self._log_prob = grid(torch.float32, 0.0)
        self.packed = {
            dtype: torch.tensor([value for _, kind, value in _LINES if kind == dtype], dtype=dtype)
            .to(self.device)[:, None]
            .repeat(1, slots)
            for dtype in (torch.int64, torch.float32, torch.bool)
        }
        self.num: dict[str, Tensor] = {}
        for name, line in lines(self.packed).items():
            if name in NUMBERS:
                self.num[name] = line
            else:
                setattr(self, name, line)
        # Neighbours: (nfe, step) are the stamps of a commit, (step, block_step) advance together.
        at = [name for name, kind, _ in _LINES if kind == torch.int64].index("nfe")
        self._now, self._clocks = (self.packed[torch.int64][i : i + 2] for i in (at, at + 1))
        self.stop_ids = torch.full((slots, stop_width), -1, dtype=torch.int64, device=self.device)

        # Views without the spare column; every update is in place, so they stay valid.
        self.ids = self._ids[:, :positions]
        self.committed_at = self._committed_at[:, :positions]
        self.fresh = self._fresh[:, :positions]
        self.score = self._score[:, :positions]
        self.draft_token = self._draft_token[:, :positions]
        self.draft_prob = self._draft_prob[:, :positions]
        self.log_prob = self._log_prob[:, :positions]
        self.pass_at = self._pass_at[:, :positions]
        # Each grid and what an empty slot holds there.
        self._grids = (
            (self._ids, 0),
            (self._committed_at, OUTSIDE),
            (self._fresh, False),
            (self._score, 0.0),
            (self._draft_token, 0),
            (self._draft_prob, 0.0),
            (self._log_prob, 0.0),
            (self._pass_at, 0),
        )
        self.order = torch.arange(positions, device=self.device)
        self.slot_order = torch.arange(slots, device=self.device)

    @property
    def masked(self) -> Tensor:
        """Positions that still hold MASK, [S, L] bool."""
        return self.committed_at == MASKED

    @property
    def known(self) -> Tensor:
        """Positions that hold a token, given or committed, [S, L] bool."""
        return self.committed_at < MASKED

    @property
    def inside(self) -> Tensor:
        """Positions of the canvas, [S, L] bool."""
        return self.committed_at < OUTSIDE

    @property
    def limit(self) -> Tensor:
        """Where decoding ends: the first committed stop token, else the length without padding, [S] int64."""
        return torch.where(self.num["stop_at_eos"], torch.minimum(self.stop_pos, self.end), self.end)

    @property
    def wanted(self) -> Tensor:
        """Masked positions that are still to be decoded, [S, L] bool."""
        return self.masked & (self.order < self.limit[:, None])

    def load(self, slot: int, canvas: Canvas) -> None:
        """Put a canvas into a slot; nothing of its former tenant stays."""
        n = len(canvas.ids)
        if n > self.positions:
            raise ValueError(f"a canvas of {n} positions does not fit a slot of {self.positions}")
        if unknown := sorted(set(canvas.numbers) - set(NUMBERS)):
            raise ValueError(f"a request has no number {unknown[0]!r}")
        self._forget(slot)
        masked = torch.tensor(canvas.masked)
        self._ids[slot, :n] = self._sent(torch.tensor(canvas.ids, dtype=torch.int64))
        self._committed_at[slot, :n] = self._sent(torch.where(masked, MASKED, GIVEN).to(torch.int32))
        stops = [*canvas.stop_ids, *[-1] * (self.stop_ids.shape[1] - len(canvas.stop_ids))]
        self.stop_ids[slot] = self._sent(torch.tensor(stops))
        end = n - int(canvas.numbers.get("pad", 0))
        lines = {"first": canvas.first, "total": n, "end": end, "block_masks": sum(canvas.masked)}
        self._set(slot, {"phase": Phase.SWEEP, "running": True, **lines, **canvas.numbers})

    def clear(self, slot: int) -> None:
        """Make a slot FREE and forget what was in it."""
        self._forget(slot)
        self.stop_ids[slot] = -1
        self._set(slot, {})

    def move(self, source: int, target: int) -> None:
        """What is in slot ``source`` goes on in ``target``; ``source`` is cleared."""
        for grid, _ in self._grids:
            grid[target] = grid[source]
        self.stop_ids[target] = self.stop_ids[source]
        for block in self.packed.values():
            block[:, target] = block[:, source]
        self.clear(source)

    def _forget(self, slot: int) -> None:
        for grid, value in self._grids:
            grid[slot] = value

    def _set(self, slot: int, values: Mapping[str, float]) -> None:
        """Give a slot's numbers these values, and all others those of an empty slot; one copy a dtype."""
        for dtype, block in self.packed.items():
            column = [values.get(name, value) for name, kind, value in _LINES if kind == dtype]
            block[:, slot] = self._sent(torch.tensor(column, dtype=dtype))

    def _sent(self, x: Tensor) -> Tensor:
        """On the state's device. From pageable memory a GPU's copy would wait for all work that is queued."""
        if self.device.type != "cuda":
            return x.to(self.device)
        return x.pin_memory().to(self.device, non_blocking=True)

    def spots(self, pos: Tensor, take: Tensor) -> Tensor:
        """Where :meth:`write` writes ``pos`` [S, C] of a grid: the spare column for those that are not taken."""
        return where(take, pos, self.positions)

    def write(self, name: str, spots: Tensor, value: Tensor | float | bool) -> None:
        """Write ``value``, [S, C] of the grid's dtype or a number, at ``spots`` [S, C] of grid ``name``."""
        grid: Tensor = getattr(self, "_" + name)
        grid.scatter_(1, spots, value)

    def write_rows(self, name: str, slot: Tensor, spots: Tensor, value: Tensor | float | bool) -> None:
        """The same for rows [N] of the slots ``slot`` [N]."""
        grid: Tensor = getattr(self, "_" + name)
        spots = torch.add(spots, slot, alpha=self.positions + 1)
        grid.view(-1).scatter_(0, spots, value)

    def commit(self, pos: Tensor, token: Tensor, prob: Tensor, take: Tensor) -> None:
        """Write ``token`` at ``pos`` where ``take`` (all [S, C]), for good."""
        spots = self.spots(pos, take)
        self.write("ids", spots, token)
        self.write("fresh", spots, True)
        self.write("log_prob", spots, prob.float().clamp_min(1e-30).log())
        now = self._now.to(torch.int32)[..., None]
        self.stamps.scatter_(2, spots.expand(2, *pos.shape), now.expand(2, *pos.shape))
        stops = (token[..., None] == self.stop_ids[:, None]).any(-1) & take
        torch.minimum(self.stop_pos, where(stops, pos, NEVER).amin(1), out=self.stop_pos)

    def end_step(self, done: Tensor) -> None:
        """Advance the clocks and mark the slots that are ``done`` [S] bool."""
        running = self.running
        self._clocks.add_(running)
        done = running & done
        torch.where(running, done + int(Phase.RUN), self.phase, out=self.phase)
        running.logical_xor_(done)

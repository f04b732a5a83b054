"""What happened in a step, as plain Python: for the event log, the live canvas and the golden tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flash_dllm.core.method import PassOut
from flash_dllm.core.step import StepRecord

if TYPE_CHECKING:
    from .engine import Engine


@dataclass
class PassSeen:
    """One pass of one slot: its kind, whether every position was recomputed, and the positions recomputed.

    ``extra`` lists rows beside the canvas (views, branches, readers) as (position, token, rank).
    """

    kind: str
    full: bool
    positions: list[int]
    extra: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass
class Mark:
    """A position and what happened to it: ``state`` is guess, draft, accepted, rejected or committed."""

    pos: int
    token: int
    prob: float
    confidence: float
    state: str


@dataclass
class SlotStep:
    """One step of one slot. ``marks`` are in candidate order, commits by confidence before verified drafts."""

    slot: int
    request_id: str
    step: int
    passes: list[PassSeen]
    marks: list[Mark]

    def commits(self) -> list[Mark]:
        return [m for m in self.marks if m.state in ("committed", "accepted")]


def slot_steps(engine: Engine, record: StepRecord) -> list[SlotStep]:
    """The step of each slot that took part, from the device tensors of ``record`` (reads to the host)."""
    steps = record.step.tolist()
    out = []
    for slot in engine.scheduler.main_slots():
        request = engine.scheduler.seated[slot]
        assert request is not None
        passes = [seen for p in record.passes if (seen := _pass(engine, p, slot)) is not None]
        if passes:
            out.append(SlotStep(slot, request.id, steps[slot], passes, _marks(record, slot)))
    return out


def _pass(engine: Engine, out: PassOut, slot: int) -> PassSeen | None:
    total = int(engine.state.total[slot])
    if out.rows is None:
        assert out.marks is not None
        positions = out.marks[slot].nonzero().flatten().tolist()
        return PassSeen(out.kind, len(positions) == total, positions) if int(out.recomputed[slot]) else None
    rows, base = out.rows, engine.decoder.ctx.kv.base
    mine = rows.valid & (rows.slot == slot)
    if not bool(mine.any()):
        return None
    own = mine & (rows.place >= base)
    extra = mine & (rows.place < base)
    positions = sorted(rows.pos[own].tolist())
    others = list(
        zip(rows.pos[extra].tolist(), rows.token[extra].tolist(), rows.rank[extra].tolist(), strict=True)
    )
    return PassSeen(out.kind, len(positions) == total, positions, others)


def _marks(record: StepRecord, slot: int) -> list[Mark]:
    cand, draft = record.cand, record.draft
    columns = (
        cand.pos[slot], cand.valid[slot], record.take[slot],
        draft.token[slot], draft.prob[slot], draft.confidence[slot],
    )  # fmt: skip
    marks = [
        Mark(pos, token, prob, conf, "committed" if taken else "guess")
        for pos, valid, taken, token, prob, conf in zip(*(c.tolist() for c in columns), strict=True)
        if valid
    ]
    if record.search is None or record.accepted is None or record.second is None:
        return marks
    search = record.search
    fields = (
        search.pos[slot], search.valid[slot], record.accepted[slot],
        search.token[slot], record.second.prob_draft[slot],
    )  # fmt: skip
    tested = [
        Mark(pos, token, prob, prob, "accepted" if ok else "rejected")
        for pos, valid, ok, token, prob in zip(*(c.tolist() for c in fields), strict=True)
        if valid
    ]
    accepted = {m.pos for m in tested if m.state == "accepted"}
    return [m for m in marks if m.pos not in accepted or m.state == "committed"] + tested

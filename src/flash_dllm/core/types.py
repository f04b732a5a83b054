"""The nouns of a pass: rows, visibility, plans, candidates and drafts.

Shapes: S slots, L positions of a slot, P key places of a slot, C candidates of a slot, N rows of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from flash_dllm.kernels.row_attention import Group

GIVEN = -1
"""``committed_at`` of a position that was there from the start."""
MASKED = 2**30
"""``committed_at`` of a position that still holds MASK."""
OUTSIDE = 2**30 + 1
"""``committed_at`` of a position past the end of the canvas."""
NEVER = 2**30
"""A position or rank that no canvas reaches."""
TRASH = 0
"""The key place of every slot that no row ever sees; rows without a key write there."""


class Phase(IntEnum):
    """What a slot is doing."""

    FREE = 0
    SWEEP = 1
    RUN = 2
    DONE = 3


@dataclass
class Rows:
    """The N queries of a pass, flat, in rectangular groups.

    ``token``, ``pos``, ``slot``, ``place`` are [N] int64, ``rank`` [N] int32, ``valid`` [N] bool. An invalid row
    is padding: it writes to :data:`TRASH` and nobody reads it.
    """

    token: Tensor
    pos: Tensor
    slot: Tensor
    place: Tensor
    rank: Tensor
    valid: Tensor
    groups: list[Group]

    def __len__(self) -> int:
        return self.token.shape[0]

    @staticmethod
    def concat(parts: list[Rows]) -> Rows:
        """Join rows; the groups move with them."""
        groups: list[Group] = []
        start = 0
        for part in parts:
            for group in part.groups:
                groups.append(group.moved(start))
            start += len(part)
        names = ("token", "pos", "slot", "place", "rank", "valid")
        columns = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        return Rows(**columns, groups=groups)


@dataclass
class View:
    """Visibility of the key places in one pass: a place is seen by ranks ``lo <= rank < hi``, [S, P] int32.

    ``ends`` [S] int32: the places of each slot's canvas end there.
    """

    lo: Tensor
    hi: Tensor
    ends: Tensor


@dataclass
class Candidates:
    """Positions whose predictions a step wants: ``pos`` [S, C] int64 and ``valid`` [S, C] bool."""

    pos: Tensor
    valid: Tensor


@dataclass
class Plan:
    """What one pass computes.

    Attributes:
        rows: the queries.
        view: who sees which key.
        reads: [S, C] int64, the row that predicts each candidate (any row where the candidate is invalid).
        score_rows: [S, C] bool or None: candidates whose queries make up the attention score; of reads that have more
            columns, the first.
    """

    rows: Rows
    view: View
    reads: Tensor
    score_rows: Tensor | None = None


@dataclass
class Draft:
    """What the model proposes at the candidates, each [S, C].

    ``token`` int64; ``prob`` float32, its probability; ``confidence`` float32, the measure that ranks candidates
    (the probability unless the rule asks for a margin or an entropy).
    """

    token: Tensor
    prob: Tensor
    confidence: Tensor


@dataclass
class Feedback:
    """What a pass reports back to its cache policy.

    Attributes:
        score: attention score of every position, [S, L] float32, or None.
        hidden: final normed hidden states of the read rows, [S, C, d].
    """

    hidden: Tensor
    score: Tensor | None = None


@dataclass
class Lanes:
    """What the host knows without asking the device: which slots take part in the pass, and their lengths.

    Attributes:
        run: slots in a steady step; ``sweep``: slots whose every row is recomputed.
        first: first masked position at admission, a number a slot; ``total``: canvas length, likewise.
        width: the most candidates that a slot may have in a step.
        partner: for a guided request, the slot of its unconditional canvas.
        exact: ``first`` and ``total`` have each canvas's own numbers. Else ``total`` is a bound of the canvases'
            lengths, ``total - first`` one of the answers', and only the device knows more.
        asked: slots whose sweep is due are in ``sweep`` already, and ``fed`` is known.
        fed: most rows that a slot of ``run`` recomputes, for policies that count them; 0 where nobody has.
    """

    run: list[int]
    sweep: list[int]
    first: list[int]
    total: list[int]
    width: int
    partner: dict[int, int] = field(default_factory=dict)
    exact: bool = True
    asked: bool = False
    fed: int = 0

    @property
    def live(self) -> list[int]:
        return sorted(self.run + self.sweep)

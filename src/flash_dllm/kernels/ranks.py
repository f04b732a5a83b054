"""What a computation that is split over ranks (processes, each with its GPU) needs of them.

The implementation is ``flash_dllm.parallel``; nothing below it knows of processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Recordings(Protocol):
    """Who may have recorded sums, in a graph that plays them again."""

    def forget(self) -> None:
        """Drop what is recorded; any thread may call this, also while a recording plays."""


class Ranks(Protocol):
    """The ranks that share one model. Every method is called by all of them, in the same order.

    Results are bit-identical on every rank: what all ranks hold alike stays alike as long as it comes from these
    results and from arithmetic that all of them do alike.
    """

    rank: int
    size: int

    def sum(self, x: Tensor) -> Tensor:
        """Sum over ranks; may overwrite ``x``."""

    def gather(self, x: Tensor) -> Tensor:
        """``x`` of every rank, [size, *x.shape]."""

    def before_parting(self, holder: Recordings) -> Callable[[], None]:
        """Have ``holder`` forget its recordings before the ranks part: NCCL waits for graphs that hold its sums.

        Keeps ``holder`` until then, or until what this returns is called. The one method that a rank may call by
        itself.
        """


@dataclass(frozen=True)
class VocabShard:
    """Rows ``start`` .. ``stop - 1`` of the vocabulary, which this rank's part of the LM head holds."""

    start: int
    stop: int
    ranks: Ranks

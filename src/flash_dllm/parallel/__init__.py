"""Tensor parallel: one model over several processes (ranks), each with a part of every matrix.

Heads, the feed-forward width and the vocabulary of the LM head are split; embedding and norms are whole on every
rank. A layer costs two sums over ranks, and the head one exchange of a few numbers a row. Rank 0 drives: what it
does to its engine it tells the others, which do the same. Nobody sends decisions around: they follow on every
rank from the same numbers by the same arithmetic (``kernels.ranks``), and ranks compare what came out.
"""

from .errors import ParallelError, RankError
from .group import Group
from .launch import Team, join
from .protocol import Follower, Leader
from .shard import RowParallel, check_split, random_part, split, with_sums

__all__ = [
    "Follower",
    "Group",
    "Leader",
    "ParallelError",
    "RankError",
    "RowParallel",
    "Team",
    "check_split",
    "join",
    "random_part",
    "split",
    "with_sums",
]

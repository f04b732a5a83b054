"""Tensor parallel behind :class:`flash_dllm.llm.LLM`: rank 0 is the caller's process, the others run :func:`main`."""

from __future__ import annotations

import itertools
import sys
import weakref
from typing import NoReturn

from flash_dllm.core.method import Method
from flash_dllm.engine.leading import FollowingEngine, LeadingEngine, unsplit
from flash_dllm.loading import Loaded, load
from flash_dllm.parallel import Follower, Leader, ParallelError, RankError
from flash_dllm.parallel.control import Hub, Spoke
from flash_dllm.parallel.launch import Place, options_of_rank_0
from flash_dllm.params import EngineArgs

_KEYS = itertools.count()


def check_method(method: Method, size: int) -> None:
    """Refuse a method that ranks cannot run together.

    Raises:
        ParallelError: says why.
    """
    if (why := unsplit(method)) is not None:
        raise ParallelError(f"tensor_parallel_size={size}: {why}")


def lead(engine: LeadingEngine, loaded: Loaded, args: EngineArgs) -> None:
    """Let the other ranks build the same engine, and wait until all of them are there the first time."""
    assert loaded.team is not None and isinstance(loaded.team.control, Hub)
    engine.link = Leader(loaded.team.control, next(_KEYS), args.model_dump_json())
    weakref.finalize(engine, loaded.team.control.drop, engine.link.key)


def follow(loaded: Loaded) -> NoReturn:
    """Serve rank 0 until it lets go, then end the process."""
    from flash_dllm.llm import LLM

    assert loaded.team is not None and isinstance(loaded.team.control, Spoke)

    def build(options: str) -> FollowingEngine:
        engine = LLM.from_args(EngineArgs.model_validate_json(options), loaded).engine
        assert isinstance(engine, FollowingEngine)
        return engine

    try:
        Follower(loaded.team.control, build).run()
    except Exception as exc:
        rank = loaded.team.group.rank
        what = str(exc) if isinstance(exc, RankError) else f"{type(exc).__name__}: {exc}"
        print(f"flash-dllm: error: rank {rank} ends: {what}", file=sys.stderr, flush=True)
        sys.exit(1)
    finally:
        loaded.team.close()
    sys.exit(0)


def stay_behind(args: EngineArgs) -> None:
    """In a process of a launch that is not rank 0: serve rank 0, and never return. Else nothing."""
    if args.tensor_parallel_size == 1:
        return
    place = Place.from_environment()
    if place is not None and place.rank:
        follow(load(args))


def main() -> NoReturn:
    """A rank that rank 0 started."""
    follow(load(EngineArgs.model_validate_json(options_of_rank_0())))


if __name__ == "__main__":
    main()

"""Engines of a model that several ranks share: rank 0's leads, the others follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from flash_dllm.core.method import Method, Rule
from flash_dllm.core.state import Canvas
from flash_dllm.core.step import StepRecord

from .engine import Engine
from .request import Finished, Request, RequestError


class Link(Protocol):
    """How rank 0 tells the others."""

    def order(self, *order: Any) -> None:
        """Do this before the next step."""

    def together(self, name: str) -> AbstractContextManager[Callable[[Any], None]]:
        """Do this now, as this rank does inside; what it ended goes to the result."""


def unsplit(method: Method) -> str | None:
    """Why ranks cannot run a method together, or None."""
    if method.cache.loop == "growing":
        return f"cache={method.cache.name!r} compares the attention of all heads, and a rank has some of them"
    if type(method.rule).see is not Rule.see:
        return f"decoding={method.rule.name!r} compares whole distributions, and a rank has a part of the vocabulary"
    if method.rule.name == "guided":
        return "decoding='guided' runs a second model, which is not split"
    return None


class LeadingEngine(Engine):
    """Rank 0's engine: what it is told to do the other ranks do too, in the same order.

    Built as :class:`Engine`; then :attr:`link` is set.
    """

    link: Link
    _watched = False

    def check(self, request: Request) -> None:
        super().check(request)
        numbers = {**self.method.defaults, **request.canvas.numbers}
        for name, off in (("top_p", 1), ("top_k", 0)):
            if numbers.get(name, off) != off:
                assert self.model.ranks is not None
                raise RequestError(
                    f"{name}={numbers[name]:g} with tensor_parallel_size={self.model.ranks.size}: it ranks the whole "
                    "vocabulary, of which each rank has a part"
                )

    def add(self, request: Request) -> None:
        written = to_json(request)
        super().add(request)
        self.link.order("add", written)

    def abort(self, request_id: str) -> bool:
        found = super().abort(request_id)
        if found:
            self.link.order("abort", request_id)
        return found

    def reset(self) -> None:
        raise RuntimeError("ranks that share a model cannot start anew after a step that failed")

    def step(self) -> list[Finished]:
        if self.idle:
            return super().step()
        if self._watched != (self.observer is not None):
            # An engine that is watched reads its steps at once, and so seats the next request a step earlier.
            self._watched = self.observer is not None
            self.link.order("watch", self._watched)
        with self.link.together("step") as ended:
            out = super().step()
            ended(outcome(out))
        return out

    def warm_up(self) -> Iterator[tuple[int, int]]:
        if self.scheduler.busy:
            raise RuntimeError("a running engine cannot be warmed up")
        with self.link.together("warm_up") as ended:
            yield from super().warm_up()
            ended([])


class FollowingEngine(Engine):
    """Another rank's engine."""

    def obey(self, orders: Sequence[Any]) -> Any:
        """Do what rank 0 does; returns what ended in the step, if there is one."""
        ended: list[Any] = []
        for name, value in orders:
            match name:
                case "add":
                    self.add(from_json(value))
                case "abort":
                    self.abort(value)
                case "watch":
                    self.observer = _watch if value else None
                case "step":
                    ended = outcome(self.step())
                case "warm_up":
                    for _ in self.warm_up():
                        pass
                case _:
                    raise ValueError(f"order {name!r} is not known")
        return ended


def _watch(engine: Engine, record: StepRecord) -> None:
    """Rank 0 is watched; nobody watches here."""


def outcome(ended: Sequence[Finished]) -> list[Any]:
    """What the ranks must agree on, ready for JSON."""
    return [[f.request.id, f.ids, f.reason, f.steps, f.nfe] for f in ended]


def to_json(request: Request) -> dict[str, Any]:
    """A request that was not added yet, ready for JSON."""
    canvases = [None if c is None else vars(c) for c in (request.canvas, request.shadow)]
    return {"id": request.id, "canvases": canvases, "stop_strings": request.stop_strings}


def from_json(written: dict[str, Any]) -> Request:
    """The request again."""
    main, shadow = (
        None if c is None else Canvas(**{**c, "stop_ids": tuple(c["stop_ids"])}) for c in written["canvases"]
    )
    assert main is not None
    return Request(written["id"], main, shadow, tuple(written["stop_strings"]))

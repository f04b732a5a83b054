"""Engines of a model that several ranks share: rank 0's leads, the others follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from flash_dllm.core.method import Method, Rule
from flash_dllm.core.state import Canvas

from .engine import Engine
from .request import Finished, Request, RequestError


class Link(Protocol):
    """How rank 0 tells the others."""

    def order(self, *order: Any) -> None:
        """Do this before the next step."""

    def step(self) -> AbstractContextManager[Callable[[Any], None]]:
        """Do a step, as this rank does inside; what it ended goes to the result."""


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
            return []
        with self.link.step() as ended:
            out = super().step()
            ended(outcome(out))
        return out


class FollowingEngine(Engine):
    """Another rank's engine."""

    def obey(self, orders: Sequence[Any]) -> Any:
        """Do what rank 0 did, a step at the end; returns what ended."""
        for name, value in orders:
            if name == "add":
                self.add(from_json(value))
            else:
                self.abort(value)
        return outcome(self.step())


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

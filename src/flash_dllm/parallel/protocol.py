"""How ranks stay in step: what rank 0 does to an engine it tells the others, which do it too.

One message a step holds what came before it (requests, aborts) and a checksum of what ended in the step before, so
that ranks that decided differently stop at once, and say so.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from .control import Hub, Message, Spoke
from .errors import RankError


class Driven(Protocol):
    """An engine as a follower needs it."""

    def obey(self, orders: Sequence[Any]) -> Any:
        """Do what is done to rank 0's engine. Returns what ended, ready for JSON."""


def checksum(ended: Any) -> int:
    """Of what a step ended, ready for JSON."""
    return zlib.crc32(json.dumps(ended, sort_keys=True).encode())


class Leader:
    """Rank 0's side of one engine.

    Args:
        hub: the lines to the other ranks.
        key: names the engine among those that share the model.
        options: what the other ranks build it from.
    """

    def __init__(self, hub: Hub, key: int, options: str) -> None:
        self.hub, self.key = hub, key
        self._orders: list[Any] = []
        self._check = checksum([])
        hub.send({"engine": key, "options": options})

    def order(self, *order: Any) -> None:
        """Something to do before the next step; ready for JSON."""
        self._orders.append(order)

    @contextlib.contextmanager
    def together(self, name: str) -> Iterator[Callable[[Any], None]]:
        """All ranks do ``name``, this one inside; call the result with what it ended.

        Raises:
            RankError: a rank is gone, or this one failed: the engine cannot go on.
        """
        self.hub.check()
        orders, self._orders = self._orders, []
        self.hub.send({"engine": self.key, "orders": [*orders, (name, None)], "check": self._check})
        try:
            with self.hub:
                yield self._ended
        except RankError:
            self.hub.leave()
            raise
        except BaseException as exc:
            # The others are in the middle of a step that this rank does not finish, and wait for its sums.
            reason = f"rank 0 failed ({type(exc).__name__}: {exc})"
            self.hub.fail(reason)
            self.hub.leave()
            if isinstance(exc, Exception):
                raise RankError(reason) from exc
            raise

    def _ended(self, ended: Any) -> None:
        self._check = checksum(ended)


class Follower:
    """Another rank's side.

    Args:
        spoke: the line to rank 0.
        build: makes an engine from rank 0's options.
    """

    def __init__(self, spoke: Spoke, build: Callable[[str], Driven]) -> None:
        self.spoke, self.build = spoke, build
        self.engines: dict[int, Driven] = {}
        self._check: dict[int, int] = {}

    def run(self) -> None:
        """Follow until rank 0 lets go.

        Raises:
            RankError: rank 0 or another rank is gone, or decided otherwise.
        """
        while (message := self.spoke.orders.get()) is not None:
            try:
                self._do(message)
            except Exception as exc:
                self.spoke.report({"failed": f"{type(exc).__name__}: {exc}"})
                raise
        if not self.spoke.closing:
            self.spoke.check()

    def _do(self, message: Message) -> None:
        key = int(message["engine"])
        if "options" in message:
            self.engines[key] = self.build(message["options"])
            self._check[key] = checksum([])
        elif "drop" in message:
            self.engines.pop(key, None)
        else:
            if message["check"] != self._check[key]:
                raise RankError(
                    "what ended in the last step is not what ended on rank 0: the ranks have come apart"
                )
            with self.spoke:
                self._check[key] = checksum(self.engines[key].obey(message["orders"]))

"""Which request sits in which slot. Host side only; the device learns of it through ``State.load``."""

from __future__ import annotations

from collections import deque

from flash_dllm.core.types import Lanes

from .request import Request, RequestError


class Scheduler:
    """First come, first served over ``slots`` slots; a slot is refilled as soon as it is free."""

    def __init__(self, slots: int) -> None:
        self.seated: list[Request | None] = [None] * slots
        self.partner: dict[int, int] = {}
        self.queue: deque[Request] = deque()
        self.new: set[int] = set()

    @property
    def free(self) -> int:
        """Slots that nobody sits in."""
        return len(self.seated) - len(self.busy)

    def check(self, request: Request) -> None:
        """Refuse a request that needs more slots than there are.

        Raises:
            RequestError: it does.
        """
        if request.slots_needed > len(self.seated):
            raise RequestError(
                f"a guided request takes two slots; this engine has max_num_seqs={len(self.seated)}"
            )

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it needs more slots than there are.
        """
        self.check(request)
        self.queue.append(request)

    def admit(self) -> list[tuple[int, Request]]:
        """Seat waiting requests; returns (slot, request) of those that came in."""
        came: list[tuple[int, Request]] = []
        free = [s for s, r in enumerate(self.seated) if r is None]
        while self.queue and len(free) >= self.queue[0].slots_needed:
            request = self.queue.popleft()
            slot = free.pop(0)
            self.seated[slot] = request
            self.new.add(slot)
            if request.shadow is not None:
                other = free.pop(0)
                self.seated[other] = request
                self.partner[slot] = other
                self.new.add(other)
            came.append((slot, request))
        return came

    def release(self, slot: int) -> list[int]:
        """Free a slot (and its partner); returns the slots that became free."""
        freed = [slot]
        if slot in self.partner:
            freed.append(self.partner.pop(slot))
        for s in freed:
            self.seated[s] = None
            self.new.discard(s)
        return freed

    def move(self, slot: int, target: int) -> None:
        """Who sits in ``slot``, alone and no newcomer, goes on in the free slot ``target``."""
        self.seated[target], self.seated[slot] = self.seated[slot], None

    def slot_of(self, request_id: str) -> int | None:
        """Where a request sits now, or None. It may move between two steps."""
        mine = (s for s in self.main_slots() if (r := self.seated[s]) is not None and r.id == request_id)
        return next(mine, None)

    @property
    def busy(self) -> list[int]:
        return [s for s, r in enumerate(self.seated) if r is not None]

    def main_slots(self) -> list[int]:
        """Busy slots without the unconditional partners."""
        shadows = set(self.partner.values())
        return [s for s in self.busy if s not in shadows]

    def lanes(self, width: int) -> Lanes:
        """The host's picture of the next pass; slots that came in since the last one sweep."""
        first, total = [], []
        for request in self.seated:
            first.append(request.canvas.first if request else 0)
            total.append(len(request.canvas.ids) if request else 0)
        busy = self.busy
        lanes = Lanes(
            run=[s for s in busy if s not in self.new],
            sweep=[s for s in busy if s in self.new],
            first=first,
            total=total,
            width=width,
            partner=dict(self.partner),
        )
        self.new.clear()
        return lanes

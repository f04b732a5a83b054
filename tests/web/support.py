"""A browser that may reach this machine only, and logs for the player."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, Page, Route

from flash_dllm.trace import TraceWriter

WAIT = 60_000.0
"""Milliseconds after which a test gives up: far more than anything takes."""


READY = "html[data-ready], #error:not([hidden])"


class Visit:
    """A page under watch: what it asked for and what it complained of."""

    def __init__(self, context: BrowserContext, base: str) -> None:
        self.context, self.base = context, base
        self.asked: list[str] = []
        self.complaints: list[str] = []
        context.set_default_timeout(WAIT)
        context.route("**/*", self._route)
        self.page: Page = context.new_page()
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _route(self, route: Route) -> None:
        url = route.request.url
        self.asked.append(url)
        if urlsplit(url).hostname in ("127.0.0.1", None):
            route.continue_()
        else:
            route.abort()

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    @property
    def strangers(self) -> list[str]:
        """Requests that would have left the machine."""
        return [url for url in self.asked if urlsplit(url).hostname not in ("127.0.0.1", None)]

    def open(self, page: str, clock: bool = False) -> Page:
        """Go to a page and wait until its script has done its start or complained.

        Args:
            clock: time stands still on the page; ``page.clock.run_for`` moves it.
        """
        if clock:
            self.page.clock.install()
        self.page.goto(self.base + page)
        self.page.wait_for_selector(READY, state="attached")
        return self.page


@contextmanager
def visit(browser: Browser, base: str, **options: Any) -> Iterator[Visit]:
    """A fresh context; at its end nothing has left the machine and nothing has complained."""
    context = browser.new_context(**options)
    made = Visit(context, base)
    yield made
    context.close()
    assert not made.strangers
    assert not made.complaints, made.complaints


def write_log(path: Path, slots: int, steps: int, requests: int, answer: int = 256, prompt: int = 32) -> Path:
    """A made-up log: every slot commits a token or two a step, drafts are tested, slots are refilled."""
    made = random.Random(0)
    header = {
        "model": "made-up", "method": "flash+verify", "params": {}, "device": "cpu", "dtype": "float32",
        "slots": slots, "versions": {}, "mask_id": 0,
    }  # fmt: skip
    waiting = [f"r{i}" for i in range(requests)]
    seated: dict[int, tuple[str, int, list[int]]] = {}
    with path.open("w", encoding="utf-8") as file:
        writer = TraceWriter(file, header, lambda token: f" w{token}")
        for name in waiting:
            writer.request(
                name,
                [1] * prompt + [0] * answer,
                list(range(prompt, prompt + answer)),
                {"max_tokens": answer},
            )
        for _ in range(steps):
            for slot in range(slots):
                if slot not in seated and waiting:
                    seated[slot] = (waiting.pop(0), 0, list(range(prompt, prompt + answer)))
            ms = made.uniform(20, 40)
            for slot, (name, step, masks) in sorted(seated.items()):
                _write_step(writer, made, ms, (name, slot, step), masks, prompt + answer)
                seated[slot] = (name, step + 1, masks)
            for slot, (name, step, masks) in list(seated.items()):
                if not masks:
                    del seated[slot]
                    writer.end(name, reason="length", steps=step, nfe=2 * step, rows=9, seconds=1.0, ids=[2])
    return path


def _write_step(
    writer: TraceWriter,
    made: random.Random,
    ms: float,
    who: tuple[str, int, int],
    masks: list[int],
    length: int,
) -> None:
    name, slot, step = who
    window = masks[:16]
    taken, accepted = window[:1], window[3:4]
    marks: list[list[Any]] = [
        [pos, 2 + pos % 50, made.random(), "committed" if pos in taken else "guess"] for pos in window
    ]
    marks += [[pos, 2 + pos % 50, made.random(), "accepted"] for pos in accepted]
    marks += [[pos, 2 + pos % 50, made.random(), "rejected"] for pos in window[5:6]]
    rows = [[0, length]] if step == 0 else [[0, 8], [masks[0], min(masks[0] + 40, length)]]
    passes = [
        {"kind": "denoise", "full": step == 0, "rows": rows, "extra": []},
        {"kind": "verify", "full": False, "rows": [], "extra": [[pos, 2, 1] for pos in window[:8]]},
    ]
    writer.step(name, slot, step, ms, passes, marks)
    for pos in taken + accepted:
        masks.remove(pos)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

"""Other schedules and windows than the pages show, to hold the two implementations together."""

from __future__ import annotations

import random

from flash_dllm.web.cache_toy import Setting, setting
from flash_dllm.web.script import BLOCK, LAYERS, LENGTH, PROMPT, Script
from flash_dllm.web.verify_toy import Place


def random_script(made: random.Random) -> Script:
    """Commits in random order inside each block of eight, one to four a step; random numbers for the rest."""
    commit_at = [-1] * LENGTH
    step = 0
    for block in range(PROMPT, LENGTH, BLOCK):
        places = made.sample(range(block, block + BLOCK), BLOCK)
        while places:
            for _ in range(min(len(places), made.randint(1, 4))):
                commit_at[places.pop()] = step
            step += 1

    def table(width: int, low: float, high: float, digits: int) -> list[list[float]]:
        return [[round(made.uniform(low, high), digits) for _ in range(width)] for _ in range(step)]

    # Few digits, so that ties happen.
    return Script(commit_at, table(LENGTH, 0, 9, 1), table(LENGTH, 0, 1, 2), table(LAYERS, 0.75, 1, 2))


def settings() -> list[Setting]:
    """Every control of the page at several places."""
    out = [setting("none")]
    for policy in ("dual", "prefix"):
        out += [setting(policy, block_length=n) for n in (8, 16, 32)]
    for track in (0, 1, 2, 4, 9, 16):
        for track_by in ("attention", "recent", "random", "none"):
            out.append(setting("flash", track=track, lookahead=4, track_by=track_by, refresh_every=0))
    out += [
        setting("flash", track=t, lookahead=a, track_by="attention", refresh_every=r)
        for t, a, r in ((4, 0, 0), (4, 16, 3), (0, 1, 5), (3, 7, 1), (16, 2, 8))
    ]
    out += [setting("dkv-decode", refresh=n) for n in (1, 2, 3, 8, 16)]
    out += [
        setting("dllm-cache", kp=p, kr=r, rho=s)
        for p, r, s in ((50, 7, 0.25), (1, 1, 0.0), (5, 3, 0.0), (4, 16, 0.7), (50, 5, 1.0), (7, 2, 0.35))
    ]
    out += [
        setting("elastic", drift=d, track_num=n)
        for d, n in ((0.9, 1), (0.7, 1), (1.0, 2), (1.01, 1), (0.84, 8), (0.95, 3))
    ]
    return out


def random_window(made: random.Random) -> tuple[Place, ...]:
    """Sixteen candidates with two digits each, so that ties and exact hits of a threshold happen."""
    return tuple(
        Place(f"w{i}", round(made.random(), 2), round(1 - made.random() ** 3 / 2, 2), made.random() < 0.8)
        for i in range(16)
    )

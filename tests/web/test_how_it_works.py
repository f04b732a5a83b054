"""docs/how-it-works.md says what the toys and the recorded race give, and its pictures are there and small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flash_dllm.web import static_folder
from flash_dllm.web.cache_toy import DEFAULTS, run_policy
from flash_dllm.web.verify_toy import EXAMPLE, outcome

from .support import lines_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-it-works.md"
TEXT = " ".join(PAGE.read_text(encoding="utf-8").split())


def test_rows_of_the_policies() -> None:
    totals = {s.policy: sum(run_policy(s).rows) for s in DEFAULTS}
    assert f"in each of 16 steps, {totals['none']} in all" in TEXT
    assert f"{totals['dual']} rows, in bursts" in TEXT
    assert f"{totals['flash']} rows, a third of {totals['none']}" in TEXT


def test_bounds_of_the_example() -> None:
    bounds = outcome(EXAMPLE, 0.9, 0.8).bounds
    assert f"In the example that is {bounds['confident']:.3f}" in TEXT
    assert f"{bounds['product']:.3f} for the four" in TEXT


def test_the_race() -> None:
    steps, passes, tested = [], [], {"accepted": 0, "rejected": 0}
    for name in ("threshold", "verify"):
        events = [e for e in lines_of(static_folder() / "data" / f"{name}.jsonl") if e["event"] == "step"]
        frames: dict[float, int] = {}
        for event in events:
            frames[event["ms"]] = max(frames.get(event["ms"], 0), len(event["passes"]))
            for mark in event["marks"]:
                if mark[3] in tested:
                    tested[mark[3]] += 1
        steps.append(len(frames))
        passes.append(sum(frames.values()))
    assert f"{passes[0]} against {passes[1]}" in TEXT
    assert f"fewer steps, {steps[1]} against {steps[0]}" in TEXT
    assert f"{tested['accepted']} accepted, {tested['rejected']} rejected" in TEXT


def test_links_and_pictures() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", PAGE.read_text(encoding="utf-8")):
        assert (PAGE.parent / target.partition("#")[0]).exists(), target


def test_a_picture_of_each_page() -> None:
    pictures = list((ROOT / "docs" / "images").glob("page-*.png"))
    names = {p.stem.removeprefix("page-") for p in pictures}
    assert names >= {"home", "cache", "verify", "player", "playground", "results", "cache-phone"}
    assert all(p.stat().st_size < 120_000 for p in pictures)
    assert sum(p.stat().st_size for p in pictures) < 900_000


@pytest.mark.parametrize("name", ["threshold", "verify"])
def test_the_recordings_are_of_the_bundled_model(name: str) -> None:
    header = lines_of(static_folder() / "data" / f"{name}.jsonl")[0]
    assert (header["model"], header["method"]) == ("flash-dllm/tiny-dream", f"flash+{name}")

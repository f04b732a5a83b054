"""The verify toy's numbers, from the engine's rules, and the matrices, from the engine's views."""

from __future__ import annotations

import random

import pytest

from flash_dllm.web.verify_toy import EXAMPLE, Place, outcome
from flash_dllm.web.views_toy import DRAFTS, matrices

from .scripts import random_window

VIEWS = matrices()


def test_the_default_example() -> None:
    seen = outcome(EXAMPLE, 0.9, 0.8)
    assert len(seen.confident) == 6
    assert seen.paper == 5
    assert EXAMPLE[seen.search[5]].view == 0.72
    assert seen.product == 4
    assert round(seen.running[4], 3) == 0.740
    assert seen.bounds["product"] <= seen.bounds["product_worst"] + 1e-6
    assert seen.bounds["paper"] <= seen.bounds["paper_worst"] + 1e-6
    assert seen.bounds["confident"] == pytest.approx(8.5 * 0.09, abs=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_the_product_rule_accepts_a_prefix_of_the_papers(seed: int) -> None:
    made = random.Random(seed)
    gamma = made.uniform(0.51, 0.99)
    seen = outcome(random_window(made), made.uniform(0.5, 1), gamma)
    assert seen.product <= seen.paper <= len(seen.search)
    assert seen.bounds["product"] <= 1 - gamma + 1e-5
    assert seen.bounds["paper"] <= 1 - gamma**seen.paper + 1e-5


def test_a_top_token_that_is_not_the_draft_stops_the_papers_rule() -> None:
    sure, last = Place("s", 0.95, 1.0), Place("b", 0.7, 0.9)
    seen = outcome((sure, Place("a", 0.8, 0.45, False), last), 0.9, 0.4)
    assert (seen.paper, seen.product) == (0, 2)
    agrees = (sure, Place("a", 0.8, 0.45), last)
    assert outcome(agrees, 0.9, 0.4).paper == 2


def test_a_step_commits_at_least_one() -> None:
    window = tuple(Place("x", p, 0.5) for p in (0.3, 0.6, 0.6))
    seen = outcome(window, 0.9, 0.8)
    assert seen.confident == [1]
    assert seen.bounds["confident"] == pytest.approx(0.4, abs=1e-6)


def test_the_papers_views_leak_for_every_draft_but_the_last() -> None:
    made = VIEWS["paper"]
    assert [len(way) for way in made.leaks] == [3] * (DRAFTS - 1) + [0]
    for k, (draft, via, judge) in enumerate(way for way in made.leaks if way):
        assert (made.rows[draft].kind, made.rows[draft].k) == ("draft", k)
        assert made.rows[via].kind == "mask" and made.rows[via].k > k
        assert judge == made.judges[k]


@pytest.mark.parametrize("views", ["leak-free", "branch"])
def test_the_other_views_do_not(views: str) -> None:
    assert VIEWS[views].leaks == [[]] * DRAFTS


@pytest.mark.parametrize("views", list(VIEWS))
def test_a_judge_sees_the_drafts_before_its_own_and_no_other(views: str) -> None:
    made = VIEWS[views]
    for k, judge in enumerate(made.judges):
        read = {
            key.token for key, sees in zip(made.keys, made.sees[judge], strict=True) if sees and key.token > 0
        }
        assert read == set(range(1, k + 1))
        if views != "branch":
            assert (made.rows[judge].kind, made.rows[judge].k) == ("mask", k)

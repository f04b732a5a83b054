"""Intervals, ratios and quantiles against numbers worked out by hand or by enumeration."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash_dllm.bench.stats import at, paired, quantiles, rate, ratio, wilson
from flash_dllm.train.evaluate import interval


@given(st.integers(1, 400), st.data())
def test_wilson_is_that_of_the_model_cards(count: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, count))
    low, high = wilson(right, count)
    assert (low, high) == pytest.approx(interval(right, count), abs=0.051)
    assert 0 <= low <= 100 * right / count + 0.1 and 100 * right / count - 0.1 <= high <= 100


def test_a_known_interval() -> None:
    # Wilson's interval of 8 in 10, from the textbook formula.
    assert wilson(8, 10) == (49.0, 94.3)
    assert rate([True] * 8 + [False] * 2) == {"n": 10, "right": 8, "accuracy": 80.0, "interval": [49.0, 94.3]}
    with pytest.raises(ValueError, match="0 observations"):
        wilson(0, 0)


def test_paired_counts_only_what_differs() -> None:
    ours = [True, True, False, True] * 25
    theirs = [True, False, True, True] * 25
    found = paired(ours, theirs)
    assert (found["difference"], found["better"], found["worse"]) == (0.0, 25, 25)
    low, high = found["interval"]
    assert low == -high
    # sqrt(51) / 102 = 7.0 %: the standard error of 25 against 25 in 100 problems, half a problem added to each cell.
    assert high == pytest.approx(196 * math.sqrt(51) / 102, abs=0.06)


def test_paired_keeps_a_width_where_nothing_differs() -> None:
    low, high = paired([True] * 50, [True] * 50)["interval"]
    assert low < 0 < high
    with pytest.raises(ValueError, match="2 verdicts against 1"):
        paired([True, True], [True])


def test_paired_covers_the_truth() -> None:
    """The interval of a difference holds the true one about as often as it says, over every small table."""
    n, p_better, p_worse = 40, 0.15, 0.05
    true = 100 * (p_better - p_worse)
    held = 0.0
    for better in range(n + 1):
        for worse in range(n + 1 - better):
            same = n - better - worse
            chance = math.factorial(n) / (
                math.factorial(better) * math.factorial(worse) * math.factorial(same)
            )
            chance *= p_better**better * p_worse**worse * (1 - p_better - p_worse) ** same
            ours = [True] * better + [False] * worse + [True] * same
            theirs = [False] * better + [True] * worse + [True] * same
            low, high = paired(ours, theirs)["interval"]
            held += chance * (low <= true <= high)
    assert 0.93 <= held <= 0.985


def test_ratio_of_sums() -> None:
    assert ratio([2, 4], [1, 2]) == {"value": 2.0, "se": 0.0}
    found = ratio([1, 3], [1, 1])
    assert found["value"] == 2.0
    # Residuals -1 and 1: sqrt(2 * 2 / 1) / 2.
    assert found["se"] == 1.0
    assert ratio([], []) == {"value": 0.0, "se": 0.0}


def test_quantiles_interpolate() -> None:
    assert at([0.0, 10.0], 0.25) == 2.5
    assert quantiles([3.0, 1.0, 2.0]) == {"p50": 2.0, "p99": pytest.approx(2.98), "mean": 2.0}
    with pytest.raises(ValueError, match="no values"):
        at([], 0.5)

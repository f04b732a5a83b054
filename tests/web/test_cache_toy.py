"""The cache toy's numbers, from the engine's policies."""

from __future__ import annotations

import json
import random

import pytest

from flash_dllm.methods import MethodError
from flash_dllm.web import static_folder
from flash_dllm.web.cache_toy import DEFAULTS, Run, run_policy, setting
from flash_dllm.web.export import toy_json
from flash_dllm.web.script import LENGTH, PROMPT, default_script

from .scripts import random_script

SCRIPT = default_script()
WHOLE = LENGTH * SCRIPT.steps


def stale_masks(run: Run) -> list[int]:
    """Committed tokens that each pass reads by the key they had as MASK."""
    last = [0] * LENGTH
    out = []
    for step, rows in enumerate(run.recomputed):
        for pos in rows:
            last[pos] = step
        out.append(sum(0 <= when < step and last[pos] <= when for pos, when in enumerate(SCRIPT.commit_at)))
    return out


def test_every_position_of_the_answer_is_committed_once() -> None:
    assert SCRIPT.commit_at[:PROMPT] == [-1] * PROMPT
    assert sorted(set(SCRIPT.commit_at[PROMPT:])) == list(range(SCRIPT.steps))


def test_flash_recomputes_a_third_at_a_steady_rate() -> None:
    run = run_policy(setting("flash", track=4, lookahead=4))
    assert 0.3 < sum(run.rows) / WHOLE < 0.36
    while_masks_last = run.rows[1:11]
    assert max(while_masks_last) - min(while_masks_last) <= 1
    assert max(run.rows[1:]) == 16
    assert max(stale_masks(run)) == 0


def test_block_refresh_does_similar_work_in_bursts() -> None:
    flash, block = (
        run_policy(setting("flash", track=4, lookahead=4)),
        run_policy(setting("dual", block_length=8)),
    )
    assert 0.8 < sum(block.rows) / sum(flash.rows) < 1.25
    assert set(block.rows) == {8, LENGTH}
    assert block.rows.count(LENGTH) == 4


def test_prompt_rows_that_never_rank_stay_stale() -> None:
    run = run_policy(setting("flash", track=4, lookahead=4))
    later = {pos for rows in run.recomputed[1:] for pos in rows}
    never = set(range(PROMPT)) - later
    assert len(never) > PROMPT / 2
    assert later & set(range(PROMPT)), "the most attended prompt rows are refreshed"


def test_without_a_budget_committed_tokens_keep_the_key_of_mask() -> None:
    stale = stale_masks(run_policy(setting("flash", track=0, lookahead=4)))
    assert stale == sorted(stale)
    done = sum(0 <= when < SCRIPT.steps - 1 for when in SCRIPT.commit_at)
    assert stale[-1] == done


def test_no_cache_recomputes_everything() -> None:
    assert run_policy(setting("none")).rows == [LENGTH] * SCRIPT.steps


def test_drift_above_one_is_no_cache() -> None:
    assert run_policy(setting("elastic", drift=1.01, track_num=1)).rows == [LENGTH] * SCRIPT.steps


def test_a_script_is_what_the_policies_see() -> None:
    """Other scores track other rows."""
    chosen = setting("flash", track=4, lookahead=4)
    assert run_policy(chosen).recomputed != run_policy(chosen, random_script(random.Random(1))).recomputed


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(MethodError, match="budget"):
        run_policy(setting("flash", budget=4))


def test_the_exported_numbers_are_those_of_the_classes() -> None:
    """``python -m flash_dllm.web.build`` makes the file anew."""
    assert (static_folder() / "data" / "toys.json").read_text(encoding="utf-8") == toy_json()
    runs = json.loads(toy_json())["cache"]["runs"]
    assert [r["setting"]["policy"] for r in runs] == [d.policy for d in DEFAULTS]

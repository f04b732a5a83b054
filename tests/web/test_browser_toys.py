"""The toys in a real browser: the numbers of their default examples, and what each control changes."""

from __future__ import annotations

import base64
import io
import random
from dataclasses import asdict
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Browser, Locator, Page, expect

from flash_dllm.web.cache_toy import run_policy
from flash_dllm.web.script import LAYERS, PROMPT, WINDOW, Script, default_script
from flash_dllm.web.verify_toy import outcome
from flash_dllm.web.views_toy import matrices

from .scripts import random_script, random_window, settings
from .support import Visit, visit

pytestmark = pytest.mark.browser


def cache_data(script: Script) -> dict[str, Any]:
    return {"prompt": PROMPT, "window": WINDOW, "layers": LAYERS, "script": asdict(script)}


def test_the_page_recomputes_what_the_engine_does(seen: Visit) -> None:
    """Every setting, on the page's schedule and on random ones with ties."""
    page = seen.open("index.html")
    for script in (default_script(), *(random_script(random.Random(seed)) for seed in (1, 2, 3))):
        compare_policies(page, script)


def compare_policies(page: Page, script: Script) -> None:
    chosen = settings()
    theirs = page.evaluate(
        """async ([data, chosen]) => {
            const { runPolicy } = await import("/js/policies.js");
            return chosen.map((setting) => runPolicy(data, setting));
        }""",
        [cache_data(script), [asdict(s) for s in chosen]],
    )
    for mine, ours in zip(chosen, theirs, strict=True):
        run = run_policy(mine, script)
        assert (ours["recomputed"], ours["rows"]) == (run.recomputed, run.rows), mine.key()


def test_the_page_decides_as_the_engine_does(seen: Visit) -> None:
    page = seen.open("index.html")
    made = random.Random(5)
    cases = [
        (random_window(made), round(made.uniform(0.3, 1), 2), round(made.uniform(0.3, 1), 2))
        for _ in range(150)
    ]
    theirs = page.evaluate(
        """async (cases) => {
            const { decide } = await import("/js/rules.js");
            return cases.map(([window, epsilon, gamma]) => decide(window, epsilon, gamma));
        }""",
        [[[asdict(p) for p in window], epsilon, gamma] for window, epsilon, gamma in cases],
    )
    for (window, epsilon, gamma), ours in zip(cases, theirs, strict=True):
        mine = outcome(window, epsilon, gamma)
        names = ("confident", "search", "paper", "product")
        assert [ours[n] for n in names] == [getattr(mine, n) for n in names], (window, epsilon, gamma)
        assert ours["running"] == pytest.approx(mine.running, abs=1e-4)
        assert ours["bounds"] == pytest.approx(mine.bounds, abs=1e-5)


# The cache toy ---------------------------------------------------------------------------------------------------


def panel(page: Page, policy: str) -> Locator:
    return page.locator(f'[data-policy="{policy}"]')


def total(page: Page, policy: str) -> int:
    return int(panel(page, policy).locator("[data-total]").get_attribute("data-total") or -1)


def wrong(page: Page, policy: str) -> int:
    return int(panel(page, policy).locator("[data-wrong]").get_attribute("data-wrong") or -1)


def picture(page: Page, policy: str) -> str:
    return str(panel(page, policy).locator("canvas").evaluate("(canvas) => canvas.toDataURL()"))


def test_the_default_of_the_cache_toy(seen: Visit) -> None:
    page = seen.open("cache.html")
    assert total(page, "none") == 768
    assert 0.3 * 768 < total(page, "flash") < 0.36 * 768
    assert 0.8 < total(page, "dual") / total(page, "flash") < 1.25
    assert all(wrong(page, name) == 0 for name in ("none", "dual", "flash", "dkv-decode", "elastic"))
    expect(panel(page, "flash")).to_contain_text("oldest row 15 steps")


def test_a_budget_of_nothing_turns_committed_rows_red(seen: Visit) -> None:
    page = seen.open("cache.html")
    before = red(page)
    panel(page, "flash").locator("[data-option=track] input").fill("0")
    assert wrong(page, "flash") == 30
    expect(panel(page, "flash")).to_contain_text("30 tokens on the key of MASK")
    assert red(page) > before + 500


def red(page: Page) -> int:
    """Pixels of the Flash-Cache picture that are rather red."""
    data = base64.b64decode(picture(page, "flash").partition(",")[2])
    pixels = Image.open(io.BytesIO(data)).convert("RGB")
    colours = pixels.getcolors(pixels.width * pixels.height) or []
    return sum(count for count, (r, g, b) in colours if r > 150 and g < 100 and b < 60)


CONTROLS = (
    ("dual", "policy", "prefix"), ("dual", "block_length", "16"), ("flash", "track", "9"),
    ("flash", "lookahead", "0"), ("flash", "track_by", "recent"), ("flash", "refresh_every", "4"),
    ("dkv-decode", "refresh", "3"), ("dllm-cache", "kr", "3"), ("dllm-cache", "rho", "0.5"),
    ("dllm-cache", "kp", "5"), ("elastic", "drift", "0.97"), ("elastic", "track_num", "4"),
)  # fmt: skip


def test_every_control_of_the_cache_toy_changes_its_picture(seen: Visit) -> None:
    """And no other picture."""
    page = seen.open("cache.html")
    names = ("none", "dual", "flash", "dkv-decode", "dllm-cache", "elastic")
    assert page.locator("[data-option]").count() == len(CONTROLS)
    for policy, option, value in CONTROLS:
        before = {name: picture(page, name) for name in names}
        field = panel(page, policy).locator(f"[data-option={option}]")
        if field.locator("select").count():
            field.locator("select").select_option(value)
        else:
            field.locator("input").fill(value)
        after = {name: picture(page, name) for name in names}
        assert [name for name in names if before[name] != after[name]] == [policy], (policy, option)


def test_time_can_be_played_paused_and_scrubbed(seen: Visit) -> None:
    page = seen.open("cache.html", clock=True)
    scrub, play, when = page.locator("#scrub"), page.locator("#play"), page.locator("#when")
    scrub.fill("3")
    expect(when).to_contain_text("step 3 of 15")
    assert total(page, "none") == 4 * 48
    page.get_by_role("button", name="One step back").click()
    assert total(page, "none") == 3 * 48
    page.get_by_role("button", name="One step on").click()
    page.clock.pause_at(page.evaluate("Date.now() + 1000"))
    play.click()
    expect(play).to_have_text("Pause")
    page.clock.run_for(950)
    expect(when).to_contain_text("step 5 of 15")
    play.click()
    expect(play).to_have_text("Play")
    page.clock.run_for(5000)
    expect(when).to_contain_text("step 5 of 15")
    scrub.fill("14")
    play.click()
    page.clock.run_for(2000)
    expect(when).to_contain_text("step 15 of 15")
    expect(play).to_have_text("Play")


def test_cells_are_read_by_pointer_and_by_keyboard(seen: Visit) -> None:
    page = seen.open("cache.html")
    canvas = panel(page, "flash").locator("canvas")
    canvas.focus()
    page.keyboard.press("ArrowRight")
    expect(panel(page, "flash").locator(".cell")).to_contain_text("position 16")
    page.keyboard.press("ArrowUp")
    expect(panel(page, "flash").locator(".cell")).to_contain_text("Step 14")
    canvas.hover(position={"x": 3, "y": 20})
    expect(panel(page, "flash").locator(".cell")).to_contain_text("Step 0, position 0 (prompt)")


def test_reduced_motion_slows_the_play(browser: Browser, site: str) -> None:
    with visit(browser, site, reduced_motion="reduce") as seen:
        page = seen.open("cache.html")
        assert page.evaluate("import('/js/theme.js').then((m) => m.still())")
        moving = page.evaluate(
            """[...document.styleSheets].flatMap((sheet) => [...sheet.cssRules].map((rule) => rule.cssText))
                .filter((text) => /transition|animation/.test(text) && !text.includes("no-preference"))"""
        )
        assert moving == []


# The verify toy --------------------------------------------------------------------------------------------------


def counts(page: Page) -> list[int]:
    cards = page.locator("#verdicts [data-count]")
    return [int(cards.nth(i).get_attribute("data-count") or -1) for i in range(3)]


def test_the_default_of_the_verify_toy(seen: Visit) -> None:
    page = seen.open("verify.html")
    assert counts(page) == [6, 5, 4]
    expect(page.locator("#verdicts")).to_contain_text("0.72, below 0.80")
    expect(page.locator("#verdicts")).to_contain_text("running product is 0.740")
    fifth = page.locator("#walk tbody tr").nth(4)
    expect(fifth).to_contain_text("0.740")


def test_every_control_of_the_verify_toy(seen: Visit) -> None:
    page = seen.open("verify.html")
    page.get_by_label("ε, commit").fill("0.7")
    assert counts(page)[0] == 10
    page.get_by_label("γ, accept").fill("0.95")
    assert counts(page)[1:] == [0, 0]
    page.get_by_role("button", name="Default example").click()
    assert counts(page) == [6, 5, 4]
    page.get_by_label("Position", exact=True).select_option("5")
    page.get_by_label("Mask view").fill("0.85")
    assert counts(page) == [6, 6, 4]
    page.get_by_label("Draft confidence").fill("0.95")
    assert counts(page)[0] == 7
    page.get_by_role("button", name="Default example").click()
    page.get_by_label("γ, accept").fill("0.4")
    page.get_by_label("Position", exact=True).select_option("4")
    page.get_by_label("Mask view").fill("0.45")
    assert counts(page)[1] == 8
    page.get_by_label("the view's top token is the draft").uncheck()
    assert counts(page)[1] == 0
    expect(page.locator("#verdicts")).to_contain_text('top token is not "24"')


def test_bars_can_be_dragged(seen: Visit) -> None:
    page = seen.open("verify.html")
    chart = page.locator("#chart")
    box = chart.bounding_box()
    assert box is not None
    column = (box["width"] - 30) / 16
    x, top = box["x"] + 30 + 5.75 * column, box["y"] + 22
    page.mouse.move(x, top + 100)
    page.mouse.down()
    page.mouse.move(x, top + 5, steps=4)
    page.mouse.up()
    assert page.evaluate("toy.state.window[5].view") > 0.9
    assert counts(page) == [6, 6, 4]
    page.mouse.move(x, top + 150)
    assert page.evaluate("toy.state.window[5].view") > 0.9, "nothing is dragged after the pointer is up"


def test_the_matrix_is_the_engines_and_shows_the_leak(seen: Visit) -> None:
    page = seen.open("verify.html")
    for name, made in matrices().items():
        page.locator("#views").get_by_role("button", name=name).click()
        cells = page.locator("#matrix tbody tr").evaluate_all(
            "(rows) => rows.map((row) => [...row.querySelectorAll('td')].map((cell) => cell.className !== ''))"
        )
        assert cells == made.sees
        hops = page.locator("#matrix td.hop").count()
        assert hops == (2 if name == "paper" else 0)
    expect(page.locator("#view-text")).to_contain_text("No draft reaches its own judge")
    page.locator("#views").get_by_role("button", name="paper").click()
    page.locator("#hops").get_by_role("button", name="i₂").click()
    expect(page.locator("#view-text")).to_contain_text("Layer 2: mask of i₂ reads mask of i₃")
    expect(page.locator("#hops").get_by_role("button", name="i₃")).to_be_disabled()

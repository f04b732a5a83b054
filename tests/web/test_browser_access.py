"""Every page for everybody: axe, keyboard, narrow screens, both themes, contrast of what axe cannot see."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from .support import Visit, visit
from .test_server import PAGES

pytestmark = pytest.mark.browser
LIMIT = 500_000
SCREENS: dict[str, dict[str, Any]] = {
    "wide, light": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
    "phone, dark": {
        "viewport": {"width": 360, "height": 740}, "color_scheme": "dark", "has_touch": True, "is_mobile": True,
        "reduced_motion": "reduce",
    },
}  # fmt: skip


@pytest.fixture(params=list(SCREENS))
def screen(request: pytest.FixtureRequest, browser: Browser, site: str) -> Iterator[Visit]:
    with visit(browser, site, **SCREENS[request.param]) as made:
        yield made


def prepare(page: Page, name: str) -> None:
    """Put the page into the state with the most in it."""
    page.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
    if name == "player":
        page.get_by_role("button", name="Open the example race").click()
        page.wait_for_selector(".lane")
        page.get_by_role("slider", name="Time").fill("30")
        page.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
    if name == "playground":
        # The form is there with a server only.
        page.evaluate("document.getElementById('form').hidden = false")


@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_nothing_serious_and_nothing_overflows_or_is_heavy(screen: Visit, name: str) -> None:
    page = screen.open(f"{name}.html")
    weight = page.evaluate("performance.getEntries().reduce((sum, e) => sum + (e.decodedBodySize || 0), 0)")
    assert 0 < weight < LIMIT
    prepare(page, name)
    found = Axe().run(page).response["violations"]
    serious = [
        (v["id"], [n["html"][:120] for n in v["nodes"]])
        for v in found
        if v["impact"] in ("serious", "critical")
    ]
    assert not serious, json.dumps(serious, indent=1)
    spare = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert spare <= 0, "the page scrolls sideways"


@pytest.mark.parametrize("name", PAGES)
def test_everything_that_works_by_pointer_is_reached_by_tab(seen: Visit, name: str) -> None:
    page = seen.open(f"{name}.html")
    prepare(page, name)
    page.evaluate(
        """() => {
            document.activeElement?.blur();
            window.reached = new Set();
            document.addEventListener("focusin", (event) => window.reached.add(event.target));
        }"""
    )
    visible = """() => [...document.querySelectorAll("a[href], button, input, select, textarea, summary, canvas")]
        .filter((e) => e.checkVisibility() && !e.disabled && !e.closest("[aria-hidden=true]"))"""
    count = page.evaluate(f"({visible})().length")
    for _ in range(count + 25):
        page.keyboard.press("Tab")
    missed = page.evaluate(
        f"({visible})().filter((e) => !window.reached.has(e)).map((e) => e.outerHTML.slice(0, 120))"
    )
    assert not missed


def test_focus_is_seen_and_the_content_can_be_skipped_to(seen: Visit) -> None:
    page = seen.open("verify.html")
    page.keyboard.press("Tab")
    skip = page.get_by_role("link", name="To the content")
    expect(skip).to_be_focused()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()


def test_sliders_work_with_the_arrow_keys(seen: Visit) -> None:
    page = seen.open("cache.html")
    budget = page.locator("[data-policy=flash] [data-option=track] input")
    budget.focus()
    for _ in range(4):
        page.keyboard.press("ArrowLeft")
    assert page.locator("[data-policy=flash] [data-wrong]").get_attribute("data-wrong") == "30"
    assert budget.get_attribute("aria-valuetext") == "0"


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_canvases_have_contrast_too(browser: Browser, site: str, theme: str) -> None:
    """What is drawn rather than written: 3:1 between neighbours that mean different things, 4.5:1 for words."""
    names = (
        "c0",
        "c1",
        "c2",
        "c3",
        "card",
        "ink",
        "soft",
        "fresh",
        "old",
        "wrong",
        "wrong-line",
        "sunk",
        "accepted",
    )
    with visit(browser, site, color_scheme=theme) as seen:
        page = seen.open("index.html")
        values = page.evaluate(
            """async (names) => {
                const { colours } = await import("/js/theme.js");
                return Object.fromEntries(names.map((name) => [name, colours()[name]]));
            }""",
            [*names, "c0-ink", "c1-ink", "c2-ink", "c3-ink"],
        )
    for n in range(4):
        assert contrast(values[f"c{n}"], values[f"c{n}-ink"]) >= 4.5
    shades = [luminance(values[f"c{n}"]) for n in range(4)]
    assert shades in (sorted(shades), sorted(shades, reverse=True)), "confidence is told by lightness alone"
    for a, b in (
        ("fresh", "old"),
        ("wrong", "wrong-line"),
        ("wrong", "old"),
        ("fresh", "card"),
        ("accepted", "sunk"),
    ):
        assert contrast(values[a], values[b]) >= 3, (a, b)
    assert contrast(values["soft"], values["card"]) >= 4.5
    assert contrast(values["soft"], values["sunk"]) >= 4.5


def test_the_theme_can_be_chosen_and_is_kept(seen: Visit) -> None:
    page = seen.open("index.html")
    button = page.locator("#theme")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    button.click()
    expect(button).to_have_text("Theme: light")
    button.click()
    expect(button).to_have_text("Theme: dark")
    assert page.evaluate(paper) != light
    page = seen.open("verify.html")
    expect(page.locator("#theme")).to_have_text("Theme: dark")
    page.locator("#theme").click()
    expect(page.locator("#theme")).to_have_text("Theme: auto")
    assert page.evaluate(paper) == light

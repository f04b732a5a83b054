"""The results browser: charts, filters, a file that is not there."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import Page, Route, expect

from .support import Visit

pytestmark = pytest.mark.browser

POINTS = [
    {"method": "none+threshold", "model": "m1", "problems": "gsm", "device": "cpu", "file": "a.json",
     "settings": {"request": {"epsilon": 0.9}}, "accuracy": 90, "tpf": 2.0, "interval": [80, 95], "date": "2026-11-30"},
    {"method": "flash+threshold", "model": "m1", "problems": "gsm", "device": "cpu", "file": "a.json",
     "settings": {}, "accuracy": 85, "tpf": 2.2},
    {"method": "flash+verify", "model": "m2", "problems": "code", "device": "H200", "file": "b.json",
     "settings": {}, "accuracy": 70, "tpf": 3.0},
    *[{"method": "flash+threshold", "model": "m2", "device": "H200", "file": "c.json", "settings": {},
       "batch": b, "throughput": 100.5 * b} for b in (1, 8, 32)],
]  # fmt: skip


@pytest.fixture
def page(seen: Visit) -> Page:
    def answer(route: Route) -> None:
        body = json.dumps(
            {"points": POINTS, "files": {"a.json": "measured by hand"}, "skipped": {"d.json": "nothing"}}
        )
        route.fulfill(body=body, content_type="application/json")

    seen.context.route("**/data/results.json", answer)
    return seen.open("results.html")


def test_both_charts(page: Page) -> None:
    expect(page.locator(".point")).to_have_count(3)
    expect(page.locator("#table tbody tr")).to_have_count(3)
    page.get_by_role("button", name="Throughput").click()
    expect(page.locator(".point")).to_have_count(3)
    expect(page.locator("#plot polyline")).to_have_count(1)
    expect(page.locator("#table tbody tr").nth(2)).to_contain_text("3216")
    expect(page.locator("#skipped")).to_contain_text("d.json: nothing")


FILTERED = (
    ("Model", "m1", 2), ("Problems", "code", 1), ("Device", "H200", 1), ("Cache", "flash", 2),
    ("Decoding", "threshold", 2), ("File", "b.json", 1),
)  # fmt: skip


def test_every_filter(page: Page) -> None:
    assert page.locator("#filters select").count() == len(FILTERED)
    for name, value, left in FILTERED:
        page.get_by_label(name, exact=True).select_option(value)
        expect(page.locator(".point")).to_have_count(left)
        expect(page.locator("#table tbody tr")).to_have_count(left)
        page.get_by_label(name, exact=True).select_option("")
        expect(page.locator(".point")).to_have_count(3)


def test_filters_that_leave_nothing(page: Page) -> None:
    page.get_by_label("Model", exact=True).select_option("m1")
    page.get_by_label("Problems", exact=True).select_option("code")
    expect(page.locator("#plot")).to_contain_text("no measurement with these filters")


def test_a_measurement_says_where_it_is_from(page: Page) -> None:
    page.locator("#table").get_by_role("button", name="none+threshold").click()
    expect(page.locator("#count")).to_contain_text("from a.json. measured by hand")
    expect(page.locator("#count")).to_contain_text("epsilon 0.9")


def test_the_real_files_are_shown(seen: Visit) -> None:
    page = seen.open("results.html")
    points = page.evaluate("toy.state.points.length")
    assert points > 20
    assert page.locator(".point").count() == page.evaluate("toy.shown().length") > 20


def test_a_missing_index_gives_a_message(seen: Visit) -> None:
    seen.context.route(
        "**/data/results.json", lambda route: route.fulfill(body="<html>", content_type="text/html")
    )
    page = seen.open("results.html")
    expect(page.get_by_role("alert")).to_contain_text("The results cannot be read")

"""The playground with a real server, and without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from flash_dllm import LLM
from tests.serve.support import MODEL, live, service_of

from .support import Visit, visit

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def server(chat_folder: Path) -> Iterator[str]:
    first = LLM(chat_folder, max_num_seqs=1)
    second = first.with_method("flash", "verify")
    with live(service_of(first, second)) as made:
        yield made.url + "/"


@pytest.fixture
def served(browser: Browser, server: str) -> Iterator[Visit]:
    with visit(browser, server, viewport={"width": 1280, "height": 900}) as made:
        yield made


def ask(page: Page, prompt: str, **fields: str) -> None:
    page.get_by_label("Prompt").fill(prompt)
    page.get_by_label("Most tokens").fill("12")
    for name, value in fields.items():
        page.locator(f"#{name}").fill(value)
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_role("button", name="Generate")).to_be_visible()


def refused(seen: Visit) -> None:
    """The browser itself notes that the server refused, and nothing else is wrong."""
    assert len(seen.complaints) == 1 and "400" in seen.complaints[0]
    seen.complaints.clear()


def test_a_chat_with_a_live_canvas(served: Visit) -> None:
    page = served.open("playground.html")
    expect(page.locator("#model")).to_have_text(MODEL)
    ask(page, "the cat sat")
    usage = page.locator("#usage")
    expect(usage).to_contain_text("forward passes (NFE)")
    expect(usage).to_contain_text("tokens/s")
    committed = page.locator("#live .committed").count()
    assert committed > 0
    log = page.evaluate(
        "({ frames: toy.state.log.frames.length, end: toy.state.log.requests.get('playground').end })"
    )
    assert log["frames"] == log["end"]["steps"] > 1
    nfe = page.locator("#usage b").nth(1).inner_text()
    assert nfe == str(log["end"]["nfe"])


def test_a_method_may_be_chosen_and_options_reach_the_server(served: Visit) -> None:
    page = served.open("playground.html")
    page.get_by_label("Method").select_option("flash+verify")
    ask(page, "so it goes", gamma="0.1", epsilon="0.99")
    expect(page.locator("#live h2")).to_have_text("flash+verify")
    verified = "toy.state.log.requests.get('playground').steps.filter((step) => step.verify).length"
    assert page.evaluate(verified) > 0
    ask(page, "so it goes", block_length="4")
    expect(page.get_by_role("alert")).to_contain_text("block_length")
    refused(served)


def test_text_and_templates(served: Visit) -> None:
    page = served.open("playground.html")
    page.get_by_label("As", exact=True).select_option("text")
    ask(page, "the cat sat")
    assert page.locator("#live .committed").count() > 0
    page.get_by_label("As", exact=True).select_option("infill")
    page.get_by_label("Most tokens").fill("")
    page.get_by_label("Prompt").fill("the {{2}} sat {{3}}.")
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#live .committed")).to_have_count(5)


def test_an_answer_is_shared_as_a_player_file(served: Visit, browser: Browser, tmp_path: Path) -> None:
    page = served.open("playground.html")
    ask(page, "the cat sat")
    shown = page.locator("#live .tokens").inner_text()
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Save as an HTML player").click()
    saved = tmp_path / "shared.html"
    waiting.value.save_as(saved)
    with visit(browser, saved.as_uri(), offline=True, viewport={"width": 1280, "height": 900}) as alone:
        played = alone.open("")
        scrub = played.get_by_role("slider", name="Time")
        scrub.fill(scrub.get_attribute("max") or "")
        assert played.locator(".tokens").first.inner_text() == shown


def test_an_empty_prompt_and_a_refusal(served: Visit) -> None:
    page = served.open("playground.html")
    ask(page, "  ")
    expect(page.get_by_role("alert")).to_have_text("The prompt is empty.")
    page.get_by_label("Prompt").fill("the cat")
    page.get_by_label("Most tokens").fill("100000")
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_role("alert")).to_contain_text("100000")
    refused(served)


def test_without_a_server_it_says_how_to_start_one(seen: Visit) -> None:
    page = seen.open("playground.html")
    expect(page.locator("#alone")).to_contain_text("flash-dllm serve")
    expect(page.locator("#form")).to_be_hidden()
    page.get_by_role("button", name="Look again").click()
    expect(page.locator("#alone")).to_be_visible()


def test_the_other_pages_are_served_too(served: Visit) -> None:
    page = served.open("")
    page.get_by_role("navigation").get_by_role("link", name="Verify").click()
    expect(page.locator("#verdicts")).to_contain_text("0.740")

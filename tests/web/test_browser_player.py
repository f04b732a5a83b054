"""The player in a real browser: logs by file, by drop and inside a file; what is broken; how fast it draws."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, expect

from flash_dllm.trace import TraceError, read_trace
from flash_dllm.web import static_folder
from flash_dllm.web.player import player_file

from .support import Visit, lines_of, visit, write_log

pytestmark = pytest.mark.browser
FRAME_MS = 33.0
DATA = static_folder() / "data"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "run.jsonl", slots=2, steps=40, requests=3, answer=20, prompt=6)


def load(page: Page, *paths: Path) -> None:
    page.locator("#file").set_input_files(list(paths))


def ended(page: Page, lane: int = 0) -> str:
    """What the canvas shows, prompt included."""
    return page.locator(".lane").nth(lane).locator(".tokens").inner_text()


def counter(page: Page, name: str, lane: int = 0) -> str:
    cell = page.locator(".lane").nth(lane).locator(".counters div").filter(has_text=name)
    return cell.locator("b").inner_text()


def test_a_log_replays_to_its_answer(seen: Visit) -> None:
    """Canvas, counters and texts at the end are those of the log's last events."""
    page = seen.open("player.html")
    load(page, DATA / "verify.jsonl")
    page.wait_for_selector(".lane")
    events = lines_of(DATA / "verify.jsonl")
    texts = {int(i): t for e in events if e["event"] == "tokens" for i, t in e["text"].items()}
    scrub = page.get_by_role("slider", name="Time")
    scrub.fill(scrub.get_attribute("max") or "")
    for end in (e for e in events if e["event"] == "end"):
        page.get_by_label("Request", exact=True).select_option(end["request"])
        assert counter(page, "forward passes") == str(end["nfe"])
        spans = page.locator(".lane .tokens span").evaluate_all(
            "(all) => all.map((s) => [s.className, s.textContent])"
        )
        mask = events[0]["mask_id"]
        for (state, text), token in zip(spans, end["ids"], strict=True):
            if token == mask:
                assert state.split()[0] in ("mask", "guess")
            else:
                assert state.split()[0] in ("prompt", "committed", "accepted")
                assert text == texts[token].replace("\n", "↵\n")


def test_every_step_and_pass_is_on_the_clock(seen: Visit, log: Path) -> None:
    page = seen.open("player.html")
    load(page, log)
    scrub = page.get_by_role("slider", name="Time")
    expect(scrub).to_have_attribute("max", "44")
    page.get_by_label("Clock").select_option("steps")
    expect(scrub).to_have_attribute("max", "22")
    scrub.fill("7")
    assert counter(page, "forward passes") == "14"
    page.get_by_role("button", name="One on").click()
    assert counter(page, "forward passes") == "16"
    page.get_by_role("button", name="One back").click()
    page.get_by_role("button", name="One back").click()
    assert counter(page, "forward passes") == "12"
    page.get_by_label("Clock").select_option("time")
    times = {e["ms"] for e in lines_of(log) if e["event"] == "step"}
    assert float(scrub.get_attribute("max") or 0) == pytest.approx(sum(times), rel=1e-6)
    page.get_by_role("button", name="One on").click()
    assert counter(page, "forward passes") == "14"


def test_it_plays_at_its_speed_and_stops_at_the_end(seen: Visit, log: Path) -> None:
    """Five passes a second at speed 1, eighty at speed 16."""
    page = seen.open("player.html", clock=True)
    load(page, log)
    page.wait_for_selector(".lane")
    page.clock.pause_at(page.evaluate("Date.now() + 1000"))
    page.get_by_role("button", name="Play").click()
    page.clock.run_for(1000)
    assert 4 <= page.evaluate("toy.player.t") <= 5.5
    page.get_by_label("Speed").select_option("16")
    page.clock.run_for(200)
    assert 18 <= page.evaluate("toy.player.t") <= 23
    page.get_by_role("button", name="Pause").click()
    held = page.evaluate("toy.player.t")
    page.clock.run_for(1000)
    assert page.evaluate("toy.player.t") == held
    page.get_by_role("button", name="Play").click()
    page.clock.run_for(2000)
    expect(page.locator("output")).to_have_text("pass 44 of 44")
    expect(page.get_by_role("button", name="Play")).to_be_visible()


def test_states_are_told_apart(seen: Visit, log: Path) -> None:
    page = seen.open("player.html")
    load(page, log)
    page.get_by_role("slider", name="Time").fill("6")
    tokens = page.locator(".tokens")
    for state, count in (("mask", 1), ("guess", 1), ("committed", 3), ("accepted", 3), ("rejected", 1)):
        assert tokens.locator(f".{state}").count() >= count, state
    verdict = page.locator(".lane p").nth(1)
    expect(verdict).to_contain_text("verify pass 8 rows")
    expect(page.locator(".tag.ok")).to_have_count(1)
    expect(page.locator(".tag.no")).to_have_count(1)
    page.get_by_role("slider", name="Time").fill("2")
    expect(verdict).to_contain_text("every row")
    page.get_by_role("slider", name="Time").fill("4")
    expect(verdict).to_contain_text("fresh commits 2")


def image(canvas: Locator) -> str:
    return str(canvas.evaluate("(canvas) => canvas.toDataURL()"))


def test_the_grid_shows_tokens_or_rows_and_reads_cells(seen: Visit, log: Path) -> None:
    page = seen.open("player.html")
    load(page, log)
    page.get_by_role("slider", name="Time").fill("14")
    grid = page.get_by_role("img", name=re.compile("^Step by position"))
    before = image(grid)
    page.get_by_label("Grid shows").select_option("rows")
    assert image(grid) != before
    grid.focus()
    for key in ["ArrowRight"] * 4:
        page.keyboard.press(key)
    cell = page.locator(".lane p[aria-live]")
    expect(cell).to_contain_text("Step 6, position 9")
    expect(cell).to_contain_text("not recomputed")
    for key in ["ArrowLeft"] * 4 + ["ArrowUp"]:
        page.keyboard.press(key)
    expect(cell).to_contain_text('Step 5, position 5: " w1", prompt; row recomputed (tokens again)')


def test_slots_choose_requests(seen: Visit, log: Path) -> None:
    page = seen.open("player.html")
    load(page, log)
    request = page.get_by_label("Request", exact=True)
    expect(request).to_have_value("r0")
    slots = page.get_by_role("img", name=re.compile("^Slots"))
    slots.focus()
    page.keyboard.press("ArrowDown")
    expect(request).to_have_value("r1")
    slots.click(position={"x": 40, "y": 5})
    expect(request).to_have_value("r0")
    page.get_by_role("slider", name="Time").fill("44")
    box = slots.bounding_box()
    assert box is not None
    refilled = next(e["slot"] for e in lines_of(log) if e["event"] == "step" and e["request"] == "r2")
    slots.click(position={"x": 26 + 0.7 * (box["width"] * 0.86 - 34), "y": 14 * refilled + 5})
    expect(request).to_have_value("r2")


def test_two_logs_race(seen: Visit) -> None:
    page = seen.open("player.html")
    page.get_by_role("button", name="Open the example race").click()
    expect(page.locator(".lane")).to_have_count(2)
    ends = []
    for name in ("threshold", "verify"):
        steps = [e for e in lines_of(DATA / f"{name}.jsonl") if e["event"] == "step"]
        frames = {e["ms"]: len(e["passes"]) for e in sorted(steps, key=lambda e: len(e["passes"]))}
        ends.append(sum(frames.values()))
    scrub = page.get_by_role("slider", name="Time")
    expect(scrub).to_have_attribute("max", str(max(ends)))
    result = page.locator("#player .note")
    expect(result).to_contain_text("flash+threshold against flash+verify")
    scrub.fill(str(min(ends)))
    expect(result).to_contain_text(f"ends first: {min(ends)} forward passes against {max(ends)}")
    assert counter(page, "batch step", 1).split("/")[0] != counter(page, "done", 0)
    page.get_by_role("button", name="Close").click()
    expect(page.locator(".lane")).to_have_count(0)


def test_files_can_be_dropped(seen: Visit, log: Path) -> None:
    page = seen.open("player.html")
    data = page.evaluate_handle(
        """(text) => {
            const data = new DataTransfer();
            data.items.add(new File([text], "dropped.jsonl"));
            return data;
        }""",
        log.read_text(),
    )
    page.dispatch_event("#drop", "drop", {"dataTransfer": data})
    expect(page.locator("#names")).to_have_text("Open: dropped.jsonl.")


Break = Callable[[list[str]], list[str]]
BROKEN: dict[str, tuple[Break, int]] = {
    "cut": (lambda lines: [*lines[:-2], lines[-2][:30]], -1),
    "not a log": (lambda _: ['{"event":"step"}'], 1),
    "other json": (lambda _: ["[1, 2]"], 1),
    "version": (lambda lines: [lines[0].replace('"version":1', '"version":9'), *lines[1:]], 1),
    "unknown event": (lambda lines: [*lines[:4], '{"event":"what"}', *lines[4:]], 5),
    "field": (lambda lines: [*lines[:6], lines[6].replace('"slot"', '"slut"'), *lines[7:]], 7),
    "state": (lambda lines: [*lines[:6], lines[6].replace('"guess"', '"guessed"', 1), *lines[7:]], 7),
    "step after end": (lambda lines: [*lines, next(x for x in lines if '"event":"step"' in x)], -1),
    "request twice": (lambda lines: [*lines[:3], lines[2], *lines[3:]], 4),
}


def test_a_broken_log_gives_a_message_that_names_the_line(seen: Visit, log: Path) -> None:
    """The page refuses what the library refuses, at the same line; what was open stays."""
    page = seen.open("player.html")
    good = log.read_text().splitlines()
    for kind, (breaks, line) in BROKEN.items():
        load(page, log)
        expect(page.get_by_role("alert")).to_be_hidden()
        lines = breaks(good)
        bad = log.with_name(f"{kind}.jsonl")
        bad.write_text("\n".join(lines) + "\n")
        number = line if line > 0 else len(lines)
        with pytest.raises(TraceError, match=rf"{kind}\.jsonl:{number}\b"):
            read_trace(bad)
        lanes = page.locator(".lane").count()
        load(page, bad)
        expect(page.get_by_role("alert")).to_contain_text(f"{kind}.jsonl, line {number}")
        expect(page.locator(".lane")).to_have_count(lanes)


def test_an_empty_file_and_a_far_position(seen: Visit, log: Path) -> None:
    page = seen.open("player.html")
    bad = log.with_name("bad.jsonl")
    bad.write_text("")
    load(page, bad)
    expect(page.get_by_role("alert")).to_contain_text("bad.jsonl: empty")
    lines = log.read_text().splitlines()
    at = next(i for i, x in enumerate(lines) if '"event":"step"' in x)
    event = json.loads(lines[at])
    event["marks"][0][0] = 900
    bad.write_text("\n".join([*lines[:at], json.dumps(event)]))
    load(page, bad)
    expect(page.get_by_role("alert")).to_contain_text(f"line {at + 1}: mark at position 900")


def test_a_big_log_plays_at_thirty_frames_a_second(seen: Visit, tmp_path: Path) -> None:
    """500 steps of 32 slots: the work of a frame while the shown request decodes, median of 150.

    The fastest of at most three tries counts, since other programs may hold the processor.
    """
    big = write_log(tmp_path / "big.jsonl", slots=32, steps=500, requests=160)
    page = seen.open("player.html")
    load(page, big)
    page.wait_for_selector(".lane")
    assert page.evaluate("toy.logs()[0].frames.length") == 500
    measure = """() => {
        const player = toy.player;
        const times = [];
        const live = player.lanes[0].request.steps.at(-1).nfe;
        for (let i = 0; i < 150; i++) {
            const began = performance.now();
            player.go(live * i / 150);
            player.lanes[0].element.getBoundingClientRect(); // layout belongs to the frame
            times.push(performance.now() - began);
        }
        return times.sort((a, b) => a - b)[75];
    }"""
    tries = []
    while len(tries) < 3 and (not tries or min(tries) >= FRAME_MS):
        tries.append(page.evaluate(measure))
    assert min(tries) < FRAME_MS, tries


def test_an_exported_file_opens_from_disk(browser: Browser, log: Path, tmp_path: Path) -> None:
    target = tmp_path / "race.html"
    target.write_text(player_file([log, log]), encoding="utf-8")
    with visit(browser, target.as_uri(), offline=True) as seen:
        page = seen.open("")
        expect(page.locator(".lane")).to_have_count(2)
        page.get_by_role("slider", name="Time").fill("44")
        assert counter(page, "forward passes") == "22"
        page.locator("#theme").click()
        expect(page.locator("#theme")).to_have_text("Theme: light")
        page.locator("summary").click()
        found = Axe().run(page).response["violations"]
        assert not [v["id"] for v in found if v["impact"] in ("serious", "critical")]


def test_the_page_exports_what_the_command_exports(seen: Visit, log: Path, tmp_path: Path) -> None:
    page = seen.open("player.html")
    load(page, log)
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Save as one HTML file").click()
    saved = tmp_path / "saved.html"
    waiting.value.save_as(saved)
    inside = re.compile(r'(<script id="logs" type="application/json">)(.*?)(</script>)', re.S)
    theirs, mine = saved.read_text(encoding="utf-8"), player_file([log])
    assert inside.sub("", theirs) == inside.sub("", mine)
    found = inside.search(theirs)
    assert found is not None
    (held,) = json.loads(found[2])
    assert gzip.decompress(base64.b64decode(held["gzip"])) == log.read_bytes()

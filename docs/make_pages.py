"""Records the example race of the player and takes the pictures of the pages (``make images``).

Writes ``src/flash_dllm/web/static/data/{threshold,verify}.jsonl``, ``examples/race.html`` and
``docs/images/page-*.png``. Needs chromium. ``--pictures`` leaves the recordings as they are.
"""

from __future__ import annotations

import argparse
import io
import shutil
import threading
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from flash_dllm import LLM, SamplingParams
from flash_dllm.cli.demo import PROMPTS
from flash_dllm.web import static_folder
from flash_dllm.web.build import made_files
from flash_dllm.web.player import player_file
from flash_dllm.web.server import page_server

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
MODEL = "flash-dllm/tiny-dream"
RACERS = {"threshold": ("flash", "threshold"), "verify": ("flash", "verify")}
WIDE, PHONE = (1180, 760), (360, 720)


def record() -> None:
    """The same three prompts in two slots, by threshold and by verification, over the same cache."""
    logs = []
    for name, (cache, decoding) in RACERS.items():
        llm = LLM(MODEL, cache=cache, decoding=decoding, max_num_seqs=2, device="cpu")
        path = static_folder() / "data" / f"{name}.jsonl"
        with llm.tracing(path):
            llm.chat(
                [[{"role": "user", "content": prompt}] for prompt in PROMPTS[:3]],
                SamplingParams(max_tokens=128),
            )
        logs.append(path)
    (ROOT / "examples").mkdir(exist_ok=True)
    (ROOT / "examples" / "race.html").write_text(player_file(logs), encoding="utf-8")


class Camera:
    """Opens pages and keeps pictures of them."""

    def __init__(self, browser: Browser, base: str) -> None:
        self.browser, self.base = browser, base

    def open(self, page: str, size: tuple[int, int], dark: bool = False) -> Page:
        context = self.browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",
        )
        opened = context.new_page()
        opened.goto(f"{self.base}{page}.html", wait_until="networkidle")
        # A bar that sticks to the window would cover what is photographed below it.
        opened.add_style_tag(content=".bar { position: static !important }")
        return opened

    def keep(self, page: Page, name: str, selector: str | None = None, full: bool = False) -> None:
        raw = page.locator(selector).screenshot() if selector else page.screenshot(full_page=full)
        # 96 colours are enough for flat areas and halve the file.
        picture = Image.open(io.BytesIO(raw)).convert("RGB").quantize(96, dither=Image.Dither.NONE)
        path = IMAGES / f"page-{name}.png"
        picture.save(path, optimize=True)
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")
        page.context.close()


def pictures(camera: Camera) -> None:
    """One of each page, and the details that docs/how-it-works.md explains."""
    camera.keep(camera.open("index", WIDE), "home")
    camera.keep(camera.open("cache", WIDE), "cache", "#policies")
    page = camera.open("cache", WIDE)
    budget = page.locator("[data-policy=flash] [data-option=track] input")
    budget.fill("0")
    camera.keep(page, "cache-budget-0", "[data-policy=flash]")
    page = camera.open("cache", PHONE, dark=True)
    page.evaluate("document.querySelector('[data-policy=flash]').scrollIntoView()")
    camera.keep(page, "cache-phone")
    camera.keep(camera.open("verify", WIDE), "verify", "#main > .card")
    camera.keep(camera.open("verify", WIDE), "verify-walk", "#main > .split")
    camera.keep(camera.open("verify", WIDE), "leak", "#matrix")
    page = camera.open("player", WIDE)
    page.get_by_role("button", name="Open the example race").click()
    page.wait_for_selector(".lane")
    page.evaluate("toy.player.go(40)")
    camera.keep(page, "player", "#player")
    camera.keep(camera.open("playground", WIDE), "playground")
    camera.keep(camera.open("results", WIDE), "results")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", action="store_true", help="pictures only")
    if not parser.parse_args().pictures:
        for path, text in made_files().items():
            path.write_text(text, encoding="utf-8")
        record()
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("chromium is not installed")
    server = page_server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        pictures(Camera(browser, f"http://127.0.0.1:{server.server_address[1]}/"))
        browser.close()
    server.shutdown()


if __name__ == "__main__":
    main()

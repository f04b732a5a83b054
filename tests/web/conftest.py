"""A chromium and the pages on loopback, once for all tests of this folder."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from flash_dllm.web.server import page_server

from .support import WAIT, Visit, visit

expect.set_options(timeout=WAIT)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The system's chromium. Missing in CI it is a failure, elsewhere a skip."""
    path = shutil.which("chromium")
    if path is None:
        message = "chromium is not installed; .ci/run installs it"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="session")
def site() -> Iterator[str]:
    """Address of the pages as ``flash-dllm explain`` serves them."""
    server = page_server()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()
    thread.join(60)


@pytest.fixture
def seen(browser: Browser, site: str) -> Iterator[Visit]:
    """A wide, light window."""
    with visit(browser, site, viewport={"width": 1280, "height": 900}, color_scheme="light") as made:
        yield made

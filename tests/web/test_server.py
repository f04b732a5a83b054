"""The little server of the pages, and the command that runs it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from flash_dllm.web import static_folder
from tests.commands import Run, interruptible

PAGES = ("index", "cache", "verify", "player", "playground", "results")


def get(site: str, path: str) -> tuple[int, str, bytes, dict[str, str]]:
    where = urlsplit(site)
    line = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
    line.request("GET", path)
    answer = line.getresponse()
    body = answer.read()
    line.close()
    return answer.status, answer.getheader("Content-Type", ""), body, dict(answer.getheaders())


def test_pages_come_with_their_type_and_a_policy(site: str) -> None:
    for path, kind in (
        ("/", "text/html"),
        ("/cache.html", "text/html"),
        ("/js/policies.js", "text/javascript"),
        ("/css/site.css", "text/css"),
        ("/data/toys.json", "application/json"),
    ):
        status, found, body, headers = get(site, path)
        assert status == 200 and found.startswith(kind) and body
        assert "default-src 'self'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "path", ["/../server.py", "/%2e%2e/server.py", "/js/", "/nothing", "/..%2fserver.py"]
)
def test_nothing_else_is_served(site: str, path: str) -> None:
    assert get(site, path)[0] == 404


def test_without_an_engine_there_are_no_models(site: str) -> None:
    status, _, body, _ = get(site, "/v1/models")
    assert status == 200 and json.loads(body)["data"] == []


def test_all_pages_share_head_and_navigation() -> None:
    heads = set()
    for name in PAGES:
        text = (static_folder() / f"{name}.html").read_text(encoding="utf-8")
        head = re.search(r"<header.*?</header>", text, re.S)
        assert head is not None
        heads.add(head[0].replace(' aria-current="page"', ""))
        assert text.count('aria-current="page"') == 1
    assert len(heads) == 1


def test_no_page_names_another_host() -> None:
    for path in static_folder().rglob("*"):
        if path.suffix in (".html", ".js", ".css"):
            text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
            assert not re.search(r"(?:https?:)?//[a-z0-9-]+\.[a-z]", text), path.name


def test_explain_serves_and_ends(tmp_path: Path) -> None:
    """The address is the first line; an interrupt ends it quietly."""
    (tmp_path / "r.json").write_text(json.dumps([{"method": "m", "batch": 2, "tokens_per_second": 3.5}]))
    command = [sys.executable, "-m", "flash_dllm", "explain", "--no-browser", "--results", str(tmp_path)]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, preexec_fn=interruptible
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        assert get(url, "/verify.html")[0] == 200
        points = json.loads(get(url, "/data/results.json")[2])["points"]
        assert points[0]["throughput"] == 3.5
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and err == ""


def test_explain_says_what_is_wrong(run: Run, tmp_path: Path) -> None:
    done = run("explain", "--no-browser", "--port", "70000")
    assert done.code == 2 and "70000" in done.err
    done = run("explain", "--no-browser", "--results", str(tmp_path / "none"))
    assert done.code == 2 and "none" in done.err
    done = run("explain", "--no-browser", "--host", "192.0.2.1")
    assert done.code == 2 and "192.0.2.1" in done.err


def test_the_numbers_of_the_toys_can_be_exported(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "toys.json"
    assert run("explain", "--export-data", str(target)).code == 0
    assert target.read_bytes() == (static_folder() / "data" / "toys.json").read_bytes()
    assert run("explain", "--export-data", "-").out == target.read_text(encoding="utf-8")

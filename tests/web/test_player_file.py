"""Logs as one HTML file: the bundle, the embedded logs, the command."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path

import pytest

from flash_dllm.trace import TraceError
from flash_dllm.web import static_folder
from flash_dllm.web.build import bundle, player_template
from flash_dllm.web.player import ExportError, player_file
from tests.commands import Run

from .support import write_log

LIMIT = 500_000
ROOT = Path(__file__).parents[2]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "run.jsonl", slots=2, steps=12, requests=3, answer=8, prompt=4)


def embedded(page: str) -> list[dict[str, str]]:
    found = re.search(r'<script id="logs" type="application/json">(.*?)</script>', page, re.S)
    assert found is not None
    logs: list[dict[str, str]] = json.loads(found[1])
    return logs


def test_the_file_holds_the_log_and_nothing_from_elsewhere(log: Path) -> None:
    page = player_file([log])
    (held,) = embedded(page)
    assert gzip.decompress(base64.b64decode(held["gzip"])) == log.read_bytes()
    assert held["name"] == "run.jsonl"
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", page)
    assert "://" not in page.replace("http://www.w3.org/2000/svg", "")


def test_a_name_cannot_end_the_script(log: Path, tmp_path: Path) -> None:
    odd = tmp_path / "<!--<script>.jsonl"
    odd.write_bytes(log.read_bytes())
    page = player_file([odd])
    assert embedded(page)[0]["name"] == odd.name
    assert odd.name not in page


def test_a_broken_log_is_named_with_its_line(log: Path) -> None:
    lines = log.read_text().splitlines()
    log.write_text("\n".join([*lines[:3], lines[3][:20], *lines[4:]]))
    with pytest.raises(TraceError, match=r"run\.jsonl:4"):
        player_file([log])


@pytest.mark.parametrize("count", [0, 3])
def test_one_log_or_two(log: Path, count: int) -> None:
    with pytest.raises(ExportError, match=str(count)):
        player_file([log] * count)


def test_the_template_is_made_from_the_modules() -> None:
    """``python -m flash_dllm.web.build`` makes the file anew."""
    assert (static_folder() / "player-file.html").read_text(encoding="utf-8") == player_template()


def test_a_bundle_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "a.js").write_text('import * as b from "./b.js";\n')
    with pytest.raises(ValueError, match=r"a\.js"):
        bundle("a.js", tmp_path)


def test_a_bundle_has_each_module_once_before_who_needs_it(tmp_path: Path) -> None:
    (tmp_path / "a.js").write_text(
        'import { b } from "./b.js";\nimport { c } from "./c.js";\nexport const a = b + c;\n'
    )
    (tmp_path / "b.js").write_text('import { c } from "./c.js";\nexport const b = c + 1;\n')
    (tmp_path / "c.js").write_text("export const c = 1;\n")
    made = bundle("a.js", tmp_path)
    starts = [made.index(f"const module_{name} =") for name in "cba"]
    assert starts == sorted(starts)
    assert made.count("const module_c =") == 1
    assert "import" not in made and "export" not in made


def test_the_command(run: Run, log: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.html"
    done = run("trace", "export", str(log), str(log), "-o", str(target))
    assert done.code == 0, done.err
    assert len(embedded(target.read_text(encoding="utf-8"))) == 2
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{}\n")
    done = run("trace", "export", str(broken), "-o", str(target))
    assert done.code == 2 and "broken.jsonl:1" in done.err
    done = run("trace", "export", str(tmp_path / "none.jsonl"), "-o", str(target))
    assert done.code == 2 and "none.jsonl" in done.err


def test_the_pages_are_small() -> None:
    """Everything that a visitor may load, recorded logs aside."""
    files = [p for p in static_folder().rglob("*") if p.is_file() and p.suffix != ".jsonl"]
    assert sum(p.stat().st_size for p in files) < LIMIT


def test_the_example_race_is_small_and_of_two_methods() -> None:
    page = ROOT / "examples" / "race.html"
    assert page.stat().st_size < 1_000_000
    methods = []
    for held in embedded(page.read_text(encoding="utf-8")):
        header = json.loads(gzip.decompress(base64.b64decode(held["gzip"])).split(b"\n")[0])
        assert header["model"] == "flash-dllm/tiny-dream"
        methods.append(header["method"])
    assert methods == ["flash+threshold", "flash+verify"]

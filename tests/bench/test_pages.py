"""The committed pages are what the script writes from the committed files, and what it writes from others."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from flash_dllm.bench import performance, results
from flash_dllm.bench.markdown import table
from flash_dllm.bench.pictures import MOST_BYTES, draw
from flash_dllm.bench.results_common import sources
from tests.commands import Run

ROOT = Path(__file__).parents[2]
FILES, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
AGAIN = "run `flash-dllm bench report` and commit what it writes"


@pytest.mark.parametrize(("name", "page"), [("results", results.page), ("performance", performance.page)])
def test_the_committed_page_is_that_of_the_files(name: str, page: Any) -> None:
    assert (DOCS / f"{name}.md").read_text(encoding="utf-8") == page(FILES, DOCS), AGAIN


@pytest.mark.parametrize("name", ["results", "performance"])
def test_links_lead_somewhere(name: str) -> None:
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert targets
    for target in targets:
        assert (DOCS / target).exists(), target


def test_every_picture_is_there_and_small(tmp_path: Path) -> None:
    made = {path.name for path in draw(FILES, tmp_path)}
    kept = {path.name: path.stat().st_size for path in (DOCS / "images" / "results").iterdir()}
    assert set(kept) == made, AGAIN
    assert max(kept.values()) < MOST_BYTES


def test_every_number_of_the_ablations_stands_in_its_file() -> None:
    text = (DOCS / "results.md").read_text(encoding="utf-8")
    for source in sources(FILES, "ablations"):
        assert source.data["synthetic"] is False
        for plan in source.data["plans"]:
            for row in plan["rows"]:
                assert f"{row['label']} | {row['n']} | {row['accuracy']:g} |" in text


def test_what_is_not_measured_is_empty() -> None:
    text = performance.page(Path("nowhere"), DOCS)
    assert text.count(performance.NOT_YET) == 6 * 4 + 5
    assert "every measured value above is empty" in text


CEILINGS = {"copy_tb_s": 4.3, "matmul_tflop_s": 790.0, "dtype": "bfloat16"}


def report(kind: str, rows: list[dict[str, Any]]) -> str:
    return json.dumps({
        "kind": kind, "synthetic": True, "date": "2027-01-01", "device": "cuda:0", "device_name": "NVIDIA H200",
        "dtype": "bfloat16", "versions": {"torch": "9"}, "command": f"flash-dllm bench {kind}", "shape": "llada-8b",
        "ceilings": CEILINGS, "rows": rows,
    })  # fmt: skip


def step_row(method: str, batch: int, ms: float, **more: Any) -> dict[str, Any]:
    return {
        "method": method, "batch": batch, "prompt": 1000, "ms": ms, "times_floor": 1.5, "first_pass_ms": 30.0,
        "peak_gib": 16.2, "idle_share": 0.02, **more,
    }  # fmt: skip


def test_measured_values_come_from_the_files(tmp_path: Path) -> None:
    rows = [
        step_row("flash+threshold", 1, 5.5), step_row("flash+threshold", 8, 26.0), step_row("flash+verify", 1, 10.5),
        step_row("flash+threshold", 16, 1.0, prompt=200), {**step_row("flash+branch", 32, 0), "ms": None},
    ]  # fmt: skip
    (tmp_path / "step-h200.json").write_text(report("step", rows))
    kernels = [
        {"op": "qkv_rope_write", "rows": 4096, "impl": impl, "ms": ms, "floor_ms": 0.5, "times_floor": 1.2}
        for impl, ms in (("ref", 0.2), ("library: projection alone", 0.1), ("triton", 0.6), ("cublas", 0.7))
    ]
    (tmp_path / "kernels-h200.json").write_text(report("kernels", kernels))
    warm = {
        "method": "flash+threshold", "batch": 32, "run": 1, "refill": True, "impl": "auto", "options": {},
        "tokens_per_second": 850.0, "ms": 9.0, "tokens_per_forward": 3.0, "latency_s": {"p50": 1.0, "p99": 2.0},
        "peak_gib": 40.0,
    }  # fmt: skip
    first = {**warm, "run": 0, "tokens_per_second": 700.0, "first_run_penalty_s": 2.5}
    loads = [first, warm]
    (tmp_path / "workload-h200.json").write_text(report("workload", loads))
    text = performance.page(tmp_path, DOCS)
    lines = {line.split(" | ")[0]: line for line in text.split("\n") if line.startswith("| ")}
    assert (
        "| measured | 5.5, 1.5 x floor | 26 (missed), 1.5 x floor | not measured yet | not measured yet |"
        in text
    )
    assert "| measured | 10.5, 1.5 x floor | not measured yet |" in text
    assert "| measured | 2 | 2 | not measured yet" in text
    assert lines["| QKV projection, rotation and cache write, 4,096 rows"].endswith("| 0.6 |")
    assert lines["| whole workload, warm"].endswith("| 850 |")
    assert lines["| whole workload, what the first run after the warm-up costs more"].endswith(
        "| 2.5 (missed) |"
    )
    assert "2027-01-01, NVIDIA H200" in text and "every measured value above is empty" not in text
    shown = results.page(tmp_path, DOCS)
    assert "`step`, synthetic" in shown and "| flash+threshold | 1 | 1000 | 5.5 | 1.5 |" in shown
    assert "| flash+threshold | 32 | warm | 850 |" in shown


def test_bars_in_cells_are_escaped() -> None:
    assert table(["a"], [["x|y"]]) == "| a |\n| --- |\n| x\\|y |\n"


def test_the_command_writes_both_pages(run: Run, tmp_path: Path) -> None:
    outcome = run("bench", "report", "--results", FILES, "--docs", tmp_path, "--no-pictures")
    assert outcome.code == 0, outcome.err
    assert {path.name for path in tmp_path.iterdir()} == {"results.md", "performance.md"}
    outcome = run("bench", "report", "--results", tmp_path / "none", "--docs", tmp_path)
    assert outcome.code == 2 and "none" in outcome.err


STUB = """#!/usr/bin/env bash
echo "$*" >>"$CALLS"
case "$*" in
  *kernels*) echo "kernel broke" >&2; exit 3 ;;
  *workload*) exit 124 ;;
esac
"""


def gpu_check(tmp_path: Path, stub: str, **env: str) -> tuple[int, dict[str, int], list[str]]:
    """Run the script with a stub for Python: its exit code, that of each part, and the stub's command lines."""
    python, calls, out = tmp_path / "python", tmp_path / "calls", tmp_path / "out"
    python.write_text(stub)
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    calls.write_text("")
    asked = {**os.environ, "PYTHON": str(python), "CALLS": str(calls), **env}
    done = subprocess.run([ROOT / "benchmarks" / "gpu_check.sh", out], env=asked, timeout=120)
    parts = [line.split("\t") for line in (out / "parts.tsv").read_text().splitlines()]
    return done.returncode, {name: int(code) for name, code, _ in parts}, calls.read_text().splitlines()


def test_gpu_check_goes_on_after_a_failure_and_a_time_limit(tmp_path: Path) -> None:
    chosen = {"PARTS": "kernels step workload dream", "SHAPE": "llada-tiny", "COMMITS": "2"}
    code, parts, calls = gpu_check(tmp_path, STUB, **chosen)
    assert code == 1
    assert parts == {"kernels": 3, "step": 0, "workload": 124, "dream": 0}
    assert "kernel broke" in (tmp_path / "out" / "kernels.log").read_text()
    json_ = tmp_path / "out" / "kernels-h200.json"
    assert calls[0] == f"-m flash_dllm bench kernels --shape llada-tiny --json {json_}"
    assert "--commit-per-step 2 " in calls[1]


def test_gpu_check_starts_nothing_without_time(tmp_path: Path) -> None:
    code, parts, calls = gpu_check(tmp_path, STUB, BUDGET="0")
    assert code == 1 and calls == []
    assert parts == dict.fromkeys(("tests", "kernels", "step", "workload", "short", "dream"), 124)


def test_gpu_check_asks_for_what_exists(run: Run, tmp_path: Path) -> None:
    """Every command line of the script is one that the program takes."""
    code, parts, asked = gpu_check(tmp_path, '#!/usr/bin/env bash\necho "$*" >>"$CALLS"\n')
    assert code == 0 and set(parts.values()) == {0}
    assert len(asked) == 6 and asked[0].startswith("-m pytest -m gpu ")
    files = [word for word in asked[0].split() if word.startswith("tests/")]
    assert len(files) >= 6 and all((ROOT / file).exists() for file in files)
    marked = {str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob("*.py") if "mark.gpu" in p.read_text()}
    # Conftest and this file only speak of the marker.
    asked_for = {m for m in marked if any(m == f or m.startswith(f + "/") for f in files)}
    assert marked - asked_for <= {"tests/conftest.py", "tests/bench/test_pages.py"}
    for line in asked[1:]:
        words = line.split()[2:]
        outcome = run(*words, "--device", "none-such")
        assert outcome.code == 2 and "none-such" in outcome.err, line

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
from flash_dllm.bench.markdown import span, table
from flash_dllm.bench.pictures import MOST_BYTES, draw
from flash_dllm.bench.results_common import sources
from flash_dllm.bench.stats import paired
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


def test_every_number_of_the_decoders_and_methods_stands_in_its_file() -> None:
    text = (DOCS / "results.md").read_text(encoding="utf-8")
    for source in sources(FILES, "decoders"):
        first, *others = source.data["runs"]
        for row in others:
            right, base = (sum(int(v) for v in r["verdicts"]) for r in (row, first))
            points = f"{round(100 * (right - base) / row['n'], 1):+g}"
            low, high = row["interval"]
            cells = f"| {row['n']} | {row['accuracy']:g} | {low:g}-{high:g} | {points} |"
            assert any(
                line.startswith(f"| {row['method']} |") and cells in line
                and line.endswith(f"| {row['answer_tokens'] / row['nfe']:.2f} | {row['rows_per_token']:g} |")
                for line in text.split("\n")
            ), row  # fmt: skip
    for source in sources(FILES, "methods"):
        for row in source.data["plans"][0]["rows"]:
            assert f"| {row['label']} | {row['n']} | {row['accuracy']:g} |" in text
        assert not source.data["missing"] or source.data["note"] in text


def test_the_tables_of_verify_are_runs_of_the_file() -> None:
    text = (DOCS / "verify.md").read_text(encoding="utf-8")
    part = text.split("## Measured so far")[1].split("On the CPU")[0]
    (data,) = (s.data for s in sources(FILES, "decoders") if s.data["model"] == "flash-dllm/tiny-llada")
    verdicts = [[v == "1" for v in run["verdicts"]] for run in data["runs"]]
    known = set()
    for run, mine in zip(data["runs"], verdicts, strict=True):
        against = paired(mine, verdicts[0])
        low, high = (f"{x:.1f}" for x in run["interval"])
        worst, best = (f"{x + 0.0:.1f}" for x in against["interval"])
        difference = "" if mine is verdicts[0] else f"{against['difference']:+.1f} ({worst} to {best})"
        known.add((
            f"{run['accuracy']:.1f} ({low}–{high})", difference, f"{run['answer_tokens'] / run['nfe']:.2f}",
            f"{run['rows_per_token']:.1f}",
        ))  # fmt: skip
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in part.split("\n") if line[:1] == "|"
    ]
    rows = [row for row in rows if row[1][:1].isdigit()]
    assert len(rows) > 25
    for name, *cells in rows:
        assert tuple(cell.replace("−", "-") for cell in cells) in known, name


def test_every_number_of_eight_bits_and_of_the_kernels_stands_in_its_file() -> None:
    text = (DOCS / "results.md").read_text(encoding="utf-8")
    lines = text.split("\n")
    for source in sources(FILES, "quantization"):
        for name, row in source.data["forms"].items():
            found = [
                line for line in lines if line.startswith(f"| {name} | {row['n']} | {row['accuracy']:g} |")
            ]
            better = f"| {row['against_plain']['better']} | {row['against_plain']['worse']} |"
            assert any(line.endswith("|  |  |" if name == "plain" else better) for line in found), (name, row)
    for source in sources(FILES, "agreement"):
        for name, row in source.data["forms"].items():
            equal = (
                f" {row['equal_values']:g} | {row['equal_texts']:g} |" if "against" in row else "|  |  |  |"
            )
            start = f"| {name} | {row['n']} | {row['accuracy']:g} |"
            assert any(line.startswith(start) and line.endswith(equal) for line in lines), (name, row)


def test_the_kernels_agree_with_the_definitions_on_the_values() -> None:
    found = sources(FILES, "agreement")
    assert {source.data["model"] for source in found} == {"flash-dllm/tiny-llada", "flash-dllm/tiny-dream"}
    for source in found:
        forms = source.data["forms"]
        for row in (row for row in forms.values() if "against" in row):
            assert row["equal_values"] >= 95
            assert abs(row["accuracy"] - forms[row["against"]]["accuracy"]) <= row["standard_error"]


def test_gpus_come_first_and_files_name_no_folder() -> None:
    for kind in ("ablations", "decoders", "quantization"):
        on_gpu = [source.data["device"].startswith("cuda") for source in sources(FILES, kind)]
        assert on_gpu == sorted(on_gpu, reverse=True) and any(on_gpu)
    for path in FILES.glob("*.json"):
        assert not re.search(r"/(tmp|home|root|work|var)/", path.read_text(encoding="utf-8")), path.name


def test_a_file_says_why_units_are_missing(tmp_path: Path) -> None:
    (source,) = sources(FILES, "methods")
    data = {**source.data, "missing": 3, "note": "The rest is at sea."}
    (tmp_path / "methods-x.json").write_text(json.dumps(data))
    assert "at sea" in results.page(tmp_path, DOCS)
    (tmp_path / "methods-x.json").write_text(json.dumps({k: v for k, v in data.items() if k != "note"}))
    assert f"3 of {data['units'] + 3} units had not run" in results.page(tmp_path, DOCS)
    (tmp_path / "methods-x.json").write_text(json.dumps({**data, "missing": 0}))
    assert "at sea" not in results.page(tmp_path, DOCS)


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


def test_two_gpus_and_each_part_come_from_their_files(tmp_path: Path) -> None:
    split = [
        {"gpus": gpus, "form": form, "method": "flash+threshold", "batch": 32, "ms": ms, "peak_gib": gib}
        for gpus, form, ms, gib in ((1, "plain", 104.29, 39.58), (2, "fp8", 46.8, 17.3))
    ]
    told = json.loads(report("split-step", split))
    del told["ceilings"]
    (tmp_path / "split-step-h200.json").write_text(json.dumps(told))
    full = {
        "method": "flash+threshold", "batch": 8, "requests": 16, "impl": "auto", "options": {}, "refill": True
    }  # fmt: skip
    shares = [
        {**full, **off, "run": run, "seconds": seconds + 1 - run}
        for off, seconds in (({}, 2.0), ({"impl": "ref"}, 5.0), ({"options": {"track": -1}}, 17.0))
        for run in (0, 1)
    ]
    (tmp_path / "shares-h200.json").write_text(report("shares", shares))
    text = performance.page(tmp_path, DOCS)
    assert "| 1 | plain | flash+threshold | 32 | 104.3 | 39.58 |\n" in text
    assert "| 2 | fp8 | flash+threshold | 32 | 46.8 | 17.3 |\n" in text
    assert "16 requests over 8 slots" in text
    lines = [line for line in text.split("\n") if line.startswith("| flash+threshold")]
    assert lines == [
        "| flash+threshold | 2.00 | 1.00 |",
        "| flash+threshold without fusion | 5.00 | 2.50 |",
        "| flash+threshold without selective refresh | 17.00 | 8.50 |",
    ]
    assert "copy" not in next(line for line in text.split("\n") if "split-step-h200.json" in line)


def test_intervals_in_words() -> None:
    assert [span(ends) for ends in ([92.4, 98.6], [-3.2, 1.4], [-0.0, 1.8], [-2.4, -0.0])] == [
        "92.4-98.6", "-3.2 to 1.4", "0-1.8", "-2.4 to 0"
    ]  # fmt: skip


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
    assert parts == dict.fromkeys(("tests", "nodes", "kernels", "step", "workload", "short", "dream"), 124)


def test_gpu_check_asks_for_what_exists(run: Run, tmp_path: Path) -> None:
    """Every command line of the script is one that the program takes."""
    code, parts, asked = gpu_check(tmp_path, '#!/usr/bin/env bash\necho "$*" >>"$CALLS"\n')
    assert code == 0 and set(parts.values()) == {0}
    files = [line.split()[-1] for line in asked if line.startswith("-m pytest -m gpu ")]
    benches = [line for line in asked if line.startswith("-m flash_dllm ")]
    assert len(benches) == 5 and len(files) + 5 == len(asked)
    assert len(files) >= 6 and all((ROOT / file).is_file() for file in files)
    marked = {str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob("*.py") if "mark.gpu" in p.read_text()}
    # Conftest and this file only speak of the marker.
    assert marked - set(files) <= {"tests/conftest.py", "tests/bench/test_pages.py"}
    for line in benches:
        words = line.split()[2:]
        outcome = run(*words, "--device", "none-such")
        assert outcome.code == 2 and "none-such" in outcome.err, line

"""The index of result files."""

from __future__ import annotations

import json
from pathlib import Path

from flash_dllm.web import static_folder
from flash_dllm.web.results import index_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def put(folder: Path, name: str, data: object) -> None:
    (folder / name).write_text(json.dumps(data))


def test_accuracy_and_throughput_with_what_stands_above_them(tmp_path: Path) -> None:
    run = {
        "method": "flash+verify",
        "options": {"track": 4},
        "accuracy": 90,
        "interval": [80, 95],
        "n": 50,
        "tokens_per_forward": 2.5,
    }
    put(
        tmp_path,
        "a.json",
        {"model": "m", "device": "cuda:0", "device_name": "H200", "note": "why", "runs": [run]},
    )
    put(
        tmp_path,
        "b.json",
        {"results": {"rows": [{"method": "dual+threshold", "batch": 8, "tokens_per_second": 70.5}]}},
    )
    seen = index_of(tmp_path)
    first, second = seen["points"]
    assert (first["accuracy"], first["tpf"], first["interval"], first["n"]) == (90, 2.5, [80, 95], 50)
    assert (first["model"], first["device"], first["file"]) == ("m", "H200", "a.json")
    assert first["settings"] == {"options": {"track": 4}}
    assert (second["batch"], second["throughput"]) == (8, 70.5)
    assert seen["files"]["a.json"] == "why"
    assert seen["skipped"] == {}


def test_a_mean_with_its_standard_error(tmp_path: Path) -> None:
    row = {"method": "m", "accuracy": 9, "tokens_per_forward": {"value": 2.25, "se": 0.1}}
    put(tmp_path, "a.json", {"plans": [{"question": "?", "rows": [row]}]})
    assert index_of(tmp_path)["points"][0]["tpf"] == 2.25


def test_an_evaluation_by_the_rule_of_the_papers(tmp_path: Path) -> None:
    rules = {
        "flexible-extract": {"accuracy": 70.0, "interval": [60.0, 80.0], "n": 9},
        "other": {"accuracy": 1.0},
    }
    task = {"rules": rules, "published_rule": "flexible-extract", "counters": {"tokens_per_forward": 3.0}}
    put(
        tmp_path,
        "e.json",
        {"kind": "evaluation", "model": "m", "method": "none+threshold", "tasks": {"gsm8k": task}},
    )
    (point,) = index_of(tmp_path)["points"]
    assert (point["accuracy"], point["tpf"], point["problems"], point["n"]) == (70.0, 3.0, "gsm8k", 9)


def test_what_is_not_shown_is_named(tmp_path: Path) -> None:
    put(tmp_path, "odd.json", {"loss": [1, 2], "accuracy": True, "tokens_per_forward": 2, "method": "x"})
    put(tmp_path, "nameless.json", [{"accuracy": 4, "tokens_per_forward": 2}])
    (tmp_path / "cut.json").write_text('{"runs": [')
    seen = index_of(tmp_path)
    assert seen["points"] == []
    assert sorted(seen["skipped"]) == ["cut.json", "nameless.json", "odd.json"]


def test_the_files_of_this_repository_have_points() -> None:
    seen = index_of(RESULTS)
    assert {p["file"] for p in seen["points"]} >= {
        "decoders-tiny-dream-cpu.json",
        "decoders-tiny-llada-h200.json",
    }
    for point in seen["points"]:
        assert point["method"] and point["device"]
        assert ("accuracy" in point and "tpf" in point) or ("throughput" in point and "batch" in point)


def test_the_bundled_copy_has_the_same_form() -> None:
    """It may be older than the files; ``python -m flash_dllm.web.build`` makes it anew."""
    seen = json.loads((static_folder() / "data" / "results.json").read_text(encoding="utf-8"))
    assert set(seen) == {"points", "files", "skipped"}
    assert seen["points"] and {p["file"] for p in seen["points"]} == set(seen["files"])

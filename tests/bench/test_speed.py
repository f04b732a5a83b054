"""Kernels, steps and loads at tiny shapes: what is counted, forced and refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flash_dllm.bench import kernels
from flash_dllm.bench.floors import (
    Ceilings,
    Work,
    attention_floor,
    layer_matmul_weights,
    measure_ceilings,
    pass_floor,
)
from flash_dllm.bench.forced import forced, quota
from flash_dllm.bench.results_tables import load_name
from flash_dllm.bench.step import Place, measure_step
from flash_dllm.bench.synthetic import Setting, engine_for, request, weights
from flash_dllm.bench.throughput import PARTS, Load, measure_load, without
from flash_dllm.bench.timing import BenchError, Timer, Timing, covered, idle_share
from flash_dllm.methods import build_method
from flash_dllm.models.config import SHAPES
from tests.commands import Run

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"lookahead": 8, "track": 16}
H200 = Ceilings(4.3e12, 790e12, "bfloat16")


@pytest.fixture(scope="module")
def model() -> Any:
    return weights("llada-tiny", torch.float32, CPU)


def test_timing_is_a_median_with_its_spread() -> None:
    timing = Timing.of([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (timing.ms, timing.low, timing.high, timing.repeats) == (3.0, 1.4, 4.6, 5)
    calls = []
    assert Timer(CPU, repeats=3, warm_up=2)(lambda: calls.append(1)).repeats == 3
    assert len(calls) == 5


def test_busy_time_is_a_union() -> None:
    assert covered([(0, 2), (1, 3), (5, 6), (5.5, 5.7)]) == 4
    assert covered([]) == 0
    assert idle_share([(4.0, 8.0), (0.0, 3.0), (2.0, 3.5), (9.0, 10.0)]) == 0.15
    assert idle_share([(1.0, 2.0), (2.0, 5.0)]) == 0.0
    assert idle_share([(3.0, 3.0)]) == 0.0


def test_floors_are_those_of_the_design() -> None:
    """LLaDA-8B: 218.1 M weights a layer; a row is 13.96 GFLOP; 128 rows cost 3.3 ms by bytes, 4,096 rows 72 ms."""
    config = SHAPES["llada-8b"]
    assert config.n_layers * layer_matmul_weights(config) == pytest.approx(6.98e9, rel=1e-3)
    one = pass_floor(config, Work(1, 128, 1, 0), H200, 2)
    head = 1e3 * 2 * config.vocab_size * config.d_model / 4.3e12
    assert one - head == pytest.approx(3.3, abs=0.06)
    assert pass_floor(config, Work(32, 4096, 1, 0), H200, 2) == pytest.approx(72, abs=1)
    # 512 KiB of K and V a position.
    bytes_read = config.n_layers * attention_floor(config, Work(32, 32, 1512, 0), H200, 2)
    assert bytes_read == pytest.approx(1e3 * 32 * 1512 * 512 * 1024 / 4.3e12, rel=1e-6)


def test_ceilings_are_measured() -> None:
    found = measure_ceilings(CPU, torch.float32)
    assert found.copy > 1e6 and found.matmul > 1e6 and found.dtype == "float32"


@pytest.mark.parametrize("rate", [1.0, 2.8, 3.0, 1.1])
def test_the_quota_adds_up(rate: float) -> None:
    taken = torch.stack([quota(torch.tensor([step]), rate) for step in range(100)])[:, 0]
    assert int(taken.sum()) == round(100 * rate)
    assert set(taken.tolist()) <= {int(rate), int(rate) + 1}


@pytest.mark.parametrize(
    ("name", "accepts", "steps"),
    # 24 tokens: 2 a step are 12 steps; two commits and two accepted drafts a step are 6; a folded verifier has no
    # drafts in its first step.
    [("none+threshold", 0, 12), ("flash+threshold", 0, 12), ("flash+verify", 2, 6), ("flash+branch", 2, 7)],
)
def test_a_forced_rate_is_kept(model: Any, name: str, accepts: float, steps: int) -> None:
    options = SMALL if name.startswith("flash") else {}
    setting = Setting("llada-tiny", name, options, 2.0, accepts)
    engine = engine_for(setting, model, 2, 64)
    import random

    for index in range(3):
        engine.add(request(setting.config, str(index), 20, 24, 40, random.Random(index)))
    done = []
    while not engine.idle:
        done += engine.step()
    assert [f.steps for f in done] == [steps] * 3
    assert all(f.end - f.request.canvas.first == 24 and f.error is None for f in done)


def test_a_rate_that_cannot_be_is_refused() -> None:
    plain = build_method("flash", "threshold", family="llada")
    for commits, accepts, text in (
        (0.5, 0, "commit-per-step=0.5"),
        (2, 1, "verifies nothing"),
        (2, -1, "at least 0"),
    ):
        with pytest.raises(BenchError, match=text):
            forced(plain, commits, accepts)


def test_a_forced_method_makes_no_claim() -> None:
    method = forced(build_method("none", "branch", family="llada"), 2.0, 1.0)
    assert method.certificate is None
    assert method.verifier is not None and method.verifier.scratch() == 64


@pytest.mark.parametrize("shape", ["llada-tiny-gqa", "dream-tiny"])
def test_every_op_is_measured_by_its_public_signature(shape: str) -> None:
    config, timer = SHAPES[shape], Timer(CPU, 2, 1)
    sizes = replace(kernels.Sizes.default(config, CPU), rows=(16,), slots=(2,))
    rows: list[dict[str, Any]] = []
    for case in kernels.Maker(config, torch.float32, CPU).cases(kernels.OPS, sizes):
        rows += kernels.measure_case(
            case, ["ref", "none-such"], timer, Ceilings(1e10, 1e11, "float32"), torch.float32
        )
    assert {row["op"] for row in rows} == set(kernels.OPS)
    for row in rows:
        if row["impl"] == "none-such":
            assert row["ms"] is None and "none-such" in row["skipped"]
        else:
            assert row["ms"] > 0 and row["floor_ms"] > 0 and row.get("error", 0) == 0


def test_a_wrong_kernel_is_reported_and_not_timed() -> None:
    case = kernels.Maker(SHAPES["llada-tiny"], torch.float32, CPU).silu_mul(8)
    right = case.run

    def wrong(impl: str | None) -> Any:
        return [1.01 * t for t in right("ref")] if impl == "wrong" else right("ref")

    def poisoned(impl: str | None) -> Any:
        return [t + float("nan") for t in right("ref")] if impl == "wrong" else right("ref")

    def broken(impl: str | None) -> Any:
        if impl == "wrong":
            raise RuntimeError("out of registers")
        return right("ref")

    for run, words in ((wrong, "relative error 0.01"), (poisoned, "inf"), (broken, "out of registers")):
        case.run = run
        rows = kernels.measure_case(case, ["wrong", "ref"], Timer(CPU, 2, 1), H200, torch.float32)
        assert rows[0]["ms"] is None and words in rows[0]["failed_with"]
        assert rows[1]["ms"] > 0


def test_step_reports_what_the_table_needs(model: Any) -> None:
    ceilings = Ceilings(1e10, 1e11, "float32")
    setting = Setting("llada-tiny", "flash+verify", SMALL, 2.0, 1.0)
    row = measure_step(setting, model, Place(2, 30, 160, 4), ceilings)
    assert {"batch", "prompt", "verify", "ms", "peak_gib", "idle_share"} <= set(row)
    assert (row["batch"], row["prompt"], row["verify"], row["passes"]) == (2, 30, True, 2)
    # 16 candidates, 8 look-ahead and 16 tracked rows a slot; a verify pass of 32 rows at most.
    assert row["rows"][0] == 2 * 40 and 0 < row["rows"][1] <= 64
    assert row["ms_low"] <= row["ms"] <= row["ms_high"] and row["floor_ms"] > 0 and row["idle_share"] is None
    json.dumps(row)
    with pytest.raises(BenchError, match="answer=20"):
        measure_step(setting, model, Place(1, 10, 20, 4), ceilings)


def test_load_counts_answers(model: Any) -> None:
    load = Load(5, (10, 20), (8, 16), 32)
    setting = Setting("llada-tiny", "flash+threshold", SMALL, 2.0)
    first, warm = measure_load(setting, model, 2, load)
    assert (first["run"], warm["run"]) == (0, 1) and "first_run_penalty_s" in first
    lengths = [r.canvas.masked.count(True) - int(r.canvas.numbers["pad"]) for r in load.build(setting)]
    assert first["answer_tokens"] == warm["answer_tokens"] == sum(lengths)
    # Two tokens a pass; the last step of an odd answer commits one.
    assert first["nfe"] == sum(-(-n // 2) for n in lengths)
    assert first["failed"] == 0 and first["latency_s"]["p50"] <= first["latency_s"]["p99"]
    assert first["passes"] == first["steps"] < first["nfe"]


def test_without_refill_slots_wait_for_each_other(model: Any) -> None:
    load = Load(6, (10, 12), (4, 24), 32, seed=3)
    setting = Setting("llada-tiny", "flash+threshold", SMALL, 2.0)
    refilled = measure_load(setting, model, 2, load, runs=1)[0]
    waiting = measure_load(replace(setting, gang=True), model, 2, load, runs=1)[0]
    assert waiting["answer_tokens"] == refilled["answer_tokens"]
    assert waiting["steps"] > refilled["steps"]
    assert (refilled["refill"], waiting["refill"]) == (True, False)


def test_each_part_can_be_switched_off_alone(model: Any) -> None:
    full = Setting("llada-tiny", "flash+threshold", SMALL, 2.0)
    load = Load(3, (10, 12), (4, 12), 32)
    whole = measure_load(full, model, 2, load, runs=1)[0]
    rows = {part: measure_load(without(full, part), model, 2, load, runs=1)[0] for part in PARTS}
    assert {row["answer_tokens"] for row in rows.values()} == {whole["answer_tokens"]}
    assert (rows["fusion"]["impl"], whole["impl"]) == ("ref", "auto")
    assert rows["selective refresh"]["options"]["track"] == -1 and whole["options"] == SMALL
    assert rows["refill"]["refill"] is False and rows["refill"]["steps"] >= whole["steps"]
    names = [load_name(row) for row in (whole, *rows.values())]
    assert names == ["flash+threshold", *(f"flash+threshold without {part}" for part in PARTS)]
    with pytest.raises(BenchError, match="dual"):
        without(Setting("llada-tiny", "dual+threshold"), "selective refresh")


def test_a_checkpoint_brings_its_own_weights(run: Run, bare_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    words = (
        "--prompt",
        "10",
        "--answer",
        "100",
        "--steps",
        "2",
        "--batch",
        "1",
        "--methods",
        "flash+threshold",
    )
    outcome = run(
        "bench", "step", "--device", "cpu", "--shape", bare_folder, *words, "-o", "track=8", "--json", file
    )
    assert outcome.code == 0, outcome.err
    row = json.loads(file.read_text())["rows"][0]
    assert (row["weights"], row["shape"]) == ("loaded", str(bare_folder))
    loaded = weights(str(bare_folder), torch.float32, CPU)
    assert loaded.config.d_model == 32 and loaded.n_parameters == loaded.config.n_parameters


def test_shares_show_every_part(run: Run, tmp_path: Path) -> None:
    size = ("--slots", "2", "--requests", "3", "--prompt", "10-12", "--answer", "4-8", "--room", "16")
    tiny = ("--device", "cpu", "--shape", "llada-tiny", "-o", "track=8", "-o", "lookahead=8")
    outcome = run("bench", "shares", *tiny, *size, "--json", tmp_path / "shares.json")
    assert outcome.code == 0, outcome.err
    assert len(json.loads((tmp_path / "shares.json").read_text())["rows"]) == 8
    assert all(f"without {part}" in outcome.out for part in PARTS)


def test_bad_loads_are_refused(model: Any) -> None:
    setting = Setting("llada-tiny", "flash+threshold", SMALL, 2.0)
    for load, text in ((Load(answer=(4, 600)), "answer=600"), (Load(prompt=(5, 2)), "prompt=5-2")):
        with pytest.raises(BenchError, match=text):
            measure_load(setting, model, 2, load)
    with pytest.raises(BenchError, match="no masked diffusion model"):
        weights("qwen2-tiny", torch.float32, CPU)


def test_commands_write_what_they_show(run: Run, tmp_path: Path) -> None:
    tiny = ("--device", "cpu", "--shape", "llada-tiny")
    file, picture = tmp_path / "step.json", tmp_path / "load.svg"
    words = ("--methods", "flash+threshold,flash+branch", "-o", "track=8", "--batch", "1,2", "--prompt", "20")
    pace = ("--answer", "140", "--steps", "2", "--commit-per-step", "2.8", "--accept-per-step", "1")
    outcome = run("bench", "step", *tiny, *words, *pace, "--json", file)
    assert outcome.code == 0, outcome.err
    report = json.loads(file.read_text())
    assert report["synthetic"] is True and "synthetic" in outcome.out
    assert {"date", "command", "device", "dtype", "versions", "ceilings"} <= set(report)
    found = [
        (r["method"], r["batch"], r["options"].get("branches"), r["accept_per_step"]) for r in report["rows"]
    ]
    assert found == [
        ("flash+threshold", 1, None, 0.0), ("flash+branch", 1, 4, 1.0),
        ("flash+threshold", 2, None, 0.0), ("flash+branch", 2, 2, 1.0),
    ]  # fmt: skip
    lengths = ("--prompt", "10-12", "--answer", "4-8", "--room", "16", "--requests", "3", "--batch", "1,2")
    outcome = run("bench", "throughput", *tiny, *lengths, "--methods", "flash+threshold", "--plot", picture)
    assert outcome.code == 0, outcome.err
    assert picture.read_text().startswith("<?xml")
    outcome = run("bench", "kernels", *tiny, "--ops", "silu_mul", "--repeats", "2", "--json", "-")
    assert outcome.code == 0 and {r["op"] for r in json.loads(outcome.out)["rows"]} == {"silu_mul"}


def test_a_failing_kernel_shows_in_the_table_and_in_the_exit_code(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = kernels.silu_op.silu_mul

    def fails(gate_up: Any, *, impl: str | None = None) -> Any:
        if impl == "triton":
            raise RuntimeError("out of registers")
        return plain(gate_up, impl=impl)

    monkeypatch.setattr(kernels.silu_op, "silu_mul", fails)
    words = ("--ops", "silu_mul,linear", "--rows", "4", "--repeats", "2", "--impl", "triton,ref,none-such")
    file = tmp_path / "kernels.json"
    outcome = run("bench", "kernels", "--device", "cpu", "--shape", "llada-tiny", *words, "--json", file)
    assert outcome.code == 1 and "silu_mul triton" in outcome.err
    assert "out of registers" in outcome.out and "none-such" in outcome.out
    rows = json.loads(file.read_text())["rows"]
    assert [r["impl"] for r in rows if r["op"] == "silu_mul" and r["ms"]] == ["ref"]
    assert len({(r["depth"], r["width"]) for r in rows if r["op"] == "linear"}) == 3


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("step", "--shape", "llada-8b"), "8.0 billion parameters"),
        (("step", "--shape", "gpt-9"), "gpt-9"),
        (("step", "--batch", "0"), "batch='0'"),
        (("step", "--methods", "flash+nothing"), "nothing"),
        (("step", "-o", "colour=3"), "colour"),
        (
            ("step", "--methods", "flash+threshold", "--commit-per-step", "2", "--accept-per-step", "1"),
            "verifies",
        ),
        (("step", "--accept-per-step", "1"), "--commit-per-step"),
        (("throughput", "--prompt", "a-b"), "prompt='a-b'"),
        (("kernels", "--ops", "softmax"), "softmax"),
        (("kernels", "--dtype", "int3"), "int3"),
        (("serve", "--url", "http://127.0.0.1:9", "--rates", "-1"), "rate=-1"),
    ],
)
def test_bad_input_is_named(run: Run, words: tuple[str, ...], text: str) -> None:
    where = () if words[0] == "serve" else ("--device", "cpu")
    shape = () if "--shape" in words or words[0] == "serve" else ("--shape", "llada-tiny")
    outcome = run("bench", *words, *where, *shape)
    assert outcome.code == 2 and text in outcome.err

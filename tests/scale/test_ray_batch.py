"""Batches over engines of a Ray cluster of two: answers, a dead engine, errors."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flash_dllm import LLM, SamplingParams
from flash_dllm.params import EngineArgs
from flash_dllm.scale.batch import BatchArgs, run_batch
from flash_dllm.scale.extras import ScaleError
from flash_dllm.scale.ray_batch import BUSY, RayAnswers, RayArgs, cause_of, pack, unpack
from flash_dllm.scale.rows import BadRow, Row
from tests.commands import Run
from tests.scale.cluster import workers

PARAMS = SamplingParams(max_tokens=12)


def write(path: Path, count: int) -> Path:
    rows = [{"id": f"r{i}", "prompt": f"the cat {i}"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(path: Path) -> dict[str, str]:
    records = [json.loads(line) for line in path.read_text().split("\n") if line]
    found = {record["id"]: record["text"] for record in records}
    assert len(found) == len(records)
    return found


def batch(source: Path, output: Path, folder: Path, **ray_args: Any) -> tuple[BatchArgs, RayAnswers]:
    engine = EngineArgs(model=str(folder), max_num_seqs=2, device="cpu")
    answers = RayAnswers(RayArgs(actors=2, group=4, **ray_args), engine, PARAMS, raw=False)
    return BatchArgs(str(source), str(output), engine, PARAMS), answers


def wanted(folder: Path, count: int) -> dict[str, str]:
    talks = [[{"role": "user", "content": f"the cat {i}"}] for i in range(count)]
    return {f"r{i}": out.text for i, out in enumerate(LLM(folder).chat(talks, PARAMS))}


def test_outcomes_survive_the_journey() -> None:
    bad = BadRow("a", "in:1", "why", {"x": 1})
    assert unpack(pack(bad)) == bad
    assert unpack(pack({"id": "a", "text": "ü"})) == {"id": "a", "text": "ü"}


def test_what_an_engine_said_is_found() -> None:
    class FailedError(Exception):
        cause: Any = None

    exc = FailedError("boom\n  File x\nvalues.ValueError: it broke\n  advice: read on")
    assert cause_of(exc) == "values.ValueError: it broke"
    exc.cause = ScaleError("of ours")
    assert cause_of(exc) == "of ours"
    exc.cause = KeyError("k")
    assert cause_of(exc) == "KeyError: 'k'"


def test_ray_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ScaleError, match=r"--ray needs ray: pip install 'flash-dllm\[ray\]'"):
        RayAnswers(RayArgs(), EngineArgs(), PARAMS, raw=False)


@pytest.mark.slow
def test_a_cluster_that_is_started_here_is_for_busy_machines(cluster: None) -> None:
    import ray

    def told() -> tuple[dict[str, str | None], float, int]:
        from ray.serve._private.constants import PROXY_READY_CHECK_TIMEOUT_S

        return {name: os.environ.get(name) for name in BUSY}, PROXY_READY_CHECK_TIMEOUT_S, os.nice(0)

    assert ray.get(ray.remote(num_cpus=0)(told).remote()) == (BUSY, 60.0, os.nice(0))


@pytest.mark.slow
def test_two_engines_answer_as_one(cluster: None, chat_folder: Path, tmp_path: Path) -> None:
    source, output = write(tmp_path / "in.jsonl", 14), tmp_path / "out.jsonl"
    source.write_text(source.read_text() + 'oops\n{"id": "long", "prompt": "x", "max_tokens": 999}\n')
    count = run_batch(*batch(source, output, chat_folder))
    assert (count.answered, count.bad) == (14, 2)
    assert texts(output) == wanted(chat_folder, 14)
    bad = [json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    assert {record["id"] for record in bad} == {"15", "long"}

    def nobody(rows: Iterator[Row]) -> Iterator[Any]:
        assert [row.id for row in rows] == ["long"]
        yield from ()

    # Without Ray the same output goes on.
    assert run_batch(batch(source, output, chat_folder)[0], nobody).before == 14


@pytest.mark.slow
def test_an_engine_that_dies_costs_no_row(cluster: None, chat_folder: Path, tmp_path: Path) -> None:
    source, output = write(tmp_path / "in.jsonl", 60), tmp_path / "out.jsonl"
    args, answers = batch(source, output, chat_folder)
    killed: list[int] = []

    def killing(rows: Iterator[Row]) -> Iterator[dict[str, Any] | BadRow]:
        for outcome in answers(rows):
            if not killed:
                killed.extend(workers("EngineActor")[:1])
                os.kill(killed[0], signal.SIGKILL)
            yield outcome

    count = run_batch(args, killing)
    assert killed and (count.answered, count.bad) == (60, 0)
    assert texts(output) == wanted(chat_folder, 60)


@pytest.mark.slow
def test_what_an_engine_refuses_is_one_line(
    cluster: None, run: Run, chat_folder: Path, tmp_path: Path
) -> None:
    source = write(tmp_path / "in.jsonl", 2)
    words = ("batch", source, tmp_path / "out.jsonl", "--ray", "--device", "cpu")
    outcome = run(*words, "-m", tmp_path / "nowhere")
    # Ray's own loggers may say more, by what this process did with it before.
    said = [line for line in outcome.err.splitlines() if line.startswith("flash-dllm: error")]
    assert outcome.code == 2 and len(said) == 1 and "nowhere" in said[0], outcome.err
    outcome = run(*words, "-m", chat_folder, "--gamma", 0.5)
    assert outcome.code == 2 and "gamma=0.5 is not read by method" in outcome.err
    assert run(*words, "-m", chat_folder, "-t", 4).code == 0
    assert len(texts(tmp_path / "out.jsonl")) == 2

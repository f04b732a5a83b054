"""Offline batches: the same answers as ``LLM``, each row once, whatever interrupts the run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flash_dllm import LLM, SamplingParams
from flash_dllm.params import EngineArgs
from flash_dllm.scale.answers import Answerer
from flash_dllm.scale.batch import BatchArgs, Count, Progress, progress_line, run_batch
from flash_dllm.scale.extras import ScaleError
from flash_dllm.scale.rows import BadRow, Row
from tests.commands import Run

TALK = [{"role": "user", "content": "the dog"}]
PROMPTS: list[dict[str, Any]] = [
    {"id": "a", "prompt": "the cat"},
    {"id": "b", "messages": TALK, "params": {"max_tokens": 6}, "level": 3},
    {"id": "c", "template": "the {{3}} sat"},
    {"id": "d", "prompt_token_ids": [7, 8, 9], "temperature": 0.7, "seed": 4, "n": 2, "logprobs": True},
    {"id": "e", "prompt": "1 + 2", "stop": ["t"]},
]
PARAMS = SamplingParams(max_tokens=9)


@pytest.fixture(scope="module")
def llm(chat_folder: Path) -> LLM:
    return LLM(chat_folder, max_num_seqs=2)


def jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def args_of(source: object, output: object, **changes: Any) -> BatchArgs:
    return BatchArgs(str(source), str(output), EngineArgs(), **{"params": PARAMS, **changes})


def echo(rows: Iterator[Row]) -> Iterator[dict[str, Any] | BadRow]:
    """Answers without a model."""
    for row in rows:
        yield {"id": row.id, "text": row.value, "finish_reason": "stop", "stop_reason": None, "token_ids": [1],
               "usage": {"completion_tokens": 1}}  # fmt: skip


def test_the_answers_are_those_of_the_llm(run: Run, chat_folder: Path, llm: LLM, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", PROMPTS)
    outcome = run("batch", source, tmp_path / "out.jsonl", "-m", chat_folder, "-t", 9)
    assert outcome.code == 0 and outcome.err.endswith("5 rows: 5 answered, 0 bad\n")
    answers = {record["id"]: record for record in jsonl(tmp_path / "out.jsonl")}
    expected = {
        "a": llm.chat([{"role": "user", "content": "the cat"}], PARAMS)[0],
        "b": llm.chat(TALK, SamplingParams(max_tokens=6))[0],
        "d": llm.generate(
            [[7, 8, 9]], SamplingParams(max_tokens=9, temperature=0.7, seed=4, n=2, logprobs=True)
        )[0],
        "e": llm.chat([{"role": "user", "content": "1 + 2"}], SamplingParams(max_tokens=9, stop=("t",)))[0],
    }
    for name, wanted in expected.items():
        first, answer = wanted.outputs[0], answers[name]
        assert (answer["text"], answer["token_ids"]) == (first.text, first.token_ids), name
        assert (answer["finish_reason"], answer["stop_reason"]) == (first.finish_reason, first.stop_reason)
        usage, prompt = answer["usage"], len(wanted.prompt_token_ids)
        assert (usage["nfe"], usage["tpf"], usage["steps"]) == (first.nfe, first.tpf, first.steps)
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, len(first.token_ids))
        assert usage["total_tokens"] == prompt + len(first.token_ids)
    assert answers["b"]["metadata"] == {"level": 3} and "metadata" not in answers["a"]
    assert [c["text"] for c in answers["d"]["choices"]] == [c.text for c in expected["d"].outputs]
    assert answers["d"]["log_probs"] == pytest.approx(expected["d"].outputs[0].log_probs, abs=1e-3)
    assert "choices" not in answers["a"] and len(answers["c"]["spans"]) == 1


def test_raw_prompts_are_continued(run: Run, chat_folder: Path, llm: LLM, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": "the cat"}, {"prompt": "so 4"}])
    run("batch", source, tmp_path / "out.jsonl", "-m", chat_folder, "-t", 9, "--raw")
    wanted = llm.generate(["the cat", "so 4"], PARAMS)
    texts = {record["id"]: record["text"] for record in jsonl(tmp_path / "out.jsonl")}
    assert texts == {"1": wanted[0].text, "2": wanted[1].text}


@pytest.mark.parametrize("place", ["local", "memory"])
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_formats_and_places(llm: LLM, tmp_path: Path, ending: str, place: str) -> None:
    rows = [{k: v for k, v in row.items() if k != "n"} for row in PROMPTS]
    base = str(tmp_path) if place == "local" else f"memory://{tmp_path.name}"
    fs, folder = fsspec.core.url_to_fs(base)
    fs.makedirs(folder, exist_ok=True)
    if ending == "jsonl":
        fs.pipe_file(f"{folder}/in.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    else:
        with fs.open(f"{folder}/in.parquet", "wb") as file:
            pq.write_table(pa.Table.from_pylist(rows, schema=table_of(rows)), file)
    args = args_of(f"{base}/in.{ending}", f"{base}/out.{ending}", part_size=2)
    count = run_batch(args, Answerer(llm, PARAMS).answers)
    assert (count.answered, count.bad, count.left) == (5, 0, 0)
    answers = read_answers(fs, f"{folder}/out.{ending}", ending)
    assert sorted(a["id"] for a in answers) == ["a", "b", "c", "d", "e"]
    by_id = {a["id"]: a for a in answers}
    assert by_id["a"]["text"] == llm.chat([{"role": "user", "content": "the cat"}], PARAMS)[0].text
    level = by_id["b"]["metadata"]
    assert (json.loads(level) if ending == "parquet" else level) == {"level": 3}
    if (place, ending) != ("local", "jsonl"):
        assert len(fs.glob(f"{folder}/out.{ending}/part-*")) == 3
    again = run_batch(args, echo)
    assert (again.before, again.answered) == (5, 0)
    assert read_answers(fs, f"{folder}/out.{ending}", ending) == answers


def table_of(rows: list[dict[str, Any]]) -> Any:
    """The union of the rows' columns."""
    return pa.unify_schemas([pa.Table.from_pylist([row]).schema for row in rows])


def read_answers(fs: Any, path: str, ending: str) -> list[dict[str, Any]]:
    files = sorted(fs.glob(f"{path}/part-*")) if fs.isdir(path) else [path]
    if ending == "jsonl":
        return [json.loads(line) for file in files for line in fs.cat_file(file).splitlines()]
    return [row for file in files for row in pq.read_table(fs.open(file)).to_pylist()]


def test_bad_rows_go_beside_with_their_reason(run: Run, chat_folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(
        b'\xef\xbb\xbf{"id": "a", "prompt": "the cat"}\n'
        b"\n"
        b"no json\n"
        b'{"id": "c", "prompt": "x", "params": {"max_token": 3}}\n'
        b'{"id": "d", "prompt": "x", "max_tokens": 500}\n'
        b'{"id": "e", "prompt": ""}\n'
        b'{"id": "f", "prompt": "x", "gamma": 0.5}\n'
        b'{"id": "g", "messages": []}\n'
        b'{"id": "h", "messages": [{"role": "user"}]}\n'
        b'{"id": "i", "messages": ["hi"]}\n'
        b'{"id": "j", "prompt_token_ids": [1, 100000]}\n'
        b'{"id": "k", "template": "no gap"}\n'
        b'{"id": "l", "prompt": "x", "stop_token_ids": [1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18]}\n'
        b'{"id": "a", "prompt": "again"}\n'
        b'{"id": "z", "prompt": "the dog"}'
    )
    outcome = run("batch", source, tmp_path / "out.jsonl", "-m", chat_folder, "-t", 4)
    assert outcome.code == 1 and "14 rows: 2 answered, 12 bad" in outcome.err
    assert sorted(record["id"] for record in jsonl(tmp_path / "out.jsonl")) == ["a", "z"]
    bad = {record["id"]: record for record in jsonl(tmp_path / "out.errors.jsonl")}
    words = {
        "3": "not a line of JSON", "c": "unknown option 'max_token'", "d": "max_tokens=500", "e": "empty",
        "f": "gamma=0.5 is not read", "g": "no message", "h": "content", "i": "list of objects", "j": "100000",
        "k": "no gap", "l": "18 stop token ids", "a": "there twice",
    }  # fmt: skip
    assert set(bad) == set(words)
    for name, word in words.items():
        assert word in bad[name]["reason"], bad[name]
    assert bad["3"]["row"] == "no json" and bad["d"]["row"]["prompt"] == "x"
    assert bad["a"]["where"] == f"{source}:14"


def test_a_guided_row_needs_two_slots(run: Run, chat_folder: Path, tmp_path: Path) -> None:
    """The engine, not the reader, refuses it; the other row is answered."""
    source = write(tmp_path / "in.jsonl", [{"prompt": "x", "cfg_scale": 1.5}, {"prompt": "y"}])
    outcome = run("batch", source, tmp_path / "out.jsonl", "-m", chat_folder, "-t", 4, "--max-num-seqs", 1)
    assert outcome.code == 1 and "1 answered, 1 bad" in outcome.err
    assert "takes two slots" in jsonl(tmp_path / "out.errors.jsonl")[0]["reason"]


def test_a_step_that_raises_costs_one_row(llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The row that makes it raise again alone; an engine that always raises ends the run."""
    decoder, poison = llm.engine.decoder, llm.tokenizer.encode("naïve")[0]  # type: ignore[union-attr]
    plain, broken = decoder.step, False

    def step(lanes: Any) -> Any:
        seated = [r for r in llm.engine.scheduler.seated if r is not None]
        if broken or any(poison in r.canvas.ids[: r.canvas.first] for r in seated):
            raise RuntimeError("a kernel failed")
        return plain(lanes)

    monkeypatch.setattr(decoder, "step", step)
    prompts = [f"1 + {i} =" for i in range(7)]
    rows = [{"id": p, "prompt": p} for p in [*prompts[:3], "naïve", *prompts[3:]]]
    source = write(tmp_path / "in.jsonl", rows)
    args = args_of(source, tmp_path / "out.jsonl", raw=True)
    count = run_batch(args, Answerer(llm, PARAMS, raw=True).answers)
    assert (count.answered, count.bad) == (7, 1)
    bad = jsonl(tmp_path / "out.errors.jsonl")[0]
    assert (
        bad["id"] == "naïve"
        and bad["reason"] == "the engine failed on this row: RuntimeError: a kernel failed"
    )
    answers = {record["id"]: record["text"] for record in jsonl(tmp_path / "out.jsonl")}
    assert answers == {p: o.text for p, o in zip(prompts, llm.generate(prompts, PARAMS), strict=True)}
    broken = True
    with pytest.raises(RuntimeError, match="a kernel failed"):
        run_batch(
            args_of(source, tmp_path / "other.jsonl", raw=True), Answerer(llm, PARAMS, raw=True).answers
        )
    broken = False
    assert (
        run_batch(
            args_of(source, tmp_path / "other.jsonl", raw=True), Answerer(llm, PARAMS, raw=True).answers
        ).left
        == 0
    )


def test_repaired_rows_are_tried_again(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"id": "a", "prompt": "x"}, {"id": "b"}])
    args = args_of(source, tmp_path / "out.jsonl")
    assert run_batch(args, echo).bad == 1
    write(source, [{"id": "a", "prompt": "x"}, {"id": "b", "prompt": "y"}])
    count = run_batch(args, echo)
    assert (count.before, count.answered, count.bad) == (1, 1, 0)
    assert (tmp_path / "out.errors.jsonl").read_text() == ""


class StopError(Exception):
    """What interrupts a run."""


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("at", range(7))
def test_an_interrupted_run_goes_on(tmp_path: Path, at: int, ending: str) -> None:
    """At any row, twice: nothing is repeated, nothing is lost, and a torn last line counts as not written."""
    source = write(tmp_path / "in.jsonl", [{"prompt": f"row {i}"} for i in range(6)])
    output = tmp_path / f"out.{ending}"
    args = args_of(source, output, part_size=2)

    def stopping(rows: Iterator[Row]) -> Iterator[dict[str, Any] | BadRow]:
        for index, answer in enumerate(echo(rows)):
            if index == at:
                raise StopError
            yield answer

    for _ in range(2):
        try:
            run_batch(args, stopping)
        except StopError:
            if ending == "jsonl" and output.stat().st_size:
                whole = output.read_bytes()
                output.write_bytes(whole[:-3] if at % 2 else whole + b'{"id": "9", "te')
    count = run_batch(args, echo)
    fs = fsspec.filesystem("file")
    answers = read_answers(fs, str(output), ending)
    assert sorted(a["id"] for a in answers) == [str(i + 1) for i in range(6)]
    assert all(a["text"] == f"row {int(a['id']) - 1}" for a in answers)
    assert count.before + count.answered == 6 and count.left == 0


def test_other_settings_are_refused(tmp_path: Path) -> None:
    source, output = write(tmp_path / "in.jsonl", [{"prompt": "x"}]), tmp_path / "out.jsonl"
    run_batch(args_of(source, output), echo)
    with pytest.raises(ScaleError, match=r"begun with the default epsilon, not epsilon=0\.5"):
        run_batch(args_of(source, output, params=SamplingParams(max_tokens=9, epsilon=0.5)), echo)
    with pytest.raises(ScaleError, match="begun with raw=False, not raw=True"):
        run_batch(args_of(source, output, raw=True), echo)
    other = write(tmp_path / "other.jsonl", [{"prompt": "x"}])
    with pytest.raises(ScaleError, match=r"input=.in.jsonl., not input=.other.jsonl."):
        run_batch(args_of(other, output), echo)
    more = BatchArgs(str(source), str(output), EngineArgs(max_num_seqs=9, device="cpu"), PARAMS)
    assert run_batch(more, echo).before == 1


def test_settings_of_a_run_that_answered_nothing_do_not_bind(tmp_path: Path) -> None:
    source, output = write(tmp_path / "in.jsonl", [{"id": "a"}]), tmp_path / "out.jsonl"
    run_batch(args_of(source, output), echo)
    assert run_batch(args_of(source, output, raw=True), echo).bad == 1


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    source, output = write(tmp_path / "in.jsonl", [{"prompt": "x"}]), tmp_path / "out.jsonl"

    def nested(rows: Iterator[Row]) -> Iterator[dict[str, Any] | BadRow]:
        with pytest.raises(ScaleError, match="another run is writing it"):
            run_batch(args_of(source, output), echo)
        yield from echo(rows)

    assert run_batch(args_of(source, output), nested).answered == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nowhere.jsonl", "out.jsonl"), "nowhere.jsonl: no such file"),
        (("in.txt", "out.jsonl"), "in.txt: the name must end in .jsonl"),
        (("in.jsonl", "out.csv"), "out.csv: the name must end in .jsonl or .parquet"),
        (("in.jsonl", "theirs.jsonl"), "theirs.jsonl:1: no answer of an earlier run"),
        (("in.jsonl", "folder.jsonl"), "folder.jsonl: is a folder"),
        (("in.jsonl", "file.parquet"), "file.parquet: is a file"),
        (("file.parquet", "out.jsonl"), "not a Parquet file"),
        (("in.jsonl", "what://bucket/out.jsonl"), "Protocol not known: what"),
        (("in.jsonl", "out.jsonl", "--actors", 2), "--actors goes with --ray"),
        (("in.jsonl", "out.jsonl", "--gamma", 0.5), "gamma=0.5 is not read by method"),
        (("in.jsonl", "out.jsonl", "-m", "nope"), "nope"),
    ],
)
def test_wrong_calls(run: Run, chat_folder: Path, tmp_path: Path, words: tuple[Any, ...], said: str) -> None:
    write(tmp_path / "in.jsonl", [{"prompt": "x"}])
    (tmp_path / "in.txt").write_text("x")
    (tmp_path / "theirs.jsonl").write_text('{"name": "x"}\n')
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "file.parquet").write_text("x")
    paths = [word if "://" in word else str(tmp_path / word) for word in words[:2]]
    model = () if "-m" in words else ("-m", chat_folder)
    outcome = run("batch", *paths, *words[2:], *model)
    assert outcome.code == 2 and said in outcome.err and outcome.err.count("\n") == 1, outcome.err
    assert (tmp_path / "theirs.jsonl").read_text() == '{"name": "x"}\n'


def test_a_folder_or_a_pattern_is_one_input(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder / "b.jsonl", [{"prompt": "3"}])
    write(folder / "a.jsonl", [{"prompt": "1"}, {"prompt": "2"}])
    (folder / "_SUCCESS").write_text("")
    for source in (folder, folder / "*.jsonl"):
        output = tmp_path / f"{source.name[:1]}out.jsonl"
        assert run_batch(args_of(source, output), echo).answered == 3
        assert {r["id"]: r["text"] for r in jsonl(output)} == {"1": "1", "2": "2", "3": "3"}


def test_a_missing_extra_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    source = write(tmp_path / "in.jsonl", [{"prompt": "x"}])
    with pytest.raises(ScaleError, match=r"Parquet needs pyarrow: pip install 'flash-dllm\[ray\]'"):
        run_batch(args_of(source, tmp_path / "out.parquet"), echo)


def test_progress() -> None:
    said: list[str] = []
    count = Count(total=10, before=2, answered=3, bad=1, tokens=60)
    with Progress(said.append, terminal=False, seconds=0.0) as progress:
        progress.show(count)
    assert said and said[0].startswith("6 of 10 rows, 1 bad, ")
    assert progress_line(count, 2.0) == "6 of 10 rows, 1 bad, 2.0 rows/s, 30.0 tokens/s, 2 s left"
    assert progress_line(Count(total=10, before=10), 2.0) == "10 of 10 rows, 0 bad"
    with Progress(said.append, terminal=False, seconds=1000.0) as progress:
        progress.show(count)
    assert len(said) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_killed_process_loses_nothing(
    chat_folder: Path, llm: LLM, tmp_path: Path, kill: signal.Signals, ending: str
) -> None:
    prompts = [{"id": f"r{i}", "prompt": f"the cat {i}"} for i in range(60)]
    source, output = write(tmp_path / "in.jsonl", prompts), tmp_path / f"out.{ending}"
    command = [sys.executable, "-m", "flash_dllm", "batch", source, output, "-m", chat_folder, "-t", "30"]
    command += ["--method", "none+greedy", "--part-size", "4"]
    first = subprocess.Popen([str(word) for word in command], stderr=subprocess.PIPE, text=True)

    def written() -> int:
        return (
            output.stat().st_size
            if ending == "jsonl" and output.exists()
            else len(list(output.glob("part-*")))
        )

    deadline = time.monotonic() + 120
    while not written() and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(first.pid, kill)
    _, err = first.communicate(timeout=120)
    before = read_answers(fsspec.filesystem("file"), str(output), ending) if ending == "parquet" else []
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    if kill == signal.SIGTERM and first.returncode == 130:
        assert "interrupted" in err
    answers = read_answers(fsspec.filesystem("file"), str(output), ending)
    assert sorted(a["id"] for a in answers) == sorted(p["id"] for p in prompts)
    assert answers[: len(before)] == before
    greedy = llm.with_method("none", "greedy")
    wanted = greedy.chat(
        [[{"role": "user", "content": p["prompt"]}] for p in prompts], SamplingParams(max_tokens=30)
    )
    assert {a["id"]: a["text"] for a in answers} == {
        p["id"]: w.text for p, w in zip(prompts, wanted, strict=True)
    }


def test_the_side_file_of_parts_is_written_anew(tmp_path: Path) -> None:
    name = f"memory://{tmp_path.name}-side"
    fs, folder = fsspec.core.url_to_fs(name)
    fs.pipe_file(f"{folder}/in.jsonl", b'{"id": "a"}\n{"id": "b"}\n{"id": "c"}\n')
    args = args_of(f"{name}/in.jsonl", f"{name}/out.jsonl", part_size=2)
    for _ in range(2):
        assert run_batch(args, echo).bad == 3
        bad = read_answers(fs, f"{folder}/out.errors.jsonl", "jsonl")
        assert [record["id"] for record in bad] == ["a", "b", "c"]
    shutil.rmtree(tmp_path)


def test_a_batch_never_writes_over_its_input(tmp_path: Path) -> None:
    bad = write(tmp_path / "a.errors.jsonl", [{"id": "x", "prompt": "y"}])
    text = bad.read_bytes()
    for source, output in ((bad, tmp_path / "a.jsonl"), (bad, bad)):
        with pytest.raises(ScaleError, match="over its input"):
            run_batch(args_of(source, output), echo)
        assert bad.read_bytes() == text


def test_a_file_that_is_no_output_is_left_as_it_is(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"id": "x", "prompt": "y"}])
    precious = tmp_path / "precious.jsonl"
    for content in ('{"note": "my only copy"}', '{"note": "one"}\n{"id": "tail"'):
        precious.write_text(content)
        with pytest.raises(ScaleError, match="precious"):
            run_batch(args_of(source, precious), echo)
        assert precious.read_text() == content
    side = tmp_path / "out.errors.jsonl"
    (side / "deep").mkdir(parents=True)
    with pytest.raises(ScaleError, match="is a folder"):
        run_batch(args_of(source, tmp_path / "out.jsonl"), echo)
    assert (side / "deep").is_dir()


@pytest.mark.parametrize("name", ["*.jsonl", ""])
def test_an_output_in_the_folder_of_the_input_is_not_read(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    write(folder / "rows.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    source = f"{folder}/{name}" if name else folder
    for answered in (2, 0):
        count = run_batch(args_of(source, folder / "answers.jsonl"), echo)
        assert (count.total, count.answered, count.bad) == (2, answered, 0)
    assert len(jsonl(folder / "answers.jsonl")) == 2
    with pytest.raises(ScaleError, match="no name"):
        run_batch(args_of("", folder / "answers.jsonl"), echo)

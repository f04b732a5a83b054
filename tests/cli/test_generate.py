"""``flash-dllm generate``: one prompt, many prompts, resuming, and every kind of wrong input."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flash_dllm import LLM, SamplingParams
from flash_dllm.trace import read_trace
from tests.checkpoints import config, write_checkpoint
from tests.commands import Run, interruptible


def lines(path: Path) -> list[dict]:  # type: ignore[type-arg]
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def test_text_from_argument_file_and_stdin(run: Run, chat_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("the cat\n")
    llm = LLM(chat_folder)
    params = SamplingParams(max_tokens=9)
    expected = llm.chat([{"role": "user", "content": "the cat"}], params)[0].text + "\n"
    base = ("generate", "-m", chat_folder, "-t", 9)
    for outcome in (
        run(*base, "the cat"),
        run(*base, "--file", file),
        run(*base, stdin="the cat\n"),
        run(*base, "-", stdin="the cat"),
    ):
        assert (outcome.code, outcome.out, outcome.err) == (0, expected, "")
    raw = run(*base, "--raw", "the cat")
    assert raw.out == llm.generate("the cat", params)[0].text + "\n" != expected


def test_json(run: Run, chat_folder: Path) -> None:
    data = json.loads(run("generate", "-m", chat_folder, "-t", 5, "--json", "--logprobs", "hello").out)
    answer = data["outputs"][0]
    assert {"text", "token_ids", "finish_reason", "nfe", "steps", "tpf", "rows", "seconds"} <= set(answer)
    assert len(answer["log_probs"]) == len(answer["token_ids"])


def test_several_answers(run: Run, chat_folder: Path) -> None:
    out = run("generate", "-m", chat_folder, "-t", 5, "--n", 3, "-T", 1.0, "hello").out
    assert out.count("\n---\n") == 2


def test_infill(run: Run, chat_folder: Path) -> None:
    outcome = run("generate", "-m", chat_folder, "--infill", "the {{3}} sat")
    assert outcome.code == 0 and outcome.out.startswith("the ") and outcome.out.endswith(" sat\n")


def test_token_ids_without_a_tokenizer(run: Run, bare_folder: Path) -> None:
    outcome = run("generate", "-m", bare_folder, "--token-ids", "-t", 4, "--no-stop-at-eos", "5, 6 7")
    assert outcome.code == 0 and all(word.isdigit() for word in outcome.out.split())


def test_an_event_log(run: Run, chat_folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    assert run("generate", "-m", chat_folder, "-t", 4, "--trace", log, "hello").code == 0
    assert read_trace(log).events


def prompts(path: Path, count: int = 4) -> Path:
    records = [{"id": f"p{i}", "prompt": f"the {i}", "level": i} for i in range(count - 1)]
    records.append({"template": "a {{2}} b", "params": {"temperature": 1.0, "seed": 3}})  # type: ignore[dict-item]
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def test_many_prompts(run: Run, chat_folder: Path, tmp_path: Path) -> None:
    source, out = prompts(tmp_path / "p.jsonl"), tmp_path / "o.jsonl"
    to_stdout = run("generate", "-m", chat_folder, "--config", settings(tmp_path), "--file", source)
    assert to_stdout.code == 0, to_stdout.err
    outcome = run(
        "generate", "-m", chat_folder, "--config", settings(tmp_path), "--file", source, "--output", out
    )
    assert (outcome.code, outcome.out) == (0, "")
    answers = {a["id"]: a for a in lines(out)}
    assert set(answers) == {"p0", "p1", "p2", "4"}
    assert answers["p2"]["level"] == 2, "unknown fields are handed through"
    assert answers["4"]["outputs"][0]["spans"]
    by_id = {a["id"]: a["outputs"][0]["token_ids"] for a in map(json.loads, to_stdout.out.splitlines())}
    assert by_id == {name: a["outputs"][0]["token_ids"] for name, a in answers.items()}


def settings(folder: Path) -> Path:
    path = folder / "config.yaml"
    path.write_text("epsilon: 0.7\nmax-num-seqs: 2\n")
    return path


def test_a_run_resumes(run: Run, chat_folder: Path, tmp_path: Path) -> None:
    source, out = prompts(tmp_path / "p.jsonl"), tmp_path / "o.jsonl"
    command = ("generate", "-m", chat_folder, "--file", source, "--output", out)
    run(*command)
    whole = {a["id"]: a["outputs"][0]["token_ids"] for a in lines(out)}
    kept = out.read_text().split("\n")[:2]
    out.write_text("\n".join(kept) + "\n" + '{"id": "p1", "prom')
    outcome = run(*command)
    assert outcome.code == 0 and "2 of 4 already" in outcome.err
    assert {a["id"]: a["outputs"][0]["token_ids"] for a in lines(out)} == whole
    assert out.read_text().split("\n")[:2] == kept
    assert run(*command).code == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "x"}\n{"prompt": ', "2: not a line of JSON"),
        (b'["x"]', "1: must be a JSON object"),
        (b'{"id": "a"}', "exactly one of"),
        (b'{"prompt": "x", "template": "y"}', "exactly one of"),
        (b'{"prompt": "x", "id": 1}\n{"prompt": "y", "id": "1"}', "2: id '1' is there twice"),
        (b'{"prompt": "x", "params": {"steps": 3}}', "1: steps=3 is not read"),
        (b'{"prompt": "x", "params": {"nope": 3}}', "nope"),
        (b'{"prompt": ""}', "1: the prompt is empty"),
        (b'{"prompt_token_ids": [1, 99999]}', "1: token id 99999"),
        (b'{"messages": [{"role": "user"}]}', "needs a role and a content"),
        (b"\n\n", "no prompts"),
        (b'{"prompt": "\xff"}', "not valid UTF-8"),
    ],
)
def test_wrong_lines(run: Run, chat_folder: Path, tmp_path: Path, content: bytes, message: str) -> None:
    source, out = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    source.write_bytes(content)
    outcome = run("generate", "-m", chat_folder, "--file", source, "--output", out)
    assert_refused(outcome, message)
    assert not out.exists() or not out.read_text(), "nothing is decoded before every line is checked"


def assert_refused(outcome, message: str) -> None:  # type: ignore[no-untyped-def]
    assert outcome.code == 2, outcome
    assert message in outcome.err
    assert outcome.err.startswith("flash-dllm: error: ") and outcome.err.count("\n") == 1
    assert "Traceback" not in outcome.err and not outcome.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", ""], "the prompt is empty"),
        (["generate", "x", "-t", "-3"], "max_tokens=-3"),
        (["generate", "x", "-t", "900"], "max_model_len=256"),
        (["generate", "word " * 400], "leaves no room"),
        (["generate", "x", "--nonsense"], "--nonsense"),
        (["generate", "x", "-t", "many"], "--max-tokens"),
        (["generate", "x", "--temperature", "-1"], "temperature=-1.0"),
        (["generate", "x", "--dtype", "int3"], "dtype='int3'"),
        (["generate", "x", "--device", "cuda:77"], "cuda:77"),
        (["generate", "x", "--cache", "nonsense"], "unknown cache 'nonsense'"),
        (["generate", "x", "--method", "none+nonsense"], "unknown decoding 'nonsense'"),
        (["generate", "x", "--method", "none+greedy", "--cache", "none"], "--method already"),
        (["generate", "x", "--option", "nonsense=3"], "option 'nonsense'"),
        (["generate", "x", "--option", "nonsense"], "NAME=VALUE"),
        (["generate", "x", "--gamma", "0.4"], "gamma=0.4 is not read"),
        (["generate", "x", "--file", "y"], "not both"),
        (["generate", "--file", "not-there.txt"], "not-there.txt: No such file"),
        (["generate", "--file", "."], "Is a directory"),
        (["generate", "--token-ids", "1,b"], "not a list of integers"),
        (["generate", "x", "--output", "y"], "--output goes with JSON Lines"),
        (["generate", "x", "--infill"], "has no gap"),
        (["generate", "x", "--revision", "main"], "revision 'main'"),
        (["generate", "x", "--max-model-len", "9999"], "max_model_len=9999"),
        (["chat", "--n", "2", "-T", "1"], "n=2"),
        (["nonsense"], "nonsense"),
    ],
)
def test_wrong_input(run: Run, chat_folder: Path, words: list[str], message: str) -> None:
    model = ["-m", str(chat_folder)] if words[0] in ("generate", "chat") else []
    assert_refused(run(*words, *model), message)


def test_files_that_are_not_text(run: Run, chat_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_bytes(b"caf\xe9")
    assert_refused(run("generate", "-m", chat_folder, "--file", file), "p.txt: not valid UTF-8")
    assert_refused(run("generate", "-m", chat_folder, stdin=b"caf\xe9"), "stdin: not valid UTF-8")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nope: 3", "unknown option 'nope'"),
        ("[1]", "must hold options"),
        ("a: [", "not valid YAML"),
        ("epsilon: high", "epsilon='high'"),
        ("max_tokens: -2", "max_tokens=-2"),
        ("options: {nope: 1}", "option 'nope'"),
    ],
)
def test_wrong_config_files(run: Run, chat_folder: Path, tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(content)
    assert_refused(run("generate", "-m", chat_folder, "--config", path, "x"), message)


def test_flags_win_over_the_config_file(run: Run, chat_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"model: {chat_folder}\nmax_tokens: 7\nstop_at_eos: false\n")
    base = ("generate", "--config", path, "--json", "x")
    for words, length in (((), 7), (("-t", 3), 3)):
        data = json.loads(run(*base, *words).out)
        assert len(data["canvas_ids"]) - len(data["prompt_token_ids"]) == length


def broken(folder: Path, kind: str) -> Path:
    write_checkpoint(folder)
    weights = folder / "model.safetensors"
    if kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif kind == "corrupt":
        weights.write_bytes(b"\x00\x01garbage" * 50)
    elif kind == "missing":
        weights.unlink()
    elif kind == "config":
        (folder / "config.json").write_text("{")
    elif kind == "mask":
        (folder / "config.json").write_text(json.dumps(config(320, mask_token_id=5000, embedding_size=320)))
    elif kind == "architecture":
        (folder / "config.json").write_text(json.dumps(config(320, architectures=["Other"])))
    elif kind == "generation":
        (folder / "generation_config.json").write_text('{"max_new_tokens": -4}')
    return folder


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("truncated", "model.safetensors"),
        ("corrupt", "model.safetensors"),
        ("missing", "no model.safetensors"),
        ("config", "config.json"),
        ("mask", "mask_token_id"),
        ("architecture", "Other"),
        ("generation", "max_new_tokens = -4"),
    ],
)
def test_broken_checkpoints(run: Run, tmp_path: Path, kind: str, message: str) -> None:
    assert_refused(run("generate", "-m", broken(tmp_path / "m", kind), "x"), message)


def test_an_unknown_model(run: Run) -> None:
    assert_refused(run("generate", "-m", "flash-dllm/nope", "x"), "no such bundled model")
    assert_refused(run("generate", "-m", "./nope", "x"), "no such folder")


def test_debug_shows_the_traceback(run: Run, chat_folder: Path) -> None:
    outcome = run("generate", "-m", chat_folder, "-t", "-3", "x", "--debug")
    assert outcome.code == 2 and "Traceback" in outcome.err and "max_tokens=-3" in outcome.err


def test_an_answer_that_fails_is_exit_code_1(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import flash_dllm.loading

    load = flash_dllm.loading.load_model

    def broken_load(*args: object, **kw: object) -> object:
        model = load(*args, **kw)  # type: ignore[arg-type]
        model.norm.fill_(float("nan"))
        return model

    monkeypatch.setattr(flash_dllm.loading, "load_model", broken_load)
    outcome = run("generate", "-m", write_checkpoint(tmp_path / "m"), "x")
    assert outcome.code == 1 and "non-finite" in outcome.err


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_finished(chat_folder: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"the {i}"}) + "\n" for i in range(400)))
    options = (
        "-m",
        chat_folder,
        "-t",
        100,
        "--no-stop-at-eos",
        "--epsilon",
        1,
        "--file",
        source,
        "--output",
        out,
    )
    command = [sys.executable, "-m", "flash_dllm", "generate", *map(str, options)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=interruptible)
    deadline = time.monotonic() + 120
    while not (out.exists() and out.read_text().count("\n") >= 2):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in err and "Traceback" not in err
    kept = lines(out)
    assert 2 <= len(kept) < 400
    shutil.copy(out, tmp_path / "kept.jsonl")

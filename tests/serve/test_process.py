"""``flash-dllm serve`` as people start it: flags, config file, signals, kill and restart."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from flash_dllm import LLM, FlashDLLMError, SamplingParams
from flash_dllm.cli.serve import settle
from flash_dllm.serve.args import ServeArgs, methods
from flash_dllm.serve.server import build_service, listen
from tests.commands import Run
from tests.serve.support import WAIT, Process, in_background, until


def test_flags_win_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASH_DLLM_API_KEY", raising=False)
    file = tmp_path / "serve.yaml"
    file.write_text(
        yaml.safe_dump({"model": "a", "max-num-seqs": 3, "port": 1, "method": "dual", "options": {"x": 1}})
    )
    args = settle("b", {"port": 0, "method": [], "host": None}, ["y=2"], file)
    assert (args.model, args.port, args.max_num_seqs) == ("b", 0, 3)
    assert args.method == ("dual",) and args.options == {"x": 1, "y": 2} and args.api_key is None
    assert settle(None, {}, [], file).model == "a"
    monkeypatch.setenv("FLASH_DLLM_API_KEY", "secret")
    assert settle(None, {}, [], None).api_key == "secret"
    assert settle(None, {"api_key": "other"}, [], None).api_key == "other"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--port", "70000"), "port=70000"),
        (("--max-queue", "-1"), "max_queue=-1"),
        (("--method", "nothere"), "unknown cache 'nothere'"),
        (("--method", "none+nothere"), "unknown decoding 'nothere'"),
        (("--method", "none", "--method", "none"), "named twice"),
        (("--method", "none", "--cache", "dual"), "--method already names"),
        (("--method", "none", "--method", "dual", "-o", "window=4"), "options belong to one method"),
        (("--method", "none", "--method", "dual", "--max-num-seqs", "1"), "2 methods"),
        (("--preset", "nothere"), "unknown preset"),
        (("--log-level", "loud"), "log_level='loud'"),
        (("--max-model-len", "100000"), "max_model_len=100000"),
        (("--host", "not.a.host.invalid"), "cannot listen on not.a.host.invalid"),
        (("--config", "nothere.yaml"), "nothere.yaml"),
    ],
)
def test_wrong_flags_are_named(run: Run, chat_folder: Path, words: tuple[str, ...], said: str) -> None:
    outcome = run("serve", chat_folder, *(() if "--port" in words else ("--port", 0)), *words)
    assert outcome.code == 2 and said in outcome.err, outcome.err


def test_an_unknown_name_in_the_file(run: Run, chat_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("prot: 1\n")
    outcome = run("serve", chat_folder, "--config", file)
    assert outcome.code == 2 and "unknown option 'prot'" in outcome.err


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(FlashDLLMError, match=rf"cannot listen on 127.0.0.1:{port}"):
            listen("127.0.0.1", port)


def test_methods_share_weights_and_divide_the_slots(chat_folder: Path) -> None:
    args = ServeArgs(model=str(chat_folder), method=("none", "dual+threshold", "prefix"), max_num_seqs=5)  # type: ignore[call-arg]
    service = build_service(args)
    assert list(service.llms) == ["none", "dual+threshold", "prefix"] and service.default == "none"
    assert [llm.engine.slots for llm in service.llms.values()] == [2, 2, 1]
    assert len({id(llm.loaded) for llm in service.llms.values()}) == 1
    assert [llm.method.name for llm in service.llms.values()] == [
        "none+threshold", "dual+threshold", "prefix+threshold",
    ]  # fmt: skip
    assert service.models == (str(chat_folder),)


def test_a_preset_is_a_method_beside_others(chat_folder: Path) -> None:
    both = methods(ServeArgs(method=("dual",), preset="gsm8k"))  # type: ignore[call-arg]
    assert list(both) == ["dual", "gsm8k"]
    assert both["dual"].preset is None and both["gsm8k"].preset == "gsm8k"
    service = build_service(ServeArgs(model=str(chat_folder), preset="gsm8k", max_num_seqs=1))  # type: ignore[call-arg]
    (llm,) = service.llms.values()
    assert service.default == "gsm8k" and llm.method.name == "flash+verify"


def test_a_missing_extra_is_one_line(chat_folder: Path) -> None:
    """An interpreter that cannot import FastAPI."""
    code = (
        "import sys; sys.modules['fastapi'] = None\n"
        "from flash_dllm.cli import main\n"
        f"sys.argv = ['flash-dllm', 'serve', {str(chat_folder)!r}]\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT)
    assert done.returncode == 2 and "pip install 'flash-dllm[serve]'" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_sigterm_finishes_what_runs(chat_folder: Path, tmp_path: Path) -> None:
    """Streams that have begun end whole; new requests get 503 meanwhile; the exit code is 0."""
    server = Process(chat_folder, "--max-num-seqs", 1, "--served-model-name", "m", log=tmp_path / "log")
    body = {"model": "m", "prompt": ["the cat"] * 30, "max_tokens": 100, "stream": True,
            "diffusion": {"stop_at_eos": False}}  # fmt: skip
    try:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=WAIT) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            until(lambda: "draining" in server.log.read_text())
            late = httpx.post(
                f"{server.url}/v1/completions", json={"model": "m", "prompt": "x"}, timeout=WAIT
            )
            assert late.status_code == 503 and late.json()["error"]["code"] == "draining"
            assert httpx.get(f"{server.url}/ready", timeout=WAIT).status_code == 503
            assert httpx.get(f"{server.url}/health", timeout=WAIT).status_code == 200
            rest = list(lines)
        assert sum('"finish_reason": "length"' in line for line in rest) == 30
        assert rest[-2] == "data: [DONE]"
        assert server.process.wait(WAIT) == 0
    finally:
        server.stop()


@pytest.mark.slow
def test_a_second_signal_ends_at_once(chat_folder: Path, tmp_path: Path) -> None:
    server = Process(chat_folder, "--max-num-seqs", 1, "--served-model-name", "m", log=tmp_path / "log")
    body = {"model": "m", "prompt": ["the cat"] * 100, "max_tokens": 200, "diffusion": {"stop_at_eos": False}}
    try:
        thread, found = in_background(
            lambda: httpx.post(f"{server.url}/v1/completions", json=body, timeout=WAIT)
        )
        metric = "flash_dllm_slots_busy"
        until(lambda: f'{metric}{{method="none+threshold"}} 1.0' in httpx.get(f"{server.url}/metrics").text)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: "draining" in server.log.read_text())
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(WAIT)
        thread.join(WAIT)
        assert not thread.is_alive() and found, "the client is not left hanging"
    finally:
        server.stop()


@pytest.mark.slow
def test_kill_and_restart(chat_folder: Path, tmp_path: Path, offline: LLM) -> None:
    """Killed, clients get a connection error; started again on the same port, the same answers."""
    words = (chat_folder, "--max-num-seqs", 1, "--served-model-name", "m")
    first = Process(*words, log=tmp_path / "first")
    second: Process | None = None
    ask: dict[str, Any] = {"model": "m", "prompt": "the cat", "max_tokens": 100,
                           "extra_body": {"diffusion": {"stop_at_eos": False}}}  # fmt: skip
    try:
        client = first.client()

        def streamed() -> str:
            return "".join(c.choices[0].text for c in client.completions.create(stream=True, **ask))

        def forever(call: Any) -> None:
            while True:
                call()

        calls = [in_background(lambda: forever(streamed)) for _ in range(3)]
        calls += [in_background(lambda: forever(lambda: client.completions.create(**ask))) for _ in range(3)]
        total = 'outcome="ok"} '
        until(lambda: total in httpx.get(f"{first.url}/metrics").text)
        os.kill(first.process.pid, signal.SIGKILL)
        for thread, found in calls:
            thread.join(WAIT)
            assert not thread.is_alive(), "a client hangs"
            assert isinstance(found[0], openai.APIConnectionError | httpx.TransportError), found[0]
        first.process.wait(WAIT)
        second = Process(*words, log=tmp_path / "second", port=first.port)
        params = SamplingParams(max_tokens=100, stop_at_eos=False)
        text = client.completions.create(**ask).choices[0].text
        assert text == offline.generate("the cat", params)[0].text
    finally:
        first.stop()
        if second is not None:
            second.stop()


@pytest.mark.slow
def test_a_config_file_and_its_server(chat_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        yaml.safe_dump(
            {"method": ["none", "dual"], "max_num_seqs": 3, "served_model_name": ["a", "b"], "seed": 5}
        )
    )
    server = Process(
        chat_folder, "--config", file, "--max-queue", 7, log=tmp_path / "log", FLASH_DLLM_API_KEY="k"
    )
    try:
        with pytest.raises(openai.AuthenticationError):
            server.client("wrong").models.list()
        client = server.client("k")
        assert [m.id for m in client.models.list().data] == ["a", "b"]
        asked: dict[str, Any] = {"prompt": "so", "max_tokens": 8, "temperature": 1.0}
        found = client.completions.create(model="b", **asked)
        told = client.completions.create(model="a", seed=5, **asked)
        assert found.choices[0].text == told.choices[0].text, "the server's seed"
        assert "secret" not in server.log.read_text()
    finally:
        server.stop()


@pytest.mark.slow
def test_many_clients_of_one_process(chat_folder: Path, tmp_path: Path, offline: LLM) -> None:
    """Answers do not depend on who else asks."""
    params = SamplingParams(max_tokens=16, stop_at_eos=False)
    prompts = ["the cat", "so", "1 + 2 =", "ein Öl"]
    expected = [out.text for out in offline.generate(prompts, params)]
    server = Process(chat_folder, "--max-num-seqs", 3, "--served-model-name", "m", log=tmp_path / "log")
    wrong: list[str] = []

    def client(index: int) -> None:
        api = server.client()
        for turn in range(6):
            which = (index + turn) % 4
            text = api.completions.create(
                model="m", prompt=prompts[which], max_tokens=16,
                extra_body={"diffusion": {"stop_at_eos": False}},
            ).choices[0].text  # fmt: skip
            if text != expected[which]:
                wrong.append(text)

    try:
        threads = [threading.Thread(target=client, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
        assert not wrong and not any(t.is_alive() for t in threads)
    finally:
        server.stop()

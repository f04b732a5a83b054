"""README's "Serve" section, docs/serving.md, the examples and the deployment files are true."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from typer.main import get_command

from flash_dllm.cli.serve import app as command
from flash_dllm.serve.args import ServeArgs
from flash_dllm.serve.metrics import Metrics
from flash_dllm.serve.protocol import ChatRequest, CompletionRequest, Diffusion
from tests.serve.support import WAIT, Process
from tests.test_docs import ROOT, read

MODEL = "flash-dllm/tiny-dream"


def section(page: str, title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", read(page), re.DOTALL | re.MULTILINE)
    assert found is not None, title
    return found[1]


def blocks(text: str, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for name, block in found if name == language]


def serve_words(text: str) -> list[list[str]]:
    """The words after ``flash-dllm serve`` of each such command."""
    lines = "".join(blocks(text, "sh")).replace("\\\n", " ").split("\n")
    words = [shlex.split(line, comments=True) for line in lines]
    return [w[2:] for w in words if w[:2] == ["flash-dllm", "serve"]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """Started by the first command of the README, on a port of its own."""
    words = serve_words(section("README.md", "Serve"))[0]
    words = [w for i, w in enumerate(words) if w != "--port" and words[i - 1 : i] != ["--port"]]
    assert words[0] == MODEL
    running = Process(
        Path(words[0]), *words[1:], log=tmp_path_factory.mktemp("serve") / "log", FLASH_DLLM_API_KEY=""
    )
    yield running
    running.stop()


@pytest.mark.slow
def test_the_readme_commands_run(server: Process, tmp_path: Path) -> None:
    text = "".join(blocks(section("README.md", "Serve"), "sh")).replace("\\\n", " ")
    ran = 0
    for line in text.split("\n"):
        words = shlex.split(line.replace("http://127.0.0.1:8000", server.url), comments=True)
        if not words or words[:2] == ["flash-dllm", "serve"] or words[0] == "pip":
            continue
        words = [sys.executable if w == "python" else w for w in words]
        done = subprocess.run(words, capture_output=True, text=True, timeout=WAIT, cwd=ROOT)
        assert done.returncode == 0 and done.stdout, (words, done.stderr)
        assert '"error"' not in done.stdout
        ran += 1
    assert ran >= 2


@pytest.mark.slow
def test_the_readme_python_runs(server: Process, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks(section("README.md", "Serve"), "py")
    exec(compile(block.replace("http://127.0.0.1:8000", server.url), "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.slow
def test_the_other_serve_commands_start(tmp_path: Path) -> None:
    """Of the README (whose first is the fixture above) and of docs/serving.md, and its settings as a file."""
    texts = [section("README.md", "Serve"), read("docs/serving.md")]
    (settings,) = blocks(read("docs/serving.md"), "yaml")
    (tmp_path / "serve.yaml").write_text(settings)
    found = [words for text in texts for words in serve_words(text)]
    commands = [words for i, words in enumerate(found) if words not in found[:i]][1:]
    assert commands
    for words in [*commands, ["--config", "serve.yaml"]]:
        words = [str(tmp_path / w) if w == "serve.yaml" else w for w in words]
        words = [w for i, w in enumerate(words) if w != "--port" and words[i - 1 : i] != ["--port"]]
        running = Process(Path(words[0]), *words[1:], log=tmp_path / "log", FLASH_DLLM_API_KEY="")
        try:
            assert httpx.get(f"{running.url}/ready", timeout=WAIT).status_code == 200
        finally:
            running.stop()
            running.log.unlink()


def example(server: Process, *words: object) -> str:
    env = {**os.environ, "FLASH_DLLM_API_KEY": ""}
    done = subprocess.run(
        [str(w) for w in words], capture_output=True, text=True, timeout=WAIT, cwd=ROOT, env=env
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.mark.slow
def test_the_client_example(server: Process) -> None:
    out = example(server, sys.executable, "examples/openai_client.py", server.url)
    assert "19" in out.splitlines()[0]
    assert "Dear Clara" in out and "step 1: committed" in out and "filled in: ' a purple'" in out
    assert re.search(r"^Karl has a purple ring\. The ring of Karl is .+\.$", out, re.MULTILINE)
    assert "400: frequency_penalty is not supported" in out


@pytest.mark.slow
def test_the_curl_example(server: Process) -> None:
    out = example(server, "bash", "examples/curl.sh", server.url)
    assert "data: [DONE]" in out and '"object":"chat.completion"' in out
    assert 'flash_dllm_requests_total{endpoint="/v1/chat/completions",outcome="ok"}' in out


@pytest.mark.slow
def test_the_batch_example_resumes(server: Process, tmp_path: Path) -> None:
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    asked = [{"id": str(i), "prompt": f"What is {i} + 7?"} for i in range(5)]
    asked.append({"id": "bad", "messages": [{"role": "tool", "content": "x"}]})
    prompts.write_text("\n".join(map(json.dumps, asked)))
    words = [sys.executable, "examples/batch.py", prompts, answers, "--url", server.url, "--max-tokens", 32]
    assert "6 answers, 0 were there" in example(server, *words)
    found = {a["id"]: a for a in map(json.loads, answers.read_text().splitlines())}
    assert set(found) == {*map(str, range(5)), "bad"} and "role" in found["bad"]["error"]
    assert "12" in found["5" if "5" in found else "4"]["text"] or "11" in found["4"]["text"]
    answers.write_text("".join(line + "\n" for line in answers.read_text().splitlines()[:3]) + '{"id": "cut')
    done = sum("text" in json.loads(line) for line in answers.read_text().splitlines()[:3])
    assert f"{6 - done} answers, {done} were there" in example(server, *words)


def test_links_of_the_page() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", read("docs/serving.md")):
        name, _, anchor = target.partition("#")
        path = ROOT / "docs" / name
        assert path.exists(), target
        titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        assert not anchor or anchor in [t.lower().replace(" ", "-") for t in titles], target


def test_the_page_names_every_option_field_and_metric() -> None:
    text = read("docs/serving.md")
    own = set(ServeArgs.model_fields) - set(ServeArgs.__mro__[1].model_fields)  # type: ignore[attr-defined]
    for name in own:
        assert f"`--{name.replace('_', '-')}`" in text, name
    for model in (ChatRequest, CompletionRequest, Diffusion):
        for name in model.model_fields:
            assert re.search(rf"`{name}[`:.]", text), name
    for family in Metrics().registry.collect():
        assert family.name.removeprefix("flash_dllm_") in text, family.name


def test_every_flag_has_its_default_from_the_model() -> None:
    flags = {o for p in get_command(command).params for o in p.opts}
    assert {f"--{name.replace('_', '-')}" for name in ServeArgs.model_fields} - {
        "--model",
        "--options",
    } <= flags


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((ROOT / name).read_text(encoding="utf-8")))


def test_the_manifests_fit_the_server() -> None:
    service, deployment = documents("deploy/kubernetes.yaml")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["args"][0] == "serve"
    flags = dict(arg.removeprefix("--").split("=") for arg in container["args"][2:])
    args = ServeArgs.model_validate({k.replace("-", "_"): yaml.safe_load(v) for k, v in flags.items()})
    assert args.drain_timeout < pod["terminationGracePeriodSeconds"]
    paths = {probe: container[probe]["httpGet"]["path"] for probe in container if probe.endswith("Probe")}
    assert paths == {"startupProbe": "/health", "livenessProbe": "/health", "readinessProbe": "/ready"}
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    (compose,) = documents("deploy/docker-compose.yaml")
    words = compose["services"]["flash-dllm"]["command"]
    assert words[0] == "serve" and "FLASH_DLLM_API_KEY" in compose["services"]["flash-dllm"]["environment"]
    known = {o for p in get_command(command).params for o in p.opts}
    assert {w for w in words if w.startswith("--")} <= known
    (prometheus,) = documents("deploy/prometheus.yaml")
    assert prometheus["scrape_configs"][0]["static_configs"][0]["targets"] == ["flash-dllm:8000"]


def test_the_docker_image_copies_what_is_there() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        for name in line.split():
            assert (ROOT / name).exists(), name
            assert f"!{name}" in (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    assert '"serve", "--host", "0.0.0.0"' in text

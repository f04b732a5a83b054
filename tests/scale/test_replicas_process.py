"""``flash-dllm serve --replicas`` as a process: it serves, and SIGTERM ends it after what runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import httpx
import pytest

from tests.scale.cluster import LONG, WAIT


def wait_for(log: Path, pattern: str, process: subprocess.Popen[bytes]) -> str:
    """The first group of ``pattern`` once the log has it."""
    pause = threading.Event()
    for _ in range(int(WAIT / 0.1)):
        text = log.read_text()
        if found := re.search(pattern, text):
            return found[1]
        assert process.poll() is None, text
        pause.wait(0.1)
    raise AssertionError(log.read_text())


@pytest.mark.slow
def test_a_request_that_runs_is_finished(chat_folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    words = [sys.executable, "-m", "flash_dllm", "serve", str(chat_folder), "--replicas", "1", "--port", "0"]
    words += [
        "--device",
        "cpu",
        "--served-model-name",
        "tiny",
        "--method",
        "none+greedy",
        "--max-num-seqs",
        "1",
    ]
    body = {"model": "tiny", "prompt": "the cat", "max_tokens": LONG}
    with (
        tempfile.TemporaryDirectory(prefix="fd", dir="/tmp", ignore_cleanup_errors=True) as folder,
        open(log, "wb") as file,
        ThreadPoolExecutor(8) as pool,
    ):
        env = {**os.environ, "RAY_TMPDIR": folder, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(words, stdout=file, stderr=file, env=env)
        try:
            url = wait_for(log, r"serving 1 replicas on (http://\S+)", process)

            def post() -> int:
                return httpx.post(
                    f"{url}/v1/completions", json=body, timeout=WAIT, trust_env=False
                ).status_code

            # One slot: when the first is answered, the others wait or run.
            sent = [pool.submit(post) for _ in range(6)]
            done, running = wait(sent, WAIT, FIRST_COMPLETED)
            assert done and running
            process.send_signal(signal.SIGTERM)
            assert [future.result(WAIT) for future in sent] == [200] * 6
            assert process.wait(WAIT) == 0
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(WAIT)

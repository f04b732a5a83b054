"""The wheel holds everything, installs and answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WEIGHTS = ROOT / "src" / "flash_dllm" / "weights"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="building without a network needs hatchling here")
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_holds_code_and_weights(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src" / "flash_dllm"
    ours = [p for p in package.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    missing = [p for p in ours if str(p.relative_to(package.parent)) not in names]
    assert not missing
    assert not [n for n in names if n.startswith("tests")]
    entry = next(n for n in names if n.endswith("entry_points.txt"))
    assert b"flash-dllm = flash_dllm.cli:main" in zipfile.ZipFile(wheel).read(entry)


@pytest.mark.slow
def test_the_wheel_installs_and_answers(wheel: Path, tmp_path: Path, chat_folder: Path) -> None:
    """A fresh environment with the wheel alone; dependencies are read from the environment of the tests."""
    home = tmp_path / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    target = sysconfig.get_path("purelib", "venv", {"base": str(home), "platbase": str(home)})
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", target, str(wheel)], check=True, timeout=240)
    shared = sysconfig.get_path("purelib")
    Path(target, "shared.pth").write_text(shared + "\n")
    model = (
        "flash-dllm/tiny-llada" if (WEIGHTS / "tiny-llada" / "model.safetensors").exists() else chat_folder
    )
    command = [
        str(home / "bin" / "python"),
        "-m",
        "flash_dllm",
        "generate",
        "-m",
        str(model),
        "-t",
        "8",
        "--json",
        "2+3?",
    ]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outputs"][0]["nfe"] > 0
    where = subprocess.run(
        [command[0], "-c", "import flash_dllm; print(flash_dllm.__file__)"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert where.stdout.startswith(str(home)), "the installed wheel ran, not the checkout"

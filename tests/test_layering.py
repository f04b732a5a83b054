"""Imports go one way (docs/architecture.md)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "flash_dllm"
SURFACE = {
    "llm", "tensor_parallel", "loading", "requests", "results", "options", "loop", "stream", "infill", "progress",
    "memory",
}  # fmt: skip
CONSUMERS = {"serve", "eval", "bench", "web", "scale"}
LEAVES = {"params", "outputs", "trace", "errors"}
ALLOWED = {
    "params": set(),
    "outputs": set(),
    "trace": set(),
    "errors": set(),
    "progress": set(),
    "memory": {"models", "errors"},
    "infill": {"errors"},
    "kernels": {"errors"},
    "models": {"kernels", "errors"},
    "core": {"kernels", "models", "errors"},
    "methods": {"core", "kernels", "models", "errors"},
    "engine": {"core", "methods", "kernels", "models", "errors"},
    **{
        name: {"engine", "methods", "core", "models", "kernels", "parallel", "quant", *SURFACE, *LEAVES}
        for name in ("llm", "tensor_parallel", "loading", "requests", "results", "options", "loop", "stream")
    },
    "train": {"models", "kernels", "errors"},
    "parallel": {"models", "kernels", "errors"},
    "quant": {"models", "kernels", "errors"},
    "cli": {"engine", "methods", "models", "train", "core", "kernels", *CONSUMERS, *SURFACE, *LEAVES},
}


def parts() -> list[str]:
    """Folders and modules below the package."""
    names = {
        p.name.removesuffix(".py")
        for p in ROOT.iterdir()
        if p.suffix == ".py" or (p / "__init__.py").exists()
    }
    return sorted(names - {"__init__", "__main__"})


def imports(file: Path) -> set[str]:
    """Parts of the package that a file imports, wherever in it."""
    found: set[str] = set()
    package = ("flash_dllm", *file.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            origin = ".".join((*base, node.module)) if node.module else ".".join(base)
            names = [f"{origin}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("flash_dllm.")}
    return found - {"__version__"}


def files(part: str) -> list[Path]:
    single = ROOT / f"{part}.py"
    return [single] if single.exists() else sorted((ROOT / part).rglob("*.py"))


@pytest.mark.parametrize("part", parts())
def test_imports_go_one_way(part: str) -> None:
    if part in CONSUMERS:
        pytest.skip("consumers may import anything below them")
    assert part in ALLOWED, f"{part}: say in test_layering.py and docs/architecture.md what it may import"
    for file in files(part):
        extra = imports(file) - ALLOWED[part] - {part}
        assert not extra, f"{file.relative_to(ROOT)} imports {', '.join(sorted(extra))}"


def test_a_relative_import_is_seen(tmp_path: Path) -> None:
    assert "core" in imports(ROOT / "methods" / "fast_dllm.py")
    assert "cache" not in imports(ROOT / "core" / "method.py")

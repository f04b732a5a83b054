"""The benchmarks that papers on diffusion models report, and how the harness gets them from local files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flash_dllm.eval.errors import EvalError, need

SUBJECTS = (
    "algebra", "counting_and_prob", "geometry", "intermediate_algebra", "num_theory", "prealgebra", "precalc",
)  # fmt: skip
TEST_IDS = range(11, 511)
"""Task ids of MBPP's test split."""


@dataclass(frozen=True)
class Task:
    """A benchmark.

    Attributes:
        name: of the harness task.
        config: its file below ``lm_eval/tasks``.
        files: split -> file names below the data folder, tried in this order, without ``.jsonl`` or ``.jsonl.gz``.
        fields: what each row must have.
        shots: examples in the prompt by default.
        length: answer tokens of the papers' two settings.
        code: scored by running what the model wrote.
    """

    name: str
    config: str
    files: dict[str, tuple[str, ...]]
    fields: tuple[str, ...]
    shots: int
    length: tuple[int, int] = (256, 512)
    code: bool = False


def _math(subject: str) -> Task:
    name = f"minerva_math_{subject}"
    return Task(
        name,
        f"minerva_math/{name}.yaml",
        {"test": (f"math/{subject}", f"math/test/{subject}")},
        ("problem", "solution"),
        4,
    )


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "gsm8k", "gsm8k/gsm8k.yaml",
            {"train": ("gsm8k/train",), "test": ("gsm8k/test",)}, ("question", "answer"), 5,
        ),
        Task(
            "minerva_math500", "minerva_math/minerva_math500.yaml",
            {"test": ("math500/math500", "math500/test")}, ("problem", "solution"), 4,
        ),
        Task(
            "humaneval", "humaneval/humaneval.yaml",
            {"test": ("humaneval/humaneval", "humaneval/HumanEval", "humaneval/test")},
            ("task_id", "prompt", "entry_point", "canonical_solution", "test"), 0, code=True,
        ),
        Task(
            "mbpp", "mbpp/mbpp.yaml", {"test": ("mbpp/mbpp-test", "mbpp/test", "mbpp/mbpp")},
            ("task_id", "text", "code", "test_list"), 3, code=True,
        ),
        *map(_math, SUBJECTS),
    )
}  # fmt: skip
GROUPS = {"minerva_math": tuple(f"minerva_math_{subject}" for subject in SUBJECTS)}
"""Names that stand for several tasks; their score is the mean over all problems."""


def expand(names: Sequence[str]) -> list[str]:
    """Task names with groups taken apart, in order, each once."""
    return list(dict.fromkeys(task for name in names for task in GROUPS.get(name, (name,))))


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSON Lines file, packed or not.

    Raises:
        EvalError: names the file.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for line in file:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("not an object")
                yield row
    except (ValueError, EOFError, gzip.BadGzipFile) as error:
        raise EvalError(f"{path}: cannot be read as JSON Lines ({error})") from error


def local_files(task: Task, folder: Path) -> dict[str, Path]:
    """The file of each split of a task below ``folder``.

    Raises:
        EvalError: none of the names is there, or its first row lacks a field.
    """
    found = {}
    for split, names in task.files.items():
        paths = [folder / f"{name}{suffix}" for name in names for suffix in (".jsonl", ".jsonl.gz")]
        path = next((p for p in paths if p.exists()), None)
        if path is None:
            tried = ", ".join(str(p.relative_to(folder)) for p in paths)
            raise EvalError(
                f"task {task.name}: no file for its {split} split in {folder} (looked for {tried})"
            )
        first = next(read_rows(path), None)
        missing = [f for f in task.fields if first is None or f not in first]
        if missing:
            raise EvalError(f"{path}: task {task.name} needs rows with the field {missing[0]!r}")
        found[split] = path
    return found


def write_configs(names: Sequence[str], data: Path, folder: Path) -> Path:
    """Task files that read local rows and leave everything else, prompts, filters and metrics, to the harness's own.

    Args:
        names: tasks of :data:`TASKS`.
        data: folder with the rows.
        folder: where to write; a subfolder is made.

    Returns:
        The folder for the harness's ``include_path``.

    Raises:
        EvalError: an unknown task, or its files are not there.
    """
    need("lm_eval", "an evaluation")
    spec = find_spec("lm_eval")
    assert spec is not None and spec.submodule_search_locations is not None
    installed = Path(next(iter(spec.submodule_search_locations))) / "tasks"
    target = folder / "tasks"
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        if name not in TASKS:
            raise EvalError(
                f"task {name!r}: no local files are known for it; known: {', '.join([*TASKS, *GROUPS])}"
            )
        task = TASKS[name]
        files = {split: str(_mbpp_test(path, target) if name == "mbpp" else path.resolve())
                 for split, path in local_files(task, data).items()}  # fmt: skip
        settings = {
            "include": str(installed / task.config),
            "task": name,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")},
        }
        # JSON is YAML, and quotes every name as it should be.
        (target / f"{name}.yaml").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    return target


def _mbpp_test(path: Path, folder: Path) -> Path:
    """A file of the test split alone: the full data set has 974 rows."""
    rows = list(read_rows(path))
    kept = [row for row in rows if row["task_id"] in TEST_IDS]
    if len(kept) == len(rows):
        return path.resolve()
    made = folder / "mbpp-test.jsonl"
    made.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    return made.resolve()

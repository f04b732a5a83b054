"""Local files for the harness, and what it is told about them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from flash_dllm.eval import errors, tasks
from flash_dllm.eval.errors import EvalError
from flash_dllm.eval.tasks import GROUPS, TASKS, expand, local_files, read_rows, write_configs
from tests.eval.rows import rows, write


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    write(folder / "gsm8k" / "train.jsonl", rows("gsm8k-train"))
    write(folder / "gsm8k" / "test.jsonl", rows("gsm8k-test"))
    write(folder / "mbpp" / "mbpp.jsonl", rows("mbpp"))
    return folder


def config(folder: Path, name: str) -> dict:
    return json.loads((folder / f"{name}.yaml").read_text(encoding="utf-8"))


def test_groups_are_taken_apart_and_nothing_is_there_twice() -> None:
    assert expand(["gsm8k", "minerva_math", "gsm8k"]) == ["gsm8k", *GROUPS["minerva_math"]]
    assert len(GROUPS["minerva_math"]) == 7


def test_a_config_changes_only_where_the_rows_come_from(data: Path, tmp_path: Path) -> None:
    made = config(write_configs(["gsm8k"], data, tmp_path / "work"), "gsm8k")
    assert set(made) == {"include", "task", "dataset_path", "dataset_name", "dataset_kwargs"}
    assert made["task"] == "gsm8k" and Path(made["include"]).is_absolute() and Path(made["include"]).exists()
    files = made["dataset_kwargs"]["data_files"]
    assert {split: Path(path).name for split, path in files.items()} == {
        "train": "train.jsonl",
        "test": "test.jsonl",
    }


@pytest.mark.parametrize("name", TASKS)
def test_every_task_has_a_file_in_the_installed_harness(name: str) -> None:
    spec = tasks.find_spec("lm_eval")
    if spec is None:
        pytest.skip("needs lm_eval")
    (home,) = spec.submodule_search_locations or ()
    text = (Path(home) / "tasks" / TASKS[name].config).read_text(encoding="utf-8")
    assert f"task: {name}\n" in text


def test_mbpp_is_cut_down_to_its_test_split(data: Path, tmp_path: Path) -> None:
    made = config(write_configs(["mbpp"], data, tmp_path / "work"), "mbpp")
    kept = list(read_rows(Path(made["dataset_kwargs"]["data_files"]["test"])))
    assert [row["task_id"] for row in kept] == [11, 367]
    write(data / "mbpp" / "mbpp-test.jsonl", kept)
    made = config(write_configs(["mbpp"], data, tmp_path / "work"), "mbpp")
    assert made["dataset_kwargs"]["data_files"]["test"] == str((data / "mbpp" / "mbpp-test.jsonl").resolve())


def test_packed_files_are_found_and_read(tmp_path: Path) -> None:
    path = tmp_path / "humaneval" / "humaneval.jsonl.gz"
    path.parent.mkdir()
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows("humaneval"))
    assert local_files(TASKS["humaneval"], tmp_path) == {"test": path}
    assert [row["task_id"] for row in read_rows(path)] == ["HumanEval/0", "HumanEval/50"]


def test_what_is_missing_is_named(data: Path, tmp_path: Path) -> None:
    with pytest.raises(EvalError, match=r"humaneval.*test split.*humaneval/humaneval\.jsonl"):
        write_configs(["humaneval"], data, tmp_path)
    with pytest.raises(EvalError, match="task 'arc_easy'"):
        write_configs(["arc_easy"], data, tmp_path)
    write(data / "gsm8k" / "test.jsonl", [{"question": "?"}])
    with pytest.raises(EvalError, match=r"test\.jsonl: .*'answer'"):
        local_files(TASKS["gsm8k"], data)
    (data / "gsm8k" / "test.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(EvalError, match="'question'"):
        local_files(TASKS["gsm8k"], data)


@pytest.mark.parametrize("content", [b"{", b"[1]\n", b"\xff\n"])
def test_a_file_that_cannot_be_read_is_named(content: bytes, tmp_path: Path) -> None:
    for name in ("x.jsonl", "x.jsonl.gz"):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(EvalError, match="cannot be read"):
            list(read_rows(path))


def test_a_missing_extra_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    with pytest.raises(EvalError, match=r"pip install 'flash-dllm\[eval\]'"):
        write_configs(["gsm8k"], data, tmp_path)

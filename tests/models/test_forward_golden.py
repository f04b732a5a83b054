"""Every forward.safetensors below --golden-dir, against the reference forward pass in float32.

A family that is not supported yet is reported as xfail with its architecture.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from flash_dllm.models import FAMILIES, Model, load_model
from flash_dllm.models.reference import forward, shift_logits

TOLERANCE = 5e-4


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "sequence" not in metafunc.fixturenames:
        return
    root = Path(
        metafunc.config.getoption("golden_dir", None) or metafunc.config.rootpath / "tests" / "golden"
    )
    cases = []
    for file in sorted(root.glob("*/forward.safetensors")):
        raw = json.loads((file.parent / "config.json").read_text())
        supported = (raw["architectures"][0], raw["model_type"]) in FAMILIES
        marks = (
            [] if supported else [pytest.mark.xfail(reason=f"{raw['architectures'][0]} not supported yet")]
        )
        with safe_open(file, "pt") as golden:
            sequences = sorted(n.partition(".")[0] for n in golden.keys() if n.endswith(".input_ids"))  # noqa: SIM118
        cases += [pytest.param(file, s, id=f"{file.parent.name}-{s}", marks=marks) for s in sequences]
    assert cases, f"no forward.safetensors below {root}"
    metafunc.parametrize(("file", "sequence"), cases)


@cache
def _model(folder: Path) -> Model:
    return load_model(folder, dtype="float32")


def test_logits_match_golden(file: Path, sequence: str) -> None:
    model = _model(file.parent)
    with safe_open(file, "pt") as opened:
        made_with = opened.metadata().get("model_sha256")  # some files do not say
    assert made_with in (None, hashlib.sha256((file.parent / "model.safetensors").read_bytes()).hexdigest())
    golden = {k.partition(".")[2]: t for k, t in load_file(file).items() if k.startswith(f"{sequence}.")}
    ids, expected, mask = golden["input_ids"], golden["logits"], golden.get("attention_mask")
    logits = forward(model, ids.view(-1, ids.shape[-1]), mask, golden.get("position_ids")).view_as(expected)
    assert logits.isfinite().all()
    compared = torch.ones_like(ids).bool() if mask is None else mask.bool()
    torch.testing.assert_close(logits[compared], expected[compared], atol=TOLERANCE, rtol=0)
    if "shifted_logits" in golden:
        assert model.config.shift
        torch.testing.assert_close(shift_logits(logits), golden["shifted_logits"], atol=TOLERANCE, rtol=0)

"""Golden folders: finding them, running a case through the engine, comparing step by step."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from flash_dllm.core.noise import Noise, TorchCPUNoise
from flash_dllm.core.state import Canvas
from flash_dllm.core.step import Vocabulary
from flash_dllm.engine.engine import Engine
from flash_dllm.engine.observe import SlotStep, slot_steps
from flash_dllm.engine.request import Finished, Request
from flash_dllm.methods import build_method
from flash_dllm.models.layers import Model
from flash_dllm.models.load import load_model

MASK, EOS, EOT, VOCAB = 511, 510, 509, 512
CONFIDENCE_TOLERANCE = 2e-4
ENTROPY_TOLERANCE = 1e-3


@dataclass(frozen=True)
class TraceFile:
    """A trace and the model folder it belongs to."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name.removesuffix(".gz").removesuffix(".json")

    @property
    def folder(self) -> Path:
        return self.path.parent.parent

    @property
    def label(self) -> str:
        return f"{self.folder.name}/{self.name}"

    def read(self) -> dict[str, Any]:
        raw = self.path.read_bytes()
        if self.path.suffix == ".gz":
            raw = gzip.decompress(raw)
        data: dict[str, Any] = json.loads(raw)
        return data


def find_traces(root: Path) -> list[TraceFile]:
    """Every trace below ``root``, plain or gzipped."""
    found = [p for p in root.glob("*/traces/*") if p.name.endswith((".json", ".json.gz"))]
    return [TraceFile(p) for p in sorted(found)]


def find_models(root: Path) -> list[Path]:
    """Every model folder below ``root``."""
    return sorted(p.parent for p in root.glob("*/config.json"))


@lru_cache
def golden_model(folder: Path, device: str = "cpu") -> Model:
    return load_model(str(folder), dtype="float32", device=device)


@lru_cache
def model_sha256(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@dataclass
class Setup:
    """How to run a trace with our engine.

    ``sure_in_full``: whole passes list the probability of what they commit, whatever ranks elsewhere.
    """

    cache: str
    decoding: str
    numbers: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    schedule: str | None = None
    seed: int | None = None
    tolerance: float = CONFIDENCE_TOLERANCE
    sure_in_full: bool = False


SetupFor = Callable[[dict[str, Any], str], Setup | None]


def build_engine(
    model: Model, setup: Setup, *, slots: int, positions: int, noise: Noise | None = None
) -> Engine:
    method = build_method(
        setup.cache, setup.decoding, family=model.config.family, schedule=setup.schedule, **setup.options
    )
    vocabulary = Vocabulary(VOCAB, MASK, eos_ids=(EOS,), quiet_ids=(EOS, EOT))
    return Engine(model, method, vocabulary, slots=slots, positions=positions, noise=noise)


def make_request(name: str, prompt: list[int], length: int, numbers: dict[str, Any]) -> Request:
    """A request with ``length`` masks after ``prompt``; fills the whole length unless numbers say otherwise."""
    numbers = {"stop_at_eos": False, **numbers}
    masked = [False] * len(prompt) + [True] * length
    shadow = None
    if numbers.get("cfg_scale", 0) > 0:
        shadow = Canvas([MASK] * (len(prompt) + length), masked, numbers=numbers)
    return Request(name, Canvas(prompt + [MASK] * length, masked, (EOS,), numbers), shadow)


def run_case(model: Model, setup: Setup, prompt: list[int], length: int) -> tuple[list[SlotStep], Finished]:
    """Decode one prompt alone; returns its steps and how it ended."""
    noise = TorchCPUNoise(setup.seed, VOCAB) if setup.seed is not None else None
    slots = 2 if setup.numbers.get("cfg_scale", 0) > 0 else 1
    engine = build_engine(model, setup, slots=slots, positions=len(prompt) + length, noise=noise)
    steps: list[SlotStep] = []
    engine.observer = lambda e, record: steps.extend(slot_steps(e, record))
    engine.add(make_request("golden", prompt, length, setup.numbers))
    ended: list[Finished] = []
    while not engine.idle:
        ended += engine.step()
    return steps, ended[0]


def close(ours: float, theirs: float, tolerance: float) -> bool:
    return abs(ours - theirs) <= tolerance


def check_step(index: int, ours: SlotStep, theirs: dict[str, Any], setup: Setup) -> None:
    """A step of format golden-trace/1: same rows, same commits, same confidences."""
    start, end = theirs["query"]
    assert ours.passes[0].positions == list(range(start, end)), f"pass {index}: rows recomputed"
    commits = {m.pos: m for m in ours.commits()}
    expected = dict(zip(theirs["positions"], theirs["tokens"], strict=True))
    assert {p: m.token for p, m in commits.items()} == expected, f"pass {index}: commits"
    by_prob = setup.sure_in_full and theirs["pass_kind"] == "full"
    for pos, confidence in zip(theirs["positions"], theirs["confidence"], strict=True):
        seen = commits[pos].prob if by_prob else commits[pos].confidence
        assert close(seen, confidence, setup.tolerance), (
            f"pass {index}, position {pos}: confidence {seen} against {confidence}"
        )

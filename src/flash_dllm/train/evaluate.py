"""Accuracy and tokens a forward for each task family, and the loss by noise level, on questions training
never sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flash_dllm.train.data import MASKABLE, Source, encode_with
from flash_dllm.train.model import StackedTransformer
from flash_dllm.train.sample import Decoded, decode
from flash_dllm.train.tasks import FAMILIES, WEIGHTS, Sample, Split, check, make, wrong_marks
from flash_dllm.train.tokenizer import EOS, MASK, load_tokenizer

WIDTH = 384


@dataclass(frozen=True, slots=True)
class Setting:
    """How to decode: block length, confidence threshold (> 1 is greedy), response length."""

    name: str
    block: int = 32
    threshold: float = 0.9
    length: int = 192


SETTINGS = (
    Setting("b32 greedy", threshold=2.0),
    Setting("b32 0.9"),
    Setting("b32 0.7", threshold=0.7),
    Setting("b32 0.5", threshold=0.5),
)
LEFT_TO_RIGHT = (Setting("left to right", block=1, threshold=2.0),)


def questions(count: int, split: Split, first: int = 0) -> list[Sample]:
    """About `count` questions: 30 % word problems, the rest in equal parts; seeds from `first` on."""
    parts = {
        family: max(1, round(count * (0.3 if family == "gsm" else 0.7 / (len(WEIGHTS) - 1))))
        for family in FAMILIES
    }
    return [make(family, first + i, split) for family, number in parts.items() for i in range(number)]


def canvases(samples: Sequence[Sample], tokenizer_path: Path, length: int) -> list[list[int]]:
    """The ids a decoder starts from: prompt and masks, or the text with its gaps masked."""
    rows = encode_with(list(samples), load_tokenizer(tokenizer_path))
    result = []
    for sample, (ids, hidden) in zip(samples, rows, strict=True):
        if sample.gaps:
            gaps = set(hidden)
            result.append([MASK if i in gaps else token for i, token in enumerate(ids)])
        else:
            result.append(ids[: hidden[0]] + [MASK] * length)
    return result


def run(
    forward: Callable[[Tensor], Tensor],
    samples: Sequence[Sample],
    setting: Setting,
    tokenizer_path: Path,
    device: torch.device,
    batch: int = 512,
    until: float = math.inf,
) -> tuple[list[bool], list[Decoded], list[str]]:
    """Decodes and checks all samples. Returns verdicts, decoded rows and texts, in the samples' order."""
    tokenizer = load_tokenizer(tokenizer_path)
    starts = canvases(samples, tokenizer_path, setting.length)
    decoded: list[Decoded] = []
    for i in range(0, len(starts), batch):
        decoded += decode(
            forward, starts[i : i + batch], setting.block, setting.threshold, WIDTH, device, until
        )
    texts, verdicts = [], []
    for sample, start, row in zip(samples, starts, decoded, strict=True):
        # A canvas is judged as a whole, so what stood before its first gap belongs to the text.
        lead = start[1 : start.index(MASK)] if sample.gaps else []
        tail = start[len(start) - start[::-1].index(MASK) : -1] if sample.gaps else []
        text = tokenizer.decode(lead + row.ids + tail, skip_special_tokens=True)
        texts.append(text)
        verdicts.append(check(sample, text))
    return verdicts, decoded, texts


def interval(right: int, count: int) -> tuple[float, float]:
    """Wilson 95 % interval of a rate, in percent."""
    z, p = 1.96, right / count
    middle, spread = p + z * z / (2 * count), z * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count))
    return tuple(round(100 * (middle + s * spread) / (1 + z * z / count), 1) for s in (-1, 1))  # type: ignore


def table(
    samples: Sequence[Sample], verdicts: Sequence[bool], rows: Sequence[Decoded], texts: Sequence[str]
) -> dict[str, Any]:
    """Per family and over all: count, accuracy in percent with its interval, tokens a forward pass, wrong
    marks.
    """
    result: dict[str, Any] = {}
    for family in (*FAMILIES, "all"):
        chosen = [i for i, s in enumerate(samples) if family in (s.family, "all")]
        if not chosen:
            continue
        right = sum(verdicts[i] for i in chosen)
        result[family] = {
            "n": len(chosen),
            "accuracy": round(100 * right / len(chosen), 1),
            "interval": interval(right, len(chosen)),
            "tokens_per_forward": round(
                sum(rows[i].tokens for i in chosen) / sum(rows[i].passes for i in chosen), 2
            ),
        }
    marks = [
        (wrong_marks(t), t.count("<<")) for s, t in zip(samples, texts, strict=True) if s.family == "gsm"
    ]
    result["wrong_marks_percent"] = round(
        100 * sum(w for w, _ in marks) / max(1, sum(n for _, n in marks)), 2
    )
    return result


def accuracy(
    forward: Callable[[Tensor], Tensor],
    count: int,
    settings: Sequence[Setting],
    tokenizer_path: Path,
    device: torch.device,
    splits: Sequence[Split] = ("dev", "heldout"),
    until: float = math.inf,
) -> dict[str, Any]:
    """Tables by split and setting, and a few decoded examples. Stops early (and says so) at `until`
    (monotonic).
    """
    result: dict[str, Any] = {"tables": {}, "examples": [], "stopped_early": False}
    for split in splits:
        samples = questions(count, split)
        for setting in settings:
            try:
                verdicts, rows, texts = run(forward, samples, setting, tokenizer_path, device, until=until)
            except TimeoutError:
                result["stopped_early"] = True
                return result
            result["tables"][f"{split} {setting.name}"] = table(samples, verdicts, rows, texts)
            if setting.name in ("b32 0.9", "left to right"):
                result["examples"] += [
                    {"split": split, "family": s.family, "prompt": s.prompt_text, "answer": t, "right": v}
                    for s, t, v in list(zip(samples, texts, verdicts, strict=True))[:: max(1, count // 40)]
                ]
    return result


def held_batch(source: Source, rows: int, length: int = 256) -> Tensor:
    """A fixed packed batch int16 [rows, length] of dev questions, for the loss during training."""
    samples = [s for s in questions(rows * 2, "dev", first=10_000) if not s.gaps]
    encoded = [r for r in encode_with(samples, load_tokenizer(Path(source.tokenizer))) if len(r[0]) <= length]
    step = max(1, len(encoded) // rows)
    packed = torch.full((rows, length), EOS, dtype=torch.int16)
    for line, (ids, hidden) in zip(packed, encoded[::step][:rows], strict=False):
        line[: len(ids)] = torch.tensor(ids, dtype=torch.int16)
        # Padding is left out: it is easy and would hide changes.
        line[hidden] += MASKABLE
    return packed


@torch.no_grad()
def loss_by_noise(model: StackedTransformer, packed: Tensor, seed: int = 7) -> dict[str, float]:
    """Mean cross entropy of hidden tokens (nats) for t in (.1, .3, .5, .7, .9, 1); causal: of all, under
    't=1'.
    """
    flags, tokens = packed >= MASKABLE, (packed & (MASKABLE - 1)).long()
    generator = torch.Generator(device=packed.device).manual_seed(seed)
    noise = torch.rand(packed.shape, device=packed.device, generator=generator)
    result = {}
    for t in (1.0,) if model.shape.causal else (0.1, 0.3, 0.5, 0.7, 0.9, 1.0):
        hidden = flags & (noise < t)
        logits = model.logits(tokens if model.shape.causal else torch.where(hidden, MASK, tokens))
        result[f"t={t:g}"] = round(float(F.cross_entropy(logits[hidden].float(), tokens[hidden])), 5)
    return result

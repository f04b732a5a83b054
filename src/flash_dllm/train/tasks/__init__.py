"""Tasks with checkable answers for training and measuring small masked diffusion models.

`make(family, seed, split)` is deterministic on every Python version. Three things keep test questions out of
training: seeds of different splits are mixed with different salts, a hash class of the question's text
belongs to each split (so no two splits share a question whatever their seeds), and `heldout` questions use
templates training never draws.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

from flash_dllm.train.tasks.basic import arith, check_ending, check_last_number, convert, lists
from flash_dllm.train.tasks.code import check_code, check_json, code, extract
from flash_dllm.train.tasks.facts import fact
from flash_dllm.train.tasks.grammar import Draw
from flash_dllm.train.tasks.gsm import check_gsm, gsm, wrong_marks
from flash_dllm.train.tasks.infill import check_infill, infill
from flash_dllm.train.tasks.prose import check_letter, check_story, letter, story
from flash_dllm.train.tasks.sample import Parts, Sample, render
from flash_dllm.train.tasks.talk import chat, check_chat

__all__ = ["FAMILIES", "WEIGHTS", "Sample", "Split", "check", "make", "mixture", "render", "wrong_marks"]

Split = Literal["train", "dev", "test", "heldout"]

_MAKERS: dict[str, tuple[Callable[[Draw], Parts], Callable[[Mapping[str, Any], str], bool]]] = {
    "gsm": (gsm, check_gsm),
    "arith": (arith, check_last_number),
    "list": (lists, check_ending),
    "convert": (convert, check_ending),
    "chat": (chat, check_chat),
    "fact": (fact, check_chat),
    "code": (code, check_code),
    "json": (extract, check_json),
    "story": (story, check_story),
    "letter": (letter, check_letter),
    "infill": (infill, check_infill),
}
FAMILIES = tuple(_MAKERS)
WEIGHTS = {
    "gsm": 0.46,
    "arith": 0.07,
    "list": 0.09,
    "convert": 0.07,
    "chat": 0.07,
    "fact": 0.03,
    "code": 0.06,
    "json": 0.05,
    "story": 0.04,
    "letter": 0.03,
    "infill": 0.03,
}
_SALT = {"train": 1, "dev": 2, "test": 3, "heldout": 4}
_CLASSES = 16
_FEW_SHOT = {"train": 0.07, "dev": 0.0, "test": 0.0, "heldout": 0.0}
_MASK = (1 << 64) - 1


def _mix(*values: int) -> int:
    """A 64-bit hash of small integers (splitmix64 rounds), so that neighbouring seeds share nothing."""
    state = 0
    for value in values:
        state = (state + value * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def _allowed(parts: Parts, split: Split) -> bool:
    """Whether the question's hash class belongs to the split: one class of 16 to test and held-out, one to
    dev.
    """
    klass = zlib.crc32((parts.question or parts.answer).encode()) % _CLASSES
    return {"train": klass > 1, "dev": klass == 1, "test": klass == 0, "heldout": klass == 0}[split]


_FREE = frozenset(("story", "letter", "chat"))


def _draw(family: str, seed: int, split: Split) -> tuple[Parts, Draw]:
    """The first try whose question may appear in the split, and the source that made it."""
    maker, index = _MAKERS[family][0], FAMILIES.index(family)
    for attempt in range(10_000):
        d = Draw(_mix(_SALT[split], index, seed, attempt), split == "heldout", family not in _FREE)
        parts = maker(d)
        if _allowed(parts, split):
            return parts, d
    raise RuntimeError(f"no question of family {family!r} falls into split {split!r}")


def make(family: str, seed: int, split: Split, shots: int | None = None) -> Sample:
    """One sample of a family.

    `seed` is any integer >= 0. `shots` worked examples (from the train split) come before the question; None
    draws their number: 0 except for 7 % of training samples. Raises KeyError for an unknown family or split.
    """
    parts, d = _draw(family, seed, split)
    if parts.gaps:
        return Sample(
            family, (), "<|startoftext|>", parts.answer, parts.check, parts.template, d.free, 0, parts.gaps
        )
    if shots is None:
        shots = _shots(d, family) if d.chance(_FEW_SHOT[split]) else 0
    examples = []
    for i in range(shots):
        example, _ = _draw(family, _mix(seed, i, 7) >> 1, "train")
        if not example.gaps:
            examples.append((example.question, example.answer))
    messages, prompt = _prompt(d, family, examples, parts.question)
    answer = parts.answer if messages else f" {parts.answer}"
    return Sample(family, messages, prompt, answer, parts.check, parts.template, d.free, len(examples))


def _shots(d: Draw, family: str) -> int:
    """One to four examples; more of the short families, rarely many, so that prompts reach 400 to 800
    tokens.
    """
    return d.pick((1, 1, 1, 1, 2, 2, 2, 3, 3, 4)) if family in _LONG else d.pick((2, 3, 4))


_LONG = frozenset(("gsm", "story", "letter"))


def _prompt(
    d: Draw, family: str, examples: list[tuple[str, str]], question: str
) -> tuple[tuple[tuple[str, str], ...], str]:
    """Turns and rendered prompt: raw for some word problems, else chat with the examples as turns or as one
    text.
    """
    blocks = [f"Question: {q}\nAnswer: {a}\n\n" for q, a in examples]
    whole = f"{''.join(blocks)}Question: {question}\nAnswer:"
    if family == "gsm" and d.chance(0.08):
        return (), f"<|startoftext|>{whole}"
    if not examples or d.chance(0.5):
        turns: list[tuple[str, str]] = []
        for q, a in examples:
            turns += (("user", q), ("assistant", a))
        messages = (*turns, ("user", question))
    else:
        messages = (("user", whole),)
    return messages, render(messages)


def check(sample: Sample, text: str) -> bool:
    """Whether `text` (the decoded response without special tokens) answers the sample."""
    return _MAKERS[sample.family][1](sample.check, text)


_CUMULATIVE = [(sum(list(WEIGHTS.values())[: i + 1]), name) for i, name in enumerate(WEIGHTS)]


def mixture(seed: int, split: Split = "train") -> Sample:
    """A sample of the training mixture: the family is drawn by `WEIGHTS` from the seed."""
    point = (_mix(seed, _SALT[split], 99) >> 11) / (1 << 53)
    family = next((name for edge, name in _CUMULATIVE if point < edge), FAMILIES[0])
    return make(family, seed, split)

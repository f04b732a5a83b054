"""Published numbers of Flash-dLLM (arXiv 2609.26796), to stand beside measured ones.

One NVIDIA A100 80GB, LLaDA-1.5, lm-evaluation-harness 0.4.8. Accuracy in percent: GSM8K flexible-extract, MATH
math_verify by the rule of 0.4.8, HumanEval pass@1 after code extraction, MBPP pass@1. Rates are tokens/s as the
released code counts them: every decoded answer position of a finished sample, the stop token and text after a stop
string included; a verify step is two passes and counts as one step. The text disagrees with itself in places
(:data:`CONTRADICTIONS`).
"""

from __future__ import annotations

from dataclasses import dataclass

SOURCE = "Flash-dLLM, arXiv 2609.26796"
MODEL, DEVICE = "LLaDA-1.5", "NVIDIA A100 80GB"


@dataclass(frozen=True)
class Figures:
    """What a paper prints for one setting; None where it prints nothing.

    ``speedup`` is over greedy decoding without a cache; ``*_sd`` over five seeds.
    """

    accuracy: float | None = None
    tokens_per_second: float | None = None
    tokens_per_step: float | None = None
    speedup: float | None = None
    accuracy_sd: float | None = None
    tokens_per_second_sd: float | None = None
    memory_gb: float | None = None


METHODS = (
    "greedy, no cache", "greedy, Flash-Cache", "confidence, no cache", "Fast-dLLM", "Elastic-Cache",
    "confidence, Flash-Cache", "Flash-Verify, no cache", "Flash-Verify, Flash-Cache",
)  # fmt: skip
"""Columns of Table 1."""
_TABLE1 = {
    ("gsm8k", 256): (
        (80.36, 6.7), (82.87, 56.8), (80.44, 22.5), (80.59, 51.2), (81.88, 45.9), (82.34, 144.9), (83.62, 38.2),
        (81.88, 194.9),
    ),
    ("gsm8k", 512): (
        (81.35, 2.6), (82.94, 54.8), (81.88, 17.2), (80.82, 36.8), (82.79, 41.7), (82.87, 149.4), (82.71, 32.2),
        (83.02, 210.6),
    ),
    ("math", 256): (
        (33.52, 8.5), (37.22, 67.6), (33.60, 22.3), (32.74, 44.4), (33.26, 40.6), (36.80, 144.3), (36.98, 38.1),
        (36.56, 189.7),
    ),
    ("math", 512): (
        (35.63, 5.0), (37.40, 66.2), (35.56, 20.3), (33.68, 44.4), (35.84, 41.4), (37.08, 149.9), (37.76, 32.8),
        (35.98, 210.1),
    ),
    ("humaneval", 256): (
        (43.29, 7.0), (42.68, 79.0), (42.68, 17.5), (34.75, 18.7), (36.59, 20.9), (40.85, 169.4), (37.20, 63.2),
        (39.63, 209.2),
    ),
    ("humaneval", 512): (
        (40.85, 3.2), (41.46, 74.5), (39.63, 9.7), (36.59, 15.4), (37.80, 16.8), (42.07, 145.7), (37.20, 57.5),
        (40.24, 185.6),
    ),
    ("mbpp", 256): (
        (38.00, 2.4), (41.20, 62.0), (38.00, 14.2), (34.60, 28.0), (41.20, 32.7), (41.80, 115.9), (41.40, 37.7),
        (38.20, 148.0),
    ),
    ("mbpp", 512): (
        (38.20, 1.0), (39.80, 58.5), (38.60, 11.5), (36.20, 17.8), (39.00, 32.8), (40.20, 102.2), (39.40, 31.6),
        (39.00, 148.2),
    ),
}  # fmt: skip


def table1(task: str, length: int, method: str) -> Figures:
    """Accuracy and rate of a task (``gsm8k``, ``math``, ``humaneval``, ``mbpp``) at an answer length."""
    row = _TABLE1[task, length]
    accuracy, rate = row[METHODS.index(method)]
    return Figures(accuracy, rate, speedup=round(rate / row[0][1], 1))


TABLE2 = {
    name: Figures(accuracy, rate, speedup=speedup)
    for name, accuracy, rate, speedup in (
        ("dKV-Cache", 81.50, 14.9, 5.7),
        ("FlashDLM", 79.91, 15.7, 6.0),
        ("dLLM-Cache", 80.97, 16.8, 6.5),
        ("Dynamic-dLLM", 79.32, 38.4, 14.8),
        ("Fast-dLLM", 80.82, 36.8, 14.2),
        ("Elastic-Cache", 82.79, 41.7, 16.0),
        ("FreeDave", 80.97, 42.8, 16.5),
        ("confidence, Flash-Cache", 82.87, 149.4, 57.5),
        ("Flash-Verify, Flash-Cache", 83.02, 210.6, 81.0),
    )
}
"""GSM8K, answers of 512 tokens."""


@dataclass(frozen=True)
class TaskSetting:
    """Table 3: tracking budget and masked window in tokens, verification threshold, slots."""

    track: int = 64
    masked: int = 64
    gamma: float = 0.8
    batch: int = 32


TABLE3 = {
    "gsm8k": TaskSetting(),
    "math": TaskSetting(gamma=0.85),
    "humaneval": TaskSetting(gamma=0.85),
    "mbpp": TaskSetting(track=48),
}
BLOCK, EPSILON, CANDIDATES = 16, 0.9, 16
"""Block length, confidence threshold, and candidates of a window in the released code."""

GAMMAS, BUDGETS = (0.60, 0.70, 0.75, 0.80, 0.85, 0.90, 1.00), (48, 64, 80, 96)
_TABLE4 = """
 80.23  0.46  277.80  1.18   80.76  0.21  261.54  1.00   81.52  0.50  248.80  0.70   81.42  0.41  235.82  0.76
 80.74  0.66  252.20  2.52   81.27  0.65  234.86  4.94   82.00  0.36  226.66  3.28   82.35  0.13  214.78  2.18
 80.94  0.81  235.60  1.36   82.14  0.47  221.68  0.71   82.52  0.45  209.76  1.29   82.56  0.91  208.08  0.51
 81.64  0.54  221.06  3.58   81.73  0.74  208.40  2.64   82.15  0.47  197.08  1.54   82.47  0.47  196.98  0.84
 81.46  1.03  211.32  0.69   82.71  0.51  197.60  0.70   82.76  0.84  187.28  0.75   83.15  0.17  185.70  0.61
 81.55  0.49  206.22  0.50   82.09  0.53  192.90  0.75   82.64  0.41  182.16  0.68   82.75  0.62  171.86  0.33
 81.79  0.64  165.14  0.83   82.24  0.43  149.60  0.47   82.96  0.51  138.28  0.37   83.41  0.50  131.58  1.41
"""
"""A row a gamma; accuracy, its deviation, rate, its deviation for each budget."""


def table4(gamma: float, budget: int) -> Figures:
    """GSM8K-512 over five seeds, by verification threshold and tracking budget."""
    column = 4 * BUDGETS.index(budget)
    row = [float(word) for word in _TABLE4.split("\n")[1 + GAMMAS.index(gamma)].split()]
    accuracy, accuracy_sd, rate, rate_sd = row[column : column + 4]
    return Figures(accuracy, rate, accuracy_sd=accuracy_sd, tokens_per_second_sd=rate_sd)


def _columns(names: tuple[int, ...], *rows: tuple[float, ...]) -> dict[int, Figures]:
    return {name: Figures(*values) for name, *values in zip(names, *rows, strict=True)}


TABLE5 = {
    ("length", "confidence, Flash-Cache"): _columns(
        (128, 256, 512, 1024),
        (79.03, 82.36, 82.24, 82.29),
        (126.7, 140.4, 131.8, 125.7),
        (2.5, 2.8, 2.8, 2.9),
    ),
    ("length", "Flash-Verify, Flash-Cache"): _columns(
        (128, 256, 512, 1024),
        (79.55, 81.90, 81.73, 81.72),
        (174.5, 198.4, 186.2, 173.0),
        (5.6, 5.6, 5.6, 5.6),
    ),
    ("shots", "confidence, Flash-Cache"): _columns(
        (1, 3, 5, 8), (80.00, 82.27, 82.24, 82.25), (155.8, 145.4, 131.8, 123.1), (2.8, 2.8, 2.8, 2.8)
    ),
    ("shots", "Flash-Verify, Flash-Cache"): _columns(
        (1, 3, 5, 8), (80.12, 81.73, 81.73, 81.73), (234.4, 209.6, 186.2, 165.7), (5.8, 5.7, 5.7, 5.6)
    ),
}
"""GSM8K, batch 16: by answer length (5-shot) and by number of examples (length 512)."""

BATCHES = (1, 2, 4, 8, 16, 24, 32)
TABLE6 = {
    method: {batch: Figures(accuracy, rate, per_step) for batch, rate in zip(BATCHES, rates, strict=True)}
    for method, accuracy, per_step, rates in (
        ("greedy, Flash-Cache", 82.94, 1.0, (18.5, 28.9, 37.7, 46.3, 51.3, 53.6, 55.0)),
        ("confidence, Flash-Cache", 82.87, 2.8, (51.7, 78.0, 102.4, 120.5, 131.8, 136.4, 139.5)),
        ("Flash-Verify, Flash-Cache", 83.02, 5.7, (56.0, 90.9, 131.3, 164.8, 186.2, 195.5, 199.8)),
    )
}
"""GSM8K-512, 5-shot, by slots."""

FUSED_SPEEDUP = 1.37
"""Figure 1a: a fused cache pipeline against separate kernels, a layer (RTX 3090 microbenchmark)."""
TOP_TOKENS, TOP_SHARE = 32, 0.5
"""Figure 1b: the most attended decoded tokens get about this share of the attention in the middle layers."""
MEMORY = {("Flash-Verify, Flash-Cache", 16): 26.0, ("Fast-dLLM", 16): 50.0}
"""Figure 4, GB at 16 slots, GSM8K-512 1-shot. The curves' points are not in the text."""
FIGURE6 = (
    "Flash-Verify at 7.2 tokens a step is about as fast as confidence-aware decoding at 5.6, with 3.5 points more "
    "accuracy; its throughput is up to 1.33 times as high"
)
FIGURE7 = "Flash-Verify's lead grows from about 1.4 to 1.5 times with the window; accuracies differ by 0.2-1.2 points"
CONTRADICTIONS = (
    "GSM8K-512, 5-shot, 32 slots: confidence-aware Flash-Cache has 149.4 tokens/s in Table 1 and 139.5 in Table 6, and "
    "82.87 % in both but 82.24 % over five seeds in Table 4",
    "Flash-Verify at gamma 0.8 has 210.6 tokens/s and 83.02 % in Table 1, 199.8 in Table 6, and 208.4 tokens/s and "
    "81.73 % over five seeds at a budget of 64 in Table 4: 83.02 is one run",
)

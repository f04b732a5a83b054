"""Right or wrong: GSM8K's two filters, both rules for MATH, and programs, without lm-evaluation-harness.

The harness scores a run; this module scores the same answers again, so that what the harness lacks (the rule for MATH
of its version 0.4.8, HumanEval after code extraction) stands beside it and a disagreement shows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flash_dllm.eval.extraction import extract
from flash_dllm.eval.sandbox import run_program

INVALID = "[invalid]"
_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_NOISE = (re.compile(r"(?s).*#### "), re.compile(r"\.$"))


def strict_number(text: str) -> str:
    """GSM8K, strict-match: the number after the first ``####``."""
    found = _STRICT.search(text)
    return found.group(1) if found else INVALID


def flexible_number(text: str) -> str:
    """GSM8K, flexible-extract: the last thing that looks like a number, ``...`` included, as in the harness."""
    found = _FLEXIBLE.findall(text)
    return found[-1].strip() if found else INVALID


def _bare(text: str) -> str:
    text = text.replace(",", "").replace("$", "")
    for noise in _NOISE:
        text = noise.sub("", text)
    return text.lower()


def score_gsm8k(text: str, answer: str) -> dict[str, bool]:
    """Whether an answer's number is that of the worked solution ``answer``, by filter."""
    gold = _bare(answer)
    return {
        "strict-match": _bare(strict_number(text)) == gold,
        "flexible-extract": _bare(flexible_number(text)) == gold,
    }


def score_math(text: str, solution: str) -> dict[str, bool]:
    """MATH by math-verify: against the whole gold solution (the harness since task version 3.0), and against the bare
    normalised answer (0.4.8, which the papers used and which rejects a fifth of the gold solutions themselves).
    """
    from math_verify import parse, verify

    said = parse(text)
    return {
        "math_verify": bool(verify(parse(solution), said)),
        "math_verify_0.4.8": bool(verify(parse(normalise_answer(boxed(solution))), said)),
    }


def score_humaneval(text: str, problem: Mapping[str, str]) -> bool:
    """HumanEval: the text as it is, behind the prompt.

    ``problem`` has the fields of the data set: ``prompt``, ``test``, ``entry_point``.
    """
    return run_program(f"{problem['prompt']}{text}\n{_check(problem)}").passed


def score_humaneval_extracted(text: str, problem: Mapping[str, str]) -> bool:
    """HumanEval after code extraction (:mod:`flash_dllm.eval.extraction`)."""
    found = extract(problem["prompt"], text, problem["entry_point"])
    return run_program(f"{found}\n{_check(problem)}").passed


def _check(problem: Mapping[str, str]) -> str:
    return f"{problem['test']}\ncheck({problem['entry_point']})"


def score_mbpp(text: str, problem: Mapping[str, Any]) -> bool:
    """MBPP: the text with the problem's three asserts. ``test_setup_code`` is left out, as in the harness."""
    tests = "\n".join(problem["test_list"][:3])
    return run_program(f"{text}\n{tests}").passed


def boxed(solution: str) -> str:
    """What the last ``\\boxed`` or ``\\fbox`` of a solution holds; without one, an empty text."""
    if "\\boxed " in solution:
        return solution.rpartition("\\boxed ")[2].partition("$")[0]
    start = max(solution.rfind("\\boxed{"), solution.rfind("\\fbox{"))
    if start < 0:
        return ""
    begin = solution.index("{", start) + 1
    depth = 1
    for index in range(begin, len(solution)):
        depth += {"{": 1, "}": -1}.get(solution[index], 0)
        if depth == 0:
            return solution[begin:index]
    return ""


# The normaliser of Minerva (Lewkowycz et al. 2022, appendix D) as harness 0.4.8 applies it, in this order.
_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_WORDS = (
    "square ways integers dollars mph inches ft hours km units \\ldots sue points feet minutes digits cents degrees cm "
    "gm pounds meters meals edges students childrentickets multiples \\text{s} \\text{.}"
)
_REMOVED = (
    *_WORDS.split(),
    "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}",
    "\\;", ",\\!", "{,}", '"', "\\dots",
)  # fmt: skip
_REWRITTEN = (
    (re.compile(r".*?\$(.*?)\$.*"), r"$\1$"),
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def normalise_answer(answer: str) -> str:
    """A final answer of MATH without units, spaces and dollar signs."""
    answer = answer.split("=")[-1]
    for before, after in _REPLACED:
        answer = answer.replace(before, after)
    for word in _REMOVED:
        answer = answer.replace(word, "")
    for pattern, form in _REWRITTEN:
        answer = pattern.sub(form, answer)
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    return digits if digits.isdigit() else answer

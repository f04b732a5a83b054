"""Every cache with every decoding that it accepts, on canvases of odd shapes.

Complaints about other engines (numbered rows of a survey of issue trackers) that have a test here: 1, 2
(batches with a dual cache, batches of Dream), 3, 5, 6, 7, 9 (an answer does not depend on mates, padding or
token values), 26 (ids beyond the tokenizer and MASK are never written), 29 (a non-finite request fails
alone), 38 (blocks longer and shorter than the answer), 41, 46 (prompt lengths).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from flash_dllm.core.state import Canvas
from flash_dllm.core.step import Vocabulary
from flash_dllm.engine.engine import Engine
from flash_dllm.engine.request import Finished, Request
from flash_dllm.methods import CACHES, DECODINGS, MethodError, build_method
from flash_dllm.models.layers import Model

from .goldens.harness import EOS, EOT, MASK, golden_model

N_TOKENS, POSITIONS = 500, 40
SHAPES = [(1, 1), (1, 9), (17, 3), (20, 20), (38, 2), (5, 30)]
"""Prompt and answer lengths; some fill all positions of a slot."""
VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    ("dual", "verify", {"views": "branch"}),
    ("prefix", "verify", {"views": "leak-free"}),
    ("none", "verify", {"views": "branch", "schedule": "blocks"}),
    ("none", "verify", {"views": "leak-free", "search": 1, "verify_rows": 2}),
    ("dkv-decode", "verify", {"views": "branch", "search": 3, "window": 4}),
    ("flash", "verify", {"search": 1, "verify_rows": 2, "track": 3, "lookahead": 0, "window": 2}),
    ("flash", "verify", {"views": "branch", "pin": "verified", "track": 0}),
    ("flash", "branch", {"branches": 1, "window": 1, "track_by": "random", "track": 5}),
    ("flash", "branch", {"refresh_on_drift": 0.05, "track": 5, "lookahead": 3, "window": 4}),
    ("flash", "threshold", {"refresh_every": 3, "track_by": "none", "track": 2}),
    ("flash", "threshold", {"track": -1, "refresh_every": 2}),
    ("none", "branch", {"branches": 16}),
    ("dynamic", "threshold", {"budget": "paper", "window_size": 3, "layer_budget": 2, "kr": 3, "kp": 5}),
    ("dynamic", "greedy", {"compare": "input", "window_size": 0, "layer_budget": 1}),
    ("dllm-cache", "threshold", {"kp": 1, "kr": 2, "rho": 0.5, "split": "row"}),
    ("elastic", "threshold", {"block_caching": False, "similarity": "keys", "track_num": 3, "window": 2}),
    ("freecache", "greedy", {"freeze": "unmasked"}),
    ("prefix", "freedave", {"draft_steps": 1}),
    ("dual", "freedave", {"draft_steps": 30}),
    ("dual", "threshold", {"schedule": "blocks-as-released"}),
    ("dkv-greedy", "random", {"refresh": 1, "window": 0}),
]


def accepted(family: str) -> list[tuple[str, str]]:
    """The pairs that :func:`build_method` makes for a family."""
    found = []
    for cache in CACHES:
        for decoding in DECODINGS:
            try:
                build_method(cache, decoding, family=family)
            except MethodError:
                continue
            found.append((cache, decoding))
    return found


def make_canvas(
    rng: random.Random, shape: tuple[int, int], scattered: bool, numbers: dict[str, Any]
) -> Canvas:
    """A prompt with masks behind it, or masks anywhere. At least one token is given."""
    length = sum(shape)
    masked = [i >= shape[0] for i in range(length)]
    if scattered:
        masked = [rng.random() < 0.5 for _ in range(length)]
        masked[0], masked[-1] = True, length < 2
        masked[rng.randrange(1, length)] = False
    # Given tokens may be MASK, EOS or lie beyond the tokenizer.
    ids = [MASK if hidden else rng.choice((MASK, EOS, 505, *range(0, 480, 3))) for hidden in masked]
    return Canvas(ids, masked, (EOS, EOT), numbers)


def make_cases(seed: str, decoding: str, count: int) -> list[Canvas]:
    rng = random.Random(seed)
    cases = []
    for index in range(count):
        shape = SHAPES[index % len(SHAPES)] if count >= len(SHAPES) else rng.choice(SHAPES)
        scattered = index % 2 == 1
        epsilons = (2.0, 0.6) if decoding == "freedave" else (0.3, 0.6, 0.9)
        numbers = {
            "seed": index,
            "epsilon": rng.choice(epsilons),
            "gamma": 0.4,
            "rule": index % 2,
            "block_length": rng.choice((1, 3, 8, 32, 64)),
            "steps": rng.choice((1, shape[1])),
            "stop_at_eos": index % 3 > 0,
        }
        cases.append(make_canvas(rng, shape, scattered, numbers))
    return cases


def decode(
    model: Model, method: tuple[str, str, dict[str, Any]], cases: list[Canvas], slots: int
) -> list[Finished]:
    cache, decoding, options = method
    built = build_method(cache, decoding, family=model.config.family, **options)
    vocabulary = Vocabulary(N_TOKENS, MASK, (EOS,), (EOS, EOT))
    longest = max(len(c.ids) for c in cases)
    engine = Engine(model, built, vocabulary, slots=slots, positions=POSITIONS if slots > 1 else longest)
    for tensor in (*engine.decoder.ctx.kv.keys, *engine.decoder.ctx.kv.values):
        tensor.fill_(float("nan"))
    for index, canvas in enumerate(cases):
        engine.add(Request(str(index), canvas))
    ended: dict[str, Finished] = {}
    for _ in range(100 * len(cases)):
        ended.update({f.request.id: f for f in engine.step()})
        if engine.idle:
            break
    assert engine.idle, "the engine does not come to an end"
    return [ended[str(i)] for i in range(len(cases))]


def check_answer(canvas: Canvas, done: Finished) -> None:
    assert done.error is None, done.error
    assert 0 < done.nfe <= done.rows
    stop = next(
        (p for p, m in enumerate(canvas.masked) if m and done.ids[p] in canvas.stop_ids), len(canvas.ids)
    )
    assert done.end == stop
    needed = stop if canvas.numbers["stop_at_eos"] else len(canvas.ids)
    for pos, (given, token, hidden) in enumerate(zip(canvas.ids, done.ids, canvas.masked, strict=True)):
        if not hidden:
            assert token == given, f"position {pos} was given"
        elif token == MASK:
            assert pos > needed, f"position {pos} is left open"
        else:
            assert token < N_TOKENS or token in canvas.stop_ids, f"position {pos} holds {token}"
            assert done.passes[pos] >= 1 and done.log_probs[pos] <= 0


def check_pair(model: Model, method: tuple[str, str, dict[str, Any]], count: int, alone: int) -> None:
    """Decode a batch in three slots; the last ``alone`` requests also by themselves."""
    cases = make_cases("+".join(method[:2]), method[1], count)
    batch = decode(model, method, cases, 3)
    for canvas, done in zip(cases, batch, strict=True):
        check_answer(canvas, done)
    for canvas, ours in list(zip(cases, batch, strict=True))[count - alone :]:
        theirs = decode(model, method, [canvas], 1)[0]
        assert ours.ids == theirs.ids
        assert (ours.nfe, ours.rows, ours.passes) == (theirs.nfe, theirs.rows, theirs.passes)


@pytest.mark.parametrize(("cache", "decoding"), accepted("llada"))
def test_pair_on_llada(golden_dir: Path, cache: str, decoding: str) -> None:
    check_pair(golden_model(golden_dir / "llada-tiny-gqa"), (cache, decoding, {}), 3, 1)


@pytest.mark.parametrize(("cache", "decoding"), accepted("dream"))
def test_pair_on_dream(golden_dir: Path, cache: str, decoding: str) -> None:
    check_pair(golden_model(golden_dir / "dream-tiny"), (cache, decoding, {}), 3, 1)


@pytest.mark.parametrize(("cache", "decoding", "options"), VARIANTS)
@pytest.mark.parametrize("folder", ["llada-tiny", "dream-tiny"])
def test_options_of_pairs(
    golden_dir: Path, folder: str, cache: str, decoding: str, options: dict[str, Any]
) -> None:
    check_pair(golden_model(golden_dir / folder), (cache, decoding, options), 6, 1)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["llada-tiny", "llada-tiny-gqa", "dream-tiny"])
@pytest.mark.parametrize("cache", CACHES)
def test_pairs_in_depth(golden_dir: Path, folder: str, cache: str) -> None:
    model = golden_model(golden_dir / folder)
    for name, decoding in accepted(model.config.family):
        if name == cache:
            # The last six have every shape once.
            check_pair(model, (cache, decoding, {}), 12, 6)


@pytest.mark.parametrize("cache", ["none", "dual", "flash", "elastic", "dllm-cache", "dkv-decode"])
def test_bfloat16(golden_dir: Path, cache: str) -> None:
    from flash_dllm.models.load import load_model

    model = load_model(str(golden_dir / "llada-tiny"), dtype="bfloat16", device="cpu")
    decodings = {"none": "branch", "dual": "freedave", "flash": "verify"}
    method = (cache, decodings.get(cache, "threshold"), {})
    cases = make_cases("bfloat16", method[1], 6)
    for canvas, done in zip(cases, decode(model, method, cases, 3), strict=True):
        check_answer(canvas, done)


@pytest.mark.parametrize(
    ("cache", "decoding"),
    [
        ("none", "threshold"), ("dual", "threshold"), ("flash", "threshold"), ("flash", "verify"),
        ("none", "branch"), ("dual", "freedave"), ("elastic", "threshold"), ("dllm-cache", "threshold"),
        ("dynamic", "threshold"), ("dkv-decode", "threshold"),
    ],
)  # fmt: skip
def test_a_request_with_non_finite_logits_fails_alone(golden_dir: Path, cache: str, decoding: str) -> None:
    """Row 29: NaN of one request never reaches another, in its batch or after it in its slot."""
    import dataclasses

    plain = golden_model(golden_dir / "llada-tiny")
    embed = plain.embed.clone()
    embed[77] = float("nan")
    model = dataclasses.replace(plain, embed=embed)
    rng = random.Random(3)
    options = {"window": 8, "track": 4, "lookahead": 2} if cache == "flash" else {}
    if (cache, decoding) == ("flash", "verify"):
        options["search"] = 4
    cases = []
    for index, (prompt, length) in enumerate([(9, 12), (20, 18), (5, 30), (12, 3), (30, 9), (8, 21)]):
        ids = [rng.randrange(80, 480) for _ in range(prompt)]
        if index in (0, 4):
            ids[2] = 77
        masked = [False] * prompt + [True] * length
        # Nobody may choose the poisoned token: its row of the LM head is as it was.
        numbers = {"stop_at_eos": False, "block_length": 8, "epsilon": 0.9, "gamma": 0.6}
        cases.append(Canvas(ids + [MASK] * length, masked, (EOS,), numbers))
    batch = decode(model, (cache, decoding, options), cases, 3)
    for index, (canvas, done) in enumerate(zip(cases, batch, strict=True)):
        if index in (0, 4):
            assert done.error is not None and "non-finite" in done.error
            continue
        assert done.error is None
        assert done.ids == decode(plain, (cache, decoding, options), [canvas], 1)[0].ids


def test_state_of_a_pass_is_finite_beside_a_failing_slot(golden_dir: Path) -> None:
    """The attention score of a slot with few candidates does not read its neighbour's rows."""
    from flash_dllm.kernels.row_attention import ScoreSum

    q = torch.full((3, 2, 4), float("nan"))
    q[1:] = 1.0
    score = ScoreSum(torch.tensor([[1, 0]]), torch.tensor([[True, False]]), 0)
    assert bool(score.mean_query(q).isfinite().all())

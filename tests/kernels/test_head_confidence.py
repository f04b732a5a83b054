"""The LM head with its reductions inside: the Triton kernel against float64, wherever it runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash_dllm.core.noise import CounterNoise, counter_uniform
from flash_dllm.core.state import Canvas
from flash_dllm.core.step import Vocabulary
from flash_dllm.engine.engine import Engine
from flash_dllm.engine.request import Request
from flash_dllm.kernels.choice import Kernels
from flash_dllm.kernels.head_confidence import (
    HeadOut,
    HeadSpec,
    Sampling,
    confidence,
    filters,
    fused,
    head_confidence,
)
from flash_dllm.kernels.head_confidence import triton as kernel
from flash_dllm.kernels.head_confidence.tiles import Tile
from flash_dllm.methods import build_method
from tests.goldens.harness import EOS, EOT, MASK, VOCAB, golden_model
from tests.methods.invariants import one_layer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")
MEASURES = ["prob", "margin", "neg_entropy"]
SAMPLES = ["argmax", "gumbel", "categorical", "gumbel filters", "categorical filters"]
SMALL_TILES = [
    Tile(16, 64, 32, 4, 2, swap=True),
    Tile(32, 64, 32, 4, 2, persistent=1),
    Tile(16, 64, 16, 4, 2, descriptor=True, parts=2, persistent=1),
    Tile(16, 64, 32, 4, 2, swap=True, descriptor=True, persistent=1, flat=True),
    Tile(64, 128, 32, 4, 2, parts=4, descriptor=True),
]

pytestmark = [
    pytest.mark.usefixtures("poisoned_outputs"),
    # numpy, in the interpreter, says so when it meets the numbers that these tests are about.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def matrices(
    rows: int, vocab: int, depth: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Rows and a head whose logits have a standard deviation of about 3."""
    made = torch.Generator(device=DEVICE).manual_seed(seed)
    h = torch.randn((rows, depth), generator=made, device=DEVICE)
    weight = torch.randn((vocab, depth), generator=made, device=DEVICE) * 3 / math.sqrt(depth)
    return h.to(dtype), weight.to(dtype)


def sampling(rows: int, categorical: bool, seed: int = 7, **more: Any) -> Sampling:
    """Counter-based sampling at temperatures from 0 to 1.5; with ``filters`` some rows have top-p, top-k or both."""
    noise, pos = CounterNoise(), torch.arange(rows, device=DEVICE)[None] * 3
    noise.begin(torch.tensor([seed], device=DEVICE), torch.tensor([2**33 + 5], device=DEVICE), 4 * rows)
    warm = torch.linspace(1.5, 0, rows)
    fields: dict[str, Any] = {
        "uniform": partial(noise.per_token, pos),
        "filters": False,
        "counter": partial(noise.token_hashes, pos),
        **more,
    }
    top_p, top_k = torch.ones(rows), torch.zeros(rows, dtype=torch.int64)
    if fields["filters"]:
        made = torch.Generator().manual_seed(seed)
        top_p = torch.rand(rows, generator=made)
        top_k = torch.randint(1, 9, (rows,), generator=made)
        which = torch.randint(0, 4, (rows,), generator=made)
        top_p[which % 2 == 0], top_k[which < 2] = 1.0, 0
    return Sampling(warm.to(DEVICE), top_p.to(DEVICE), top_k.to(DEVICE), categorical=categorical, **fields)


def check(h: Tensor, weight: Tensor, spec: HeadSpec, run: Callable[[], HeadOut]) -> None:
    """The kernel is as near to float64 as the plain computation in the same dtype, times two."""
    exact_logits = h.double() @ weight.double().T
    out, plain, exact = run(), head_confidence(h, weight, spec, impl="ref"), confidence(exact_logits, spec)
    assert out.token.dtype == torch.int64 and out.prob.dtype == out.measure.dtype == torch.float32
    # Of two tokens that are equal but for rounding, either may win; their probabilities are then equal too.
    same = out.token == exact.token
    if spec.sampling is None:
        gap = (exact_logits.gather(1, exact.token[:, None]) - exact_logits.gather(1, out.token[:, None]))[
            :, 0
        ]
        assert (gap <= 1e-5 * exact_logits.abs().amax(1)).all()
    assert same.float().mean() >= 0.9
    for name in ("prob", "measure", "prob_wanted"):
        mine, theirs, right = (getattr(o, name) for o in (out, plain, exact))
        assert (mine is None) == (right is None)
        if right is None:
            continue
        error = (mine.double() - right.double()).abs()[same]
        bound = 2 * (theirs.double() - right.double()).abs().max() + 4 * torch.finfo(torch.float32).eps
        # The sum of p log p is as large as the logarithm of the vocabulary, and adds 1e-10 to each p.
        slack = 2e-5 if name == "measure" and spec.measure == "neg_entropy" else 2e-6
        assert error.max() <= bound + slack, name


def spec_for(rows: int, vocab: int, measure: str, ask: str, sample: str, seed: int) -> HeadSpec:
    made = torch.Generator().manual_seed(seed)
    suppress = wanted = None
    if "suppress" in ask:
        suppress = (torch.arange(rows) % 4).to(DEVICE)
    if "wanted" in ask:
        wanted = torch.randint(0, vocab, (rows,), generator=made).to(DEVICE)
    how, _, filters = sample.partition(" ")
    drawn = (
        None if how == "argmax" else sampling(rows, how == "categorical", seed=seed, filters=bool(filters))
    )
    return HeadSpec(max(2, vocab - 3), 1, measure, suppress, (0, vocab // 2), (vocab // 2, 4), drawn, wanted)


@settings(max_examples=40)
@given(
    st.sampled_from([1, 2, 15, 16, 17, 33]), st.sampled_from([6, 63, 64, 65, 200, 517]),
    st.sampled_from([8, 40, 64, 75]),
    st.sampled_from(MEASURES), st.sampled_from(["", "suppress", "wanted", "suppress wanted"]),
    st.sampled_from(SAMPLES[:3]), st.sampled_from(SMALL_TILES),
    st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 99),
)  # fmt: skip
def test_kernel_does_what_the_definition_does(
    rows: int,
    vocab: int,
    depth: int,
    measure: str,
    ask: str,
    sample: str,
    tile: Tile,
    dtype: torch.dtype,
    seed: int,
) -> None:
    h, weight = matrices(rows, vocab, depth, dtype, seed)
    spec = spec_for(rows, vocab, measure, ask, sample, seed)
    check(h, weight, spec, lambda: kernel.head_confidence(h, weight, spec, tile))


@settings(max_examples=12)
@given(
    st.integers(1, 4), st.sampled_from([6, 65, 517]), st.sampled_from(MEASURES),
    st.sampled_from(["", "suppress wanted"]), st.sampled_from(SAMPLES[3:]), st.sampled_from(SMALL_TILES),
    st.integers(0, 99),
)  # fmt: skip
def test_filters_keep_what_the_definition_keeps(
    rows: int, vocab: int, measure: str, ask: str, sample: str, tile: Tile, seed: int
) -> None:
    h, weight = matrices(rows, vocab, 40, torch.float32, seed)
    spec = spec_for(rows, vocab, measure, ask, sample, seed)
    check(h, weight, spec, lambda: kernel.head_confidence(h, weight, spec, tile))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("impl", ["triton", "invariant"])
@pytest.mark.parametrize("rows", [1, 17, 50])
def test_the_tiles_that_it_chooses(rows: int, impl: str, dtype: torch.dtype) -> None:
    h, weight = matrices(rows, 600, 75, dtype)
    spec = spec_for(rows, 600, "margin", "suppress wanted", "argmax", 0)
    check(h, weight, spec, lambda: head_confidence(h, weight, spec, impl=impl))


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab", "depth"), [(126_464, 4096), (152_064, 3584)])
@pytest.mark.parametrize(("rows", "sample", "measure"), [
    *((rows, "argmax", "prob") for rows in (1, 16, 17, 128, 512)),
    *((16, sample, measure) for sample in ("argmax", "gumbel", "categorical") for measure in MEASURES),
    *((512, sample, "prob") for sample in ("gumbel", "categorical")),
    *((rows, sample, "prob") for rows in (16, 512) for sample in SAMPLES[3:]),
])  # fmt: skip
def test_real_sizes(rows: int, vocab: int, depth: int, sample: str, measure: str) -> None:
    h, weight = matrices(rows, vocab, depth, torch.bfloat16)
    spec = spec_for(rows, vocab, measure, "suppress wanted", sample, 1)
    check(h, weight, spec, lambda: head_confidence(h, weight, spec, impl="triton"))


@pytest.mark.gpu
def test_the_invariant_tile_gives_a_row_the_same_bits_in_any_batch() -> None:
    h, weight = matrices(200, 126_464, 4096, torch.bfloat16)
    spec = HeadSpec(126_349, 126_336)
    whole = head_confidence(h, weight, spec, impl="invariant")
    for rows in (1, 16, 63, 130):
        part = head_confidence(h[-rows:], weight, spec, impl="invariant")
        assert torch.equal(part.prob, whole.prob[-rows:]) and torch.equal(part.token, whole.token[-rows:])


@pytest.mark.gpu
def test_logits_are_held_for_filters_only_and_in_chunks() -> None:
    h, weight = matrices(1024, 126_464, 4096, torch.bfloat16)
    logits = 512 * 126_464 * 4
    for kept, least, most in ((False, 0, logits / 4), (True, logits, 1.25 * logits)):
        spec = HeadSpec(126_349, 126_336, sampling=sampling(1024, False, filters=kept))
        head_confidence(h, weight, spec, impl="triton")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        head_confidence(h, weight, spec, impl="triton")
        assert least <= torch.cuda.max_memory_allocated() - before < most


@pytest.mark.parametrize("tile", SMALL_TILES, ids=str)
def test_ties_go_to_the_lower_id(tile: Tile) -> None:
    h = torch.ones(3, 16, device=DEVICE)
    weight = torch.zeros(300, 16, device=DEVICE)
    weight[[41, 43, 130, 299]] = 1.0
    spec = HeadSpec(300, 41, "margin")
    out = kernel.head_confidence(h, weight, spec, tile)
    assert out.token.tolist() == [43] * 3
    assert out.measure.tolist() == [0.0] * 3


def test_banned_ids_keep_their_mass_and_are_never_chosen() -> None:
    h, weight = matrices(9, 130, 24)
    weight[5] = 2 * h.mean(0)
    weight[120:] = h[:1] * 3
    spec = HeadSpec(120, 5)
    out = head_confidence(h, weight, spec, impl="triton")
    probs = (h.double() @ weight.double().T).softmax(-1)
    assert not ((out.token == 5) | (out.token >= 120)).any()
    assert torch.allclose(out.prob.double(), probs.gather(1, out.token[:, None])[:, 0], atol=1e-6)
    assert out.prob[0] < 1e-3


def test_logits_far_apart_neither_overflow_nor_vanish() -> None:
    h = torch.ones(1, 16, device=DEVICE)
    weight = torch.zeros(150, 16, device=DEVICE)
    weight[0], weight[3], weight[149] = 50.0, 49.95, -500.0
    for measure in MEASURES:
        spec = HeadSpec(150, 0, measure)
        check(h, weight, spec, lambda spec=spec: head_confidence(h, weight, spec, impl="triton"))  # type: ignore[misc]


@pytest.mark.parametrize("bad", [NAN, float("inf")])
@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("sample", SAMPLES)
def test_a_row_that_is_not_finite_shows_and_stays_alone(bad: float, measure: str, sample: str) -> None:
    h, weight = matrices(5, 200, 16)
    h[2, 3] = bad
    spec = spec_for(5, 200, measure, "wanted", sample, 3)
    if spec.sampling is not None and spec.sampling.filters:
        spec = replace(spec, sampling=replace(spec.sampling, top_k=torch.full((5,), 3, device=DEVICE)))
    out = head_confidence(h, weight, spec, impl="triton")
    assert not out.prob[2].isfinite()
    others = [0, 1, 3, 4]
    assert out.prob[others].isfinite().all() and out.measure[others].isfinite().all()
    assert ((out.token >= 0) & (out.token < 200)).all()


def test_one_logit_that_is_not_a_number_shows_even_at_a_banned_id() -> None:
    h, weight = matrices(4, 200, 16)
    weight[1] = NAN
    assert not head_confidence(h, weight, HeadSpec(190, 1), impl="triton").prob.isfinite().any()
    weight[1], weight[199] = 0.0, NAN
    assert not head_confidence(h, weight, HeadSpec(190, 1), impl="triton").prob.isfinite().any()


@settings(max_examples=15)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40), st.integers(0, 2**31 - 1))
def test_noise_is_that_of_the_definition(seed: int, step: int, place: int) -> None:
    """With equal logits the noise alone decides: the kernel's argmax is that of the uniform numbers."""
    vocab = 150
    noise, pos = CounterNoise(), torch.tensor([[place, 0, 7]], device=DEVICE)
    noise.begin(torch.tensor([seed], device=DEVICE), torch.tensor([step], device=DEVICE), 1)
    one = torch.ones(3, device=DEVICE)
    drawn = Sampling(
        one, one, one.long() * 0, partial(noise.per_token, pos), filters=False,
        counter=partial(noise.token_hashes, pos),
    )  # fmt: skip
    h, weight = torch.zeros(3, 16, device=DEVICE), torch.zeros(vocab, 16, device=DEVICE)
    out = head_confidence(h, weight, HeadSpec(vocab, vocab, sampling=drawn), impl="triton")
    index = torch.arange(1, vocab + 1, device=DEVICE)
    words = (torch.full_like(index, word)[None] for word in (seed, step))
    uniform = counter_uniform(*words, pos[0][:, None], index[None])
    assert torch.equal(out.token, uniform.argmax(1))


def test_what_the_kernel_does_not_know_runs_on_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    h, weight = matrices(4, 50, 16)
    plain = sampling(4, False)
    known = HeadSpec(50, 1, sampling=plain)
    assert fused(known) and fused(HeadSpec(50, 1))
    assert fused(HeadSpec(50, 1, sampling=sampling(4, False, filters=True)))
    unknown = [
        HeadSpec(50, 1, sampling=sampling(4, True, choose=lambda p: p.argmax(-1))),
        HeadSpec(50, 1, sampling=sampling(4, False, counter=None)),
    ]

    def never(*args: Any, **kwargs: Any) -> HeadOut:
        raise AssertionError("the kernel ran")

    monkeypatch.setattr(kernel, "head_confidence", never)
    for spec in unknown:
        assert not fused(spec)
        out, expected = (head_confidence(h, weight, spec, impl=impl) for impl in ("triton", "ref"))
        assert torch.equal(out.token, expected.token) and torch.equal(out.prob, expected.prob)
    with pytest.raises(AssertionError, match="the kernel ran"):
        head_confidence(h, weight, known, impl="triton")


@pytest.mark.parametrize("categorical", [False, True])
def test_filters_keep_the_lower_ids_of_equal_logits(categorical: bool) -> None:
    """Eight equal logits and many far below: which of them are ever drawn, and how sure the draw is."""
    rows, vocab = 8, 150
    h = torch.ones(rows, 16, device=DEVICE)
    weight = torch.full((vocab, 16), -5.0, device=DEVICE)
    equal = [2, 3, 20, 64, 65, 99, 140, 149]
    weight[equal] = 1.0
    for top_p, top_k, kept in ((1.0, 3, 3), (0.5, 0, 5), (0.25, 7, 3), (0.0, 0, 1)):
        drawn = replace(
            sampling(rows, categorical, filters=True),
            temperature=torch.ones(rows, device=DEVICE),
            top_p=torch.full((rows,), top_p, device=DEVICE),
            top_k=torch.full((rows,), top_k, device=DEVICE),
        )
        out = head_confidence(h, weight, HeadSpec(vocab, 0, sampling=drawn), impl="triton")
        drawn_ids = set(out.token.tolist())
        assert drawn_ids <= set(equal[:kept]) and equal[kept - 1] in drawn_ids, (top_p, top_k)
        among = kept if categorical else 8
        assert torch.allclose(out.prob, torch.full_like(out.prob, 1 / among)), (top_p, top_k)


def test_filters_over_more_than_one_block_of_the_vocabulary() -> None:
    """In Dream's form, which takes every kernel of the filters. Equal logits, zeros of both signs among them, lie in
    blocks far apart; which of them stay is counted throughout."""
    rows, vocab = 2, 2 * max(tile["B"] for tile in (filters.CUT, filters.DRAW, filters.RATE)) + 700
    logits = torch.full((rows, vocab), -9.0)
    equal = [7, 1030, 1031, 2060, 4100, 8193, vocab - 1]
    logits[:, equal] = torch.tensor([0.0, -0.0, 0.0, -0.0, 0.0, -0.0, 0.0])
    drawn = replace(
        sampling(rows, True, filters=True), temperature=torch.ones(rows, device=DEVICE),
        top_p=torch.ones(rows, device=DEVICE), top_k=torch.tensor([4, 6], device=DEVICE),
    )  # fmt: skip
    spec = HeadSpec(vocab, 0, "margin", sampling=drawn, wanted=torch.tensor([2060, vocab - 1], device=DEVICE))
    exact = confidence(logits.to(DEVICE).double(), spec)
    # One column of ones: the logits are the weights.
    weight = torch.zeros(rows, vocab, 16)
    weight[..., 0] = logits
    for row in range(rows):
        one = replace(spec, wanted=spec.wanted[row : row + 1], sampling=sampling_of(drawn, row))  # type: ignore[index]
        h = torch.zeros(1, 16, device=DEVICE)
        h[:, 0] = 1.0
        out = head_confidence(h, weight[row].to(DEVICE), one, impl="triton")
        assert out.token.item() == exact.token[row].item()
        for name in ("prob", "measure", "prob_wanted"):
            assert getattr(out, name).item() == pytest.approx(getattr(exact, name)[row].item(), abs=1e-5), (
                name
            )


def sampling_of(drawn: Sampling, row: int) -> Sampling:
    """One row of it, with the numbers that this row draws in the batch."""
    assert drawn.counter is not None
    first, second = drawn.counter()
    one = slice(row, row + 1)
    return replace(
        drawn, temperature=drawn.temperature[one], top_p=drawn.top_p[one], top_k=drawn.top_k[one],
        counter=lambda: (first[one], second[one]),
    )  # fmt: skip


def test_filters_of_some_rows_change_no_other_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, vocab = 8, 300
    h, weight = matrices(rows, vocab, 40)
    for categorical in (False, True):
        some = sampling(rows, categorical, filters=True)
        spec = HeadSpec(vocab - 3, 1, "margin", sampling=some)
        free = (some.top_p >= 1) & (some.top_k <= 0)
        assert 0 < free.sum() < rows
        mixed = head_confidence(h, weight, spec, impl="triton")
        plain = head_confidence(
            h, weight, replace(spec, sampling=replace(some, filters=False)), impl="triton"
        )
        for ours, theirs in (
            (mixed.token, plain.token),
            (mixed.prob, plain.prob),
            (mixed.measure, plain.measure),
        ):
            assert torch.equal(ours[free], theirs[free])
        if categorical:
            assert (mixed.prob[~free] > plain.prob[~free]).any()
        monkeypatch.setattr(kernel, "KEPT_ROWS", 4)
        chunks = head_confidence(h, weight, spec, impl="triton")
        monkeypatch.undo()
        assert torch.equal(chunks.token, mixed.token)
        assert torch.allclose(chunks.prob, mixed.prob, rtol=1e-5)


def test_empty_and_wrong_asks() -> None:
    h, weight = matrices(4, 50, 16)
    assert head_confidence(h[:0], weight, HeadSpec(50, 1), impl="triton").token.shape == (0,)
    with pytest.raises(ValueError, match="'luck'"):
        head_confidence(h, weight, HeadSpec(50, 1, "luck"), impl="triton")
    with pytest.raises(ValueError, match=r"'fast'.*ref, triton, invariant"):
        head_confidence(h, weight, HeadSpec(50, 1), impl="fast")


def test_strided_rows_are_read_where_they_lie() -> None:
    h, weight = matrices(12, 100, 32)
    wide = torch.full((12, 2, 32), NAN, device=DEVICE)
    wide[:, 1] = h
    spec = HeadSpec(100, 1)
    out = head_confidence(wide[:, 1], weight, spec, impl="triton")
    assert torch.equal(out.token, head_confidence(h, weight, spec, impl="triton").token)
    check(h, weight, spec, lambda: out)


@pytest.mark.parametrize("method", ["flash+verify", "flash+branch", "none+threshold"])
def test_an_engine_gives_the_same_tokens_with_the_kernels(
    golden_dir: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float32; one request greedy, one with suppressed confidences and, without a verifier, sampled."""
    calls = []
    plain = kernel.head_confidence
    monkeypatch.setattr(kernel, "head_confidence", lambda *a, **k: calls.append(1) or plain(*a, **k))
    model = one_layer(golden_model(golden_dir / "llada-tiny")).to(DEVICE)
    answers = []
    for impl in ("ref", "triton"):
        cache, decoding = method.split("+")
        built = build_method(cache, decoding, family=model.config.family)
        words = Vocabulary(VOCAB, MASK, (EOS,), (EOS, EOT))
        kernels = Kernels(rms_norm=impl, silu_mul=impl, head_confidence=impl)
        engine = Engine(model, built, words, slots=2, positions=40, kernels=kernels)
        for seed in range(2):
            masked = [False] * 8 + [True] * 12
            heat = 0.9 * seed if decoding == "threshold" else 0.0
            numbers = {"epsilon": 0.3, "temperature": heat, "seed": seed, "suppress": 2 * seed}
            engine.add(Request(str(seed), Canvas([*range(5, 13), *[MASK] * 12], masked, (EOS,), numbers)))
        ended = {}
        while not engine.idle:
            ended.update({done.request.id: done.ids for done in engine.step()})
        answers.append(ended)
        assert bool(calls) == (impl == "triton")
    assert answers[0] == answers[1]


@pytest.mark.parametrize("scale", [1e-40, 1e-30, 0.01, 3.0, 100.0, 1e30])
def test_the_cut_is_where_a_sort_has_it(scale: float) -> None:
    """Whatever the logits' scale, denormal numbers, both signs, infinities and equal ones among them."""
    made = torch.Generator().manual_seed(3)
    asked = [
        (0.9, 0),
        (0.5, 0),
        (0.999, 0),
        (1.0, 1),
        (1.0, 40),
        (0.7, 12),
        (1.0, 600),
        (0.0, 0),
        (1.0, 5000),
    ]
    top_p, top_k = (torch.tensor(column, device=DEVICE) for column in zip(*asked, strict=True))
    logits = torch.randn(len(asked), 700, generator=made) * scale
    logits[:, ::5], logits[:, 3] = logits[:, 1:2], -torch.inf
    logits = logits.to(DEVICE)
    order = torch.empty(len(asked), dtype=torch.int32, device=DEVICE)
    amounts = torch.empty(len(asked), 3, device=DEVICE)
    heat = torch.ones(len(asked), device=DEVICE)
    filters._cut[(len(asked),)](
        logits, heat, heat, top_p, top_k, order, amounts, 700, 700, 0,
        CHOICE=False, SUPPRESS=False, EOS=(), QUIET=(), **filters.CUT,
    )  # fmt: skip
    ranked = logits.sort(dim=1, descending=True, stable=True).values
    before = ranked.double().softmax(1).cumsum(1) - ranked.double().softmax(1)
    place = torch.arange(700, device=DEVICE)
    stays = ((top_p[:, None] >= 1) | (before <= top_p[:, None])) & (
        (top_k[:, None] == 0) | (place < top_k[:, None])
    )
    last = ranked.gather(1, (stays | (place == 0)).sum(1, keepdim=True) - 1)[:, 0]
    bits = (last + 0.0).view(torch.int32)
    expected = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    assert order.tolist() == expected.tolist()

"""The bounds of a certificate, checked by enumeration of small joint distributions."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_dllm.core.step import confidence_bound
from flash_dllm.methods import build_method


def total_variation(p: torch.Tensor, q: torch.Tensor) -> float:
    return float((p - q).abs().sum() / 2)


def joint(n: int, seed: int, sharp: float) -> torch.Tensor:
    """A joint distribution of n tokens over a vocabulary of 3 whose mode is all zeros for a large ``sharp``."""
    made = torch.Generator().manual_seed(seed)
    logits = torch.randn((3,) * n, generator=made, dtype=torch.float64)
    logits[(0,) * n] += sharp
    return logits.flatten().softmax(0).view((3,) * n)


def marginals(p: torch.Tensor) -> list[torch.Tensor]:
    return [p.movedim(i, 0).flatten(1).sum(1) if p.ndim > 1 else p for i in range(p.ndim)]


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 4), st.integers(0, 10_000), st.floats(4.0, 12.0))
def test_tokens_committed_together_stay_within_the_bound(n: int, seed: int, sharp: float) -> None:
    p = joint(n, seed, sharp)
    parts = marginals(p)
    confidence = torch.tensor([[float(m.max()) for m in parts]])
    bound = float(confidence_bound(confidence, torch.ones(1, n, dtype=torch.bool))[0])
    if n > 1 and bound < 1:
        product = torch.ones(())
        for m in parts:
            product = product[..., None] * m
        assert total_variation(p.flatten(), product.flatten()) <= bound + 1e-6
        assert int(p.argmax()) == int(product.argmax())


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 4), st.integers(0, 10_000), st.floats(2.0, 12.0))
def test_verified_tokens_stay_within_one_minus_the_product(n: int, seed: int, sharp: float) -> None:
    p = joint(n, seed, sharp)
    tokens = tuple(int(i) for i in torch.unravel_index(p.argmax(), p.shape))
    chain, rest = 1.0, p
    for token in tokens:
        conditional = marginals(rest)[0] / rest.sum()
        chain *= float(conditional[token])
        rest = rest[token]
    point = torch.zeros_like(p)
    point[tokens] = 1
    assert total_variation(p.flatten(), point.flatten()) <= 1 - chain + 1e-9


def test_the_example_of_the_docs() -> None:
    """Two tokens, p(a, a) = .90, p(a, b) = .05, p(b, a) = .04, p(b, b) = .01."""
    p = torch.tensor([[0.90, 0.05], [0.04, 0.01]], dtype=torch.float64)
    first, second = marginals(p)
    assert [float(first[0]), float(second[0])] == pytest.approx([0.95, 0.94])
    product = first[:, None] * second
    assert total_variation(p.flatten(), product.flatten()) == pytest.approx(0.014)
    taken = torch.ones(1, 2, dtype=torch.bool)
    assert float(confidence_bound(torch.tensor([[0.95, 0.94]]), taken)[0]) == pytest.approx(2.5 * 0.06)
    chain = 0.95 * (0.90 / 0.95)
    point = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    assert total_variation(p.flatten(), point.flatten()) == pytest.approx(1 - chain)


def test_no_bound_where_the_theorem_has_none() -> None:
    prob = torch.tensor([[0.6, 0.6], [0.6, 0.9], [0.3, 0.2]])
    take = torch.tensor([[True, True], [True, False], [False, False]])
    assert confidence_bound(prob, take).tolist() == pytest.approx([1.0, 0.4, 0.0])


@pytest.mark.parametrize(
    ("cache", "decoding", "options", "given_"),
    [
        ("none", "threshold", {}, True), ("none", "branch", {}, True), ("none", "verify", {"views": "leak-free"}, True),
        ("flash", "threshold", {}, True), ("none", "verify", {}, False), ("none", "random", {}, False),
    ],
)  # fmt: skip
def test_who_gets_a_certificate(cache: str, decoding: str, options: dict[str, str], given_: bool) -> None:
    method = build_method(cache, decoding, family="llada", **options)
    assert (method.certificate is not None) == given_
    assert ("cached" in (method.certificate or "")) == (given_ and cache == "flash")


def test_all_products_were_enumerated() -> None:
    """The joint of the helper really sums to one over all 3^n answers."""
    p = joint(3, 1, 5.0)
    assert float(sum(p[i] for i in itertools.product(range(3), repeat=3))) == pytest.approx(1.0)

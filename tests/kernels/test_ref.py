"""The reference kernels against slow float64 definitions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_dllm.kernels.head_confidence import HeadSpec, Sampling, confidence, head_confidence
from flash_dllm.kernels.qkv_rope_write import qkv_rope_write, rotate
from flash_dllm.kernels.rms_norm import rms_norm
from flash_dllm.kernels.row_attention import key_score, row_attention
from flash_dllm.kernels.silu_mul import silu_mul

NAN = float("nan")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def naive_attention(q, keys, values, rank, lo, hi):  # type: ignore[no-untyped-def]
    out = torch.zeros(q.shape, dtype=torch.float64)
    lanes, rows, heads, dim = q.shape
    share = heads // keys.shape[2]
    for b in range(lanes):
        for r in range(rows):
            seen = [p for p in range(keys.shape[1]) if lo[b, p] <= rank[b, r] < hi[b, p]]
            for h in range(heads):
                if not seen:
                    continue
                k, v = keys[b, seen, h // share].double(), values[b, seen, h // share].double()
                out[b, r, h] = (k @ q[b, r, h].double() / math.sqrt(dim)).softmax(0) @ v
    return out


@settings(deadline=None, max_examples=25)
@given(
    st.integers(1, 3), st.integers(1, 17), st.sampled_from([1, 17, 33]), st.sampled_from([(4, 4), (4, 2), (7, 1)]),
    st.integers(0, 99),
)  # fmt: skip
def test_row_attention_sees_exactly_its_intervals(
    lanes: int, rows: int, places: int, heads: tuple[int, int], seed: int
) -> None:
    made = torch.Generator().manual_seed(seed)
    q = randn(lanes, rows, heads[0], 8, seed=seed)
    keys, values = (
        randn(lanes, places, heads[1], 8, seed=seed + 1),
        randn(lanes, places, heads[1], 8, seed=seed + 2),
    )
    rank = torch.randint(0, 4, (lanes, rows), generator=made, dtype=torch.int32)
    lo = torch.randint(0, 4, (lanes, places), generator=made, dtype=torch.int32)
    hi = torch.randint(0, 5, (lanes, places), generator=made, dtype=torch.int32)
    expected = naive_attention(q, keys, values, rank, lo, hi)
    never = hi <= lo
    keys[never], values[never] = NAN, NAN
    out = row_attention(q, keys, values, rank, (lo, hi))
    assert torch.allclose(out.double(), expected, atol=1e-5)


def test_row_attention_without_intervals_sees_everything() -> None:
    q, keys, values = randn(2, 5, 4, 8), randn(2, 9, 2, 8, seed=1), randn(2, 9, 2, 8, seed=2)
    zeros = torch.zeros(2, 9, dtype=torch.int32)
    rank = torch.zeros(2, 5, dtype=torch.int32)
    expected = naive_attention(q, keys, values, rank, zeros, zeros + 1)
    assert torch.allclose(row_attention(q, keys, values).double(), expected, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv"), [(4, 4), (4, 2), (8, 1)])
def test_key_score_is_the_mean_of_raw_logits(heads: int, kv: int) -> None:
    rows, keys = randn(2, 6, heads, 8), randn(2, 11, kv, 8, seed=1)
    logits = torch.einsum("srhd,sphd->srhp", rows, keys.repeat_interleave(heads // kv, 2)).double()
    expected = logits.mean((1, 2))
    assert torch.allclose(key_score(rows.mean(1), keys).double(), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_adds_before_it_normalises(dtype: torch.dtype) -> None:
    x, delta, weight = (randn(7, 16, seed=i).to(dtype) for i in range(3))
    weight = weight[0]
    out, residual = rms_norm(x, weight, 1e-5, delta)
    wide = (x + delta).double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert torch.equal(residual, x + delta)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    assert torch.allclose(out.double(), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(rms_norm(x, weight, 1e-5)[1], x)


def test_silu_mul_gates_the_first_half() -> None:
    packed = randn(3, 10)
    gate, up = packed[:, :5].double(), packed[:, 5:].double()
    assert torch.allclose(silu_mul(packed).double(), gate * torch.sigmoid(gate) * up, atol=1e-6)


def test_rotation_is_a_rotation_by_the_position() -> None:
    x = randn(5, 2, 8)
    angle = torch.rand(5, 4, generator=torch.Generator().manual_seed(1))
    out = rotate(x, angle.cos(), angle.sin(), True)
    z = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    assert torch.allclose(out, torch.cat([z.real, z.imag], -1), atol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_keys_and_values_go_to_their_rows_and_nowhere_else(bias: bool) -> None:
    heads, kv, dim, width = 4, 2, 8, 12
    h, weight = randn(3, width), randn((heads + 2 * kv) * dim, width, seed=1)
    b = randn((heads + 2 * kv) * dim, seed=2) if bias else None
    keys, values = torch.full((2, 6, kv, dim), NAN), torch.full((2, 6, kv, dim), NAN)
    slot, place = torch.tensor([0, 1, 1]), torch.tensor([5, 0, 3])
    cos, sin = torch.ones(3, dim // 2), torch.zeros(3, dim // 2)
    q = qkv_rope_write(h, weight, b, (cos, sin), (slot, place), (keys, values), True)
    packed = (h @ weight.T + (b if b is not None else 0)).view(3, -1, dim)
    assert torch.allclose(q, packed[:, :heads], atol=1e-5)
    assert torch.allclose(keys[slot, place], packed[:, heads : heads + kv], atol=1e-5)
    assert torch.allclose(values[slot, place], packed[:, heads + kv :], atol=1e-5)
    written = torch.zeros(2, 6, dtype=torch.bool)
    written[slot, place] = True
    assert keys[~written].isnan().all() and values[~written].isnan().all()


def spec(**changes: object) -> HeadSpec:
    return HeadSpec(**{"n_tokens": 9, "mask_id": 3, **changes})  # type: ignore[arg-type]


def test_banned_ids_keep_their_mass_and_are_never_chosen() -> None:
    logits = randn(50, 12) * 3
    logits[:25, 3] = 9.0
    logits[25:, 10] = 9.0
    out = confidence(logits, spec())
    probs = logits.double().softmax(-1)
    assert not ((out.token == 3) | (out.token >= 9)).any()
    assert torch.allclose(out.prob.double(), probs.gather(1, out.token[:, None])[:, 0], atol=1e-6)


def test_measures() -> None:
    logits = randn(20, 12) * 3
    probs = logits.double().softmax(-1)
    top = probs.topk(2).values
    margin = confidence(logits, spec(measure="margin")).measure
    entropy = confidence(logits, spec(measure="neg_entropy")).measure
    assert torch.allclose(margin.double(), top[:, 0] - top[:, 1], atol=1e-6)
    assert torch.allclose(entropy.double(), (probs * (probs + 1e-10).log()).sum(-1), atol=1e-5)
    with pytest.raises(ValueError, match="'luck'"):
        confidence(logits, spec(measure="luck"))


def test_eos_policies() -> None:
    logits = randn(6, 12)
    logits[:, 1] = 5.0
    mode = torch.tensor([0, 1, 2, 3, 0, 2])
    out = confidence(logits, spec(suppress=mode, eos_ids=(1,), quiet_ids=(1, 2)))
    assert (out.token == 1).tolist() == [True, False, True, False, True, True]
    assert (out.prob == 0).tolist() == [False, False, True, False, False, True]


def test_probability_of_wanted_tokens() -> None:
    h, weight = randn(4, 6), randn(12, 6, seed=1)
    wanted = torch.tensor([0, 5, 11, 2])
    out = head_confidence(h, weight, spec(wanted=wanted))
    probs = (h.double() @ weight.double().T).softmax(-1)
    assert out.prob_wanted is not None
    assert torch.allclose(out.prob_wanted.double(), probs.gather(1, wanted[:, None])[:, 0], atol=1e-6)


def sampling(
    rows: int, temperature: float, top_p: float = 1.0, top_k: int = 0, seed: int = 0, **more: object
) -> Sampling:
    made = torch.Generator().manual_seed(seed)

    def uniform(vocab: int) -> torch.Tensor:
        return torch.rand(rows, vocab, dtype=torch.float64, generator=made).clamp(1e-12, 1 - 1e-12)

    return Sampling(
        torch.full((rows,), temperature),
        torch.full((rows,), top_p),
        torch.full((rows,), top_k),
        uniform,
        **more,
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("categorical", [False, True])
def test_samples_follow_the_tempered_distribution(categorical: bool) -> None:
    rows, temperature = 20_000, 0.7
    logits = randn(1, 6).expand(rows, 6)
    out = confidence(logits, spec(n_tokens=6, sampling=sampling(rows, temperature, categorical=categorical)))
    allowed = logits[0].double().clone()
    allowed[3] = float("-inf")
    expected = (allowed / temperature).softmax(0)
    seen = torch.bincount(out.token, minlength=6) / rows
    assert torch.allclose(seen.double(), expected, atol=0.015)


def test_filters_keep_the_smallest_set_with_the_mass() -> None:
    logits = torch.tensor([0.5, 0.3, 0.0, 0.0, 0.15, 0.05]).clamp_min(1e-9).log().expand(4000, 6)
    for top_p, top_k, kept in (
        (0.79, 0, {0, 1}),
        (1.0, 1, {0}),
        (1e-9, 0, {0}),
        (0.9, 0, {0, 1, 4}),
        (0.9, 2, {0, 1}),
    ):
        out = confidence(logits, spec(n_tokens=6, mask_id=3, sampling=sampling(4000, 1.0, top_p, top_k)))
        assert set(out.token.tolist()) == kept


def test_temperature_zero_is_argmax_in_a_mixed_batch() -> None:
    logits = randn(8, 12)
    mixed = sampling(8, 0.0)
    mixed.temperature[4:] = 1.0
    out = confidence(logits, spec(sampling=mixed))
    assert torch.equal(out.token[:4], confidence(logits, spec()).token[:4])

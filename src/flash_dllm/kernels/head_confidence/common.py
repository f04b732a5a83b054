"""What the head's Triton kernels share: the noise of a token, and names of constants."""

from __future__ import annotations

import triton
import triton.language as tl

MARGIN, ENTROPY = tl.constexpr(1), tl.constexpr(2)
ARGMAX, GUMBEL, CATEGORICAL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
NEG_INF = tl.constexpr(float("-inf"))
NOBODY = tl.constexpr(2**31 - 1)


@triton.jit
def _mix(x):
    """The 32-bit hash of `core.noise`."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def gumbel(first, second, column):
    """Gumbel noise, float64, of tokens ``column`` for rows whose hashes stand at ``first`` and ``second``.

    `core.noise.counter_uniform` continued by the word ``column + 1``, whose upper half is zero.
    """
    word = (column + 1).to(tl.uint32)
    first = _mix(_mix(first ^ word))
    second = _mix(_mix(second + word * 0x85EBCA77))
    bits = (first.to(tl.uint64) << 20) + (second >> 12).to(tl.uint64)
    uniform = (bits.to(tl.float64) + 0.5) * (1.0 / 4503599627370496.0)
    return -tl.log(-tl.log(uniform))

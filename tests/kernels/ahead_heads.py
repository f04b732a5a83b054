"""Compiles the kernels of the LM head, RMSNorm and the gated activation for GPUs that are not there; prints JSON lines.

Runs as a program, without ``TRITON_INTERPRET``: Triton cannot compile where it interprets. With ``--variants`` also
what is only to be measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from flash_dllm.kernels.gated_linear import triton as gated_linear
from flash_dllm.kernels.head_confidence import filters
from flash_dllm.kernels.head_confidence import tiles as heads
from flash_dllm.kernels.head_confidence import triton as head
from flash_dllm.kernels.qkv_rope_write import streamed
from flash_dllm.kernels.rms_norm import triton as norm
from flash_dllm.kernels.silu_mul import triton as gate
from tests.kernels.ahead import Compiled, compile_for

LIMITS = {90: 227 * 1024, 80: 163 * 1024, 89: 99 * 1024}
"""Shared memory of a block, bytes, by compute capability."""


@dataclass(frozen=True)
class Ask:
    """What a request wants of the head, as the constants of its kernel."""

    measure: int = 0
    sample: int = 0
    suppress: bool = False
    asked: bool = False
    filters: bool = False


PLAIN = Ask()
# A draft by margin or by entropy, and the read of a verify pass with gaps of a fixed length.
USUAL = (Ask(measure=1), Ask(measure=2), Ask(suppress=True, asked=True))
SAMPLED = (Ask(sample=1), Ask(sample=2, measure=2), Ask(sample=2, measure=1, suppress=True))
FILTERED = tuple(Ask(sample=sample, measure=1, suppress=True, filters=True) for sample in (1, 2))


@dataclass
class Case:
    """One kernel to compile; ``variant``: only to be measured, not chosen."""

    name: str
    arch: int
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int]
    aligned: tuple[str, ...] = field(default=())
    variant: bool = False

    def compile(self) -> Compiled:
        return compile_for(
            self.kernel, self.signature, self.constants, self.arch, self.aligned, **self.options
        )


def with_constants(signature: dict[str, str], constants: dict[str, Any]) -> dict[str, str]:
    return {**signature, **dict.fromkeys(constants, "constexpr")}


def scan(tile: heads.Tile, arch: int, ask: Ask, dtype: str = "bf16", variant: bool = False) -> Case:
    """The head's kernel for a width that the tile divides."""

    def operand(rows: int) -> str:
        return f"tensordesc<{dtype}[{rows}, {tile.depth}]>" if tile.descriptor else f"*{dtype}"

    integers = ["rows", "vocab", "depth", "stride", "weight_stride", "n_tokens", "mask_id", "tiles", "splits"]
    signature = {
        "h": operand(tile.rows), "w": operand(tile.vocab), "suppress": "*i64", "wanted": "*i64",
        "temperature": "*fp32", "top_p": "*fp32", "top_k": "*i64", "hash_first": "*i64", "hash_second": "*i64",
        "part": "*fp32", "score": "*fp64" if ask.sample else "*fp32", "token": "*i32", "keep": "*fp32",
        **dict.fromkeys(integers, "i32"),
    }  # fmt: skip
    constants = {
        "MEASURE": ask.measure, "SAMPLE": ask.sample, "SUPPRESS": ask.suppress, "ASKED": ask.asked,
        "EOS": (3,) if ask.suppress else (), "QUIET": (3, 4) if ask.suppress else (), "FILTER": ask.filters,
        "M": tile.rows, "V": tile.vocab, "K": tile.depth, "SWAP": tile.swap, "PARTS": tile.parts,
        "DESCRIPTOR": tile.descriptor, "FLAT": tile.flat, "EVEN": True,
        "PRECISION": "ieee" if dtype == "fp32" else "tf32",
    }  # fmt: skip
    return Case(
        f"{tile} {ask} {dtype}", arch, head._scan, with_constants(signature, constants), constants,
        {"num_warps": tile.warps, "num_stages": tile.stages},
        ("vocab", "depth", "stride", "weight_stride"), variant,
    )  # fmt: skip


def head_cases() -> Iterator[Case]:
    """Every tile that may be chosen with what may be asked of it, and every variant plainly."""
    for arch, table in ((90, heads.HOPPER), (80, heads.AMPERE), (89, heads.SMALL)):
        for _, tile in table:
            for ask in (PLAIN, *USUAL) if arch == 90 else (PLAIN, USUAL[-1]):
                yield scan(tile, arch, ask)
        for _, tile in heads.NOISY:
            for ask in (*SAMPLED, *FILTERED) if arch == 90 else (SAMPLED[-1], FILTERED[-1]):
                yield scan(tile, arch, ask)
        for _, tile in heads.WIDE:
            yield scan(tile, arch, USUAL[1], "fp32")
        yield scan(heads.INVARIANT, arch, PLAIN)
    for tiles in heads.VARIANTS.values():
        for tile in tiles:
            yield scan(tile, 90, PLAIN, variant=True)


def join_cases() -> Iterator[Case]:
    """The parts of LLaDA's vocabulary at the smallest tile."""
    pointers = [
        "part",
        "score",
        "token",
        "suppress",
        "out_token",
        "out_prob",
        "out_measure",
        "out_wanted",
        "out_z",
    ]
    kinds = ["*fp32", "*fp64", "*i32", "*i64", "*i64", *["*fp32"] * 4]
    signature = {**dict(zip(pointers, kinds, strict=True)), "rows": "i32", "splits": "i32"}
    constants = {
        "MEASURE": 1, "SAMPLE": 1, "FILTER": True, "SUPPRESS": True, "ASKED": True, "QUIET": (3, 4), "S": 2048
    }  # fmt: skip
    yield Case("join", 90, head._join, with_constants(signature, constants), constants, {"num_warps": 4})


def filter_cases() -> Iterator[Case]:
    """Top-k and top-p on the logits that were kept."""
    kinds = {
        "suppress": "*i64", "wanted": "*i64", "top_k": "*i64", "hash_first": "*i64", "hash_second": "*i64",
        "order": "*i32", "out_token": "*i64", **dict.fromkeys(["vocab", "n_tokens", "mask_id"], "i32"),
    }  # fmt: skip
    usual = {"SUPPRESS": True, "EOS": (3,), "QUIET": (3, 4)}
    cases = [
        *((filters._cut, {"CHOICE": choice}, filters.CUT) for choice in (True, False)),
        *((filters._draw, {"SAMPLE": n}, filters.DRAW) for n in (1, 2)),
        *((filters._rate, {"MEASURE": n, "ASKED": True}, filters.RATE) for n in (0, 1, 2)),
    ]
    for arch in (90, 80, 89):
        for kernel, constants, options in cases:
            constants = {**usual, **constants, "B": options["B"]}
            names = [name for name in kernel.arg_names if name not in constants]
            signature = {name: kinds.get(name, "*fp32") for name in names}
            yield Case(
                f"filter {kernel.fn.__name__} {constants}", arch, kernel, with_constants(signature, constants),
                constants, {"num_warps": options["num_warps"]},
            )  # fmt: skip


def product_cases() -> Iterator[Case]:
    """Products with what follows them, for many rows on Hopper: LLaDA's form, and Dream's with its bias."""
    sizes = dict.fromkeys(["n_rows", "depth", "places", "n_heads", "n_kv"], "i32")
    for tile in streamed.VARIANTS:
        signature = {
            "x": f"tensordesc<bf16[{tile.rows}, {tile.k}]>", "weight": f"tensordesc<bf16[256, {tile.k}]>",
            "bias": "*bf16", "cos": "*fp32", "sin": "*fp32", "slot": "*i64", "place": "*i64",
            **dict.fromkeys(["keys", "values", "queries"], "*bf16"), **sizes,
        }  # fmt: skip
        for wide in (True, False):
            constants = {
                "DIM": 128, "M": tile.rows, "K": tile.k, "GROUP": tile.group, "FP32": wide, "BIAS": not wide,
            }  # fmt: skip
            yield Case(
                f"{tile} projection bf16", 90, streamed._streamed, with_constants(signature, constants), constants,
                {"num_warps": tile.warps, "num_stages": tile.stages}, ("depth",), tile != streamed.TILE,
            )  # fmt: skip
    for gated in gated_linear.VARIANTS:
        signature = {
            "x": f"tensordesc<bf16[{gated.rows}, {gated.k}]>",
            "weight": f"tensordesc<bf16[2, {gated.width}, {gated.k}]>",
            "out": f"tensordesc<bf16[{gated.rows}, {gated.width}]>", **dict.fromkeys(["rows", "width", "depth"], "i32"),
        }  # fmt: skip
        constants = {"M": gated.rows, "N": gated.width, "K": gated.k, "GROUP": gated.group}
        yield Case(
            f"{gated} gated bf16", 90, gated_linear._gated, with_constants(signature, constants), constants,
            {"num_warps": gated.warps, "num_stages": gated.stages}, ("width", "depth"), gated != gated_linear.TILE,
        )  # fmt: skip


def row_cases() -> Iterator[Case]:
    """RMSNorm at the widths of its table, the gated activation at every tile."""
    signature = {
        **dict.fromkeys(["x", "delta", "weight", "normed", "residual"], "*bf16"), "rows": "i32", "width": "i32",
        "eps": "fp32", "stride": "i32", "delta_stride": "i32",
    }  # fmt: skip
    aligned = ("width", "stride", "delta_stride")
    wide = [(4096, tile, True) for tile in norm.VARIANTS]
    for width, tile, variant in [(w, t, False) for w, t in norm.TILES] + wide:
        constants = {"ADD": True, "ROWS": tile.rows, "WIDTH": width}
        yield Case(
            f"norm {width} {tile}", 90, norm._norm, with_constants(signature, constants), constants,
            {"num_warps": tile.warps}, aligned, variant,
        )  # fmt: skip
    signature = {"packed": "*bf16", "out": "*bf16", "width": "i32", "stride": "i32", "blocks": "i32"}
    for tile in gate.VARIANTS:
        constants = {"WIDTH": tile.width}
        yield Case(
            f"gate {tile}", 90, gate._gate, with_constants(signature, constants), constants,
            {"num_warps": tile.warps}, ("width", "stride"), tile != gate.TILE,
        )  # fmt: skip


def main() -> None:
    variants = "--variants" in sys.argv[1:]
    for case in (*head_cases(), *join_cases(), *filter_cases(), *product_cases(), *row_cases()):
        if case.variant and not variants:
            continue
        built = asdict(case.compile())
        matrix = "wgmma" in built.pop("ptx")
        print(
            json.dumps(
                {"name": case.name, "arch": case.arch, "variant": case.variant, "wgmma": matrix, **built}
            )
        )


if __name__ == "__main__":
    main()

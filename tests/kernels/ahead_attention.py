"""Compiles attention, projection and matrix product for GPUs that are not there; prints JSON lines.

Runs as a program, without ``TRITON_INTERPRET``: Triton cannot compile where it interprets.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

import torch

from flash_dllm.kernels.devices import A100, ADA, H200, Limits
from flash_dllm.kernels.linear import triton as product
from flash_dllm.kernels.qkv_rope_write import triton as qkv
from flash_dllm.kernels.row_attention import triton as attention
from flash_dllm.kernels.row_attention.tiles import Tiles, invariant_tiles, tiles_for
from tests.kernels.ahead_heads import Case, with_constants

CHIPS: dict[int, Limits] = {90: H200, 80: A100, 89: ADA}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PRECISION = {"bf16": "tf32", "fp32": "ieee"}


def attention_cases() -> Iterator[Case]:
    """A denoise step's rows with the score, a sweep's, those of a verify pass, and grouped queries."""
    for arch, chip in CHIPS.items():
        for rows, group, whole, score in (
            (128, 1, True, True), (1512, 1, True, False), (32, 1, False, False), (16, 1, False, False),
            (128, 7, True, True),
        ):  # fmt: skip
            for slots in (1, 32) if arch == 90 else (32,):
                for beside in (False, True) if slots == 1 else (False,):
                    tiles = tiles_for(rows, slots * 32 // group, group, torch.bfloat16, chip, beside)
                    yield attend(tiles, arch, "bf16", group, whole, score)
        yield attend(invariant_tiles(torch.bfloat16, chip), arch, "bf16", 1, True, False)
        yield attend(tiles_for(128, 32, 1, torch.float32, chip), arch, "fp32", 1, True, True)


def attend(tiles: Tiles, arch: int, dtype: str, group: int, whole: bool, score: bool) -> Case:
    tile = f"tensordesc<{dtype}[{tiles.n}, 128]>" if tiles.descriptor else f"*{dtype}"
    signature = {
        **dict.fromkeys(("q", "k", "v"), f"*{dtype}"), **dict.fromkeys(("key_tiles", "value_tiles"), tile),
        "out": f"*{dtype}", **dict.fromkeys(("part", "stats"), "*fp32"),
        **dict.fromkeys(("table", "rank", "lo", "hi", "ends"), "*i32"),
        **dict.fromkeys(("shares", "score"), "*fp32"),
        "scale": "fp32", **dict.fromkeys(("base", "row_stride", "places", "positions", "n_rows", "n_kv"), "i32"),
    }  # fmt: skip
    lanes = attention.lanes(tiles.m, tiles.warps, DTYPES[dtype])
    constants = {
        "GROUP": group, "DIM": 128, "PAD": 128, "M": tiles.m, "N": tiles.n, "SPLITS": tiles.splits, "WHOLE": whole,
        "SCORE": score, "LANES": lanes, "PARTS": attention.LANES, "DESCRIPTOR": tiles.descriptor,
        "PRECISION": PRECISION[dtype],
    }  # fmt: skip
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    name = f"attend {tiles} {dtype} group={group} whole={whole} score={score}"
    kernel, typed = attention._attend, with_constants(signature, constants)
    return Case(name, arch, kernel, typed, constants, options, ("row_stride",))


def projection_cases() -> Iterator[Case]:
    """The fused projection at every number of rows that has its own tile, and the scatter behind a product."""
    scalars = ("n_rows", "depth", "places", "n_heads", "n_kv")
    for arch, chip in CHIPS.items():
        for rows in (1, 32, 128, 4096):
            for dtype in ("bf16", "fp32") if arch == 90 else ("bf16",):
                tiles = qkv.tiles_for(rows, 128, DTYPES[dtype], chip)
                signature = {
                    **dict.fromkeys(("x", "weight", "bias"), f"*{dtype}"), "cos": "*fp32", "sin": "*fp32",
                    "slot": "*i64", "place": "*i64", **dict.fromkeys(("keys", "values", "queries"), f"*{dtype}"),
                    **dict.fromkeys(scalars, "i32"),
                }  # fmt: skip
                constants = {
                    "DIM": 128, "M": tiles.m, "HEADS": tiles.heads, "PAIRS": tiles.pairs,
                    "PARTS": 64 // tiles.pairs, "K": tiles.k, "GROUP": tiles.group, "FP32": True, "BIAS": False,
                    "PRECISION": PRECISION[dtype],
                }  # fmt: skip
                options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
                yield Case(
                    f"project {tiles} {dtype}", arch, qkv._project, with_constants(signature, constants), constants,
                    options, ("depth", "n_heads", "n_kv"),
                )  # fmt: skip
    signature = {
        "packed": "*bf16", "cos": "*fp32", "sin": "*fp32", "slot": "*i64", "place": "*i64",
        **dict.fromkeys(("keys", "values", "queries"), "*bf16"), **dict.fromkeys(scalars[2:], "i32"),
    }  # fmt: skip
    constants = {"DIM": 128, "HALF": 64, "HEADS": 16, "FP32": True}
    typed = with_constants(signature, constants)
    yield Case("scatter", 90, qkv._scatter, typed, constants, {"num_warps": 4, "num_stages": 3})


def product_cases() -> Iterator[Case]:
    """Triton's matrix product for few rows and many, and with the one tile of invariant products."""
    for arch, chip in CHIPS.items():
        tiles = [product.tiles_for(rows, 12288, torch.bfloat16, chip) for rows in (1, 64, 128, 4096)]
        for t in (*tiles, product.invariant_tiles(torch.bfloat16, chip)):
            signature = {
                **dict.fromkeys(("x", "weight", "bias", "out"), "*bf16"),
                **dict.fromkeys(("rows", "width", "depth"), "i32"),
            }
            constants = {"M": t.m, "N": t.n, "K": t.k, "GROUP": t.group, "BIAS": False, "PRECISION": "tf32"}
            options = {"num_warps": t.warps, "num_stages": t.stages}
            typed = with_constants(signature, constants)
            yield Case(f"product {t}", arch, product._matmul, typed, constants, options, ("width", "depth"))


def main() -> None:
    for case in (*attention_cases(), *projection_cases(), *product_cases()):
        built = asdict(case.compile())
        matrix = "wgmma" in built.pop("ptx")
        print(json.dumps({"name": case.name, "arch": case.arch, "wgmma": matrix, **built}))


if __name__ == "__main__":
    main()

"""``flash-dllm tune``: the fastest tiles of each op on this GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flash_dllm.cli.bench_shared import DEVICE, DTYPE, SHAPE, where, words
from flash_dllm.cli.fields import UsageError
from flash_dllm.cli.tables import print_table

if TYPE_CHECKING:
    from flash_dllm.bench.tune import Tried

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def tune(
    shape: SHAPE = "llada-8b",
    ops: Annotated[str, typer.Option(help="comma-separated, or all")] = "all",
    repeats: Annotated[int, typer.Option(min=1)] = 10,
    output: Annotated[
        Path | None, typer.Option("--output", help="file to write instead of the one that engines read")
    ] = None,
    dtype: DTYPE = "auto",
    device: DEVICE = "auto",
) -> None:
    """Measure the tiles of every op on this GPU at a model's shape; engines on it use the fastest from then on.

    The choices are stored in the user's cache folder, one file for each kind of GPU and version of Triton. Delete
    the file to go back to the built-in ones.
    """
    from flash_dllm.bench.facts import facts
    from flash_dllm.bench.kernels import Maker, Sizes
    from flash_dllm.bench.synthetic import Setting
    from flash_dllm.bench.timing import Timer
    from flash_dllm.bench.tune import TUNED_OPS
    from flash_dllm.bench.tune import tune as measure
    from flash_dllm.kernels.tuned import save, stored_at

    at, kind = where(device, dtype)
    if at.type != "cuda":
        raise UsageError(f"tune measures a CUDA GPU; the device is {at}")
    names = TUNED_OPS if ops == "all" else words(ops)
    unknown = sorted(set(names) - set(TUNED_OPS))
    if unknown:
        raise UsageError(f"ops: {unknown[0]!r} has no tiles to choose; there are {', '.join(TUNED_OPS)}")
    config = Setting(shape, "none+threshold").config
    found: list[Tried] = []
    table = measure(
        Maker(config, kind, at), Sizes.default(config, at), Timer(at, repeats, 2), names, found.append
    )
    path = output or stored_at(at)
    save(table, path, {**facts(at, kind, synthetic=True), "shape": shape})
    rows = [(e.op, str(e.rows), e.impl, _tiles(e.tiles), f"{e.ms:.4f}") for e in table.entries]
    print_table(f"fastest tiles, of {len(found)} measured", ("op", "rows", "impl", "tiles", "ms"), rows)
    failed = [t for t in found if t.timing is None]
    if failed:
        typer.echo(
            f"{len(failed)} gave no right result, as {failed[0].candidate.tiles}: {failed[0].why}", err=True
        )
    typer.echo(f"stored in {path}")


def _tiles(tiles: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in tiles.items() if value not in (False, 0))

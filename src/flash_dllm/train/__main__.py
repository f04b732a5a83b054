"""`python -m flash_dllm.train`: train the tokenizer, run a stage, export a state."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

_START = time.monotonic()

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Train small masked diffusion models.")


@app.command()
def run(
    recipe: Annotated[str, typer.Option(help="Name of a recipe (train/recipes.py).")],
    budget: Annotated[float, typer.Option(help="Seconds for everything, start-up and measuring included.")],
    out: Annotated[Path, typer.Option(help="Output folder.")],
    stage: Annotated[str, typer.Option(help="Stage of the recipe's schedule.")] = "A",
    resume: Annotated[Path | None, typer.Option(help="Folder with the previous stage's state.")] = None,
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto.")] = "auto",
    workers: Annotated[int, typer.Option(help="Data processes; 0 chooses by the number of cores.")] = 0,
    compiled: Annotated[bool, typer.Option(help="Compile the layer functions (GPU only).")] = True,
    reserve: Annotated[
        float, typer.Option(help="Seconds of the budget kept for saving and measuring.")
    ] = 0.0,
) -> None:
    """Train one stage."""
    import torch

    from flash_dllm.train.recipes import RECIPES
    from flash_dllm.train.trainer import Options, Trainer

    if recipe not in RECIPES:
        raise typer.BadParameter(f"unknown recipe {recipe!r}; there are {', '.join(RECIPES)}")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        # Data workers need cores too, and OpenMP threads that share one wait for each other.
        torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    count = workers or max(1, min(12, (os.cpu_count() or 2) // 2 - 1))
    options = Options(stage, budget, out, _START, resume, device, count, compiled)
    chosen = RECIPES[recipe]
    report = Trainer(replace(chosen, reserve=reserve or chosen.reserve), options).run()
    for name, table in report["accuracy"]["tables"].items():
        typer.echo(f"{recipe} {name}: all {table['all']} gsm {table.get('gsm')}")


@app.command()
def tokenizer(
    out: Annotated[Path, typer.Option(help="Folder for the tokenizer files.")],
    samples: Annotated[int, typer.Option(help="Samples to train on.")] = 100_000,
) -> None:
    """Train the tokenizer."""
    from flash_dllm.train.tokenizer import save_tokenizer, train_tokenizer

    save_tokenizer(train_tokenizer(samples), out)


@app.command("export")
def export_command(
    recipe: Annotated[str, typer.Option(help="Name of a recipe (train/recipes.py).")],
    state: Annotated[Path, typer.Option(help="Folder with state.safetensors.")],
    out: Annotated[Path, typer.Option(help="Model folder to write.")],
) -> None:
    """Write the model of a saved state."""
    from flash_dllm.train.checkpoint import load_state
    from flash_dllm.train.export import export
    from flash_dllm.train.recipes import RECIPES
    from flash_dllm.train.tokenizer import bundled_folder

    tensors, _ = load_state(state)
    masters = {name.removeprefix("master."): t for name, t in tensors.items() if name.startswith("master.")}
    export(RECIPES[recipe].shape, masters, out, bundled_folder())


@app.command()
def cards(
    results: Annotated[
        Path, typer.Option(help="Folder with the measurements: training-*.json, card-*.json.")
    ],
    weights: Annotated[
        Path | None, typer.Option(help="Folder of the models; default: the bundled ones.")
    ] = None,
) -> None:
    """Write the bundled models' cards from committed measurements."""
    from flash_dllm.train.card import write_cards
    from flash_dllm.train.tokenizer import bundled_folder

    write_cards(results, weights or bundled_folder().parent)


if __name__ == "__main__":
    app()

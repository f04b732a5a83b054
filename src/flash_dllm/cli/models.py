"""``flash-dllm models``: what is supported, and what a checkpoint needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flash_dllm.cli.fields import UsageError
from flash_dllm.cli.tables import gigabytes, print_table, write_json

app = typer.Typer(add_completion=False, rich_markup_mode=None)
KNOWN = (
    ("GSAI-ML/LLaDA-8B-Base", "LLaDA", "raw text"),
    ("GSAI-ML/LLaDA-8B-Instruct", "LLaDA", "chat"),
    ("GSAI-ML/LLaDA-1.5", "LLaDA", "chat"),
    ("Dream-org/Dream-v0-Base-7B", "Dream", "raw text"),
    ("Dream-org/Dream-v0-Instruct-7B", "Dream", "chat"),
)


@app.command()
def models(
    checkpoint: Annotated[
        str | None, typer.Argument(help="folder, hub id or bundled name to look into")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="branch, tag or commit of a hub id")] = None,
    dtype: Annotated[
        str, typer.Option(help="to compute in; auto is the checkpoint's own, float32 on a CPU")
    ] = "auto",
    device: Annotated[str, typer.Option(help="where it should fit")] = "auto",
    max_num_seqs: Annotated[int, typer.Option(min=1, help="canvases at the same time")] = 8,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="longest canvas; default the model's")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """What is supported; with a checkpoint: its parameters, the memory it needs, whether it fits.

    No weight is loaded, and of a model on the hub only the small files are fetched.
    """
    if checkpoint is None:
        _supported(json_)
        return
    facts = _inspect(checkpoint, revision, dtype, device, max_num_seqs, max_model_len)
    if json_:
        write_json(Path("-"), facts)
    else:
        _show(facts)


def _supported(json_: bool) -> None:
    from flash_dllm.models.load import BUNDLED

    rows = [
        (name, "bundled" if _installed(name) else "bundled, but not in this installation", "")
        for name in BUNDLED
    ]
    rows += [(name, family, use) for name, family, use in KNOWN]
    if json_:
        write_json(Path("-"), [{"name": n, "family": f, "use": u} for n, f, u in rows])
        return
    print_table("Models", ("name", "kind", "use"), rows)
    typer.echo("Any other checkpoint of these two architectures works too, iLLaDA-8B among them.")
    typer.echo("flash-dllm models NAME shows what one needs.")


def _installed(name: str) -> bool:
    from flash_dllm.models.config import ModelError
    from flash_dllm.models.load import resolve

    try:
        return (resolve(name) / "model.safetensors").exists()
    except ModelError:
        return False


def _inspect(
    checkpoint: str, revision: str | None, dtype: str, device: str, slots: int, length: int | None
) -> dict[str, Any]:
    from flash_dllm.llm import LONGEST
    from flash_dllm.loading import pick_device, pick_dtype
    from flash_dllm.models import ModelConfig, inspect_checkpoint, memory_estimate
    from flash_dllm.models.load import DTYPES

    facts = inspect_checkpoint(checkpoint, revision)
    config = ModelConfig(**facts["config"])
    where = pick_device(device)
    name = pick_dtype(dtype, where)
    name = facts["dtype"] or "bfloat16" if name == "auto" else name
    if name not in DTYPES:
        raise UsageError(f"dtype={dtype!r}: not supported, only auto, {', '.join(DTYPES)}")
    if length is not None and length > config.max_positions:
        raise UsageError(f"max_model_len={length} is more than the model's {config.max_positions}")
    length = length or min(config.max_positions, LONGEST)
    need = memory_estimate(config, DTYPES[name], slots, length)
    have = free_memory(where)
    return {
        **facts, "compute_dtype": name, "max_num_seqs": slots, "max_model_len": length, "memory": need,
        "device": where, "free": have, "fits": None if have is None else need["total"] <= have,
    }  # fmt: skip


def free_memory(device: str) -> int | None:
    """Bytes that are free on a device, or None if unknown."""
    import torch

    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise UsageError(f"device={device!r}: no CUDA GPU here")
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)


def _show(facts: dict[str, Any]) -> None:
    config, need = facts["config"], facts["memory"]
    heads = f"{config['n_heads']} heads, {config['n_kv_heads']} for keys and values"
    stored = ", ".join(f"{name} {gigabytes(size)}" for name, size in (facts["stored_bytes"] or {}).items())
    rows = [
        ("family", facts["family"]),
        ("parameters", f"{facts['parameters']:,}"),
        ("layers", f"{config['n_layers']} of width {config['d_model']}, {heads}"),
        ("vocabulary", f"{config['n_tokens']:,} tokens, MASK {config['mask_id']}"),
        ("positions", f"{config['max_positions']:,}"),
        ("stored", stored or "unknown until fetched"),
        ("weights", f"{gigabytes(need['weights'])} in {facts['compute_dtype']}"),
        (
            "keys, values",
            f"{gigabytes(need['kv_cache'])} for {facts['max_num_seqs']} x {facts['max_model_len']:,}",
        ),
        ("activations", f"at most {gigabytes(need['activations'])}"),
        ("total", gigabytes(need["total"])),
    ]
    if facts["free"] is not None:
        verdict = "fits" if facts["fits"] else "does not fit"
        rows.append(("here", f"{verdict}: {gigabytes(facts['free'])} free on {facts['device']}"))
    print_table(facts["source"], ("", ""), rows)

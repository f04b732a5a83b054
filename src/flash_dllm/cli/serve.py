"""``flash-dllm serve``: an OpenAI-compatible server."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from flash_dllm.cli.fields import UsageError, pair, parameters, read_config
from flash_dllm.scale.replica_args import ReplicaArgs
from flash_dllm.serve.args import ServeArgs

app = typer.Typer(add_completion=False, rich_markup_mode=None)
OWN = tuple(name for name in ServeArgs.model_fields if name not in ("model", "options"))
KNOWN = {**ServeArgs.model_fields, **ReplicaArgs.model_fields}


def serve(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="folder, hub id or bundled name")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option", "-o", metavar="NAME=VALUE", help="option of the method's constructor; repeatable"
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of options; flags win over it")] = None,
    **flags: Any,
) -> None:
    """Serve a model over OpenAI's API: chat and text completions, streams, metrics.

    SIGTERM ends it gracefully: running requests are finished, new ones get 503.
    """
    replicas = replicas_of(flags, config)
    args = settle(model, flags, option or [], config)
    try:
        if replicas.replicas is not None:
            from flash_dllm.scale.replicas import run as run_replicas

            return run_replicas(args, replicas)
        from flash_dllm.serve.server import run
    except ImportError as exc:
        raise UsageError(f"serve needs {exc.name}: pip install 'flash-dllm[serve]'") from exc
    run(args)


def replicas_of(flags: dict[str, Any], config: Path | None) -> ReplicaArgs:
    """Takes the options of replicas out of the flags; those of the config file are under them."""
    names = ReplicaArgs.model_fields
    values = {n: v for n, v in (read_config(config, KNOWN) if config else {}).items() if n in names}
    given = {name: value for name in names if (value := flags.pop(name, None)) is not None}
    return ReplicaArgs.model_validate({**values, **given})


def settle(model: str | None, flags: dict[str, Any], option: list[str], config: Path | None) -> ServeArgs:
    """Flags over the config file, validated.

    Raises:
        UsageError, pydantic.ValidationError: an unknown name or a bad value.
    """
    given = {name: value for name, value in flags.items() if value not in (None, [])}
    if model is not None:
        given["model"] = model
    values = read_config(config, KNOWN) if config else {}
    values = {name: value for name, value in values.items() if name not in ReplicaArgs.model_fields}
    options = {**(values.pop("options", None) or {}), **dict(map(pair, option))}
    values = {**values, **given}
    values.setdefault("api_key", os.environ.get("FLASH_DLLM_API_KEY") or None)
    return ServeArgs.model_validate({**values, "options": options})


_shown = [p for p in inspect.signature(serve, eval_str=True).parameters.values() if p.name != "flags"]
_made = parameters({name: KNOWN[name] for name in (*OWN, *ReplicaArgs.model_fields)})
serve.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [*(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in _shown), *_made]
)
app.command()(serve)

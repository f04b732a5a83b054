"""Command line options made from the pydantic models of ``flash_dllm.params``: the two cannot drift."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import typer
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from flash_dllm.errors import FlashDLLMError
from flash_dllm.params import EngineArgs, SamplingParams

SKIP = {"options"}
"""Fields without a flag of their own: ``--option NAME=VALUE`` fills this one."""
SHORT = {"model": "-m", "max_tokens": "-t", "temperature": "-T"}


class UsageError(FlashDLLMError):
    """Flags or a file that do not make sense together."""


def fields() -> dict[str, FieldInfo]:
    """Every option by name. ``seed`` is that of the request, which is the same thing on the command line."""
    models: tuple[type[BaseModel], ...] = (EngineArgs, SamplingParams)
    return {name: field for model in models for name, field in model.model_fields.items() if name not in SKIP}


def flag(name: str) -> str:
    """``max_tokens`` -> ``--max-tokens``."""
    return "--" + name.replace("_", "-")


def takes_options(func: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command every option; it receives them validated, as ``engine`` and ``params``."""
    own = [
        p
        for p in inspect.signature(func, eval_str=True).parameters.values()
        if p.name not in ("engine", "params")
    ]
    known = fields()
    shared = [
        _parameter(
            "method",
            str,
            typer.Option(None, "--method", help="cache+decoding in one word, as none+threshold"),
        ),
        _parameter(
            "option",
            list[str],
            typer.Option(
                None,
                "--option",
                "-o",
                metavar="NAME=VALUE",
                help="option of the method's constructor; repeatable",
            ),
        ),
        _parameter(
            "config", Path, typer.Option(None, "--config", help="YAML file of options; flags win over it")
        ),
    ]

    @wraps(func)
    def call(**values: Any) -> Any:
        given = {name: value for name in known if (value := values.pop(name)) not in (None, [])}
        engine, params = settle(given, values.pop("method"), values.pop("option") or [], values.pop("config"))
        if engine.tensor_parallel_size > 1:
            from flash_dllm.tensor_parallel import stay_behind

            stay_behind(engine)
        return func(**values, engine=engine, params=params)

    made = parameters(known)
    call.__signature__ = inspect.Signature([*own, *made, *shared])  # type: ignore[attr-defined]
    return call


def settle(
    given: dict[str, Any], method: str | None, option: list[str], config: Path | None
) -> tuple[EngineArgs, SamplingParams]:
    """Options from flags over those of a config file, validated.

    Raises:
        UsageError, pydantic.ValidationError: an unknown name or a bad value.
    """
    values = read_config(config, {*fields(), "options"}) if config else {}
    options = dict(values.pop("options", None) or {})
    if method is not None:
        if "cache" in given or "decoding" in given:
            raise UsageError("--method already names cache and decoding")
        cache, _, decoding = method.partition("+")
        values.update(cache=cache or None, decoding=decoding or None)
    values.update(given)
    options.update(pair(text) for text in option)
    in_engine = {n: v for n, v in values.items() if n in EngineArgs.model_fields and n != "seed"}
    rest = {n: v for n, v in values.items() if n not in in_engine}
    engine = EngineArgs.model_validate({**in_engine, "options": options})
    return engine, SamplingParams.model_validate(rest)


def read_config(path: Path, known: Collection[str]) -> dict[str, Any]:
    """Options by name from a YAML file.

    Raises:
        UsageError: it cannot be read, or names something that is not ``known``.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as exc:
        raise UsageError(f"{path}: not valid UTF-8") from exc
    except yaml.YAMLError as exc:
        raise UsageError(f"{path}: not valid YAML ({exc})") from exc
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UsageError(f"{path}: must hold options by name")
    values = {str(name).replace("-", "_"): value for name, value in values.items()}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise UsageError(f"{path}: unknown option {unknown[0]!r}")
    return values


def parameters(known: Mapping[str, FieldInfo]) -> list[inspect.Parameter]:
    """A flag for each field, as parameters of a command."""
    return [_from_field(name, field) for name, field in known.items()]


def pair(text: str) -> tuple[str, Any]:
    """``NAME=VALUE``, the value read as YAML."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"--option {text}: write NAME=VALUE")
    return name.replace("-", "_"), yaml.safe_load(value)


def _from_field(name: str, field: FieldInfo) -> inspect.Parameter:
    kind, choices = _kind(field.annotation)
    names = [flag(name)]
    if kind is bool:
        names = [f"{flag(name)}/--no-{name.replace('_', '-')}"]
    if name in SHORT:
        names.append(SHORT[name])
    help_ = field.description or ""
    if field.default not in (None, ()):
        help_ += f" [{'on' if field.default is True else 'off' if field.default is False else field.default}]"
    return _parameter(name, kind, typer.Option(None, *names, help=help_, metavar="|".join(choices) or None))


def _kind(annotation: Any) -> tuple[Any, tuple[str, ...]]:
    """The type a flag parses to, and the words it may be. The model checks values, not the flag."""
    parts = [a for a in get_args(annotation) if a is not type(None)]
    if type(None) in get_args(annotation) and get_origin(annotation) is not Literal:
        return _kind(parts[0] if len(parts) == 1 else Union[tuple(parts)])  # noqa: UP007
    if get_origin(annotation) is Literal:
        return str, tuple(str(p) for p in parts)
    if get_origin(annotation) is tuple:
        return list[parts[0]], ()  # type: ignore[valid-type]
    return annotation, ()


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind | None)

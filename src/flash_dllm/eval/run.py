"""An evaluation from options to a report: the harness builds prompts and scores, the engine answers."""

from __future__ import annotations

import inspect
import logging
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flash_dllm.eval.answers import Answerer, Policy
from flash_dllm.eval.errors import EvalError, need
from flash_dllm.eval.journal import Journal
from flash_dllm.eval.tasks import GROUPS, TASKS, expand, write_configs
from flash_dllm.params import EngineArgs

if TYPE_CHECKING:
    from flash_dllm.llm import LLM
    from flash_dllm.loading import Loaded

OURS = frozenset({
    "model", "model_args", "tasks", "limit", "num_fewshot", "apply_chat_template", "fewshot_as_multiturn",
    "system_instruction", "gen_kwargs", "task_manager", "confirm_run_unsafe_code", "log_samples", "batch_size",
    "max_batch_size", "device", "use_cache", "evaluation_tracker",
})  # fmt: skip
"""Arguments of the harness's ``simple_evaluate`` that have an option of their own here, or no meaning."""


@dataclass(frozen=True)
class Settings:
    """What to evaluate; names as in the harness where it has the same thing.

    Attributes:
        tasks: names of :data:`TASKS` or :data:`GROUPS`, or any task of the harness.
        data_dir: folder of local files (docs/evaluation.md); None lets the harness ask its hub.
        limit: the first so many problems of each task.
        harness: further arguments of ``simple_evaluate``.
        confirm_run_unsafe_code: needed for humaneval and mbpp, whose answers are run (in a sandbox).
        include_path: folder of the user's own task files.
        mc_num: random maskings of a likelihood.
        add_bos: put the tokenizer's first token before each prompt.
        answers: ``model``; ``gold`` and ``broken`` check the scoring with the data's own answers and with nonsense.
    """

    tasks: tuple[str, ...]
    data_dir: Path | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    apply_chat_template: bool = False
    fewshot_as_multiturn: bool = True
    system_instruction: str | None = None
    gen_kwargs: dict[str, Any] = field(default_factory=dict)
    log_samples: bool = True
    confirm_run_unsafe_code: bool = False
    include_path: Path | None = None
    harness: dict[str, Any] = field(default_factory=dict)
    mc_num: int = 128
    add_bos: bool = False
    answers: str = "model"

    @property
    def names(self) -> list[str]:
        """Tasks with groups taken apart, where the harness's own group cannot be used."""
        return expand(self.tasks)

    def prompt_settings(self) -> dict[str, Any]:
        """What changes prompts or answers, as plain data."""
        return {
            "num_fewshot": self.num_fewshot, "apply_chat_template": self.apply_chat_template,
            "fewshot_as_multiturn": self.fewshot_as_multiturn, "system_instruction": self.system_instruction,
            "gen_kwargs": self.gen_kwargs, "harness": {k: str(v) for k, v in self.harness.items()},
            "data": "hub" if self.data_dir is None else str(self.data_dir.resolve()), "answers": self.answers,
        }  # fmt: skip


def check(settings: Settings) -> None:
    """Refuse early what cannot work, before a model is loaded.

    Raises:
        EvalError: names it.
    """
    if not settings.tasks:
        raise EvalError(f"tasks: give at least one of {', '.join([*TASKS, *GROUPS])}")
    need("lm_eval", "an evaluation")
    unsafe = [name for name in settings.names if name in TASKS and TASKS[name].code]
    if unsafe and not settings.confirm_run_unsafe_code:
        raise EvalError(
            f"task {unsafe[0]} runs what the model wrote (in a sandbox, see docs/evaluation.md): allow it with "
            "--confirm-run-unsafe-code"
        )
    if any("math" in name for name in settings.names):
        need("math_verify", "the MATH tasks")
        need("antlr4", "the MATH tasks")
    taken = sorted(set(settings.harness) & OURS)
    if taken:
        raise EvalError(f"harness argument {taken[0]!r} has an option of its own, or none here")


def evaluate(
    engine: EngineArgs,
    settings: Settings,
    policy: Policy,
    output: Path | None = None,
    loaded: Loaded | None = None,
) -> dict[str, Any]:
    """Run the tasks, one after the other, and write a report.

    Args:
        engine: model and method.
        settings: tasks and harness options.
        policy: stop strings, lengths, sampling.
        output: folder for answers, samples and reports; an earlier run in it goes on. None keeps nothing.
        loaded: the model, if it is in memory already.

    Returns:
        The report (docs/evaluation.md).

    Raises:
        FlashDLLMError: an option, the data or the model is wrong.
    """
    check(settings)
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flash-dllm-eval-")))
        include = [] if settings.include_path is None else [settings.include_path]
        if settings.data_dir is not None:
            include.append(write_configs(settings.names, settings.data_dir, work))
        from flash_dllm.bench.measure import warm_up
        from flash_dllm.eval.report import build, write
        from flash_dllm.llm import LLM

        began = time.perf_counter()
        llm = LLM.from_args(engine, loaded)
        load_seconds = time.perf_counter() - began
        policy = _settled(policy, settings, llm)
        journal = Journal(
            None if output is None else output / "answers.jsonl", fingerprint(llm, policy, settings)
        )
        stack.enter_context(journal)
        answerer = _answerers()[settings.answers](llm, policy, journal)
        if settings.answers == "model":
            warm_up(llm)
        results = {}
        stack.enter_context(_harness(offline=settings.data_dir is not None))
        for name, result in _run_tasks(answerer, settings, include):
            results[name] = result
        made = build(answerer, settings, results, load_seconds)
        if output is not None:
            write(made, results if settings.log_samples else {}, output)
        return made


def _answerers() -> dict[str, type[Answerer]]:
    from flash_dllm.eval.gold import BrokenAnswerer, GoldAnswerer

    return {"model": Answerer, "gold": GoldAnswerer, "broken": BrokenAnswerer}


def _settled(policy: Policy, settings: Settings, llm: LLM) -> Policy:
    """The policy with what depends on the model."""
    if settings.add_bos:
        from flash_dllm.eval.lm import bos_token

        policy = replace(policy, bos=bos_token(llm))
    if settings.apply_chat_template and not llm.has_chat_template:
        raise EvalError(f"apply_chat_template: model {llm.loaded.name!r} has no chat template")
    if llm.has_chat_template and not settings.apply_chat_template:
        warnings.warn("the model has a chat template; --apply-chat-template would use it", stacklevel=2)
    if settings.apply_chat_template:
        from flash_dllm.eval.lm import with_chat

        policy = with_chat(policy)
    return policy


def fingerprint(llm: LLM, policy: Policy, settings: Settings) -> dict[str, Any]:
    """What an answer depends on, for refusing to go on with another run's answers."""
    import flash_dllm

    engine = llm.args.model_dump(mode="json", exclude={"options"})
    options = {name: str(value) for name, value in llm.args.options.items()}
    return {
        **engine, "options": options, "method": llm.method.name, "device": str(llm.loaded.model.device),
        "dtype": str(llm.loaded.model.dtype), "max_num_seqs": llm.max_num_seqs, "max_model_len": llm.max_model_len,
        "policy": policy.settings(), "prompts": settings.prompt_settings(), "version": flash_dllm.__version__,
    }  # fmt: skip


@contextmanager
def _harness(offline: bool) -> Iterator[None]:
    """The harness quiet, its code metric ours, and with local files no attempt at a hub."""
    from unittest.mock import patch

    from flash_dllm.eval.metric import sandboxed_code_eval

    with ExitStack() as stack:
        stack.enter_context(sandboxed_code_eval())
        import datasets
        import huggingface_hub.constants
        import lm_eval.api.task as task

        if offline:
            stack.enter_context(patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True))
            stack.enter_context(patch.object(datasets.config, "HF_HUB_OFFLINE", True))
        datasets.disable_progress_bars()
        # The bars of building prompts would fill a log.
        stack.enter_context(patch.object(task, "tqdm", _bar_on_terminals(task.tqdm)))
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        yield


def _bar_on_terminals(bar: Any) -> Any:
    def quiet(*args: Any, **kwargs: Any) -> Any:
        return bar(*args, **{**kwargs, "disable": kwargs.get("disable") or None})

    return quiet


def _run_tasks(
    answerer: Answerer, settings: Settings, include: list[Path]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each task on its own, so that its wall time is its own."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from flash_dllm.eval.lm import FlashDLLM

    unknown = sorted(set(settings.harness) - set(inspect.signature(simple_evaluate).parameters))
    if unknown:
        raise EvalError(f"harness argument {unknown[0]!r} is not known to lm_eval {_version('lm_eval')}")
    lm = FlashDLLM.over(answerer, settings.mc_num)
    manager = TaskManager(
        include_path=[str(p) for p in include] or None, include_defaults=settings.data_dir is None
    )
    for name in settings.names:
        if name not in manager.all_tasks:
            raise EvalError(f"task {name!r} is not known to lm_eval {_version('lm_eval')}")
    for name in settings.names:
        try:
            result = simple_evaluate(
                model=lm,
                tasks=[name],
                task_manager=manager,
                limit=settings.limit,
                num_fewshot=settings.num_fewshot,
                apply_chat_template=settings.apply_chat_template,
                fewshot_as_multiturn=settings.fewshot_as_multiturn,
                system_instruction=settings.system_instruction,
                gen_kwargs=settings.gen_kwargs or None,
                confirm_run_unsafe_code=settings.confirm_run_unsafe_code,
                log_samples=True,
                **settings.harness,
            )
        except ConnectionError as error:
            raise EvalError(f"task {name}: {error}; for files of your own give --data-dir") from error
        assert result is not None
        yield name, dict(result)


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"

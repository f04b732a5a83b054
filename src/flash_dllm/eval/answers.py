"""The harness's requests through the engine: lengths, stop strings, counters. Knows nothing of the harness."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from flash_dllm.engine.engine import tokens_before
from flash_dllm.eval.errors import EvalError
from flash_dllm.eval.journal import Answer, Journal
from flash_dllm.eval.progress import progress
from flash_dllm.llm import LLM
from flash_dllm.outputs import RequestOutput
from flash_dllm.params import SamplingParams
from flash_dllm.requests import Job
from flash_dllm.results import raw_text

DEFAULT_LENGTH = 256
"""Answer tokens where neither the user nor the task names a number: what the harness's own models take."""
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names under which a task may give its answer length, the first one wins."""
COUNTING = (
    "answer tokens: decoded up to, without, the first stop token; kept tokens: those of them before the first stop "
    "string; prompt tokens never count; every forward pass counts (nfe); wall time includes tokenising and excludes "
    "loading the model and a first short request that warms up"
)

Stop = Literal["early", "late"]
TooLong = Literal["error", "truncate"]


@dataclass(frozen=True)
class Policy:
    """How requests become prompts and answers.

    Attributes:
        params: what the user asked for; wins over the task's own settings.
        chat: prompts are rendered conversations, so the tokenizer adds nothing of its own.
        stop: ``early`` ends an answer once a stop string is complete in its committed prefix; ``late`` decodes up to
            the stop token and cuts afterwards, as the papers do, so tokens past the stop string cost time.
        too_long: ``error`` refuses prompts that do not fit; ``truncate`` takes tokens off their beginning, and says so.
        bos: token that is put before each prompt, or None.
        uncut: tasks whose answers are never ended early.
    """

    params: SamplingParams = field(default_factory=SamplingParams)
    chat: bool = False
    stop: Stop = "early"
    too_long: TooLong = "error"
    bos: int | None = None
    uncut: frozenset[str] = frozenset()

    def settings(self) -> dict[str, Any]:
        """For reports and for telling whether two runs are the same."""
        return {
            "params": self.params.model_dump(mode="json", exclude_unset=True), "chat": self.chat, "stop": self.stop,
            "too_long": self.too_long, "bos": self.bos, "uncut": sorted(self.uncut),
        }  # fmt: skip


@dataclass(frozen=True)
class Ask:
    """One request: its task and the number of its row (and the row), the prompt, the task's generation settings."""

    task: str
    doc: int
    text: str
    settings: Mapping[str, Any]
    row: Mapping[str, Any] | None = None


@dataclass
class _Ready:
    """A request that can be decoded: its key, prompt tokens, parameters, and where its text is cut."""

    ask: Ask
    key: str
    ids: list[int]
    params: SamplingParams
    stops: tuple[str, ...]
    cut_tokens: int


class Answerer:
    """Answers requests of the harness with one :class:`LLM`, all of them through its slots together.

    Attributes:
        answers: all that were given, one a request, in the order of the requests.
    """

    def __init__(self, llm: LLM, policy: Policy | None = None, journal: Journal | None = None) -> None:
        if llm.tokenizer is None:
            raise EvalError(f"model {llm.loaded.name!r} has no tokenizer, and an evaluation needs text")
        self.llm, self.tokenizer = llm, llm.tokenizer
        self.policy = policy or Policy()
        self.journal = journal or Journal(None, {})
        self.answers: list[Answer] = []
        if self.policy.params.n != 1:
            raise EvalError(f"n={self.policy.params.n}: one answer a request is scored")

    def answer(self, asks: Sequence[Ask]) -> list[Answer]:
        """Answer all requests, in any order; gives the answers in the order of ``asks``.

        Raises:
            EvalError, RequestError: a request cannot be served; nothing is decoded then.
        """
        began = time.perf_counter()
        ready = self._prepare(asks)
        todo = {r.key: r for r in ready if r.key not in self.journal.answers}
        jobs = [self.llm.job({"prompt_token_ids": r.ids}, self._params(r)) for r in todo.values()]
        waiting = list(todo.values())
        with progress(len(ready), len(ready) - len(waiting)) as advance:
            for index, output in self.llm.as_completed(jobs):
                made = self._answer(waiting[index], jobs[index], output, time.perf_counter() - began)
                self.journal.add(made)
                advance(made.answer_tokens)
        answers = [self.journal.answers[r.key] for r in ready]
        self.answers += answers
        return answers

    def _prepare(self, asks: Sequence[Ask]) -> list[_Ready]:
        seen: Counter[tuple[str, int]] = Counter()
        ready, over = [], []
        for ask in asks:
            params = sampling_params(ask.settings, self.policy.params)
            repeat = seen[ask.task, ask.doc]
            seen[ask.task, ask.doc] += 1
            if repeat:
                params = params.model_copy(update={"seed": (params.seed or self.llm.args.seed) + repeat})
            ids = self._encode(ask.text)
            assert params.max_tokens is not None
            excess = len(ids) + params.max_tokens - self.llm.max_model_len
            if excess > 0:
                over.append((ask, len(ids), params.max_tokens, excess))
            keep = ids[max(excess, 0) :]
            ready.append(
                _Ready(ask, _key(ask, keep, params), keep, params, params.stop, len(ids) - len(keep))
            )
        if over:
            self._check_lengths(over, len(asks))
        return ready

    def _check_lengths(self, over: list[tuple[Ask, int, int, int]], total: int) -> None:
        ask, prompt, length, excess = max(over, key=lambda entry: entry[3])
        hopeless = excess >= prompt
        if self.policy.too_long == "truncate" and not hopeless:
            return
        most = self.llm.loaded.config.max_positions
        larger = f", a larger --max-model-len (at most {most})" if most > self.llm.max_model_len else ""
        raise EvalError(
            f"{len(over)} of {total} prompts do not fit max_model_len={self.llm.max_model_len}; the longest (task "
            f"{ask.task}, problem {ask.doc}) has {prompt} tokens and is to get {length} more: fewer examples "
            f"(--num-fewshot), a shorter answer (--max-tokens){larger}"
            + (
                ""
                if hopeless
                else " or --too-long truncate, which takes tokens off the beginning of the prompt"
            )
        )

    def _encode(self, text: str) -> list[int]:
        ids = self.tokenizer.encode(text, add_special=not self.policy.chat)
        bos = self.policy.bos
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def _late(self, ready: _Ready) -> bool:
        return self.policy.stop == "late" or ready.ask.task in self.policy.uncut

    def _params(self, ready: _Ready) -> SamplingParams:
        """What the engine gets: without stop strings where the text is cut afterwards."""
        return ready.params.model_copy(update={"stop": ()}) if self._late(ready) else ready.params

    def _answer(self, ready: _Ready, job: Job, output: RequestOutput, elapsed: float) -> Answer:
        done = output.outputs[0]
        ids = self._decoded(job, output)
        text, kept, full = done.text, len(done.token_ids), done.text
        if self._late(ready):
            text, kept = cut(self.llm, done.token_ids, ready.stops)
        elif not done.error:
            full = self.tokenizer.decode(ids)
        return Answer(
            key=ready.key, task=ready.ask.task, doc=ready.ask.doc, text=text, full_text=full,
            finish_reason=done.finish_reason, prompt_tokens=len(ready.ids), cut_tokens=ready.cut_tokens,
            answer_tokens=len(ids), kept_tokens=kept, nfe=done.nfe, steps=done.steps, rows=done.rows,
            seconds=round(done.seconds, 6), queued=round(done.queued, 6), elapsed=round(elapsed, 6),
            run=self.journal.run, error=done.error,
        )  # fmt: skip

    def _decoded(self, job: Job, output: RequestOutput) -> list[int]:
        """Tokens of the canvas behind the prompt up to the first stop token; positions that are still MASK left out."""
        if output.outputs[0].error:
            return []
        ids = output.canvas_ids[job.first :]
        end = next((i for i, token in enumerate(ids) if token in job.stop_ids), len(ids))
        return [token for token in ids[:end] if token != self.llm.mask_id]


def cut(llm: LLM, ids: Sequence[int], stops: Sequence[str]) -> tuple[str, int]:
    """Text of ``ids`` before the first stop string, without special tokens, and how many tokens lie before it.

    Stop strings are looked for in the text with special tokens, since some of them are the names of such.
    """
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    raw = raw_text(tokenizer, list(ids))
    at = min((raw.find(stop) for stop in stops if stop in raw), default=None)
    if at is None:
        return tokenizer.decode(ids), len(ids)
    kept = tokens_before(lambda some: raw_text(tokenizer, some), list(ids), at)
    whole = raw_text(tokenizer, list(ids[:kept]))
    return tokenizer.decode(ids[:kept]) + raw[len(whole) : at], kept


def sampling_params(settings: Mapping[str, Any], mine: SamplingParams) -> SamplingParams:
    """A task's generation settings as sampling parameters; fields that the user gave (``mine``) win.

    Args:
        settings: ``until`` (text or list), a length under one of :data:`LENGTHS`, ``do_sample``, ``temperature``, or
            any field of :class:`SamplingParams`.

    Raises:
        EvalError: a name that nobody reads.
    """
    rest = dict(settings)
    until = rest.pop("until", None) or ()
    stops = [until] if isinstance(until, str) else list(until)
    lengths = [value for name in LENGTHS if (value := rest.pop(name, None)) is not None]
    if not rest.pop("do_sample", bool(rest.get("temperature"))):
        rest.pop("temperature", None)
    unknown = sorted(set(rest) - set(SamplingParams.model_fields) - {"stop"})
    if unknown:
        raise EvalError(f"generation setting {unknown[0]}={rest[unknown[0]]!r} is not known")
    values = {"max_tokens": int(lengths[0]) if lengths else DEFAULT_LENGTH, **rest}
    values.update(mine.model_dump(exclude_unset=True))
    values["stop"] = tuple(dict.fromkeys(s for s in (*stops, *mine.stop) if s))
    return SamplingParams.model_validate(values)


def _key(ask: Ask, ids: Sequence[int], params: SamplingParams) -> str:
    what = [ask.task, ask.doc, list(ids), params.model_dump(mode="json")]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]

"""A model of lm-evaluation-harness over our engine. Importing this module imports the harness (several seconds)."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from flash_dllm.eval.answers import Answerer, Ask, Policy
from flash_dllm.eval.errors import EvalError
from flash_dllm.eval.likelihood import SAMPLES, Likelihood
from flash_dllm.llm import LLM
from flash_dllm.params import EngineArgs, SamplingParams

NAME = "flash-dllm"


@register_model(NAME)
class FlashDLLM(LM):  # type: ignore[misc]
    """Generation by the engine, all requests through its slots together; likelihood by Monte Carlo.

    Args:
        model, cache, decoding, dtype, ...: fields of :class:`EngineArgs`; ``pretrained`` is another name of ``model``,
            ``method`` names cache and decoding in one word, and any other name is an option of the method.
        max_tokens, epsilon, ...: fields of :class:`SamplingParams`, which win over the tasks' settings.
        stop_mode, too_long: see :class:`Policy` (``stop`` and ``too_long`` there).
        add_bos: put the tokenizer's first token before each prompt (Dream's base model is evaluated so).
        mc_num: random maskings of a likelihood; ``mc_batch`` of them in a pass; ``mc_greedy`` False skips the
            check whether greedy decoding gives the text, which costs up to a pass a token.
        batch_size: slots, if ``max_num_seqs`` is not given; ``auto`` leaves the default.

    Raises:
        FlashDLLMError: a name or value is wrong.
    """

    def __init__(
        self,
        *,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        mc_num: int = SAMPLES,
        mc_batch: int = 16,
        mc_greedy: bool = True,
        **values: Any,
    ) -> None:
        super().__init__()
        if "max_num_seqs" not in values and batch_size not in (None, "auto", ""):
            values["max_num_seqs"] = _number("batch_size", batch_size)
        if device is not None:
            values["device"] = _device(device)
        policy = {name: values.pop(given) for given, name in (("stop_mode", "stop"), ("too_long", "too_long"))
                  if given in values}  # fmt: skip
        add_bos = bool(values.pop("add_bos", False))
        engine, params = split_options(values)
        llm = LLM.from_args(engine)
        bos = bos_token(llm) if add_bos else None
        self._over(Answerer(llm, Policy(params, bos=bos, **policy)))
        self._likelihood = Likelihood(llm, mc_num, mc_batch, engine.seed)
        self._greedy = mc_greedy

    @classmethod
    def over(cls, answerer: Answerer, samples: int = SAMPLES, check_greedy: bool = True) -> FlashDLLM:
        """A model over an :class:`Answerer` that is already there."""
        made = cls.__new__(cls)
        LM.__init__(made)
        made._over(answerer)
        made._likelihood = Likelihood(answerer.llm, samples, seed=answerer.llm.args.seed)
        made._greedy = check_greedy
        return made

    def _over(self, answerer: Answerer) -> None:
        self.answerer, self.llm = answerer, answerer.llm
        self._device = answerer.llm.loaded.model.device

    @property
    def tokenizer_name(self) -> str:
        """Name for the harness's request cache."""
        return self.llm.loaded.name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's text; the harness asks for it to name it in its results."""
        if isinstance(chat_template, str):
            raise EvalError(f"apply_chat_template={chat_template!r}: the model has one (chat_template=FILE)")
        return self.answerer.tokenizer.chat_template

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as text. From here on prompts are rendered conversations.

        With ``add_generation_prompt`` False the last message begins the answer.
        """
        self.answerer.policy = with_chat(self.answerer.policy)
        if add_generation_prompt:
            return self.answerer.tokenizer.render_chat(chat_history)
        if not chat_history or chat_history[-1]["role"] != "assistant":
            raise EvalError(
                "a conversation that the model is to go on with must end with the assistant's words"
            )
        *before, last = chat_history
        return self.answerer.tokenizer.render_chat(before) + last["content"]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """One text a request, in order, cut before the first stop string."""
        asks = []
        for request in requests:
            text, settings = request.args
            asks.append(Ask(str(request.task_name), int(request.doc_id or 0), text, settings, request.doc))
        answers = self.answerer.answer(asks)
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, answer.text)
        return [answer.text for answer in answers]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Monte Carlo estimate of each continuation's log-probability, and whether it is the greedy answer."""
        results = []
        for request in requests:
            context, target = self._pair(*request.args)
            greedy = self._greedy and self._likelihood.is_greedy(context, target)
            results.append((self._likelihood.log_prob(context, target), greedy))
            self.cache_hook.add_partial("loglikelihood", request.args, results[-1])
        return results

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The same of whole texts; a text must fit the model."""
        encode = self.answerer.tokenizer.encode
        return [self._likelihood.log_prob([], encode(request.args[0])) for request in requests]

    def _pair(self, context: str, target: str) -> tuple[list[int], list[int]]:
        """Tokens of both; spaces at the end of the context belong to the continuation, where words begin."""
        bare = context.rstrip()
        target = context[len(bare) :] + target
        encode, special = self.answerer.tokenizer.encode, not self.answerer.policy.chat
        before = encode(bare, add_special=special)
        return before, encode(bare + target, add_special=special)[len(before) :]

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes into its results."""
        model = self.llm.loaded.model
        return {
            "model_name": self.llm.loaded.name,
            "model_num_parameters": model.n_parameters,
            "model_dtype": str(model.dtype),
            "method": self.llm.method.name,
            "mc_num": self._likelihood.samples,
        }


def with_chat(policy: Policy) -> Policy:
    """Prompts are conversations from here on; a chat model explains its code, so HumanEval's is cut out afterwards."""
    return policy if policy.chat else replace(policy, chat=True, uncut=frozenset({"humaneval"}))


def split_options(values: dict[str, Any]) -> tuple[EngineArgs, SamplingParams]:
    """Options by name as those of the engine, of requests, and (the rest) of the method."""
    values = dict(values)
    if "pretrained" in values:
        values["model"] = values.pop("pretrained")
    if "method" in values:
        cache, _, decoding = str(values.pop("method")).partition("+")
        values.update(cache=cache or None, decoding=decoding or None)
    engine = {k: values.pop(k) for k in list(values) if k in EngineArgs.model_fields}
    params = {k: values.pop(k) for k in list(values) if k in SamplingParams.model_fields}
    options = {**engine.pop("options", {}), **values}
    return EngineArgs.model_validate({**engine, "options": options}), SamplingParams.model_validate(params)


def bos_token(llm: LLM) -> int:
    """The token that a text of this model begins with.

    Raises:
        EvalError: its files name none.
    """
    token = llm.tokenizer.bos_id if llm.tokenizer is not None else None
    if token is None:
        raise EvalError(f"add_bos: the tokenizer of {llm.loaded.name!r} names no first token (bos_token)")
    return token


def _number(name: str, value: Any) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise EvalError(f"{name}={value!r} is not a number of slots") from error


def _device(device: str) -> str:
    """The harness's command line asks for ``cuda:0`` whether there is a GPU or not."""
    if device == "cuda:0" and not torch.cuda.is_available():
        warnings.warn(
            "device=cuda:0 (the harness's default) is not available here: using the CPU", stacklevel=2
        )
        return "cpu"
    return device

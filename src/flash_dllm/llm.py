"""The Python interface: text in, text out, over the engine."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import flash_dllm
from flash_dllm.core.method import Method
from flash_dllm.core.step import Vocabulary
from flash_dllm.engine.engine import Engine
from flash_dllm.engine.leading import FollowingEngine, LeadingEngine
from flash_dllm.engine.request import RequestError
from flash_dllm.infill import Template
from flash_dllm.kernels.choice import INVARIANT, Kernels, kernels_of
from flash_dllm.kernels.tuned import use_stored
from flash_dllm.loading import Loaded, load, with_guide
from flash_dllm.loop import Loop
from flash_dllm.memory import Need, Room, choose_slots
from flash_dllm.methods import CACHES, build_method
from flash_dllm.methods.presets import build_preset
from flash_dllm.models.config import ModelConfig, ModelError
from flash_dllm.models.tokenizer import Tokenizer
from flash_dllm.outputs import RequestOutput, StreamEvent
from flash_dllm.params import EngineArgs, SamplingParams
from flash_dllm.requests import Builder, Job, Message, Prompt, prompt_list
from flash_dllm.results import completion, raw_text
from flash_dllm.stream import watch
from flash_dllm.tensor_parallel import check_method, follow, lead
from flash_dllm.trace import TraceWriter

LONGEST = 4096
"""Positions of a slot by default, where the model allows as many."""
SCRATCH = 96
"""Key places beside a canvas for the views of the methods that need most, more or less."""
SLOTS = 4
"""Slots by default where memory is not planned (CPU, MPS)."""
DEFAULT_METHOD = ("none", "threshold")
"""Cache and decoding where none is named: the exact pass, whatever the model and the number of slots.

On the bundled model a cache costs accuracy or makes no difference beyond chance, with one exception, and the accuracy
of an 8B model has not been measured by this project. More slots make a cache save more time, but not lose less. The
threshold 0.9 is the knee of its curve. docs/methods.md has the numbers, and what to choose for speed.
"""

Params = SamplingParams | Sequence[SamplingParams] | None


def longest_canvas(config: ModelConfig, args: EngineArgs) -> int:
    """Positions of a slot.

    Raises:
        ModelError: more than the model has.
    """
    length = args.max_model_len or min(config.max_positions, LONGEST)
    if length > config.max_positions:
        raise ModelError(f"max_model_len={length} is more than the model's {config.max_positions}")
    return length


def method_of(loaded: Loaded, args: EngineArgs) -> Method:
    """The decoding method that ``args`` names, for a model that is already ``loaded``.

    Raises:
        FlashDLLMError: an unknown name or a wrong option.
    """
    config, options = loaded.config, dict(args.options)
    if isinstance(options.get("guide"), str):
        options = with_guide(loaded, options)
    if args.preset is not None:
        return build_preset(
            args.preset, family=config.family, eos_id=config.eos_ids[0] if config.eos_ids else None,
            cache=args.cache, decoding=args.decoding, options=options,
        )  # fmt: skip
    cache, decoding = DEFAULT_METHOD
    if args.cache in CACHES and args.decoding is None:
        accepted = CACHES[args.cache].decodings
        decoding = decoding if not accepted or decoding in accepted else accepted[0]
    return build_method(args.cache or cache, args.decoding or decoding, family=config.family, **options)


def max_slots(loaded: Loaded, args: EngineArgs, *methods: Method) -> int:
    """Slots on weights that are already ``loaded``, whichever of the ``methods`` they are of.

    Raises:
        ModelError: they do not fit on the GPU; the message says what would.
    """
    model, length = loaded.model, longest_canvas(loaded.config, args)
    kv_dtype = torch.float8_e4m3fn if args.kv_cache_dtype == "fp8" else model.dtype
    kept = max(method.bytes_per_position(model.config, model.dtype.itemsize) for method in methods)
    need = Need.of(model.config, model.dtype, kv_dtype, length + SCRATCH, kept)
    room = Room.of(model.device, args.gpu_memory_utilization)
    return choose_slots(args.max_num_seqs, need, room, SLOTS, length)


class LLM:
    """A model with a decoding method.

    Args:
        model: folder, hub id or bundled name.
        cache, decoding: the method, see ``flash-dllm methods``.
        dtype: of the weights; ``auto`` is the checkpoint's own on a GPU, float32 on the CPU.
        device: ``auto`` takes the CUDA GPU if there is one.
        quantization: ``int8`` or ``fp8`` keeps the layers' weights in 8 bits (docs/scaling.md).
        kv_cache_dtype: ``fp8`` keeps keys and values in 8 bits.
        tensor_parallel_size: GPUs that share the model. This process becomes rank 0 and starts the others, or
            ``torchrun`` started all of them; then this call returns on rank 0 only.
        kernels: how the ops of a pass are done: ``auto``, ``ref``, ``triton`` or ``fused`` (docs/performance.md).
        deterministic: a request gives bit-identical answers alone and in any batch (GPU only, slower).
        enforce_eager: no CUDA graphs.
        gpu_memory_utilization: share of the GPU's memory that weights, keys and values may take.
        max_num_seqs: canvases decoded at the same time; default 4 on the CPU, on a GPU as many as fit, up to 32.
        max_model_len: longest canvas; default the model's own, at most 4096.
        preset: named settings.
        revision: of a hub id.
        chat_template: file or Jinja text that replaces the model's own.
        seed: of requests that give none.
        **method_options: options of the method's constructor.

    Raises:
        FlashDLLMError: the model, the method or an option is wrong; one line that names it.

    Not thread-safe.
    """

    def __init__(
        self,
        model: str | Path = "flash-dllm/tiny-llada",
        *,
        cache: str | None = None,
        decoding: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        tensor_parallel_size: int = 1,
        kernels: str = "auto",
        deterministic: bool = False,
        enforce_eager: bool = False,
        gpu_memory_utilization: float = 0.9,
        max_num_seqs: int | None = None,
        max_model_len: int | None = None,
        preset: str | None = None,
        revision: str | None = None,
        chat_template: str | Path | None = None,
        seed: int = 0,
        **method_options: Any,
    ) -> None:
        values: dict[str, Any] = {
            "model": str(model), "cache": cache, "decoding": decoding, "dtype": dtype, "device": device,
            "quantization": quantization, "kv_cache_dtype": kv_cache_dtype,
            "tensor_parallel_size": tensor_parallel_size, "kernels": kernels,
            "deterministic": deterministic, "enforce_eager": enforce_eager,
            "gpu_memory_utilization": gpu_memory_utilization,
            "max_num_seqs": max_num_seqs, "max_model_len": max_model_len, "preset": preset,
            "revision": revision, "chat_template": None if chat_template is None else str(chat_template),
            "seed": seed, "options": method_options,
        }  # fmt: skip
        args = EngineArgs.model_validate(values)
        self._start(_load(args), args)

    @classmethod
    def from_args(cls, args: EngineArgs, loaded: Loaded | None = None, method: Method | None = None) -> LLM:
        """From validated options, on weights that are already ``loaded`` and with the ``method`` of these, if given.

        A method serves one engine.
        """
        llm = cls.__new__(cls)
        llm._start(loaded or _load(args), args, method)
        return llm

    def with_method(
        self, cache: str | None = None, decoding: str | None = None, **method_options: Any
    ) -> LLM:
        """Another method on the same weights; a preset of this one does not carry over."""
        changes = {"preset": None, "cache": cache, "decoding": decoding, "options": method_options}
        return self.from_args(self.args.model_copy(update=changes), self.loaded)

    def _start(self, loaded: Loaded, args: EngineArgs, method: Method | None = None) -> None:
        config = loaded.config
        assert config.mask_id is not None
        self.loaded, self.args = loaded, args
        self.max_model_len = longest_canvas(config, args)
        self.method = method or method_of(loaded, args)
        self.max_num_seqs = max_slots(loaded, args, self.method)
        tokenizer = loaded.tokenizer
        known = config.n_tokens if tokenizer is None else min(config.n_tokens, tokenizer.n_tokens)
        vocabulary = Vocabulary(known, config.mask_id, config.eos_ids, loaded.stop_ids)
        text = None if tokenizer is None else lambda ids: raw_text(tokenizer, ids)
        self._check_cache_dtype()
        self.engine = _engine_class(loaded, self.method)(
            loaded.model,
            self.method,
            vocabulary,
            slots=self.max_num_seqs,
            positions=self.method.cache.positions(self.max_model_len),
            text=text,
            kv_dtype=torch.float8_e4m3fn if args.kv_cache_dtype == "fp8" else None,
            kernels=self._kernels(),
            enforce_eager=args.enforce_eager,
        )
        if isinstance(self.engine, LeadingEngine):
            # Ranks with unequal memory must not choose for themselves.
            lead(self.engine, loaded, args.model_copy(update={"max_num_seqs": self.max_num_seqs}))
        self._loop = Loop(self.engine)
        self._builder = Builder(
            config,
            tokenizer,
            self.method,
            stop_ids=loaded.stop_ids,
            max_tokens=loaded.max_tokens,
            positions=self.max_model_len,
            seed=args.seed,
        )

    def _kernels(self) -> Kernels:
        """How the ops are done.

        Raises:
            ModelError: not possible on this device or with these weights; names the option.
        """
        args, device = self.args, self.loaded.model.device
        use_stored(device)
        if not args.deterministic:
            if args.kernels not in ("auto", "ref") and device.type != "cuda":
                raise ModelError(f"kernels={args.kernels!r} needs a CUDA GPU; the model is on {device}")
            return kernels_of(args.kernels)
        if device.type != "cuda":
            raise ModelError(f"deterministic=True needs a CUDA GPU; the model is on {device}")
        for name, plain in (("kernels", "auto"), ("quantization", None), ("tensor_parallel_size", 1)):
            if (value := getattr(args, name)) != plain:
                raise ModelError(f"deterministic=True does not go with {name}={value!r}")
        return kernels_of(INVARIANT)

    def _check_cache_dtype(self) -> None:
        """Refuse float8 keys and values where they are compared with new ones or the device has no such numbers."""
        if self.args.kv_cache_dtype == "auto":
            return
        device, cache = self.loaded.model.device.type, self.method.cache
        if device not in ("cpu", "cuda"):
            raise ModelError(f"kv_cache_dtype='fp8': device {device!r} has no float8")
        if cache.loop != "compact":
            raise ModelError(
                f"kv_cache_dtype='fp8': cache={cache.name!r} compares what it keeps with what is new, and rounding "
                "would count as change"
            )

    def warm_up(self, progress: bool = False) -> None:
        """On a GPU, compile and record now what would be when it first comes up; ``progress`` shows a line.

        Raises:
            RuntimeError: a request is running.
        """
        from flash_dllm.progress import counted

        for _ in counted("recording steps", self.engine.warm_up(), show=progress):
            pass

    def close(self) -> None:
        """End the other ranks of a tensor-parallel model, which serves no one from then on. Else nothing."""
        if self.loaded.team is not None:
            self.loaded.team.close()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer, or None if it has none."""
        return self.loaded.tokenizer

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`chat` works."""
        return self.tokenizer is not None and self.tokenizer.has_chat_template

    @property
    def loop(self) -> Loop:
        """What drives the engine, for callers that run the steps themselves, as the server does."""
        return self._loop

    @property
    def mask_id(self) -> int:
        """The id of MASK."""
        return self._builder.mask_id

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Continue prompts, each as it is (no chat template).

        Args:
            prompts: text, token ids, ``{"prompt": text}``, ``{"prompt_token_ids": ids}``, or a list of these.
            sampling_params: options for all, or one set a prompt.
            use_tqdm: show a progress bar if stderr is a terminal.

        Returns:
            One output a prompt, in order.

        Raises:
            FlashDLLMError: a prompt or option is wrong; nothing is decoded then.
        """
        items = prompt_list(prompts)
        jobs = [
            self._builder.prompt(p, s) for p, s in zip(items, _each(sampling_params, len(items)), strict=True)
        ]
        return self._run(jobs, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template. See :meth:`generate`."""
        many = bool(messages) and not any(isinstance(m, dict) for m in messages)
        talks: list[Any] = list(messages) if many else [messages]
        jobs = [
            self._builder.chat(t, s) for t, s in zip(talks, _each(sampling_params, len(talks)), strict=True)
        ]
        return self._run(jobs, use_tqdm)

    def infill(
        self, template: Template, sampling_params: SamplingParams | None = None, *, use_tqdm: bool = True
    ) -> RequestOutput:
        """Fill the gaps of a template; see :func:`flash_dllm.infill.parse_template`.

        The answer's ``text`` is the whole text and ``spans`` what each gap got.
        """
        return self._run([self._builder.infill(template, sampling_params or SamplingParams())], use_tqdm)[0]

    def stream(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Iterator[StreamEvent]:
        """Continue a prompt, or answer a conversation (a list of dicts), and report every step as it happens.

        Closing the iterator early aborts the request.
        """
        return self.watch(self.job(prompt, sampling_params or SamplingParams()))

    def job(self, prompt: Any, params: SamplingParams, template: bool = False) -> Job:
        """A prompt, conversation or (``template``) template, checked but not started."""
        if template:
            return self._builder.infill(prompt, params)
        if isinstance(prompt, Sequence) and prompt and all(isinstance(m, dict) for m in prompt):
            return self._builder.chat(prompt, params)
        return self._builder.prompt(prompt, params)

    def watch(self, job: Job) -> Iterator[StreamEvent]:
        """Run one job and report every step."""
        return watch(self._loop, job, self.tokenizer, self.mask_id)

    def as_completed(self, jobs: Sequence[Job]) -> Iterator[tuple[int, RequestOutput]]:
        """Run jobs together; gives (index, output) of each as soon as all its answers are there.

        Raises:
            RequestError: the engine refuses one of them, or one is there twice.
        """
        if len({job.id for job in jobs}) < len(jobs):
            raise RequestError("a job is there twice; make one for each answer, or ask for n answers")
        waiting = dict(enumerate(jobs))
        try:
            for job in jobs:
                self._loop.submit(job)
            while waiting:
                self._loop.step()
                ready = [
                    i for i, j in waiting.items() if all(r.id in self._loop.finished for r in j.requests)
                ]
                for index in ready:
                    yield index, self._collect(waiting.pop(index))
        finally:
            for job in waiting.values():
                self._loop.drop(job)

    @contextmanager
    def tracing(self, path: str | Path) -> Iterator[None]:
        """Log every request that is started inside the ``with`` block to an event log at ``path``."""
        model, tokenizer = self.loaded.model, self.tokenizer
        header = {
            "model": self.loaded.name,
            "method": self.method.name,
            "params": self.args.model_dump(exclude_defaults=True),
            "device": str(model.device),
            "dtype": str(model.dtype).removeprefix("torch."),
            "slots": self.max_num_seqs,
            "versions": {
                "flash_dllm": flash_dllm.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "mask_id": self.mask_id,
        }
        text = None if tokenizer is None else lambda token: raw_text(tokenizer, [token])
        with open(path, "w", encoding="utf-8") as file:
            before, self._loop.tracer = self._loop.tracer, TraceWriter(file, header, text)
            try:
                yield
            finally:
                self._loop.tracer = before

    def _run(self, jobs: list[Job], progress: bool) -> list[RequestOutput]:
        from flash_dllm.progress import bar

        outputs: dict[int, RequestOutput] = {}
        with bar(len(jobs), show=progress and len(jobs) > 1) as advance:
            for index, output in self.as_completed(jobs):
                outputs[index] = output
                advance(sum(len(c.token_ids) for c in output.outputs))
        return [outputs[i] for i in range(len(jobs))]

    def _collect(self, job: Job) -> RequestOutput:
        done = [self._loop.finished.pop(r.id) for r in job.requests]
        answers = [completion(job, i, d, self.tokenizer, self.mask_id) for i, d in enumerate(done)]
        return RequestOutput(job.id, job.prompt, job.prompt_ids, answers, done[0].ids)


def _load(args: EngineArgs) -> Loaded:
    """The checkpoint; in a process of a launch that is not rank 0 this serves rank 0 and never returns."""
    loaded = load(args)
    if loaded.team is not None and not loaded.team.leads:
        follow(loaded)
    return loaded


def _engine_class(loaded: Loaded, method: Method) -> type[Engine]:
    """The engine of one process, of rank 0 or of another rank."""
    if loaded.team is None:
        return Engine
    check_method(method, loaded.team.group.size)
    return LeadingEngine if loaded.team.leads else FollowingEngine


def _each(params: Params, count: int) -> list[SamplingParams]:
    """One set of options a prompt."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if isinstance(params, str | Mapping) or not all(isinstance(p, SamplingParams) for p in params):
        raise RequestError(f"sampling parameters must be SamplingParams, one or one a prompt, not {params!r}")
    if len(params) != count:
        raise RequestError(f"{len(params)} sets of sampling parameters for {count} prompts")
    return list(params)

"""The engine: seats requests in slots, runs steps, hands out what is finished."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from flash_dllm.core.cache import KVCache
from flash_dllm.core.forward import Context
from flash_dllm.core.method import Method
from flash_dllm.core.noise import Noise
from flash_dllm.core.state import NUMBERS, State
from flash_dllm.core.step import Decoder, StepRecord, Vocabulary
from flash_dllm.core.types import MASKED, NEVER, Phase
from flash_dllm.kernels.choice import Kernels
from flash_dllm.models.layers import Model

from .mirror import Mirror
from .request import Finished, Request, RequestError
from .runner import Runner
from .scheduler import Scheduler

Text = Callable[[list[int]], str]
Observer = Callable[["Engine", StepRecord], None]


@dataclass
class Totals:
    """Counters of a run: steps of the engine, launches of a pass, requests by outcome, rows recomputed."""

    steps: int = 0
    passes: int = 0
    rows: int = 0
    finished: int = 0
    failed: int = 0
    aborted: int = 0


class Engine:
    """Decodes canvases of token ids with one method, ``slots`` at a time.

    Args:
        model: weights; their device and dtype are the engine's.
        method: what to run. Of this engine alone, since its parts keep tensors of its slots.
        vocabulary: which ids may be produced.
        slots: canvases decoded at the same time.
        positions: longest canvas.
        text: decodes ids, needed for stop strings only.
        kv_dtype: of keys and values; default that of the model.
        noise: source of random numbers; the default does not depend on the batch.
        observer: called after each step (event log, live canvas).
        kernels: how each op of a pass is done; None chooses by device.
        enforce_eager: run steps op by op where a GPU would replay recorded ones.
        late: read what a step did only after the next one was launched, so that the device never waits; default on
            a CUDA GPU. A request then ends a step later, without another token, pass or row.

    Not thread-safe: one thread calls :meth:`add`, :meth:`step` and :meth:`abort`.
    """

    def __init__(
        self,
        model: Model,
        method: Method,
        vocabulary: Vocabulary,
        *,
        slots: int = 1,
        positions: int | None = None,
        text: Text | None = None,
        noise: Noise | None = None,
        observer: Observer | None = None,
        kv_dtype: torch.dtype | None = None,
        kernels: Kernels | None = None,
        enforce_eager: bool = False,
        late: bool | None = None,
    ) -> None:
        self.model, self.method, self.vocabulary = model, method, vocabulary
        self.positions = positions or model.config.max_positions
        scratch = method.verifier.scratch() if method.verifier else 0
        kv = KVCache.allocate(model.config, slots, self.positions, scratch, model.embed, kv_dtype)
        self.state = State(slots, self.positions, device=model.device)
        self.decoder = Decoder(
            Context.build(model, kv, self.positions, kernels), self.state, method, vocabulary, noise
        )
        self.runner = Runner.for_device(self.decoder, enforce_eager)
        self.scheduler = Scheduler(slots)
        on_gpu = model.device.type == "cuda"
        self.late = on_gpu if late is None else late
        self._copies = on_gpu or self.late
        self._spare: list[Mirror] = []
        self._launched: deque[Mirror] = deque()
        self._seen = Mirror(self.state, False)
        self.text, self.observer = text, observer
        self.totals = Totals()
        self.last: StepRecord | None = None

    @property
    def slots(self) -> int:
        return self.state.slots

    @property
    def idle(self) -> bool:
        """Nothing queued, nothing running."""
        return not self.scheduler.queue and not self.scheduler.busy

    def add(self, request: Request) -> None:
        """Queue a request; its canvas gets the method's defaults.

        Raises:
            RequestError: see :meth:`check`.
        """
        self.check(request)
        numbers = {**self.method.defaults, **request.canvas.numbers}
        canvas = replace(request.canvas, numbers=numbers)
        request.canvas = self.method.cache.prepare(canvas, self.positions)
        self.scheduler.add(request)

    def check(self, request: Request) -> None:
        """Refuse what cannot be served. Changes nothing, so any thread may ask.

        Raises:
            RequestError: the canvas is empty, has nothing to fill in, is too long, holds a bad id, or needs
                what the method or the number of slots does not give.
        """
        canvas = request.canvas
        if not any(canvas.masked):
            raise RequestError("the canvas has no masked position to fill in")
        if len(canvas.ids) > self.positions:
            raise RequestError(
                f"the canvas has {len(canvas.ids)} positions (prompt and answer), more than max_model_len="
                f"{self.positions}"
            )
        rows = self.model.config.vocab_size
        for token in canvas.ids:
            if not 0 <= token < rows:
                raise RequestError(f"token id {token} is outside the vocabulary of {rows}")
        if request.stop_strings and self.text is None:
            raise RequestError("stop strings need a tokenizer, and this checkpoint has none")
        if len(canvas.stop_ids) > self.state.stop_ids.shape[1]:
            raise RequestError(
                f"{len(canvas.stop_ids)} stop token ids; at most {self.state.stop_ids.shape[1]}"
            )
        if request.shadow is not None and not self.method.cache.supports_cfg:
            raise RequestError(
                f"cache={self.method.cache.name!r} has no classifier-free guidance (cfg_scale)"
            )
        if request.shadow is not None and self.method.verifier is not None:
            raise RequestError(f"method {self.method.name} has no classifier-free guidance (cfg_scale)")
        for name, value in canvas.numbers.items():
            if not abs(value) < 2**62:
                raise RequestError(f"{name}={value!r} is no number that the engine can keep")
        self.scheduler.check(request)

    def abort(self, request_id: str) -> bool:
        """Drop a queued or running request; its slot is free for the next step."""
        for request in list(self.scheduler.queue):
            if request.id == request_id:
                self.scheduler.queue.remove(request)
                self.totals.aborted += 1
                return True
        slot = self.scheduler.slot_of(request_id)
        if slot is None:
            return False
        self._release(slot)
        self.totals.aborted += 1
        return True

    @torch.inference_mode()
    def reset(self) -> None:
        """Empty every slot and the K/V cache, after a step that raised; the queue stays.

        Raises:
            Exception: the device does not answer any more; nothing can be decoded with this engine then.
        """
        with self._on_device():
            for slot in self.scheduler.main_slots():
                self._release(slot)
            self._launched.clear()
            kv = self.decoder.ctx.kv
            for tensor in (*kv.keys, *kv.values):
                tensor.zero_()
            # Kernels of a GPU run later than they are called: wait, so that a broken device shows here.
            self.state.phase.tolist()

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Seat what waits, run one step of every live slot, return what ended (if late: in the step before)."""
        with self._on_device():
            return self._step()

    def _on_device(self) -> AbstractContextManager[Any]:
        """Kernels, graphs and events go to the current GPU, which each thread has its own of."""
        device = self.state.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def _step(self) -> list[Finished]:
        for slot, request in self.scheduler.admit():
            self._seat(slot, request)
        if not self.scheduler.busy:
            self._launched.clear()
            return []
        self._close_up()
        lanes = self.scheduler.lanes(self._width())
        record = self.runner.step(lanes)
        self.totals.steps += 1
        self.totals.passes += len(record.passes)
        self.last = record
        self._look(record)
        if self.observer is not None:
            self.observer(self, record)
        out: list[Finished] = []
        # Whoever observes steps waits for them anyway.
        while len(self._launched) > (1 if self.late and self.observer is None else 0):
            mirror = self._launched.popleft()
            mirror.wait()
            self._seen = mirror
            out += self._collect(mirror)
            self._spare.append(mirror)
        return out

    def warm_up(self) -> Iterator[tuple[int, int]]:
        """On a GPU: compile kernels, and record the steady steps of every number of slots.

        Yields how many are recorded, and of how many.

        Raises:
            RuntimeError: a request is running.
        """
        if self.scheduler.busy:
            raise RuntimeError("a running engine cannot be warmed up")
        with self._on_device():
            block = int(self.method.defaults.get("block_length", NUMBERS["block_length"][1]))
            yield from self.runner.warm_up(self.method.schedule.width([self.positions], [block]))

    def _close_up(self) -> None:
        """Move canvases into lower slots that nobody is about to take, where a smaller recorded step then serves."""
        scheduler = self.scheduler
        # Only a step without a sweep and without guidance is played.
        if scheduler.new or scheduler.partner or scheduler.queue:
            return
        for source, target in self.runner.moves(scheduler.busy):
            self.decoder.move(source, target)
            scheduler.move(source, target)
            self._seen.move(source, target)

    def _look(self, record: StepRecord) -> None:
        """Start to copy what the step did."""
        # What is not finite is not 0 either when it is taken 0 times.
        bad = ((record.draft.prob * 0 != 0) & record.cand.valid).any(1)
        mirror = self._spare.pop(0) if len(self._spare) > 1 else Mirror(self.state, self._copies)
        mirror.look(self.state, bad, self.scheduler.seated)
        self._launched.append(mirror)

    def _seat(self, slot: int, request: Request) -> None:
        request.started = time.perf_counter()
        self.state.load(slot, request.canvas)
        self.method.cache.seat(slot, request.canvas)
        if request.shadow is not None:
            other = self.scheduler.partner[slot]
            self.state.load(other, request.shadow)
            self.method.cache.seat(other, request.shadow)
        live = [r for r in self.scheduler.seated if r is not None]
        numbers = [r.canvas.numbers for r in live]
        hints = self.decoder.hints
        hints.filters = any(n.get("top_p", 1) < 1 or n.get("top_k", 0) > 0 for n in numbers)
        # Dream filters the distribution at temperature 0 too.
        hot = any(n.get("temperature", 0) > 0 for n in numbers)
        hints.sampling = hot or (hints.filters and self.method.rule.categorical)
        hints.suppress = any(n.get("suppress", 0) > 0 for n in numbers)
        self.method.rule.prepare(numbers)

    def _width(self) -> int:
        live = [r for r in self.scheduler.seated if r is not None]
        lengths = [len(r.canvas.ids) - r.canvas.first for r in live]
        blocks = [int(r.canvas.numbers.get("block_length", 32)) for r in live]
        return self.method.schedule.width(lengths, blocks)

    def _collect(self, mirror: Mirror) -> list[Finished]:
        """End the requests that were over after the step of ``mirror``."""
        bad, phase = mirror.bad.tolist(), mirror.phase.tolist()
        out: list[Finished] = []
        for slot in self.scheduler.main_slots():
            request = self.scheduler.seated[slot]
            assert request is not None
            if (then := mirror.slot_of(request)) is None:
                continue
            if bad[then]:
                out.append(self._finish(slot, "error", None, "the model gave non-finite logits"))
            elif (cut := self._stop_string(slot)) is not None:
                out.append(self._finish(slot, "stop", cut[1], end=cut[0]))
            elif phase[then] == Phase.DONE:
                out.append(self._finish(slot, "", None))
        return out

    def _stop_string(self, slot: int) -> tuple[int, str] | None:
        """Position and text of the first stop string inside the committed prefix."""
        request = self.scheduler.seated[slot]
        if request is None or not request.stop_strings or self.text is None:
            return None
        ids = self.answer_prefix(slot)
        text = self.text(ids)
        hits = [(text.find(s), s) for s in request.stop_strings if s in text]
        if not hits:
            return None
        at, stop = min(hits)
        return request.canvas.first + tokens_before(self.text, ids, at), stop

    def answer_prefix(self, slot: int) -> list[int]:
        """Tokens from the first masked position up to the first one that is still MASK or a stop token.

        They are those after the last step whose outcome :meth:`step` has read; none of a request that came in since.

        Args:
            slot: where the request sits now (:meth:`Scheduler.slot_of`), whatever its slot was in that step.
        """
        request, seen = self.scheduler.seated[slot], self._seen
        then = None if request is None else seen.slot_of(request)
        if request is None or then is None:
            return []
        first, end = request.canvas.first, self._length(request)
        # Behind its first stop token an answer has no text, whether or not decoding goes on there.
        end = min(end, int(seen.stop_pos[then]))
        open_ = (seen.committed_at[then, first:end] == MASKED).nonzero()
        if len(open_):
            end = first + int(open_[0])
        ids: list[int] = seen.ids[then, first:end].tolist()
        return ids

    @staticmethod
    def _length(request: Request) -> int:
        """Positions of a request's canvas without padding."""
        return len(request.canvas.ids) - int(request.canvas.numbers.get("pad", 0))

    def _finish(
        self, slot: int, reason: str, stop: str | int | None, error: str | None = None, end: int | None = None
    ) -> Finished:
        state, request = self._seen, self.scheduler.seated[slot]
        assert request is not None and request.started is not None
        then = state.slot_of(request)
        assert then is not None
        n, numbers = self._length(request), request.canvas.numbers
        ids: list[int] = state.ids[then, :n].tolist()
        stop_pos = int(state.stop_pos[then])
        if not reason:
            # The reference preset ends at a stop token without the option: masks behind it are left.
            ends = bool(numbers.get("stop_at_eos", True)) or bool(
                (state.committed_at[then, :n] == MASKED).any()
            )
            reason = "stop" if stop_pos < NEVER and ends else "length"
        if stop is None and reason == "stop":
            stop = ids[stop_pos]
        now = time.perf_counter()
        finished = Finished(
            request=request,
            ids=ids,
            end=min(stop_pos, n) if end is None else end,
            reason=reason,
            stop_reason=stop,
            steps=int(state.step[then]),
            nfe=int(state.nfe[then]),
            rows=int(state.rows[then]),
            seconds=now - request.started,
            queued=request.started - request.arrived,
            log_probs=state.log_prob[then, :n].tolist(),
            passes=state.pass_at[then, :n].tolist(),
            bound=float(state.bound[then]),
            by_confidence=int(state.by_confidence[then]),
            by_verify=int(state.by_verify[then]),
            unbounded=int(state.unbounded[then]),
            # A drawn token is no argmax, so the bounds say nothing about it.
            assumes=None if numbers.get("temperature", 0) > 0 else self.method.certificate,
            error=error,
            notes=self.method.rule.notes(slot),
        )
        for other in [s for s in (self.scheduler.partner.get(slot),) if s is not None]:
            finished.nfe += int(state.nfe[other])
            finished.rows += int(state.rows[other])
        self.totals.rows += finished.rows
        if error:
            self.totals.failed += 1
        else:
            self.totals.finished += 1
        self._release(slot)
        return finished

    def _release(self, slot: int) -> None:
        for freed in self.scheduler.release(slot):
            self.state.clear(freed)


def tokens_before(text: Text, ids: list[int], chars: int) -> int:
    """How many of ``ids`` lie wholly before character ``chars`` of their text."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high + 1) // 2
        if len(text(ids[:middle])) <= chars:
            low = middle
        else:
            high = middle - 1
    # A token that ends inside a character reads as U+FFFD there; the token that completes it may reach further.
    whole = text(ids)
    while low and not whole.startswith(text(ids[:low])):
        low -= 1
    return low

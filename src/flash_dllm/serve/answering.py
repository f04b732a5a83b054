"""From a request body to a response: jobs, the wait for the engine, whole answers and streams."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from sse_starlette import EventSourceResponse

from flash_dllm.errors import FlashDLLMError
from flash_dllm.infill import Gap
from flash_dllm.llm import LLM
from flash_dllm.outputs import Completion
from flash_dllm.requests import Job
from flash_dllm.serve.errors import ServeError, invalid, refused, wrong_input
from flash_dllm.serve.protocol import ChatRequest, CompletionRequest
from flash_dllm.serve.replies import Style
from flash_dllm.serve.service import Service
from flash_dllm.serve.ticket import Ended, Event, Progress, Show, Ticket
from flash_dllm.serve.tracing import Spans

log = logging.getLogger("flash_dllm.serve")
Body = ChatRequest | CompletionRequest
DEFAULT_GAP = 16
"""Tokens between prompt and suffix where max_tokens is not given: OpenAI's default for completions."""
PING = 15
"""Seconds after which a silent stream sends a comment, so that proxies keep it open."""

STALLED = 60
"""Seconds after which a client that reads nothing is given up."""


class Call:
    """One HTTP request from arrival to last byte: what the log, the metrics and the trace say of it."""

    def __init__(self, service: Service, spans: Spans, endpoint: str, headers: Mapping[str, str]) -> None:
        self.service, self.endpoint = service, endpoint
        self.facts: dict[str, Any] = {}
        self._span = spans.begin(endpoint, headers)
        self._began = time.monotonic()
        self._open = True

    def end(self, outcome: str, completions: list[Completion] | None = None) -> None:
        """Once, however it ended."""
        if not self._open:
            return
        self._open = False
        seconds = time.monotonic() - self._began
        metrics = self.service.metrics
        metrics.requests.labels(self.endpoint, outcome).inc()
        metrics.latency.labels(self.endpoint).observe(seconds)
        self.facts["outcome"] = outcome
        if completions:
            self.facts["answer_tokens"] = sum(len(c.token_ids) for c in completions)
            self.facts["nfe"] = sum(c.nfe for c in completions)
            self.facts["queue_seconds"] = round(max(c.queued for c in completions), 4)
        self.facts["seconds"] = round(seconds, 4)
        log.info("%s %s", self.endpoint, " ".join(f"{k}={v!r}" for k, v in self.facts.items()))
        self._span.end(outcome, self.facts)


class Desk:
    """Serves request bodies.

    Args:
        max_answers: prompts times n of one request.
        log_prompts: put prompts into the log.
    """

    def __init__(self, service: Service, max_answers: int, log_prompts: bool, spans: Spans) -> None:
        self.service, self.max_answers, self.log_prompts, self.spans = (
            service,
            max_answers,
            log_prompts,
            spans,
        )

    async def serve(self, body: Body, request: Request) -> Response:
        """The response to a body.

        Raises:
            ServeError: there is none, and why.
        """
        call = Call(self.service, self.spans, request.url.path, request.headers)
        inbox: asyncio.Queue[Event] = asyncio.Queue()
        try:
            style, ticket = await self._open(body, call, inbox)
        except ServeError as error:
            call.end(error.outcome)
            raise
        except BaseException:
            call.end("error")
            raise
        if body.stream:
            usage = bool(body.stream_options and body.stream_options.include_usage)
            events = _Stream(call, style, ticket, inbox, usage)
            return _Reply(events, self.service)
        return await self._whole(call, style, ticket, inbox, request)

    async def _open(self, body: Body, call: Call, inbox: asyncio.Queue[Event]) -> tuple[Style, Ticket]:
        service = self.service
        service.check_model(body.model)
        method = service.pick(body.option("method"))
        llm = service.llms[method]
        allowed = service.allowed(body.option("timeout"))
        chat = isinstance(body, ChatRequest)
        logprobs = body.logprobs is not None and body.logprobs is not False
        try:
            jobs = await run_in_threadpool(self._jobs, llm, body, logprobs)
        except ValidationError as exc:
            raise invalid(list(exc.errors())) from exc
        except FlashDLLMError as exc:
            raise wrong_input(exc) from exc
        loop = asyncio.get_running_loop()
        show: Show = "nothing" if not body.stream else body.option("stream") or "text"

        def deliver(event: Event) -> None:
            loop.call_soon_threadsafe(inbox.put_nowait, event)

        span_only = isinstance(body, CompletionRequest) and body.suffix is not None
        ticket = Ticket(method, jobs, show, deliver, allowed, span_only)
        call.facts.update(
            method=method, prompt_tokens=sum(len(job.prompt_ids) for job in jobs), answers=len(ticket.answers)
        )
        if body.user is not None:
            call.facts["user"] = body.user
        if self.log_prompts:
            log.info("prompts of the next request: %r", [job.prompt or job.prompt_ids for job in jobs])
        try:
            service.submit(ticket)
        except FlashDLLMError as exc:
            raise wrong_input(exc) from exc
        echo = isinstance(body, CompletionRequest) and bool(body.echo)
        return Style(chat, body.model, llm, echo, logprobs), ticket

    def _jobs(self, llm: LLM, body: Body, logprobs: bool) -> list[Job]:
        """One job a prompt; runs in the thread pool, since long prompts take time."""
        if isinstance(body, ChatRequest):
            params = body.sampling(
                logprobs=logprobs, max_tokens=body.max_completion_tokens or body.max_tokens
            )
            self._few(params.n)
            return [llm.job([{"role": m.role, "content": m.text} for m in body.messages], params)]
        params = body.sampling(logprobs=logprobs)
        self._few(params.n * len(body.prompts))
        if body.suffix is not None:
            template = [body.prompt, Gap(max_tokens=body.max_tokens or DEFAULT_GAP), body.suffix]
            params = params.model_copy(update={"max_tokens": None})
            return [llm.job([part for part in template if part != ""], params, template=True)]
        if body.option("infill"):
            if not all(isinstance(p, str) for p in body.prompts):
                raise refused("prompt: a template is a text", "prompt")
            return [llm.job(prompt, params, template=True) for prompt in body.prompts]
        return [llm.job(prompt, params) for prompt in body.prompts]

    def _few(self, answers: int) -> None:
        if answers > self.max_answers:
            raise refused(f"{answers} answers (prompts times n); at most {self.max_answers} a request", "n")

    async def _whole(
        self, call: Call, style: Style, ticket: Ticket, inbox: asyncio.Queue[Event], request: Request
    ) -> Response:
        work = asyncio.create_task(_collect(ticket, inbox))
        gone = asyncio.create_task(_gone(request))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                # Nobody reads this.
                return Response(status_code=499)
            completions = work.result()
            response = JSONResponse(style.reply(ticket, completions))
            call.end("ok", completions)
            return response
        except ServeError as error:
            call.end(error.outcome)
            raise
        finally:
            work.cancel()
            gone.cancel()
            self.service.abort(ticket)
            call.end("disconnected")


async def _collect(ticket: Ticket, inbox: asyncio.Queue[Event]) -> list[Completion]:
    """All answers, in order."""
    found: dict[int, Completion] = {}
    while len(found) < len(ticket.answers):
        event = await inbox.get()
        if isinstance(event, ServeError):
            raise event
        if isinstance(event, Ended):
            found[event.index] = event.completion
    return [found[index] for index in range(len(found))]


async def _gone(request: Request) -> None:
    """Returns when the client has hung up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Stream:
    """The chunks of a ticket, as server-sent events."""

    def __init__(
        self, call: Call, style: Style, ticket: Ticket, inbox: asyncio.Queue[Event], usage: bool
    ) -> None:
        self.call, self.style, self.ticket, self.inbox, self.usage = call, style, ticket, inbox, usage

    async def __aiter__(self) -> AsyncIterator[dict[str, str]]:
        style, ticket = self.style, self.ticket
        for index, answer in enumerate(ticket.answers):
            if style.chat or style.echo:
                yield self._data(style.chunk(index, None if style.chat else style.before(answer)))
        found: dict[int, Completion] = {}
        while len(found) < len(ticket.answers):
            event = await self.inbox.get()
            if isinstance(event, ServeError):
                self.call.end(event.outcome)
                yield {"data": json.dumps(event.body(), ensure_ascii=False)}
                yield {"data": "[DONE]"}
                return
            if isinstance(event, Progress):
                canvas = {} if event.canvas is None else {"diffusion": event.canvas}
                yield self._data(style.chunk(event.index, event.text, **canvas))
            else:
                found[event.index] = event.completion
                ending = style.ending(ticket.answers[event.index], event.completion)
                yield self._data(style.chunk(event.index, "", **ending))
        completions = [found[index] for index in range(len(found))]
        if self.usage:
            yield {"data": json.dumps(style.last_chunk(ticket, completions), ensure_ascii=False)}
        # Before the last event, after which many clients hang up at once.
        self.call.end("ok", completions)
        yield {"data": "[DONE]"}

    def _data(self, chunk: dict[str, Any]) -> dict[str, str]:
        if self.usage:
            chunk["usage"] = None
        return {"data": json.dumps(chunk, ensure_ascii=False)}


class _Reply(EventSourceResponse):
    """A stream; however it ends, its slot is freed."""

    def __init__(self, stream: _Stream, service: Service) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(aiter(stream), headers=headers, ping=PING, sep="\n", send_timeout=STALLED)
        self._ours, self._service = stream, service

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._service.abort(self._ours.ticket)
            self._ours.call.end("disconnected")

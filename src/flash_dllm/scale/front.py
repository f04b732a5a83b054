"""What runs inside a deployment: an engine behind the server's own application, and the front that clients talk to.

The front hands each request whole to an engine replica and hands back what its application sends. As long as nothing
of an answer has gone to the client, a replica that is lost costs it one more try elsewhere: an answer depends on its
request only, so it comes out the same. A stream of which something was sent ends with an error event instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from flash_dllm.serve.errors import ServeError

log = logging.getLogger("flash_dllm.scale")
Message = dict[str, Any]
"""A message of ASGI, as plain data."""
TRIES = 2
REPLICA, RETRIED = "x-flash-dllm-replica", "x-flash-dllm-retried"
"""Headers of a response: the replica that answered, and how many others were lost over it."""
GONE = 15.0
"""Seconds that the application gets to notice that its client has hung up."""


def lost(message: str) -> ServeError:
    """The replica died, and so did the one after it: 503."""
    return ServeError(503, message, code="replica_lost", outcome="error", retry_after=1)


class EngineReplica:
    """One engine and the server's application over it, in an actor of Ray Serve.

    Args:
        args: a ``ServeArgs`` as plain data.
    """

    def __init__(self, args: dict[str, Any]) -> None:
        from flash_dllm.serve.app import Limits, create_app
        from flash_dllm.serve.args import ServeArgs
        from flash_dllm.serve.server import build_service

        options = ServeArgs.model_validate(args)
        logging.basicConfig(level=options.log_level.upper())
        self.service = build_service(options)
        limits = Limits(options.max_body, options.max_answers)
        self.app = create_app(
            self.service, api_key=options.api_key, limits=limits, log_prompts=options.log_prompts
        )
        self.name = _replica_name()
        # No server runs the application's lifespan here.
        self.service.start()

    async def answer(self, scope: Message, body: bytes) -> AsyncGenerator[Message, None]:
        """What the application sends in answer to a request. Closing the generator is the client hanging up."""
        sent: asyncio.Queue[Message | BaseException | None] = asyncio.Queue()
        work = asyncio.create_task(self._run(scope, body, sent))
        try:
            while (message := await sent.get()) is not None:
                if isinstance(message, BaseException):
                    raise message
                if self.service.state == "failed":
                    # Everybody here is told so; dead, this replica is replaced at once, and all of them are answered
                    # by another.
                    log.critical("the engine has failed (%s): this replica ends", self.service.reason)
                    os._exit(70)
                if message["type"] == "http.response.start":
                    message["replica"] = self.name
                yield message
        finally:
            work.cancel()

    async def _run(self, scope: Message, body: bytes, sent: asyncio.Queue[Any]) -> None:
        gone = asyncio.Event()
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if parts:
                return parts.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.put_nowait(dict(message))

        running = asyncio.ensure_future(self.app(asgi_scope(scope), receive, send))
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            gone.set()
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await asyncio.wait_for(running, GONE)
            raise
        except Exception as exc:
            sent.put_nowait(exc)
        sent.put_nowait(None)

    def check_health(self) -> None:
        """Ray Serve replaces a replica whose check raises a few times."""
        if not self.service.healthy:
            raise RuntimeError(f"the engine has failed: {self.service.reason}")

    def __del__(self) -> None:
        service = getattr(self, "service", None)
        if service is not None:
            service.close()


def _replica_name() -> str:
    """Its id in Ray Serve; empty outside."""
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        return str(serve.get_replica_context().replica_id.unique_id)
    except RayServeException:
        return ""


def asgi_scope(scope: Message) -> Message:
    """A scope of ASGI from what :meth:`Front.__call__` sends."""
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in scope["headers"]]
    return {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
        "method": scope["method"], "scheme": "http", "path": scope["path"], "raw_path": scope["path"].encode(),
        "query_string": scope["query"].encode("latin-1"), "root_path": "", "headers": headers,
        "client": tuple(scope["client"]) if scope["client"] else None, "server": None, "state": {},
    }  # fmt: skip


class Front:
    """Takes HTTP requests and has engines answer them.

    Args:
        engines: handle of the engine deployment. It sends a request to the better of two random replicas, by the
            requests that are outstanding there (power of two choices).
        max_body: bytes of a body.
    """

    def __init__(self, engines: Any, max_body: int) -> None:
        self._engines = engines.options(stream=True)
        self._max_body = max_body

    async def __call__(self, request: Any) -> Any:
        """The response to a ``starlette`` request."""
        from starlette.responses import Response, StreamingResponse

        try:
            scope, body = scope_of(request), await self._body(request)
            answer = await self._first(scope, body)
        except ServeError as error:
            return Response(
                json.dumps(error.body()), error.status, error.headers, media_type="application/json"
            )
        headers = [*answer.headers, (REPLICA, answer.replica), (RETRIED, str(answer.retried))]
        if answer.stream is None:
            response: Any = Response(answer.body, answer.status)
        else:
            response = StreamingResponse(answer.chunks(), answer.status)
        response.raw_headers = [(n.encode("latin-1"), v.encode("latin-1")) for n, v in headers]
        return response

    async def _body(self, request: Any) -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._max_body:
                message = f"the body is longer than {self._max_body} bytes"
                raise ServeError(413, message, code="body_too_long", outcome="refused")
        return bytes(body)

    async def _first(self, scope: Message, body: bytes) -> Answer:
        """The answer, up to where something of it must go to the client."""
        reason = ""
        for attempt in range(TRIES):
            stream = self._engines.answer.remote(scope, body)
            answer = Answer(stream, attempt)
            try:
                await answer.begin()
                return answer
            except Exception as exc:
                if not is_lost(exc):
                    raise
                reason = type(exc).__name__
                log.warning("a replica was lost over %s (%s)", scope["path"], reason)
            except BaseException:
                stream.cancel()
                raise
        raise lost(f"{TRIES} replicas were lost over this request ({reason})")


class Answer:
    """What an engine sends: headers, then a whole body, or a stream of which the first chunk is there."""

    def __init__(self, stream: Any, retried: int) -> None:
        self.stream: Any = stream
        self._messages = aiter(stream)
        self.retried = retried
        self.status, self.body, self.replica = 500, b"", ""
        self.headers: list[tuple[str, str]] = []

    async def begin(self) -> None:
        """Read up to where the client must hear something: the whole body, or the first chunk of an event stream."""
        start = await anext(self._messages)
        self.status = start["status"]
        self.headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in start["headers"]
            if name.lower() != b"content-length"
        ]
        self.replica = start["replica"]
        events = any(
            name.lower() == "content-type" and "event-stream" in value for name, value in self.headers
        )
        async for message in self._messages:
            self.body += message.get("body", b"")
            if events and message.get("more_body"):
                return
        self.stream = None
        if self.status != 304:
            self.headers.append(("content-length", str(len(self.body))))

    async def chunks(self) -> AsyncIterator[bytes]:
        """Chunks of the stream; where its replica is lost, an error event as the server's own streams end with."""
        stream, self.stream = self.stream, None
        try:
            yield self.body
            async for message in self._messages:
                yield message.get("body", b"")
        except Exception as exc:
            if not is_lost(exc):
                raise
            log.warning("a replica was lost during a stream (%s)", type(exc).__name__)
            error = json.dumps(lost("the replica was lost before the stream ended").body())
            # A blank line first, for an event that was cut in the middle.
            yield f"\n\ndata: {error}\n\ndata: [DONE]\n\n".encode()
        finally:
            stream.cancel()


def scope_of(request: Any) -> Message:
    """What an engine needs to know of a request, as plain data."""
    raw = request.scope
    return {
        "method": raw["method"], "path": raw["path"], "query": raw.get("query_string", b"").decode("latin-1"),
        "headers": [(n.decode("latin-1"), v.decode("latin-1")) for n, v in raw["headers"]],
        "client": list(raw["client"]) if raw.get("client") else None,
    }  # fmt: skip


def is_lost(exc: BaseException) -> bool:
    """Whether the replica itself is gone, rather than the request wrong."""
    from ray.exceptions import RayActorError, RaySystemError, WorkerCrashedError

    return isinstance(exc, RayActorError | RaySystemError | WorkerCrashedError)

"""In front of ``/v1``: the key, and how much a client may send."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from flash_dllm.serve.errors import ServeError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGI = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class Gate:
    """ASGI middleware: 401 without the key, 413 for a body that is too long, before anything is parsed.

    Args:
        api_key: what ``Authorization: Bearer`` must carry under ``/v1``; None asks for nothing.
        max_body: bytes of a request body.
    """

    def __init__(self, app: ASGI, *, api_key: str | None, max_body: int) -> None:
        self.app, self.max_body = app, max_body
        self._key = None if api_key is None else _digest(api_key.encode())

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = _below_mount(scope)
        headers = {name.lower(): value for name, value in scope["headers"]}
        if (path == "/v1" or path.startswith("/v1/")) and not self._knows(headers.get(b"authorization", b"")):
            message = "the API key is missing or wrong; send Authorization: Bearer KEY"
            await answer(send, ServeError(401, message, code="invalid_api_key", outcome="refused"))
            return
        body = await self._body(receive, headers.get(b"content-length", b""))
        if body is None:
            message = f"the body is longer than {self.max_body} bytes"
            await answer(send, ServeError(413, message, code="body_too_long", outcome="refused"))
            return
        await self.app(scope, _replay(body, receive), send)

    def _knows(self, header: bytes) -> bool:
        if self._key is None:
            return True
        scheme, _, given = header.partition(b" ")
        # Digests have one length, and comparing them takes one time, whatever was sent.
        same = hmac.compare_digest(_digest(given.strip()), self._key)
        return scheme.lower() == b"bearer" and same

    async def _body(self, receive: Receive, length: bytes) -> bytes | None:
        """The whole body, or None once it is too long."""
        if length.isdigit() and int(length[:20]) > self.max_body:
            return None
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return bytes(body)
            body += message.get("body", b"")
            if len(body) > self.max_body:
                return None
            if not message.get("more_body"):
                return bytes(body)


def _below_mount(scope: MutableMapping[str, Any]) -> str:
    """The path that the routes see: without the prefix under which the application is mounted."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(root + "/") else path


def _replay(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def again() -> Message:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return again


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()


async def answer(send: Send, error: ServeError) -> None:
    """Send an error as a whole response."""
    body = json.dumps(error.body(), ensure_ascii=False).encode("utf-8")
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    if error.status == 413:
        headers["connection"] = "close"
    raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})

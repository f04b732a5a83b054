"""A small server for the pages, for ``flash-dllm explain``: files of the static folder, this machine only."""

from __future__ import annotations

import json
from collections.abc import Callable
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

from . import static_folder

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
POLICY = "default-src 'self'; img-src 'self' data: blob:; style-src 'self' 'unsafe-inline'; base-uri 'none'"


class _Handler(SimpleHTTPRequestHandler):
    made: ClassVar[dict[str, Callable[[], Any]]] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.extensions_map = {**SimpleHTTPRequestHandler.extensions_map, **TYPES}
        # This answers the request, so it comes last.
        super().__init__(*args, directory=str(static_folder()), **kwargs)

    def do_GET(self) -> None:
        make = self.made.get(self.path.partition("?")[0])
        if make is None:
            super().do_GET()
            return
        body = json.dumps(make(), ensure_ascii=False).encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def list_directory(self, path: Any) -> None:
        self.send_error(HTTPStatus.NOT_FOUND, "no such page")

    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads an access log of pages."""


def page_server(
    host: str = "127.0.0.1", port: int = 0, made: dict[str, Callable[[], Any]] | None = None
) -> ThreadingHTTPServer:
    """A server of the pages that is bound and not running yet; port 0 takes a free one.

    Args:
        made: path -> a function whose result is served there as JSON, in place of a file.

    Raises:
        OSError: the port is taken or the address is not this machine's.
    """
    # The playground asks who is there.
    made = {"/v1/models": lambda: {"object": "list", "data": []}, **(made or {})}
    handler = type("Handler", (_Handler,), {"made": made})
    server = ThreadingHTTPServer((host, port), handler)
    server.daemon_threads = True
    return server

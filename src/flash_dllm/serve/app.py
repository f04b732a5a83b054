"""The HTTP surface: routes, errors, streams. Everything slow happens on the engine thread or in the thread pool."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flash_dllm
from flash_dllm.serve.service import Service

try:
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, PlainTextResponse, Response
    from fastapi.staticfiles import StaticFiles
    from starlette.exceptions import HTTPException
except ImportError as exc:
    from flash_dllm.errors import FlashDLLMError

    raise FlashDLLMError(f"the server needs {exc.name}: pip install 'flash-dllm[serve]'") from exc

from flash_dllm.serve.answering import Desk
from flash_dllm.serve.errors import ServeError, invalid, refused
from flash_dllm.serve.middleware import Gate
from flash_dllm.serve.openapi import ANSWERS, ERRORS, STATUS, described
from flash_dllm.serve.protocol import ChatRequest, CompletionRequest
from flash_dllm.serve.tracing import Spans


@dataclass(frozen=True)
class Limits:
    """How much one request may ask for: bytes of its body, answers (prompts times n)."""

    max_body: int = 4 * 2**20
    max_answers: int = 128


def create_app(
    service: Service,
    *,
    api_key: str | None = None,
    static_dir: str | Path | None = None,
    limits: Limits | None = None,
    log_prompts: bool = False,
    spans: Spans | None = None,
) -> FastAPI:
    """The server's application.

    Args:
        service: the engines; started and closed with the application.
        api_key: what clients must send under ``/v1``.
        static_dir: folder served at ``/``, without listings; default: the pages of ``flash_dllm.web``, if any.
        limits: of a request.
        log_prompts: put prompts into the log.
        spans: where OpenTelemetry spans go.
    """
    limits = limits or Limits()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        service.close()

    # The interactive pages of FastAPI load their scripts from another host.
    app = FastAPI(
        title="Flash-dLLM", version=flash_dllm.__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.service = service
    desk = Desk(service, limits.max_answers, log_prompts, spans or Spans(None))
    _answers(app, desk)
    _facts(app, service)
    _errors(app)
    app.openapi = described(app, service, api_key is not None)  # type: ignore[method-assign]
    app.add_middleware(Gate, api_key=api_key, max_body=limits.max_body)
    folder = static_dir if static_dir is not None else _pages()
    if folder is not None:
        _serve_pages(app, folder)
    return app


def _serve_pages(app: FastAPI, folder: str | Path) -> None:
    """Files for whatever no route knows: a mount at "/" would also take what a route refuses for its method."""
    files, nothing = StaticFiles(directory=folder, html=True), app.router.default

    async def pages(scope: Any, receive: Any, send: Any) -> None:
        await (files if scope["type"] == "http" else nothing)(scope, receive, send)

    app.router.default = pages


def _pages() -> Path | None:
    """The folder of the web pages, where this installation has it."""
    try:
        folder = importlib.import_module("flash_dllm.web").static_folder()
    except (ImportError, AttributeError):
        return None
    return Path(folder) if Path(folder).is_dir() else None


def _answers(app: FastAPI, desk: Desk) -> None:
    @app.post("/v1/chat/completions", responses=ANSWERS, tags=["answers"])
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await desk.serve(body, request)

    @app.post("/v1/completions", responses=ANSWERS, tags=["answers"])
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue prompts or, with a suffix or a template, fill in."""
        return await desk.serve(body, request)


def _facts(app: FastAPI, service: Service) -> None:
    def model(name: str) -> dict[str, Any]:
        first = service.llms[service.default]
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "flash-dllm",
            "max_model_len": first.max_model_len,
            "methods": list(service.llms),
        }

    @app.get("/v1/models", tags=["facts"])
    async def models() -> dict[str, Any]:
        """The names of the model, and the methods that ``diffusion.method`` may name."""
        return {"object": "list", "data": [model(name) for name in service.models]}

    @app.get("/v1/models/{name:path}", responses=ERRORS, tags=["facts"])
    async def one_model(name: str) -> dict[str, Any]:
        """One name of the model."""
        service.check_model(name)
        return model(name)

    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses=STATUS, tags=["facts"])
    async def health() -> JSONResponse:
        """200 while the engine works, draining included; 503 after an error that it cannot recover from."""
        return JSONResponse(
            {"status": service.state, "reason": service.reason}, 200 if service.healthy else 503
        )

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", responses=STATUS, tags=["facts"])
    async def ready() -> JSONResponse:
        """200 while new requests are taken."""
        return JSONResponse({"status": service.state}, 200 if service.state == "ready" else 503)

    @app.get("/metrics", tags=["facts"], response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _errors(app: FastAPI) -> None:
    @app.exception_handler(ServeError)
    async def serve_error(_: Request, exc: ServeError) -> JSONResponse:
        return JSONResponse(exc.body(), exc.status, exc.headers)

    def refuse(request: Request, error: ServeError) -> JSONResponse:
        app.state.service.metrics.requests.labels(request.url.path, "refused").inc()
        return JSONResponse(error.body(), error.status)

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, exc: RequestValidationError) -> JSONResponse:
        return refuse(request, invalid(list(exc.errors())))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, exc: HTTPException) -> JSONResponse:
        # Raised by FastAPI alone, for what its parser gives up on: no UTF-8, or an integer of thousands of digits.
        if exc.status_code == 400:
            return refuse(request, refused("the body cannot be read as JSON in UTF-8", code="invalid_json"))
        error = ServeError(exc.status_code, str(exc.detail), code="http_error", outcome="refused")
        return JSONResponse(error.body(), exc.status_code, exc.headers)

    @app.exception_handler(Exception)
    async def unexpected(_: Request, exc: Exception) -> JSONResponse:
        error = ServeError(500, "an error in the server", code="internal_error", outcome="error")
        return JSONResponse(error.body(), 500)

"""The OpenAPI document: what FastAPI derives, with our errors in place of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from flash_dllm.serve.service import Service


class ErrorFields(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Body of every response that is no answer."""

    error: ErrorFields


_WHEN = {
    400: "a field is wrong, unknown or not supported; `param` names it",
    401: "the API key is missing or wrong",
    404: "no such model or page",
    408: "not answered in time",
    413: "the body is too long",
    429: "the queue is full; see Retry-After",
    500: "this request failed while it was decoded",
    503: "shutting down, or the engine has failed",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text} for status, text in _WHEN.items()
}


ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "the answers, or with `stream` their pieces as server-sent events",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {"schema": {"type": "string"}},
        },
    },
    **ERRORS,
}

STATUS: dict[int | str, dict[str, Any]] = {503: {"description": "not in this state; `status` says which"}}


def described(app: FastAPI, service: Service, with_key: bool) -> Callable[[], dict[str, Any]]:
    """What ``app.openapi`` becomes."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _amended(
                get_openapi(title=app.title, version=app.version, routes=app.routes)
            )
        return app.openapi_schema

    def _amended(made: dict[str, Any]) -> dict[str, Any]:
        for path in made["paths"].values():
            for operation in path.values():
                # Every wrong field is a 400, as with OpenAI.
                operation["responses"].pop("422", None)
        schemas = made["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        for name in ("ChatRequest", "CompletionRequest"):
            schemas[name]["properties"]["model"]["enum"] = list(service.models)
        schemas["Diffusion"]["properties"]["method"]["enum"] = [*service.llms, None]
        if with_key:
            made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            made["security"] = [{"key": []}]
        return made

    return document

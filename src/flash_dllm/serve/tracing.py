"""OpenTelemetry: a span for each request. Optional; prompts and answers never go in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from flash_dllm.errors import FlashDLLMError


class Span:
    """A request's span, or nothing where there is no tracer."""

    def __init__(self, span: Any) -> None:
        self._span = span

    def end(self, outcome: str, facts: Mapping[str, Any]) -> None:
        """Write down how the request went."""
        if self._span is None:
            return
        from opentelemetry.trace import Status, StatusCode

        for name, value in facts.items():
            self._span.set_attribute(f"flash_dllm.{name}", value)
        if outcome == "error":
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


class Spans:
    """Begins spans; ``tracer`` is one of OpenTelemetry's, or None for no tracing."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer

    @classmethod
    def from_environment(cls) -> Spans:
        """A tracer as OpenTelemetry's own variables say; ``OTEL_TRACES_EXPORTER`` names the exporter.

        Raises:
            FlashDLLMError: OpenTelemetry or the exporter is not installed.
        """
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as exc:
            raise FlashDLLMError("--otel needs OpenTelemetry: pip install 'flash-dllm[otel]'") from exc
        provider = trace.get_tracer_provider()
        if not isinstance(provider, TracerProvider):
            # Nobody has set one up (as `opentelemetry-instrument` does).
            provider = TracerProvider()
            provider.add_span_processor(BatchSpanProcessor(_exporter()))
            trace.set_tracer_provider(provider)
        return cls(provider.get_tracer("flash_dllm.serve"))

    def begin(self, endpoint: str, headers: Mapping[str, str]) -> Span:
        """A span, child of the caller's if its headers name one."""
        if self._tracer is None:
            return Span(None)
        from opentelemetry import context, propagate, trace
        from opentelemetry.trace import SpanKind

        # Later versions of FastAPI open a span of their own, which then is the child of the caller's.
        inside = trace.get_current_span().get_span_context().is_valid
        parent = context.get_current() if inside else propagate.extract(dict(headers))
        kind = SpanKind.INTERNAL if inside else SpanKind.SERVER
        return Span(self._tracer.start_span(f"POST {endpoint}", context=parent, kind=kind))


def _exporter() -> Any:
    from importlib.metadata import entry_points

    name = os.environ.get("OTEL_TRACES_EXPORTER", "otlp")
    alias = {"otlp": "otlp_proto_http"}.get(name, name)
    if name == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter()
    found = list(entry_points(group="opentelemetry_traces_exporter", name=alias))
    if not found:
        raise FlashDLLMError(
            f"OTEL_TRACES_EXPORTER={name}: not installed; for otlp: pip install opentelemetry-exporter-otlp-proto-http"
        )
    return found[0].load()()

"""What Prometheus reads at ``/metrics``. Each server has a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from flash_dllm.core.step import StepRecord
from flash_dllm.outputs import Completion

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
PER_FORWARD = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 16.0, 32.0)
FORWARDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


class Metrics:
    """Counters of one server; the engine thread and the event loop both write them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"flash_dllm_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"flash_dllm_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"flash_dllm_{name}", text, labels, buckets=buckets, registry=registry)

        self.requests = counter(
            "requests", "HTTP requests for answers, by how they ended", "endpoint", "outcome"
        )
        self.latency = histogram("request_seconds", "From request to last byte", SECONDS, "endpoint")
        self.queued = histogram("queue_seconds", "Answers: from arrival to first pass", SECONDS, "method")
        self.first_text = histogram(
            "time_to_first_text_seconds", "Streams: from arrival to text that stays", SECONDS, "method"
        )
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of answers", "method")
        self.answer_tokens = counter("answer_tokens", "Answer tokens, before the stop token", "method")
        self.per_forward = histogram(
            "tokens_per_forward", "Answers: answer tokens per forward pass (TPF)", PER_FORWARD, "method"
        )
        self.forwards = histogram("forward_passes", "Answers: forward passes (NFE)", FORWARDS, "method")
        self.rows = counter("rows_recomputed", "Rows recomputed for finished answers", "method")
        self.step_seconds = histogram(
            "step_seconds",
            "Steps: sweep (a slot recomputed every row), verify (with a second pass), steady (others)",
            STEP_SECONDS,
            "method",
            "kind",
        )
        self.faults = counter("engine_faults", "Steps that raised", "method")
        self.waiting = gauge("answers_waiting", "Answers that no slot has room for yet")
        self.slots = gauge("slots", "Slots", "method")
        self.busy = gauge("slots_busy", "Slots with a canvas in them", "method")
        self.cache_bytes = gauge("cache_bytes", "Bytes of keys and values", "method")
        self.healthy = gauge("healthy", "1 while the engine answers")

    def step(self, method: str, record: StepRecord, seconds: float) -> None:
        """A step of an engine."""
        second = any(out.kind == "verify" for out in record.passes)
        kind = "sweep" if record.swept else "verify" if second else "steady"
        self.step_seconds.labels(method, kind).observe(seconds)

    def answer(self, method: str, completion: Completion, prompt_tokens: int) -> None:
        """An answer is finished."""
        self.queued.labels(method).observe(completion.queued)
        self.prompt_tokens.labels(method).inc(prompt_tokens)
        self.answer_tokens.labels(method).inc(len(completion.token_ids))
        self.rows.labels(method).inc(completion.rows)
        self.forwards.labels(method).observe(completion.nfe)
        if completion.nfe:
            self.per_forward.labels(method).observe(completion.tpf)

    def text(self) -> bytes:
        """Prometheus' exposition format."""
        return generate_latest(self.registry)

"""Open-loop load on a running server: requests arrive by a Poisson process, whether or not earlier ones are done.

A closed loop (a fixed number of clients that wait for their answers) slows down with the server and hides its queue; an
open one does not. Requests are streamed chat or text completions of the OpenAI protocol.

Counting: the time to the first token runs from the moment at which a request was due, so that a client that falls
behind does not flatter the server. Tokens are those that the server's own usage report counts; where it sends none,
they are missing and throughput is given in requests only.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from flash_dllm.bench.stats import quantiles
from flash_dllm.bench.timing import BenchError


@dataclass(frozen=True)
class Target:
    """Where requests go.

    Attributes:
        url: of the server, with or without ``/v1``.
        model: name that requests carry; None asks the server for its first.
        chat: chat completions; else text completions.
        max_tokens: of each answer; None leaves it to the server.
        extra: further fields of every request (``{"epsilon": 0.9}``).
        timeout: seconds after which a request counts as failed.
    """

    url: str
    model: str | None = None
    chat: bool = True
    max_tokens: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    timeout: float = 600.0
    api_key: str | None = None

    @property
    def base(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1") + "/v1"

    def body(self, model: str, prompt: str) -> dict[str, Any]:
        """The JSON of one request."""
        asked = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        length = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": model, **asked, **length, **stream, **self.extra}


@dataclass
class Seen:
    """One request: seconds since the start of the load, and what came back."""

    due: float
    sent: float = 0.0
    first: float | None = None
    last: float | None = None
    tokens: int | None = None
    error: str | None = None


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Times of ``count`` arrivals of a Poisson process of ``rate`` a second; all at 0 for an infinite rate.

    Raises:
        BenchError: no positive rate.
    """
    if not rate > 0:
        raise BenchError(f"rate={rate}: requests a second, above 0 (inf sends all at once)")
    made, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        now += made.expovariate(rate) if rate != float("inf") else 0.0
        times.append(now)
    return times


def measure_serve(
    target: Target, prompts: Sequence[str], rate: float, count: int, seed: int = 0
) -> dict[str, Any]:
    """Send ``count`` requests at ``rate`` a second and report throughput and latencies.

    Raises:
        BenchError: there are no prompts, httpx is missing, or the server cannot be reached.
    """
    if not prompts:
        raise BenchError("serve: no prompts")
    times = arrivals(rate, count, seed)
    seen, model, seconds = asyncio.run(_load(target, prompts, times))
    done = [s for s in seen if s.error is None]
    tokens = [s.tokens for s in done]
    known = sum(t for t in tokens if t is not None) if all(t is not None for t in tokens) else None
    errors = sorted({s.error for s in seen if s.error is not None})
    return {
        "url": target.url, "model": model, "rate": None if rate == float("inf") else rate, "requests": count,
        "failed": len(seen) - len(done), "errors": errors[:5], "seconds": round(seconds, 4),
        "requests_per_second": round(len(done) / seconds, 4), "answer_tokens": known,
        "tokens_per_second": None if known is None else round(known / seconds, 3),
        "first_token_s": _latency([s.first - s.due for s in done if s.first is not None]),
        "last_token_s": _latency([s.last - s.due for s in done if s.last is not None]),
        "sent_late_s": _latency([s.sent - s.due for s in seen]),
        "max_tokens": target.max_tokens, "extra": target.extra, "seed": seed,
    }  # fmt: skip


def _latency(values: list[float]) -> dict[str, float] | None:
    return {k: round(v, 4) for k, v in quantiles(values).items()} if values else None


async def _load(
    target: Target, prompts: Sequence[str], times: Sequence[float]
) -> tuple[list[Seen], str, float]:
    try:
        import httpx
    except ImportError as error:
        raise BenchError("bench serve needs httpx: pip install httpx") from error
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        timeout=target.timeout, limits=limits, headers=headers, trust_env=False
    ) as client:
        try:
            model = target.model or await _first_model(client, target)
        except (httpx.HTTPError, LookupError, ValueError) as error:
            raise BenchError(f"{target.base}/models: {error or type(error).__name__}") from error
        began = time.perf_counter()
        seen = [Seen(due) for due in times]
        tasks = [
            _one(client, target, target.body(model, prompts[i % len(prompts)]), s, began)
            for i, s in enumerate(seen)
        ]
        await asyncio.gather(*tasks)
        ended = max((s.last or s.sent for s in seen), default=0.0)
    return seen, model, max(ended, 1e-9)


async def _first_model(client: Any, target: Target) -> str:
    answer = await client.get(f"{target.base}/models")
    answer.raise_for_status()
    return str(answer.json()["data"][0]["id"])


async def _one(client: Any, target: Target, body: dict[str, Any], seen: Seen, began: float) -> None:
    """One streamed request; what went wrong is in ``seen.error``."""
    import httpx

    await asyncio.sleep(max(0.0, began + seen.due - time.perf_counter()))
    seen.sent = time.perf_counter() - began
    path = "chat/completions" if target.chat else "completions"
    try:
        async with client.stream("POST", f"{target.base}/{path}", json=body) as answer:
            if answer.status_code != 200:
                text = (await answer.aread()).decode("utf-8", "replace")
                seen.error = f"status {answer.status_code}: {text[:200]}"
                return
            async for event in events(answer.aiter_lines()):
                _note(seen, event, time.perf_counter() - began)
    except (httpx.HTTPError, ValueError) as error:
        seen.error = f"{type(error).__name__}: {error}"
    if seen.error is None and seen.last is None:
        seen.error = "the stream ended without any token"


async def events(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each ``data:`` line of a stream, up to ``[DONE]``."""
    async for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        yield json.loads(data)


def _note(seen: Seen, event: dict[str, Any], now: float) -> None:
    if "error" in event:
        seen.error = str(event["error"])[:200]
        return
    if event.get("usage"):
        seen.tokens = int(event["usage"]["completion_tokens"])
    for choice in event.get("choices") or []:
        text = choice.get("text") or (choice.get("delta") or {}).get("content")
        if text:
            seen.first = now if seen.first is None else seen.first
            seen.last = now
        elif choice.get("finish_reason"):
            # An answer may be empty; its end then is its first sign.
            seen.first, seen.last = seen.first or now, now

"""Many prompts, a few at a time, from JSON Lines to JSON Lines; run it again to resume.

    python examples/batch.py prompts.jsonl answers.jsonl --url http://127.0.0.1:8000 --parallel 16

A line of input has ``id`` and ``prompt`` or ``messages``; a line of output has ``id``, ``text`` and ``usage``, or
``error``. A full queue (429) is waited for: the client tries again when the server says.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from pathlib import Path
from typing import Any, TextIO

import openai


def finished(path: Path) -> set[str]:
    """Ids that have an answer already; a last line that was cut off counts as none."""
    found = set()
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            item = json.loads(line)
        except ValueError:
            continue
        if "error" not in item:
            found.add(str(item["id"]))
    return found


async def answer(
    client: openai.AsyncOpenAI, model: str, item: dict[str, Any], max_tokens: int
) -> dict[str, Any]:
    """The line of output for a line of input."""
    messages = item.get("messages") or [{"role": "user", "content": item["prompt"]}]
    try:
        reply = await client.chat.completions.create(model=model, messages=messages, max_tokens=max_tokens)
    except openai.APIError as error:
        return {"id": item["id"], "error": error.message}
    assert reply.usage is not None
    return {"id": item["id"], "text": reply.choices[0].message.content, "usage": reply.usage.model_dump()}


async def worker(
    client: openai.AsyncOpenAI, model: str, todo: asyncio.Queue[dict[str, Any]], out: TextIO, max_tokens: int
) -> None:
    while not todo.empty():
        line = await answer(client, model, todo.get_nowait(), max_tokens)
        out.write(json.dumps(line, ensure_ascii=False) + "\n")
        out.flush()


async def main() -> None:
    parser = argparse.ArgumentParser(description="Many prompts from JSON Lines to JSON Lines.")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--parallel", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()

    done = finished(args.answers)
    lines = args.prompts.read_text(encoding="utf-8").splitlines()
    items = [item for line in lines if line.strip() and str((item := json.loads(line))["id"]) not in done]
    todo: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    for item in items:
        todo.put_nowait(item)
    key = os.environ.get("FLASH_DLLM_API_KEY") or "none"
    async with openai.AsyncOpenAI(base_url=f"{args.url}/v1", api_key=key, max_retries=20) as client:
        model = (await client.models.list()).data[0].id
        with open(args.answers, "a", encoding="utf-8") as out:
            jobs = [worker(client, model, todo, out, args.max_tokens) for _ in range(args.parallel)]
            await asyncio.gather(*jobs)
    print(f"{len(items)} answers, {len(done)} were there")


if __name__ == "__main__":
    asyncio.run(main())

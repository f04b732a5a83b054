"""OpenAI's own client against ``flash-dllm serve``.

flash-dllm serve flash-dllm/tiny-dream
pip install openai
python examples/openai_client.py [http://127.0.0.1:8000]
"""

from __future__ import annotations

import os
import sys

import openai

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = openai.OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("FLASH_DLLM_API_KEY") or "none")
model = client.models.list().data[0].id

# A whole answer. What only a diffusion model has goes into `diffusion`.
reply = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What is 12 + 7?"}],
    max_tokens=64,
    extra_body={"diffusion": {"epsilon": 0.8}},
)
usage = reply.usage
print(reply.choices[0].message.content)
print(f"[{usage.completion_tokens} tokens in {usage.nfe} passes, {usage.tpf} a pass]\n")

# A stream: text that can no longer change, as it becomes known.
for chunk in client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Write a letter from Leo to Clara about a new job."}],
    max_tokens=96,
    stream=True,
):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print("\n")

# The canvas: what each step did, anywhere in the answer.
for chunk in client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What is 12 + 7?"}],
    max_tokens=24,
    stream=True,
    extra_body={"diffusion": {"stream": "canvas"}},
):
    step = getattr(chunk.choices[0], "diffusion", None) or {}
    if step.get("event") == "step":
        columns = zip(step["positions"], step["texts"], step["states"], strict=True)
        committed = [f"{pos}:{text!r}" for pos, text, state in columns if state in ("committed", "accepted")]
        print(f"step {step['step']}: committed {' '.join(committed) or 'nothing'}")

# Infilling: between a prompt and a suffix, or in the gaps of a template.
reply = client.completions.create(
    model=model, prompt="Karl has a purple ring. The ring of Karl is", suffix=".", max_tokens=2
)
print(f"\nfilled in: {reply.choices[0].text!r}")
reply = client.completions.create(
    model=model,
    prompt="Karl has a purple ring. The ring of Karl is{{1}}.",
    extra_body={"diffusion": {"infill": True}},
)
print(reply.choices[0].text)

# A field that the server does not support is an error that names it, never ignored.
try:
    client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Hi"}], frequency_penalty=0.5
    )
except openai.BadRequestError as error:
    print(f"\n{error.status_code}: {error.body['message']}")

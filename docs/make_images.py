"""Draws docs/images/canvas.svg: one answer of the bundled model at a few moments of its decoding."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console
from rich.text import Text

from flash_dllm import LLM, SamplingParams
from flash_dllm.cli.canvas import Canvas
from flash_dllm.cli.demo import PROMPTS

MOMENTS = (0.15, 0.45, 0.75, 1.0)


def main() -> None:
    """Write the picture."""
    llm = LLM(max_num_seqs=1)
    prompt = PROMPTS[0]
    job = llm.job([{"role": "user", "content": prompt}], SamplingParams())
    canvas = Canvas(llm, job, prompt)
    frames = []
    for event in llm.watch(job):
        canvas.see(event)
        frames.append(canvas.render())
    console = Console(
        record=True, width=100, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    for moment in MOMENTS:
        console.print(frames[round(moment * (len(frames) - 1))])
        console.print(Text())
    title = f"flash-dllm demo: {canvas.llm.loaded.name}"
    path = Path(__file__).parent / "images" / "canvas.svg"
    path.parent.mkdir(exist_ok=True)
    path.write_text(console.export_svg(title=title), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()

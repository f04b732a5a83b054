"""Draws docs/images/canvas.svg: a recording of the live canvas while a bundled model answers."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from pathlib import Path

from rich.console import Console, RenderableType
from rich.segment import Segment

from flash_dllm import LLM, SamplingParams
from flash_dllm.cli.canvas import Canvas
from flash_dllm.cli.demo import PROMPTS

MODEL = "flash-dllm/tiny-dream"
COLUMNS = 84
CELL, LINE, MARGIN = 8.4, 18, 14
PACE, HOLD = 0.3, 5.0
"""Seconds that a step is shown, and the last one."""

Frame = list[list[Segment]]


def record() -> list[Frame]:
    """The canvas after each step, as lines of styled text."""
    llm = LLM(MODEL, max_num_seqs=1, device="cpu")
    job = llm.job([{"role": "user", "content": PROMPTS[0]}], SamplingParams())
    canvas = Canvas(llm, job, PROMPTS[0][: COLUMNS - 8] + "...")
    console = Console(width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")

    def lines(picture: RenderableType) -> Frame:
        return [list(Segment.simplify(line)) for line in console.render_lines(picture)]

    frames = [lines(canvas.render())]
    for event in llm.watch(job):
        if event.output is not None:  # tokens a second would tell how busy this machine was
            event = replace(event, output=replace(event.output, seconds=0.0))
        canvas.see(event)
        frames.append(lines(canvas.render()))
    return frames


def runs(line: list[Segment]) -> Iterator[str]:
    """One element for each run of a line: it says where it stands, so that no font can shift it."""
    column = 0
    for text, style, _ in line:
        attributes = []
        if style is not None and style.color is not None:
            attributes.append(f'fill="{style.color.get_truecolor().hex}"')
        for on, name in (
            (style and style.bold, 'font-weight="bold"'),
            (style and style.italic, 'font-style="italic"'),
            (style and style.underline, 'text-decoration="underline"'),
        ):
            if on:
                attributes.append(name)
        if text.strip():
            start = MARGIN + (column + len(text) - len(text.lstrip())) * CELL
            shown = text.strip()
            yield (
                f'<tspan x="{start:.1f}" textLength="{len(shown) * CELL:.1f}" {" ".join(attributes)}>'
                f"{escape(shown)}</tspan>"
            )
        column += len(text)


def svg(frames: list[Frame]) -> str:
    """Frames one after another by CSS; viewers that show no motion have the last one."""
    rows = max(map(len, frames))
    width, height = COLUMNS * CELL + 2 * MARGIN, rows * LINE + 2 * MARGIN
    whole = PACE * (len(frames) - 1) + HOLD
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}">',
        "<style>text{font:14px Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#ddd;white-space:pre}"
        f".f{{visibility:hidden;animation:s {whole:.1f}s step-end infinite}}"
        f".l{{visibility:visible;animation:h {whole:.1f}s step-end infinite}}"
        f"@keyframes s{{0%{{visibility:visible}}{100 * PACE / whole:.2f}%,100%{{visibility:hidden}}}}"
        f"@keyframes h{{0%{{visibility:visible}}{100 * HOLD / whole:.2f}%,100%{{visibility:hidden}}}}"
        "@media(prefers-reduced-motion){.f,.l{animation:none}}</style>",
        f'<rect width="{width:.0f}" height="{height}" rx="8" fill="#1b1b1f"/>',
    ]
    for index, frame in enumerate(frames):
        kind = "l" if index == len(frames) - 1 else "f"
        parts.append(f'<g class="{kind}" style="animation-delay:{index * PACE - whole:.1f}s">')
        for number, line in enumerate(frame):
            parts.append(f'<text y="{MARGIN + (number + 0.8) * LINE:.1f}">{"".join(runs(line))}</text>')
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Write the picture."""
    path = Path(__file__).parent / "images" / "canvas.svg"
    path.parent.mkdir(exist_ok=True)
    path.write_text(svg(record()), encoding="utf-8")
    print(f"docs/images/{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()

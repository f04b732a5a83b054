"""The live canvas: every position as MASK, current guess or committed token coloured by confidence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from flash_dllm.llm import LLM
from flash_dllm.outputs import Completion, StreamEvent
from flash_dllm.requests import Job

# Okabe and Ito's palette, which colour-blind readers can tell apart; the lowest level is underlined as well.
LEVELS = (
    (0.95, "#56B4E9", "≥ .95"),
    (0.8, "#009E73", "≥ .8"),
    (0.5, "#F0E442", "≥ .5"),
    (0.0, "underline #E69F00", "< .5"),
)
MASK = "░"
GUESS = "italic #999999"
MASK_STYLE = "#555555"


def level(confidence: float) -> str:
    """Style of a committed token. Entropy-like measures are negative logarithms: near 0 is sure."""
    if confidence < 0:
        confidence = 1 + confidence
    return next((style for bound, style, _ in LEVELS if confidence >= bound), LEVELS[-1][1])


@dataclass
class Canvas:
    """What is known of each position of one job."""

    llm: LLM
    job: Job
    title: str
    committed: dict[int, tuple[int, float]] = field(default_factory=dict)
    guesses: dict[int, int] = field(default_factory=dict)
    step: int = 0
    nfe: int = 0
    output: Completion | None = None

    def see(self, event: StreamEvent) -> None:
        """Take in a step."""
        for pos, token, confidence in zip(event.positions, event.tokens, event.confidences, strict=True):
            self.committed[pos] = (token, confidence)
        self.guesses = {pos: token for pos, token, _ in event.guesses}
        self.step, self.nfe, self.output = event.step, event.nfe, event.output

    def render(self) -> RenderableType:
        """Title, canvas, legend and counters."""
        return Panel(
            Group(self._text(), Text(), legend(), self._counters()),
            title=Text(self.title),
            title_align="left",
            border_style="#777777",
        )

    def _text(self) -> Text:
        job, text = self.job, Text()
        start = 0 if job.parts is not None else job.first
        for pos in range(start, len(job.ids)):
            if not job.masked[pos]:
                text.append(self._piece(job.ids[pos]), "bold")
            elif pos in self.committed:
                token, confidence = self.committed[pos]
                if token in job.stop_ids and job.parts is None and job.params.stop_at_eos:
                    text.append("∎", level(confidence))
                    break
                text.append(self._piece(token), level(confidence))
            elif pos in self.guesses and self.output is None:
                text.append(self._piece(self.guesses[pos]), GUESS)
            else:
                text.append(MASK, MASK_STYLE)
        return text

    def _piece(self, token: int) -> str:
        tokenizer = self.llm.tokenizer
        if tokenizer is None:
            return f"{token} "
        if token in self.job.stop_ids:
            return "∎"
        text = tokenizer.decode([token], skip_special=self.job.params.skip_special_tokens)
        return text.replace("\ufffd", "·")

    def _counters(self) -> Text:
        tokens = len(self.committed)
        line = f"step {self.step}  passes {self.nfe}  tokens {tokens}"
        if self.output is not None:
            out = self.output
            rate = f"  {len(out.token_ids) / out.seconds:.1f} tokens/s" if out.seconds else ""
            line = (
                f"{out.finish_reason}  answer {len(out.token_ids)} tokens  passes {out.nfe}  "
                f"{out.tpf:.2f} tokens a pass{rate}"
            )
        return Text(line, "#999999")


def legend() -> Text:
    """What the colours mean."""
    text = Text()
    text.append(MASK, MASK_STYLE).append(" mask  ", "#999999").append("guess", GUESS)
    text.append("  committed at ", "#999999")
    for _, style, name in LEVELS:
        text.append(name, style).append(" ")
    return text.append("  ∎ end", "#999999")


def show_live(llm: LLM, job: Job, title: str, console: Console, delay: float = 0.0) -> Iterator[StreamEvent]:
    """Run a job and draw it while it runs; gives the events on. The last picture stays."""
    import time

    canvas = Canvas(llm, job, title)
    with Live(canvas.render(), console=console, auto_refresh=False, vertical_overflow="visible") as live:
        for event in llm.watch(job):
            canvas.see(event)
            live.update(canvas.render(), refresh=True)
            yield event
            if delay:
                time.sleep(delay)

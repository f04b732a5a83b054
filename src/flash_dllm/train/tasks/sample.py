"""What the task generator hands out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

CHAT_HEADER = "<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>"
ASSISTANT = "<|start_header_id|>assistant<|end_header_id|>\n\n"


@dataclass(slots=True)
class Parts:
    """What a family makes: a question, the reference answer, data for its checker, and the template's name.

    For a canvas (`gaps` not empty) the question is empty and `gaps` are character spans of the answer to
    hide.
    """

    question: str
    answer: str
    check: Mapping[str, object]
    template: str
    gaps: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class Sample:
    """One question with its reference answer.

    `messages` are the (role, text) turns before the answer, empty for a raw prompt or a canvas; `prompt_text`
    is rendered with special tokens; `free_choices` counts the answer's uncertain wordings; `gaps` are
    character spans of `answer_text` that a canvas hides.
    """

    family: str
    messages: tuple[tuple[str, str], ...]
    prompt_text: str
    answer_text: str
    check: Mapping[str, object]
    template: str
    free_choices: int
    shots: int = 0
    gaps: tuple[tuple[int, int], ...] = field(default=())

    @property
    def stop(self) -> str:
        """The special token after the answer: a turn ends with EoT, raw text with EOS."""
        return "<|eot_id|>" if self.messages else "<|endoftext|>"


def render(messages: tuple[tuple[str, str], ...]) -> str:
    """The chat template: BOS, the turns, and an open assistant header."""
    turns = "".join([CHAT_HEADER.format(role=role, text=text) for role, text in messages])
    return f"<|startoftext|>{turns}{ASSISTANT}"

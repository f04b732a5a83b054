"""Templates with gaps: text with masked spans anywhere.

As a list: ``["The ", Gap(2), " sat on ", Gap(max_tokens=6), "."]``. As text: ``"The {{2}} sat on {{<=6}}."``.
A part may also be a list of token ids, which a checkpoint without a tokenizer needs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from flash_dllm.errors import FlashDLLMError

_MARK = re.compile(r"\{\{\s*(<=)?\s*(\d+)\s*\}\}")


class TemplateError(FlashDLLMError):
    """A template that cannot be filled in."""


@dataclass(frozen=True)
class Gap:
    """A masked span of exactly ``length`` tokens, or of at most ``max_tokens``.

    The model ends a span of the second kind early by writing a stop token in it; the span is cut there.
    """

    length: int | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.length is None) == (self.max_tokens is None):
            raise TemplateError("a gap needs either length or max_tokens")
        if not isinstance(self.size, int) or isinstance(self.size, bool) or self.size < 1:
            raise TemplateError(f"a gap of {self.size!r} tokens; it needs at least 1")

    @property
    def size(self) -> int:
        """Masked positions it takes on the canvas."""
        size = self.max_tokens if self.length is None else self.length
        assert size is not None
        return size

    @property
    def open_ended(self) -> bool:
        """Whether the model may end it early."""
        return self.max_tokens is not None


Part = str | list[int] | Gap
Template = str | Sequence[Part]


def parse_template(template: Template) -> list[Part]:
    """Texts and gaps in order. In text, ``{{8}}`` is a gap of 8 tokens and ``{{<=8}}`` one of at most 8.

    Anything else in double braces is plain text; to have ``{{8}}`` as text, give the template as a list.

    Raises:
        TemplateError: no gap, or a part that is none of text, token ids and gap.
    """
    parts = _split(template) if isinstance(template, str) else list(template)
    for part in parts:
        ids = isinstance(part, list) and all(isinstance(t, int) and not isinstance(t, bool) for t in part)
        if not ids and not isinstance(part, str | Gap):
            raise TemplateError(
                f"a template holds text, lists of token ids and gaps, not {type(part).__name__}"
            )
    if not any(isinstance(part, Gap) for part in parts):
        raise TemplateError("the template has no gap; write {{8}} for 8 tokens or {{<=8}} for at most 8")
    return parts


def _split(text: str) -> list[Part]:
    parts: list[Part] = []
    at = 0
    for found in _MARK.finditer(text):
        if found.start() > at:
            parts.append(text[at : found.start()])
        if len(found[2]) > 9:
            raise TemplateError(f"a gap of {found[2][:9]}... tokens is too long")
        size = int(found[2])
        parts.append(Gap(max_tokens=size) if found[1] else Gap(size))
        at = found.end()
    if at < len(text):
        parts.append(text[at:])
    return parts

"""The base of every error that wrong input causes. Imports nothing, so that everything may import it.

Subclasses live where they are raised: ``ModelError`` (a checkpoint), ``MethodError`` (a method or its
options), ``RequestError`` (a prompt or its parameters). All are ``ValueError`` with a message of one line.
"""

from __future__ import annotations


class FlashDLLMError(ValueError):
    """Something in the input is wrong; the message says what, in one line."""

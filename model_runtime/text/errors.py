"""What can go wrong between text and tokens. Both are the model files' or the caller's fault, never a peer's."""

from __future__ import annotations


class TokenizerError(ValueError):
    """The model files do not describe a tokenizer that can be built; names the file and the key."""


class ChatTemplateError(ValueError):
    """The model has no chat template, or its template refused these messages."""

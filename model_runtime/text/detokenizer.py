"""Turns a stream of tokens into a stream of text.

A token is a run of bytes, not of characters: one character may arrive in several tokens. The detokenizer holds back an
unfinished character and nothing else. It belongs to one request and knows neither stop strings nor gRPC.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from model_runtime.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The concatenation of everything `push` and `finish` return equals `tokenizer.decode` of all pushed tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that is certain once these tokens are known. Raises IndexError for an id outside the vocabulary."""
        return "".join(self._decoder.decode(self._tokenizer.token_bytes(token_id)) for token_id in token_ids)

    def finish(self) -> str:
        """What is still held back; an unfinished character becomes U+FFFD. Ends the stream."""
        return self._decoder.decode(b"", final=True)

"""What the two kinds of model files have in common once they are read: everything a `Tokenizer` is made of."""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers

from model_runtime.text.chat_template import ChatTemplate
from model_runtime.text.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerModel:
    """`prefix_token_ids` and `suffix_token_ids` go around a text that is encoded with special tokens, in addition to
    what the backend's own post-processor does. `tool_template` takes the place of `chat_template` where tools are
    given.
    """

    backend: tokenizers.Tokenizer
    vocabulary: Vocabulary
    prefix_token_ids: tuple[int, ...]
    suffix_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    max_context_tokens: int
    chat_template: ChatTemplate | None
    tool_template: ChatTemplate | None = None

    def __post_init__(self) -> None:
        vocab_size = len(self.vocabulary.tokens)
        for name, token_ids in (
            ("prefix_token_ids", self.prefix_token_ids),
            ("suffix_token_ids", self.suffix_token_ids),
            ("eos_token_ids", self.eos_token_ids),
        ):
            for token_id in token_ids:
                if not 0 <= token_id < vocab_size:
                    raise ValueError(f"{name}: token id {token_id} is outside [0, {vocab_size})")
        if self.max_context_tokens < 1:
            raise ValueError(f"max_context_tokens: {self.max_context_tokens} is below 1")

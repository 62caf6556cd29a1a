"""A tokenizer without a model: one token per byte, "<|end|>", and as many more tokens as a test wants."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers

from model_runtime.text.chat_template import ChatTemplate
from model_runtime.text.tokenizer import Tokenizer
from model_runtime.text.tokenizer_model import TokenizerModel
from model_runtime.text.vocabulary import BYTE_LEVEL_ALPHABET, Spelling, Vocabulary

END_TOKEN = 256


def make_tokenizer(
    *,
    chat_template: str | None = "{{ messages[0].content }}<|end|>",
    vocab_size: int = END_TOKEN + 1,
    context_tokens: int = 64,
) -> Tokenizer:
    """Tokens beyond "<|end|>" read as their number in brackets, "<257>" and so on."""
    words = [f"<{token_id}>" for token_id in range(END_TOKEN + 1, vocab_size)]
    backend = tokenizers.Tokenizer(models.BPE(vocab=dict(BYTE_LEVEL_ALPHABET), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    backend.add_tokens([AddedToken(word, special=False) for word in words])
    characters = sorted(BYTE_LEVEL_ALPHABET, key=BYTE_LEVEL_ALPHABET.__getitem__)
    vocabulary = Vocabulary(
        tokens=(*characters, "<|end|>", *words),
        spelling=Spelling.BYTE_LEVEL,
        verbatim=frozenset(range(END_TOKEN, vocab_size)),
        silent=frozenset({END_TOKEN}),
    )
    return Tokenizer(
        TokenizerModel(
            backend=backend,
            vocabulary=vocabulary,
            prefix_token_ids=(),
            suffix_token_ids=(),
            eos_token_ids=(END_TOKEN,),
            max_context_tokens=context_tokens,
            chat_template=None if chat_template is None else ChatTemplate(chat_template, bos_token="", eos_token=""),
        )
    )

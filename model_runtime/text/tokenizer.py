"""Text to tokens and back, as one model does it.

Loads from the same GGUF file or checkpoint directory as the model, but reads no tensor and needs no torch, so that a
router starts in well under a second. It knows no request and no sampling.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from model_runtime.text.chat_template import ChatMessage, JsonObject
from model_runtime.text.errors import ChatTemplateError, TokenizerError
from model_runtime.text.gguf_tokenizer import gguf_has_chat_template, load_gguf_tokenizer
from model_runtime.text.pretrained_tokenizer import load_pretrained_tokenizer, pretrained_has_chat_template
from model_runtime.text.tokenizer_model import TokenizerModel


def load_tokenizer(path: str | Path) -> Tokenizer:
    """From a GGUF file or a directory with tokenizer.json and config.json.

    Raises TokenizerError naming the file and the key or field at fault.
    """
    location = Path(path)
    if location.is_dir():
        return Tokenizer(load_pretrained_tokenizer(location))
    if not location.is_file():
        raise TokenizerError(f"{location}: no such file or directory")
    return Tokenizer(load_gguf_tokenizer(location))


def has_chat_template(path: str | Path) -> bool:
    """Whether the model at `path` takes chats; answered from headers, without loading a tokenizer.

    Raises TokenizerError naming the file at fault.
    """
    location = Path(path)
    return pretrained_has_chat_template(location) if location.is_dir() else gguf_has_chat_template(location)


class Tokenizer:
    """Immutable and safe to share between threads; encoding releases the interpreter lock."""

    def __init__(self, model: TokenizerModel) -> None:
        self._model = model

    @property
    def vocab_size(self) -> int:
        """Number of token ids the model can produce; every id is in [0, vocab_size)."""
        return len(self._model.vocabulary.tokens)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The model's own end tokens; may be empty."""
        return self._model.eos_token_ids

    @property
    def max_context_tokens(self) -> int:
        """Prompt and completion together."""
        return self._model.max_context_tokens

    @property
    def has_chat_template(self) -> bool:
        return self._model.chat_template is not None

    @property
    def shows_tools(self) -> bool:
        """Whether the model is told of the tools that a chat comes with."""
        model = self._model
        return model.tool_template is not None or (model.chat_template is not None and model.chat_template.shows_tools)

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """Token ids of `text`; special tokens that are spelled out in it become themselves.

        With `add_special`, the tokens that the model expects around a text (begin of sequence) are added.
        """
        token_ids = self._model.backend.encode(text, add_special_tokens=add_special).ids
        if not add_special:
            return token_ids
        return [*self._model.prefix_token_ids, *token_ids, *self._model.suffix_token_ids]

    def encode_chat(self, messages: Sequence[ChatMessage], tools: Sequence[JsonObject] = ()) -> list[int]:
        """Token ids of the messages in the model's chat format, ready for the assistant's turn.

        Raises ChatTemplateError when the model has no template or its template refuses.
        """
        return self.encode(self.render_chat(messages, tools), add_special=False)

    def render_chat(self, messages: Sequence[ChatMessage], tools: Sequence[JsonObject] = ()) -> str:
        """The text that `encode_chat` encodes."""
        if self._model.chat_template is None:
            raise ChatTemplateError("the model has no chat template; send text or token ids instead")
        if tools and self._model.tool_template is not None:
            return self._model.tool_template.render(messages, tools)
        return self._model.chat_template.render(messages, tools)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this token adds to a text; none for control tokens. Raises IndexError outside the vocabulary."""
        return self._model.vocabulary.token_bytes(token_id)

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text these tokens add to whatever they follow: a leading space is kept, control tokens are left out,
        bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes(token_id) for token_id in token_ids).decode("utf-8", errors="replace")

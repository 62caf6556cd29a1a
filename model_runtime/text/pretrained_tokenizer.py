"""Builds a tokenizer from a checkpoint directory: tokenizer.json and the JSON files beside it.

The backend reads tokenizer.json by itself; this module finds out how its vocabulary spells bytes and collects end
tokens, context length and chat template from the other files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError
from tokenizers import Tokenizer

from model_runtime.text.chat_template import ChatTemplate
from model_runtime.text.errors import TokenizerError
from model_runtime.text.tokenizer_model import TokenizerModel
from model_runtime.text.vocabulary import Spelling, Vocabulary

_TOKENIZER_FILE = "tokenizer.json"
_CONFIG_FILE = "config.json"
_TEXTS_FILE = "tokenizer_config.json"
_TEMPLATE_FILE = "chat_template.jinja"
_DEFAULT_TEMPLATE_NAME = "default"
_TOOL_TEMPLATE_NAME = "tool_use"


class _File(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _TokenContent(_File):
    content: str


class _NamedTemplate(_File):
    name: str
    template: str


class _TokenizerConfig(_File):
    """tokenizer_config.json"""

    bos_token: str | _TokenContent | None = None
    eos_token: str | _TokenContent | None = None
    chat_template: str | tuple[_NamedTemplate, ...] | None = None


class _GenerationConfig(_File):
    """generation_config.json"""

    eos_token_id: int | tuple[int, ...] | None = None


class _ModelConfig(_File):
    """config.json"""

    vocab_size: int
    max_position_embeddings: int
    eos_token_id: int | tuple[int, ...] | None = None


_FileT = TypeVar("_FileT", bound=_File)


def load_pretrained_tokenizer(directory: Path) -> TokenizerModel:
    """Raises TokenizerError that names the file and the field at fault."""
    backend = _load_backend(directory / _TOKENIZER_FILE)
    model = _read(directory / _CONFIG_FILE, _ModelConfig)
    texts = _read_optional(directory / _TEXTS_FILE, _TokenizerConfig) or _TokenizerConfig()
    generation = _read_optional(directory / "generation_config.json", _GenerationConfig) or _GenerationConfig()
    eos_token_id = model.eos_token_id if generation.eos_token_id is None else generation.eos_token_id
    vocabulary = _vocabulary(directory, backend, model.vocab_size)
    chat_template = _chat_template(directory, texts)
    tool_template = _compiled(_template_source(texts, _TOOL_TEMPLATE_NAME), texts)
    try:
        return TokenizerModel(
            backend=backend,
            vocabulary=vocabulary,
            prefix_token_ids=(),
            suffix_token_ids=(),
            eos_token_ids=_as_tuple(eos_token_id),
            max_context_tokens=model.max_position_embeddings,
            chat_template=chat_template,
            tool_template=tool_template,
        )
    except ValueError as error:
        raise TokenizerError(f"{directory}: {error}") from error


def pretrained_has_chat_template(directory: Path) -> bool:
    """Reads no vocabulary. Raises TokenizerError for a file that is not as it should be."""
    if (directory / _TEMPLATE_FILE).is_file():
        return True
    texts = _read_optional(directory / _TEXTS_FILE, _TokenizerConfig) or _TokenizerConfig()
    return _template_source(texts, _DEFAULT_TEMPLATE_NAME) is not None


def _load_backend(path: Path) -> Tokenizer:
    if not path.is_file():
        raise TokenizerError(f"{path}: no such file; a checkpoint directory needs its {_TOKENIZER_FILE}")
    try:
        return Tokenizer.from_file(str(path))
    # The backend raises bare Exception for everything it finds wrong.
    except Exception as error:
        raise TokenizerError(f"{path}: {error}") from error


def _vocabulary(directory: Path, backend: Tokenizer, vocab_size: int) -> Vocabulary:
    by_string = backend.get_vocab(with_added_tokens=True)
    highest_id = max(by_string.values(), default=-1)
    if highest_id >= vocab_size:
        raise TokenizerError(
            f"{directory}: {_TOKENIZER_FILE} has token id {highest_id}, vocab_size in {_CONFIG_FILE} is {vocab_size}"
        )
    tokens: list[str | None] = [None] * vocab_size
    for token, token_id in by_string.items():
        tokens[token_id] = token
    added = backend.get_added_tokens_decoder()
    return Vocabulary(
        tokens=tuple(tokens),
        spelling=_spelling(directory, backend),
        verbatim=frozenset(added),
        silent=frozenset(token_id for token_id, token in added.items() if token.special),
    )


def _spelling(directory: Path, backend: Tokenizer) -> Spelling:
    """Raises TokenizerError when the decoder is of neither known kind."""
    decoder = backend.decoder
    kinds = set() if decoder is None else set(_decoder_types(json.loads(decoder.__getstate__())))
    if "ByteLevel" in kinds:
        return Spelling.BYTE_LEVEL
    if kinds & {"ByteFallback", "Metaspace"}:
        return Spelling.SENTENCEPIECE
    raise TokenizerError(
        f"{directory / _TOKENIZER_FILE}: decoder {sorted(kinds) or None} is neither byte-level nor SentencePiece"
    )


def _decoder_types(decoder: JsonValue) -> Iterator[str]:
    if isinstance(decoder, dict):
        kind = decoder.get("type")
        if isinstance(kind, str):
            yield kind
        yield from _decoder_types(decoder.get("decoders"))
    elif isinstance(decoder, list):
        for step in decoder:
            yield from _decoder_types(step)


def _chat_template(directory: Path, texts: _TokenizerConfig) -> ChatTemplate | None:
    path = directory / _TEMPLATE_FILE
    source = path.read_text(encoding="utf-8") if path.is_file() else _template_source(texts, _DEFAULT_TEMPLATE_NAME)
    return _compiled(source, texts)


def _compiled(source: str | None, texts: _TokenizerConfig) -> ChatTemplate | None:
    if source is None:
        return None
    return ChatTemplate(source, bos_token=_token_text(texts.bos_token), eos_token=_token_text(texts.eos_token))


def _template_source(texts: _TokenizerConfig, name: str) -> str | None:
    """The template of that name; the only one of a file that names none is the default."""
    if isinstance(texts.chat_template, tuple):
        named = {entry.name: entry.template for entry in texts.chat_template}
        return named.get(name)
    return texts.chat_template if name == _DEFAULT_TEMPLATE_NAME else None


def _token_text(token: str | _TokenContent | None) -> str:
    if token is None:
        return ""
    return token if isinstance(token, str) else token.content


def _as_tuple(token_ids: int | tuple[int, ...] | None) -> tuple[int, ...]:
    if token_ids is None:
        return ()
    return (token_ids,) if isinstance(token_ids, int) else tuple(dict.fromkeys(token_ids))


def _read_optional(path: Path, kind: type[_FileT]) -> _FileT | None:
    return _read(path, kind) if path.is_file() else None


def _read(path: Path, kind: type[_FileT]) -> _FileT:
    try:
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise TokenizerError(f"{path}: no such file") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise TokenizerError(f"{path}: {field}: {first['msg']}") from error

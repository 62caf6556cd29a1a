"""Builds a tokenizer from the metadata of a GGUF file: byte-level BPE ("gpt2") and SentencePiece BPE ("llama").

The file names its pre-tokenizer instead of spelling it out; the patterns behind the names are here. Where llama.cpp and
the model's original tokenizer differ, the original is followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from model_runtime.text.chat_template import ChatTemplate
from model_runtime.text.errors import TokenizerError
from model_runtime.text.gguf_metadata import GgufMetadata, read_gguf_metadata
from model_runtime.text.tokenizer_model import TokenizerModel
from model_runtime.text.vocabulary import WORD_START, Spelling, Vocabulary

_PREFIX = "tokenizer.ggml."
_TOKENS_KEY = f"{_PREFIX}tokens"
_TOKEN_TYPE_KEY = f"{_PREFIX}token_type"
_MERGES_KEY = f"{_PREFIX}merges"
_SCORES_KEY = f"{_PREFIX}scores"
_MODEL_KEY = f"{_PREFIX}model"
_PRE_KEY = f"{_PREFIX}pre"
_CHAT_TEMPLATE_KEY = "tokenizer.chat_template"
_TOOL_TEMPLATE_KEY = "tokenizer.chat_template.tool_use"


class _TokenType(IntEnum):
    """Source: GGUF specification, `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class _PreTokenizer(IntEnum):
    GPT2 = 0
    SMOLLM = 1
    LLAMA3 = 2
    QWEN2 = 3


_PRE_TOKENIZERS: Mapping[str, _PreTokenizer] = MappingProxyType(
    {
        "default": _PreTokenizer.GPT2,
        "gpt-2": _PreTokenizer.GPT2,
        "gpt2": _PreTokenizer.GPT2,
        "smollm": _PreTokenizer.SMOLLM,
        "llama-bpe": _PreTokenizer.LLAMA3,
        "llama3": _PreTokenizer.LLAMA3,
        "llama-v3": _PreTokenizer.LLAMA3,
        "qwen2": _PreTokenizer.QWEN2,
    }
)

# Source: the `pre_tokenizer` sections of the tokenizers published with Llama 3 and Qwen 2, which differ only in how
# digits split.
_SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def load_gguf_tokenizer(path: Path) -> TokenizerModel:
    """Raises TokenizerError that names the file and the key at fault."""
    metadata = read_gguf_metadata(path)
    model = metadata.string(_MODEL_KEY)
    if model == "gpt2":
        return _byte_level_model(metadata)
    if model == "llama":
        return _sentencepiece_model(metadata)
    raise TokenizerError(f'{path}: key "{_MODEL_KEY}" is "{model}", supported are "gpt2" and "llama"')


def gguf_has_chat_template(path: Path) -> bool:
    """Reads no vocabulary. Raises TokenizerError for a file that is no GGUF."""
    return read_gguf_metadata(path, with_arrays=False).find_string(_CHAT_TEMPLATE_KEY) is not None


def _byte_level_model(metadata: GgufMetadata) -> TokenizerModel:
    pre = _pre_tokenizer(metadata)
    tokens = metadata.strings(_TOKENS_KEY)
    vocab = _token_ids_by_string(tokens)
    # Llama 3 takes a word that is a token as it is, before any merge.
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=_merges(metadata, vocab), ignore_merges=pre is _PreTokenizer.LLAMA3)
    )
    backend.pre_tokenizer = _pre_tokenizer_steps(pre)
    if pre is _PreTokenizer.QWEN2:
        backend.normalizer = normalizers.NFC()
    return _finish(metadata, backend, tokens, Spelling.BYTE_LEVEL, adds_bos=pre is _PreTokenizer.LLAMA3)


def _pre_tokenizer(metadata: GgufMetadata) -> _PreTokenizer:
    name = metadata.find_string(_PRE_KEY) or "default"
    pre = _PRE_TOKENIZERS.get(name)
    if pre is None:
        supported = ", ".join(sorted(_PRE_TOKENIZERS))
        raise TokenizerError(f'{metadata.path}: key "{_PRE_KEY}" is "{name}", supported are {supported}')
    return pre


def _pre_tokenizer_steps(pre: _PreTokenizer) -> pre_tokenizers.PreTokenizer:
    if pre is _PreTokenizer.GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre is _PreTokenizer.SMOLLM:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    digits_pattern = r"\p{N}{1,3}" if pre is _PreTokenizer.LLAMA3 else r"\p{N}"
    split = pre_tokenizers.Split(Regex(_SPLIT_PATTERN.format(digits=digits_pattern)), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _merges(metadata: GgufMetadata, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for merge in metadata.strings(_MERGES_KEY):
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise TokenizerError(f'{metadata.path}: key "{_MERGES_KEY}": {merge!r} uses a token that does not exist')
        merges.append((left, right))
    return merges


def _sentencepiece_model(metadata: GgufMetadata) -> TokenizerModel:
    stored = metadata.strings(_TOKENS_KEY)
    kinds = _token_types(metadata, len(stored))
    tokens = tuple(_sentencepiece_token(token, kind) for token, kind in zip(stored, kinds, strict=True))
    vocab = _token_ids_by_string(tokens)
    unknown_id = _special_token_id(metadata, "unknown", len(tokens))
    backend = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_by_score(metadata, tokens),
            unk_token=None if unknown_id is None else tokens[unknown_id],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", WORD_START)
    add_space_prefix = metadata.find_bool(f"{_PREFIX}add_space_prefix")
    if add_space_prefix is None or add_space_prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(WORD_START), spaces])
    else:
        backend.normalizer = spaces
    return _finish(metadata, backend, tokens, Spelling.SENTENCEPIECE, adds_bos=True)


def _sentencepiece_token(stored: str, kind: int) -> str:
    """Spaces as the step that looks for the token sees them, however the file spells them.

    User-defined tokens, such as runs of spaces, are found in the text as it came; the others where WORD_START stands
    for a space already.
    """
    return stored.replace(WORD_START, " ") if kind == _TokenType.USER_DEFINED else stored.replace(" ", WORD_START)


def _merges_by_score(metadata: GgufMetadata, tokens: tuple[str, ...]) -> list[tuple[str, str]]:
    """The merges that score-driven merging implies: all ways to make a token of two, best token first.

    Source: T. Kudo, SentencePiece, `bpe_model.cc`: the adjacent pair whose union scores highest merges first.
    """
    scores = metadata.floats(_SCORES_KEY)
    _check_length(metadata, _SCORES_KEY, len(scores), len(tokens))
    kinds = _token_types(metadata, len(tokens))
    mergeable = {
        token: token_id
        for token_id, token in enumerate(tokens)
        if kinds[token_id] in (_TokenType.NORMAL, _TokenType.UNUSED)
    }
    merges: list[tuple[str, str]] = []
    for token, _ in sorted(mergeable.items(), key=lambda item: (-scores[item[1]], item[1])):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in mergeable and right in mergeable:
                merges.append((left, right))
    return merges


def _finish(
    metadata: GgufMetadata, backend: Tokenizer, tokens: tuple[str, ...], spelling: Spelling, *, adds_bos: bool
) -> TokenizerModel:
    """What both models share. `adds_bos` holds when the file does not say."""
    kinds = _token_types(metadata, len(tokens))
    whole = {
        token_id: AddedToken(tokens[token_id], normalized=False, special=kind == _TokenType.CONTROL)
        for token_id, kind in enumerate(kinds)
        if kind in (_TokenType.CONTROL, _TokenType.USER_DEFINED) and tokens[token_id]
    }
    backend.add_tokens(list(whole.values()))
    bos_id = _special_token_id(metadata, "bos", len(tokens))
    eos_id = _special_token_id(metadata, "eos", len(tokens))
    ends = [_special_token_id(metadata, name, len(tokens)) for name in ("eos", "eot", "eom")]
    add_bos = metadata.find_bool(f"{_PREFIX}add_bos_token")
    add_eos = metadata.find_bool(f"{_PREFIX}add_eos_token")
    bos_token = "" if bos_id is None else tokens[bos_id]
    eos_token = "" if eos_id is None else tokens[eos_id]
    silent_kinds = (_TokenType.CONTROL, _TokenType.UNKNOWN, _TokenType.UNUSED)
    return TokenizerModel(
        backend=backend,
        vocabulary=Vocabulary(
            tokens=tokens,
            spelling=spelling,
            verbatim=frozenset(whole),
            silent=frozenset(token_id for token_id, kind in enumerate(kinds) if kind in silent_kinds),
        ),
        prefix_token_ids=(bos_id,) if bos_id is not None and (adds_bos if add_bos is None else add_bos) else (),
        suffix_token_ids=(eos_id,) if eos_id is not None and add_eos else (),
        eos_token_ids=tuple(dict.fromkeys(token_id for token_id in ends if token_id is not None)),
        max_context_tokens=_context_tokens(metadata),
        chat_template=_template(metadata, _CHAT_TEMPLATE_KEY, bos_token, eos_token),
        tool_template=_template(metadata, _TOOL_TEMPLATE_KEY, bos_token, eos_token),
    )


def _token_ids_by_string(tokens: tuple[str, ...]) -> dict[str, int]:
    """The first id of a string that occurs twice."""
    return {token: token_id for token_id, token in reversed(list(enumerate(tokens)))}


def _token_types(metadata: GgufMetadata, num_tokens: int) -> tuple[int, ...]:
    if _TOKEN_TYPE_KEY not in metadata.values:
        return (int(_TokenType.NORMAL),) * num_tokens
    kinds = metadata.integers(_TOKEN_TYPE_KEY)
    _check_length(metadata, _TOKEN_TYPE_KEY, len(kinds), num_tokens)
    return kinds


def _check_length(metadata: GgufMetadata, key: str, num_items: int, num_tokens: int) -> None:
    if num_items != num_tokens:
        raise TokenizerError(f'{metadata.path}: key "{key}" has {num_items} items, "{_TOKENS_KEY}" has {num_tokens}')


def _special_token_id(metadata: GgufMetadata, name: str, num_tokens: int) -> int | None:
    key = f"{_PREFIX}{name}_token_id"
    token_id = metadata.find_integer(key)
    if token_id is not None and not 0 <= token_id < num_tokens:
        raise TokenizerError(f'{metadata.path}: key "{key}" is {token_id}, outside [0, {num_tokens})')
    return token_id


def _context_tokens(metadata: GgufMetadata) -> int:
    key = f"{metadata.string('general.architecture')}.context_length"
    context_tokens = metadata.find_integer(key)
    if context_tokens is None or context_tokens < 1:
        raise TokenizerError(f'{metadata.path}: key "{key}" must be at least 1, is {context_tokens}')
    return context_tokens


def _template(metadata: GgufMetadata, key: str, bos_token: str, eos_token: str) -> ChatTemplate | None:
    source = metadata.find_string(key)
    return None if source is None else ChatTemplate(source, bos_token=bos_token, eos_token=eos_token)

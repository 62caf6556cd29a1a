"""Tokenizers from GGUF metadata: merges, splits, special tokens, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from model_runtime.text.errors import TokenizerError
from model_runtime.text.tokenizer import Tokenizer, load_tokenizer

GgufValue = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]
WriteGguf = Callable[[Mapping[str, GgufValue]], Path]


def _pieces(tokenizer: Tokenizer, text: str) -> list[bytes]:
    return [tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(text)]


def test_byte_level_text_is_merged_and_decodes_to_itself(byte_level_tokenizer: Tokenizer) -> None:
    assert _pieces(byte_level_tokenizer, "hello a") == [b"hello", b" a"]
    for text in ("hello", "  a\n\tb ", "日本語 🙂", "é\u0301", "\x00\x7f"):
        assert byte_level_tokenizer.decode(byte_level_tokenizer.encode(text)) == text


def test_special_tokens_in_the_text_become_themselves_and_only_control_tokens_are_silent(
    byte_level_tokenizer: Tokenizer,
) -> None:
    token_ids = byte_level_tokenizer.encode("<|begin|>a<think>b<|end|>")
    assert token_ids[0] == 0
    assert token_ids[-1] == 1
    assert 2 in token_ids
    assert byte_level_tokenizer.decode(token_ids) == "a<think>b"


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        # Digits stay apart although the vocabulary has "12", and spaces before them stay together.
        ("smollm", "12  1", [b"1", b"2", b" ", b" ", b"1"]),
        ("gpt-2", "12", [b"12"]),
        ("default", "12", [b"12"]),
        ("llama-bpe", "1212", [b"12", b"1", b"2"]),
        ("qwen2", "12", [b"1", b"2"]),
    ],
)
def test_the_named_pre_tokenizer_decides_where_text_splits(
    write_gguf: WriteGguf, byte_level_values: dict[str, GgufValue], pre: str, text: str, pieces: list[bytes]
) -> None:
    tokenizer = load_tokenizer(write_gguf({**byte_level_values, "tokenizer.ggml.pre": pre}))
    assert _pieces(tokenizer, text) == pieces


def test_begin_and_end_tokens_are_added_only_when_asked_and_declared(
    write_gguf: WriteGguf, byte_level_values: dict[str, GgufValue], byte_level_tokenizer: Tokenizer
) -> None:
    plain = byte_level_tokenizer.encode("a")
    assert byte_level_tokenizer.encode("a", add_special=True) == plain
    declared = {**byte_level_values, "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    tokenizer = load_tokenizer(write_gguf(declared))
    assert tokenizer.encode("a") == plain
    assert tokenizer.encode("a", add_special=True) == [0, *plain, 1]


def test_limits_and_end_tokens_come_from_the_file(
    write_gguf: WriteGguf, byte_level_values: dict[str, GgufValue]
) -> None:
    tokenizer = load_tokenizer(write_gguf({**byte_level_values, "tokenizer.ggml.eot_token_id": 2}))
    assert tokenizer.vocab_size == 3 + 256 + 6
    assert tokenizer.max_context_tokens == 128
    assert tokenizer.eos_token_ids == (1, 2)
    assert not tokenizer.has_chat_template
    with pytest.raises(IndexError, match=r"265 is outside \[0, 265\)"):
        tokenizer.token_bytes(265)


def test_sentencepiece_merges_the_best_score_first_and_falls_back_to_bytes(
    write_gguf: WriteGguf, sentencepiece_values: dict[str, GgufValue]
) -> None:
    tokenizer = load_tokenizer(write_gguf(sentencepiece_values))
    # "bc" scores above "ab", so "ab" is never formed on the way and "abcb" keeps "abc" whole.
    assert _pieces(tokenizer, "abcb") == [b" abc", b"b"]
    assert _pieces(tokenizer, "é") == [b" ", b"\xc3", b"\xa9"]
    assert tokenizer.encode("a", add_special=True)[0] == 1
    assert tokenizer.decode(tokenizer.encode("abc é a")) == " abc é a"


def test_sentencepiece_adds_no_space_when_the_file_says_so(
    write_gguf: WriteGguf, sentencepiece_values: dict[str, GgufValue]
) -> None:
    tokenizer = load_tokenizer(write_gguf({**sentencepiece_values, "tokenizer.ggml.add_space_prefix": False}))
    assert tokenizer.decode(tokenizer.encode("abc é a")) == "abc é a"


@pytest.mark.parametrize("spelled", ["  ", "▁▁"])
def test_a_run_of_spaces_with_a_token_of_its_own_becomes_that_token_however_the_file_spells_it(
    write_gguf: WriteGguf, sentencepiece_values: dict[str, GgufValue], spelled: str
) -> None:
    user_defined = 4
    changes: dict[str, GgufValue] = {
        "tokenizer.ggml.tokens": [*sentencepiece_values["tokenizer.ggml.tokens"], spelled],
        "tokenizer.ggml.token_type": [*sentencepiece_values["tokenizer.ggml.token_type"], user_defined],
        "tokenizer.ggml.scores": [*sentencepiece_values["tokenizer.ggml.scores"], 0.0],
        "tokenizer.ggml.add_space_prefix": False,
    }
    tokenizer = load_tokenizer(write_gguf({**sentencepiece_values, **changes}))
    assert _pieces(tokenizer, "a  b c") == [b"a", b"  ", b"b", b" ", b"c"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, r'"tokenizer.ggml.model" is "rwkv"'),
        ({"tokenizer.ggml.pre": "klingon"}, r'"tokenizer.ggml.pre" is "klingon", supported are default'),
        ({"tokenizer.ggml.merges": ["x yz"]}, r'"tokenizer.ggml.merges": \'x yz\' uses a token that does not exist'),
        ({"tokenizer.ggml.token_type": [1]}, r'"tokenizer.ggml.token_type" has 1 items, .* has 265'),
        ({"tokenizer.ggml.eos_token_id": 265}, r'"tokenizer.ggml.eos_token_id" is 265, outside \[0, 265\)'),
        ({"llama.context_length": 0}, r'"llama.context_length" must be at least 1'),
        ({"tokenizer.ggml.tokens": 5}, r'"tokenizer.ggml.tokens" must be an array'),
    ],
)
def test_wrong_metadata_is_refused_by_key(
    write_gguf: WriteGguf, byte_level_values: dict[str, GgufValue], changes: dict[str, GgufValue], message: str
) -> None:
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(write_gguf({**byte_level_values, **changes}))


def test_sentencepiece_needs_one_score_per_token(
    write_gguf: WriteGguf, sentencepiece_values: dict[str, GgufValue]
) -> None:
    with pytest.raises(TokenizerError, match=r'"tokenizer.ggml.scores" has 1 items'):
        load_tokenizer(write_gguf({**sentencepiece_values, "tokenizer.ggml.scores": [0.0]}))


def test_a_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"nowhere\.gguf: no such file"):
        load_tokenizer(tmp_path / "nowhere.gguf")

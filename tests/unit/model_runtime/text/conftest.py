"""Small model files, written byte by byte so that a test can damage them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from model_runtime.text.tokenizer import Tokenizer, load_tokenizer
from model_runtime.text.vocabulary import BYTE_LEVEL_ALPHABET
from pdmesh_cli.model_fetch import resolve_model

GgufValue = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]
WriteGguf = Callable[[Mapping[str, GgufValue]], Path]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6


def _encode_string(text: str) -> bytes:
    content = text.encode("utf-8")
    return struct.pack("<Q", len(content)) + content


def _encode_value(value: GgufValue) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _encode_string(value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    items = [_encode_value(item) for item in value]
    kind = items[0][:4] if items else struct.pack("<I", 8)
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(items)) + b"".join(item[4:] for item in items)


def encode_gguf(values: Mapping[str, GgufValue]) -> bytes:
    """A GGUF file without tensors."""
    pairs = b"".join(_encode_string(key) + _encode_value(value) for key, value in values.items())
    return struct.pack("<4sIQQ", b"GGUF", 3, 0, len(values)) + pairs


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    def write(values: Mapping[str, GgufValue]) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(encode_gguf(values))
        return path

    return write


@pytest.fixture
def byte_level_values() -> dict[str, GgufValue]:
    """A byte-level vocabulary: two control tokens, one user-defined token, all bytes, and words such as "hello"."""
    alphabet = sorted(BYTE_LEVEL_ALPHABET, key=BYTE_LEVEL_ALPHABET.__getitem__)
    words = ["he", "ll", "hell", "hello", "Ġa", "12"]
    tokens = ["<|begin|>", "<|end|>", "<think>", *alphabet, *words]
    return {
        "general.architecture": "llama",
        "llama.context_length": 128,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_CONTROL, _CONTROL, _USER_DEFINED] + [_NORMAL] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["h e", "l l", "he ll", "hell o", "Ġ a", "1 2"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


@pytest.fixture
def sentencepiece_values() -> dict[str, GgufValue]:
    """A SentencePiece vocabulary with byte fallback in which "abc" can be merged in two ways."""
    pieces = {"▁": -1.0, "a": -2.0, "b": -3.0, "c": -4.0, "ab": -6.0, "bc": -5.0, "abc": -7.0, "▁abc": -8.0}
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *pieces]
    kinds = [_UNKNOWN, _CONTROL, _CONTROL] + [_BYTE] * 256 + [_NORMAL] * len(pieces)
    return {
        "general.architecture": "llama",
        "llama.context_length": 64,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [0.0] * 259 + list(pieces.values()),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.fixture
def byte_level_tokenizer(write_gguf: WriteGguf, byte_level_values: dict[str, GgufValue]) -> Tokenizer:
    return load_tokenizer(write_gguf(byte_level_values))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, fetched on first use."""
    return resolve_model("smollm2")

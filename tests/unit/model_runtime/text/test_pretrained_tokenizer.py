"""Tokenizers from a checkpoint directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from model_runtime.text.chat_template import ChatMessage
from model_runtime.text.errors import ChatTemplateError, TokenizerError
from model_runtime.text.tokenizer import load_tokenizer
from model_runtime.text.vocabulary import BYTE_LEVEL_ALPHABET

_USER = (ChatMessage(role="user", content="hi"),)


def _write(directory: Path, name: str, content: object) -> None:
    (directory / name).write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Byte-level tokenizer of 256 bytes and "<|end|>", in a model with three more output rows."""
    backend = Tokenizer(models.BPE(vocab=dict(BYTE_LEVEL_ALPHABET), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    _write(tmp_path, "config.json", {"vocab_size": 260, "max_position_embeddings": 512, "eos_token_id": 0})
    return tmp_path


def test_text_round_trips_and_rows_without_a_token_are_silent(checkpoint: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer.vocab_size == 260
    assert tokenizer.max_context_tokens == 512
    assert tokenizer.decode(tokenizer.encode("a 日<|end|>b")) == "a 日b"
    assert tokenizer.encode("<|end|>") == [256]
    assert tokenizer.token_bytes(259) == b""


def test_end_tokens_of_the_generation_config_win(checkpoint: Path) -> None:
    assert load_tokenizer(checkpoint).eos_token_ids == (0,)
    _write(checkpoint, "generation_config.json", {"eos_token_id": [256, 7]})
    assert load_tokenizer(checkpoint).eos_token_ids == (256, 7)


def test_the_chat_template_is_found_in_each_of_its_places(checkpoint: Path) -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        load_tokenizer(checkpoint).render_chat(_USER)
    config = {"eos_token": {"content": "<|end|>"}, "chat_template": "{{ messages[0].content }}{{ eos_token }}"}
    _write(checkpoint, "tokenizer_config.json", config)
    assert load_tokenizer(checkpoint).encode_chat(_USER) == [ord("h"), ord("i"), 256]
    named = [{"name": "tool_use", "template": "with tools"}, {"name": "default", "template": "named"}]
    _write(checkpoint, "tokenizer_config.json", {"chat_template": named})
    assert load_tokenizer(checkpoint).render_chat(_USER) == "named"
    assert load_tokenizer(checkpoint).render_chat(_USER, [{"type": "function"}]) == "with tools"
    (checkpoint / "chat_template.jinja").write_text("own file", encoding="utf-8")
    assert load_tokenizer(checkpoint).render_chat(_USER) == "own file"


def test_a_sentencepiece_decoder_is_recognised(checkpoint: Path) -> None:
    vocab = {"<unk>": 0, "▁a": 1, "<0xE2>": 2}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Prepend("▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.save(str(checkpoint / "tokenizer.json"))
    tokenizer = load_tokenizer(checkpoint)
    assert [tokenizer.token_bytes(token_id) for token_id in (1, 2)] == [b" a", b"\xe2"]


def test_what_is_missing_or_wrong_is_named(checkpoint: Path) -> None:
    _write(checkpoint, "config.json", {"vocab_size": 100, "max_position_embeddings": 512})
    with pytest.raises(TokenizerError, match=r"token id 256, vocab_size in config.json is 100"):
        load_tokenizer(checkpoint)
    _write(checkpoint, "config.json", {"vocab_size": 260, "max_position_embeddings": 512, "eos_token_id": 260})
    with pytest.raises(TokenizerError, match=r"eos_token_ids: token id 260 is outside \[0, 260\)"):
        load_tokenizer(checkpoint)
    _write(checkpoint, "config.json", {"vocab_size": "many", "max_position_embeddings": 512})
    with pytest.raises(TokenizerError, match=r"config\.json: vocab_size"):
        load_tokenizer(checkpoint)
    (checkpoint / "config.json").unlink()
    with pytest.raises(TokenizerError, match=r"config\.json: no such file"):
        load_tokenizer(checkpoint)
    (checkpoint / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_tokenizer(checkpoint)
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: no such file"):
        load_tokenizer(checkpoint)


def test_a_decoder_of_an_unknown_kind_is_refused(checkpoint: Path) -> None:
    backend = Tokenizer(models.WordLevel(vocab={"a": 0}, unk_token="a"))
    backend.save(str(checkpoint / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="neither byte-level nor SentencePiece"):
        load_tokenizer(checkpoint)

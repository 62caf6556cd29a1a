"""Streaming text equals text decoded at once, and is never early."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model_runtime.text.detokenizer import IncrementalDetokenizer
from model_runtime.text.tokenizer import Tokenizer


def test_a_character_of_several_tokens_appears_when_it_is_whole(byte_level_tokenizer: Tokenizer) -> None:
    token_ids = byte_level_tokenizer.encode("a🙂b")
    assert len(token_ids) == 6
    detokenizer = IncrementalDetokenizer(byte_level_tokenizer)
    assert [detokenizer.push([token_id]) for token_id in token_ids] == ["a", "", "", "", "🙂", "b"]
    assert detokenizer.finish() == ""


def test_a_character_that_never_ends_becomes_the_replacement_character(byte_level_tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level_tokenizer)
    assert detokenizer.push(byte_level_tokenizer.encode("🙂")[:2]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_control_tokens_add_no_text_and_do_not_break_a_character(byte_level_tokenizer: Tokenizer) -> None:
    first, *rest = byte_level_tokenizer.encode("é")
    detokenizer = IncrementalDetokenizer(byte_level_tokenizer)
    assert detokenizer.push([0, first, 1, *rest]) == "é"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_pieces_add_up_to_the_text_decoded_at_once(byte_level_tokenizer: Tokenizer, data: st.DataObject) -> None:
    token_id = st.integers(min_value=0, max_value=byte_level_tokenizer.vocab_size - 1)
    text_ids = st.text().map(byte_level_tokenizer.encode)
    pieces = data.draw(st.lists(st.one_of(st.lists(token_id, max_size=4), text_ids), max_size=20))
    detokenizer = IncrementalDetokenizer(byte_level_tokenizer)
    streamed = "".join(detokenizer.push(piece) for piece in pieces) + detokenizer.finish()
    assert streamed == byte_level_tokenizer.decode(token_id for piece in pieces for token_id in piece)

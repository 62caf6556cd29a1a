"""Tokens become deltas."""

from __future__ import annotations

import pytest
from pdmesh.v1 import inference_pb2

from model_runtime.text.tokenizer import Tokenizer
from router_node.text_stream import TextStream


def _tokens(content: bytes | list[int]) -> list[inference_pb2.SampledToken]:
    return [inference_pb2.SampledToken(token_id=token_id, logprob=-0.5) for token_id in content]


def test_text_waits_for_whole_characters_and_tokens_do_not(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stop=(), stop_token_ids=())
    first = stream.push(_tokens(b"a\xc3"))
    assert (first.text, [token.token_id for token in first.tokens]) == ("a", [0x61, 0xC3])
    assert first.tokens[0].logprob == -0.5
    assert stream.push(_tokens(b"\xa9")).text == "é"
    assert stream.finish() == ""


def test_a_stop_string_over_several_tokens_ends_the_text_and_drops_what_follows(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stop=("END",), stop_token_ids=())
    assert stream.push(_tokens(b"xE")).text == "x"
    delta = stream.push(_tokens(b"NDyz"))
    assert stream.matched_stop == "END"
    assert (delta.text, len(delta.tokens)) == ("", 2)
    assert stream.num_tokens == 4


def test_held_back_text_comes_at_the_end(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stop=("END",), stop_token_ids=())
    assert stream.push(_tokens(b"xEN\xf0")).text == "x"
    assert stream.finish() == "EN\ufffd"
    assert stream.matched_stop is None


def test_a_stop_string_may_be_completed_by_the_end_itself(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stop=("\ufffd",), stop_token_ids=())
    stream.push(_tokens(b"x\xf0"))
    assert (stream.finish(), stream.matched_stop) == ("", "\ufffd")


def test_a_stop_token_is_no_part_of_the_text(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stop=(), stop_token_ids=(0x62,))
    delta = stream.push(_tokens(b"ab"))
    assert (delta.text, len(delta.tokens)) == ("a", 2)


def test_a_token_outside_the_vocabulary_is_refused(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stop=(), stop_token_ids=())
    with pytest.raises(ValueError, match=r"token 257 is outside \[0, 257\)"):
        stream.push(_tokens([257]))

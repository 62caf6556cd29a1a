"""What the client gets is one answer, however many nodes it comes from."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from pdmesh.v1 import decode_pb2, inference_pb2
from unit.router_node.fakes import EOS, admitted_event, finish_event

from model_runtime.text.tokenizer import Tokenizer
from node_runtime.request_rules import check_request_id
from router_node.answer import LENGTH, STOP, Answer
from router_node.request_preparation import PreparedRequest


def _answer(tokenizer: Tokenizer, *, max_tokens: int = 10, stop: Sequence[str] = (), request_id: str = "r") -> Answer:
    message = decode_pb2.DecodeRequest(
        request_id=request_id,
        token_ids=b"hi!",
        max_tokens=max_tokens,
        stop_token_ids=[EOS],
        sampling=inference_pb2.SamplingParams(temperature=0.7, seed=99),
        num_logprobs=2,
        extra_keys=[b"salt"],
    )
    return Answer(PreparedRequest(message=message, stop=tuple(stop)), tokenizer)


def _tokens(content: bytes | Sequence[int]) -> list[inference_pb2.SampledToken]:
    return [inference_pb2.SampledToken(token_id=token_id, logprob=-0.5) for token_id in content]


def _admitted(*, cached: int = 1, compute_ms: float = 2.0) -> decode_pb2.DecodeAdmitted:
    return decode_pb2.DecodeAdmitted(
        cached=inference_pb2.CachedTokens(prefill_device=cached),
        timings=inference_pb2.Timings(
            prefill_queue_ms=1.0,
            prefill_compute_ms=compute_ms,
            transfer_ms=0.5,
            transfer_exposed_ms=0.25,
            transferred_bytes=100,
            transferred_runs=3,
            transferred_blocks=2,
            time_to_first_token_ms=4.0,
        ),
    )


def test_the_first_attempt_asks_for_the_prompt_alone(tokenizer: Tokenizer) -> None:
    request = _answer(tokenizer).request("h:1")
    assert (bytes(request.token_ids), request.num_output_tokens, request.max_tokens) == (b"hi!", 0, 10)
    assert request.prefill_address == "h:1"


def test_the_next_attempt_asks_to_go_on_behind_what_the_client_has(tokenizer: Tokenizer) -> None:
    answer = _answer(tokenizer)
    answer.begin_attempt()
    answer.take_tokens(_tokens(b"abc"), 1.0)
    request = answer.request("h:2")
    assert (bytes(request.token_ids), request.num_output_tokens, request.max_tokens) == (b"hi!abc", 3, 7)
    # The nodes of the first attempt may still know its name.
    assert request.request_id == "r~2"
    # All else is as it was, the seed above all.
    request.request_id = "r"
    request.token_ids[:], request.num_output_tokens, request.max_tokens = b"hi!", 0, 10
    assert request == _answer(tokenizer).request("h:2")


@pytest.mark.parametrize("name", ["x" * 128, "é" * 64, "x" + "é" * 63])
def test_the_longest_names_stay_within_their_limit(tokenizer: Tokenizer, name: str) -> None:
    answer = _answer(tokenizer, request_id=name)
    assert answer.request("h:1").request_id == name
    for _ in range(12):
        answer.begin_attempt()
    again = answer.request("h:1").request_id
    check_request_id(again)
    assert again.endswith("~13")
    assert name.startswith(again.removesuffix("~13"))


def test_a_character_that_begins_on_one_node_and_ends_on_another_is_whole(tokenizer: Tokenizer) -> None:
    answer = _answer(tokenizer)
    answer.begin_attempt()
    assert answer.take_tokens(_tokens(b"a\xc3"), 1.0).text == "a"
    answer.begin_attempt()
    delta = answer.take_tokens(_tokens(b"\xa9"), 3.0)
    assert delta.text == "é"
    assert delta.tokens[0].logprob == -0.5


def test_a_stop_string_across_the_seam_is_found(tokenizer: Tokenizer) -> None:
    answer = _answer(tokenizer, stop=("END",))
    answer.begin_attempt()
    assert answer.take_tokens(_tokens(b"xE"), 1.0).text == "x"
    answer.begin_attempt()
    assert answer.take_tokens(_tokens(b"NDy"), 3.0).text == ""
    assert answer.is_complete
    finish = answer.finish()
    assert (finish.reason, finish.matched_stop, finish.usage.completion_tokens) == (STOP, "END", 4)


def test_an_undisturbed_answer_ends_with_what_the_decode_node_reported(tokenizer: Tokenizer) -> None:
    answer = _answer(tokenizer)
    answer.begin_attempt()
    answer.take_admitted(admitted_event().admitted)
    answer.take_tokens(_tokens(b"ab"), 1.0)
    reported = finish_event(STOP, matched_token_id=EOS).finish
    answer.take_finish(reported)
    finish = answer.finish()
    assert (finish.usage, finish.timings) == (reported.usage, reported.timings)
    assert (finish.reason, finish.matched_token_id, finish.num_replacements) == (STOP, EOS, 0)


def test_usage_and_timings_of_a_moved_answer_are_those_of_the_whole(tokenizer: Tokenizer) -> None:
    answer = _answer(tokenizer)
    answer.begin_attempt()
    answer.take_admitted(_admitted(cached=1))
    answer.take_tokens(_tokens(b"abc"), 11.0)
    answer.begin_attempt()
    # The second attempt finds what the first one computed, which is no hit of this request.
    answer.take_admitted(_admitted(cached=3, compute_ms=3.0))
    answer.take_tokens(_tokens(b"de"), 13.0)
    answer.take_tokens(_tokens(b"f"), 13.5)
    report = finish_event(LENGTH).finish
    report.usage.completion_tokens = 6
    answer.take_finish(report)
    finish = answer.finish()
    assert finish.num_replacements == 1
    assert finish.usage == inference_pb2.Usage(
        prompt_tokens=3, completion_tokens=6, cached=inference_pb2.CachedTokens(prefill_device=1)
    )
    assert finish.timings == inference_pb2.Timings(
        prefill_queue_ms=2.0,
        prefill_compute_ms=5.0,
        transfer_ms=1.0,
        transfer_exposed_ms=0.5,
        transferred_bytes=200,
        transferred_runs=6,
        transferred_blocks=4,
        decode_ms=2500.0,
    )


def test_what_a_moved_answer_had_cached_is_what_the_first_attempt_to_be_admitted_found(tokenizer: Tokenizer) -> None:
    answer = _answer(tokenizer)
    answer.begin_attempt()
    answer.begin_attempt()
    answer.take_admitted(_admitted(cached=2))
    answer.take_tokens(_tokens(b"a"), 10.6)
    answer.take_finish(finish_event(LENGTH).finish)
    assert answer.finish().usage.cached.prefill_device == 2


@pytest.mark.parametrize(
    ("content", "is_complete"),
    [([0x61], False), ([0x61, 0x62], True), ([EOS], True)],
)
def test_an_answer_is_complete_with_its_last_token(tokenizer: Tokenizer, content: list[int], is_complete: bool) -> None:
    answer = _answer(tokenizer, max_tokens=2)
    answer.begin_attempt()
    answer.take_tokens(_tokens(content), 1.0)
    assert answer.is_complete is is_complete


@pytest.mark.parametrize(("content", "reason"), [([0x61, 0x62], LENGTH), ([EOS], STOP)])
def test_a_complete_answer_whose_report_was_lost_ends_all_the_same(
    tokenizer: Tokenizer, content: list[int], reason: inference_pb2.FinishReason
) -> None:
    answer = _answer(tokenizer, max_tokens=2)
    answer.begin_attempt()
    answer.take_tokens(_tokens(content), 1.0)
    finish = answer.finish()
    assert finish.reason == reason
    assert finish.usage.completion_tokens == len(content)
    assert finish.matched_token_id == (EOS if reason == STOP else 0)


def test_the_prompt_is_told_of_once_by_whichever_attempt_is_admitted(tokenizer: Tokenizer) -> None:
    answer = _answer(tokenizer)
    answer._prepared.message.num_prompt_logprobs = 0
    assert answer.request("h:1").HasField("num_prompt_logprobs")
    answer.begin_attempt()
    answer.begin_attempt()
    assert answer.request("h:1").HasField("num_prompt_logprobs")
    admitted = _admitted()
    admitted.prompt_logprobs.extend(_tokens(b"i!"))
    told = answer.take_admitted(admitted)
    assert told is not None
    assert [(token.token_id, token.HasField("logprob")) for token in told.tokens] == [
        (ord("h"), False), (ord("i"), True), (ord("!"), True),
    ]  # fmt: skip
    answer.take_tokens(_tokens(b"a"), 2.0)
    answer.begin_attempt()
    # The client has them; the next node need not compute the prompt without its cache.
    assert not answer.request("h:1").HasField("num_prompt_logprobs")
    assert answer.take_admitted(_admitted()) is None


def test_a_node_that_keeps_the_prompts_log_probabilities_to_itself_is_found_out(tokenizer: Tokenizer) -> None:
    answer = _answer(tokenizer)
    answer._prepared.message.num_prompt_logprobs = 2
    answer.begin_attempt()
    with pytest.raises(ValueError, match="of 0 prompt tokens came, 2 were asked for"):
        answer.take_admitted(_admitted())
    with pytest.raises(ValueError, match="tokens came before"):
        answer.take_tokens(_tokens(b"a"), 1.0)

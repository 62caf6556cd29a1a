"""What a client may ask for, and what the decode node is told."""

from __future__ import annotations

import math
import threading

import pytest
from pdmesh.v1 import inference_pb2

from model_runtime.text.tokenizer import Tokenizer
from node_runtime.adapters import AdapterId
from node_runtime.errors import InvalidRequest, UnknownModel
from router_node.node_pool import TokenLimits
from router_node.request_preparation import PromptLimits, RequestPreparer

LIMITS = PromptLimits(max_prompt_bytes=40, max_stop_bytes=4)
EOS = 256
_HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def preparer(tokenizer: Tokenizer) -> RequestPreparer:
    return RequestPreparer(tokenizer, model_name="tiny", limits=LIMITS, draw_seed=lambda: 77)


def _chat(*roles_and_contents: tuple[str, str]) -> inference_pb2.ChatPrompt:
    messages = [inference_pb2.ChatMessage(role=role, content=content) for role, content in roles_and_contents]
    return inference_pb2.ChatPrompt(messages=messages)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "prompt: one of text, chat and tokens is required"),
        ({"text": ""}, "prompt.text: must not be empty"),
        ({"text": "é" * 21}, "prompt.text: 42 bytes given, at most 40 allowed"),
        ({"chat": _chat()}, "prompt.chat.messages: empty"),
        ({"chat": _chat(("user", "a"), ("robot", "b"))}, r'messages\[1\].role: "robot" given, one of system, user'),
        ({"chat": _chat(("user", "a" * 20), ("user", "b" * 21))}, "prompt.chat: 41 bytes given, at most 40"),
        ({"chat": {"messages": _HI, "tools_json": ["{"]}}, r"prompt.chat.tools_json\[0\]: no JSON"),
        ({"chat": {"messages": _HI, "tools_json": ["[" * 30]}}, r"prompt.chat.tools_json\[0\]: no JSON"),
        ({"chat": {"messages": _HI, "tools_json": ['{"a": ["\\udfff"]}']}}, r"prompt.chat.tools_json\[0\]: no JSON"),
        ({"chat": {"messages": _HI, "tools_json": ["{}"] * 129}}, "prompt.chat.tools_json: 129 given, at most 128"),
        ({"chat": {"messages": _HI, "tools_json": ["{}" + " " * 37]}}, "prompt.chat: 41 bytes given, at most 40"),
        (
            {"chat": {"messages": [{"role": "assistant", "tool_calls_json": ["{}", "3"]}]}},
            r"prompt.chat.messages\[0\].tool_calls_json\[1\]: int given, a JSON object required",
        ),
        ({"tokens": inference_pb2.TokenPrompt()}, "prompt.tokens.token_ids: empty"),
        ({"tokens": {"token_ids": [1, 257]}}, r"prompt.tokens.token_ids: token 257 is outside \[0, 257\)"),
        ({"text": "a", "max_tokens": 0}, "max_tokens: 0 given, at least 1"),
        ({"text": "a", "sampling": {"temperature": math.nan}}, "sampling.temperature: nan given"),
        ({"text": "a", "sampling": {"temperature": -0.5}}, "sampling.temperature: -0.5 given"),
        ({"text": "a", "sampling": {"top_p": 0.0}}, "sampling.top_p: 0 given"),
        ({"text": "a", "sampling": {"top_k": 0}}, "sampling.top_k: 0 given"),
        ({"text": "a", "num_logprobs": 21}, "num_logprobs: 21 given, at most 20"),
        ({"text": "a", "stop": ["x"] * 17}, "stop: 17 strings given, at most 16"),
        ({"text": "a", "stop": ["x", ""]}, r"stop\[1\]: must not be empty"),
        ({"text": "a", "stop": ["12345"]}, r"stop\[0\]: 5 bytes given, at most 4"),
        ({"text": "a", "stop_token_ids": [257]}, r"stop_token_ids: token 257 is outside \[0, 257\)"),
        ({"text": "a", "stop_token_ids": range(65)}, "stop_token_ids: 65 given, at most 64"),
        ({"text": "a", "cache_salt": b"x" * 65}, "cache_salt: 65 bytes given, at most 64"),
    ],
)
def test_each_rule_is_checked_and_named(preparer: RequestPreparer, fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        preparer.check(inference_pb2.GenerateRequest(**fields))  # type: ignore[arg-type]


def test_another_model_is_unknown(preparer: RequestPreparer) -> None:
    assert preparer.find_adapter(inference_pb2.GenerateRequest(text="a", model="tiny"), {}) is None
    with pytest.raises(UnknownModel, match='model: "big" is not served here, only "tiny" is'):
        preparer.find_adapter(inference_pb2.GenerateRequest(text="a", model="big"), {})


ADAPTERS = {name: AdapterId(name=name, digest=name[:1].encode() * 32) for name in ("red", "blue")}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"adapter": "red"}, "red"),
        ({"adapter": "red", "model": "tiny"}, "red"),
        ({"model": "blue"}, "blue"),
        ({"adapter": "blue", "model": "blue"}, "blue"),
    ],
)
def test_an_adapter_is_named_by_its_field_or_in_the_place_of_the_model(
    preparer: RequestPreparer, fields: dict[str, str], name: str
) -> None:
    request = inference_pb2.GenerateRequest(text="a", **fields)  # type: ignore[arg-type]
    adapter = preparer.find_adapter(request, ADAPTERS)
    assert adapter == ADAPTERS[name]
    prepared = preparer.prepare(request, "id", [5], None, adapter=adapter)
    assert prepared.adapter == adapter
    assert (prepared.message.adapter.name, prepared.message.adapter.digest) == (name, name[:1].encode() * 32)
    assert not preparer.prepare(request, "id", [5], None).message.HasField("adapter")


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"adapter": "green"}, UnknownModel, 'adapter: "green" is not served here, only "blue", "red"'),
        ({"model": "green"}, UnknownModel, 'model: "green" is not served here, only "tiny", "blue", "red" are'),
        ({"model": "red", "adapter": "blue"}, InvalidRequest, 'adapter: "blue" given beside model "red"'),
    ],
)
def test_names_that_are_not_served_or_contradict_each_other_are_refused(
    preparer: RequestPreparer, fields: dict[str, str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        preparer.find_adapter(inference_pb2.GenerateRequest(text="a", **fields), ADAPTERS)  # type: ignore[arg-type]


def test_a_chat_needs_a_template(tokenizer: Tokenizer) -> None:
    class Plain(Tokenizer):
        has_chat_template = False  # type: ignore[assignment]

    plain = Plain(tokenizer._model)
    preparer = RequestPreparer(plain, model_name="tiny", limits=LIMITS)
    with pytest.raises(InvalidRequest, match=r"prompt\.chat: the model has no chat template"):
        preparer.check(inference_pb2.GenerateRequest(chat=_chat(("user", "a"))))


def test_every_field_reaches_the_decode_node(preparer: RequestPreparer) -> None:
    request = inference_pb2.GenerateRequest(
        text="ignored",
        sampling=inference_pb2.SamplingParams(temperature=0.5, top_k=3, top_p=0.9, seed=5),
        max_tokens=7,
        stop=["x"],
        stop_token_ids=[1, EOS],
        num_logprobs=0,
        cache_salt=b"salt",
    )
    prepared = preparer.prepare(request, "name", [10, 11], None).addressed("p:1")
    message = prepared.message
    assert (message.request_id, list(message.token_ids), message.max_tokens) == ("name", [10, 11], 7)
    assert message.sampling == request.sampling
    assert list(message.stop_token_ids) == [EOS, 1]
    assert message.HasField("num_logprobs")
    assert list(message.extra_keys) == [b"salt"]
    assert message.prefill_address == "p:1"
    assert prepared.stop == ("x",)


def test_what_the_client_leaves_out_gets_its_default(preparer: RequestPreparer) -> None:
    message = preparer.prepare(inference_pb2.GenerateRequest(text="a"), "name", [10] * 4, None).message
    assert message.max_tokens == 60
    assert message.sampling.seed == 77
    assert list(message.stop_token_ids) == [EOS]
    assert not message.HasField("num_logprobs")
    assert not message.extra_keys


def test_end_tokens_do_not_stop_when_they_are_to_be_ignored(preparer: RequestPreparer) -> None:
    request = inference_pb2.GenerateRequest(text="a", ignore_eos=True, stop_token_ids=[1])
    assert list(preparer.prepare(request, "name", [10], None).message.stop_token_ids) == [1]


def test_prompt_and_completion_must_fit_the_context(preparer: RequestPreparer) -> None:
    request = inference_pb2.GenerateRequest(text="a", max_tokens=5)
    assert preparer.prepare(request, "name", [10] * 59, None).prompt_tokens == 59
    with pytest.raises(InvalidRequest, match="max_tokens: 5 given, at most 4 fit a context of 64"):
        preparer.prepare(request, "name", [10] * 60, None)
    with pytest.raises(InvalidRequest, match="prompt: 64 tokens given, at most 63"):
        preparer.prepare(inference_pb2.GenerateRequest(text="a"), "name", [10] * 64, None)
    with pytest.raises(InvalidRequest, match="prompt: the text has no tokens"):
        preparer.prepare(request, "name", [], None)


def test_the_nodes_limits_bound_the_context_and_the_default(preparer: RequestPreparer) -> None:
    limits = TokenLimits(context_tokens=30, max_request_tokens=20)
    request = inference_pb2.GenerateRequest(text="a")
    assert preparer.prepare(request, "name", [10] * 8, limits).message.max_tokens == 12
    with pytest.raises(InvalidRequest, match="max_tokens: 23 given, at most 22 fit a context of 30"):
        preparer.prepare(inference_pb2.GenerateRequest(text="a", max_tokens=23), "name", [10] * 8, limits)


async def test_text_chat_and_tokens_become_tokens(preparer: RequestPreparer) -> None:
    assert await preparer.tokenize(inference_pb2.GenerateRequest(text="ab")) == [97, 98]
    assert await preparer.tokenize(inference_pb2.GenerateRequest(chat=_chat(("user", "ab")))) == [97, 98, EOS]
    tokens = inference_pb2.TokenPrompt(token_ids=[5, 6])
    assert await preparer.tokenize(inference_pb2.GenerateRequest(tokens=tokens)) == [5, 6]


async def test_long_text_is_tokenised_off_the_event_loop(tokenizer: Tokenizer) -> None:
    threads: list[threading.Thread] = []

    class Watched(Tokenizer):
        def encode(self, text: str, *, add_special: bool = False) -> list[int]:
            threads.append(threading.current_thread())
            return super().encode(text, add_special=add_special)

    preparer = RequestPreparer(Watched(tokenizer._model), model_name="tiny", limits=LIMITS)
    await preparer.tokenize(inference_pb2.GenerateRequest(text="a"))
    await preparer.tokenize(inference_pb2.GenerateRequest(text="a" * 10_000))
    assert threads[0] is threading.current_thread()
    assert threads[1] is not threading.current_thread()

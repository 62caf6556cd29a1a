"""The HTTP API end to end: official clients, the router's own server, compute nodes that do as they are told."""

from __future__ import annotations

import asyncio
import hashlib
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from pdmesh.v1 import decode_pb2, inference_pb2, mesh_pb2
from support.byte_tokenizer import make_tokenizer
from support.certificates import MeshAuthority
from unit.router_node.fakes import (
    EOS,
    FakeNode,
    Hang,
    Refusal,
    RunningRouter,
    StartNode,
    StartRouter,
    admitted_event,
    finish_event,
    tokens_event,
)

from node_runtime.errors import PortInUse, QueueFull
from router_node.openai_api.server import MAX_HEADER_BYTES

STOP, LENGTH = inference_pb2.FINISH_REASON_STOP, inference_pb2.FINISH_REASON_LENGTH
HI = [{"role": "user", "content": "hi"}]
BAD = {"type": "colour"}


@pytest.fixture
async def router(start_router: StartRouter, prefill: FakeNode, decode: FakeNode) -> RunningRouter:
    decode.script = [admitted_event(), tokens_event("ab"), tokens_event("c"), finish_event(STOP, EOS)]
    return await start_router(prefill, decode, http="127.0.0.1:0", served_model_name="tiny", max_attempts=1)


def _client(router: RunningRouter) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://{router.router.http_address}/v1", api_key="any", max_retries=0)


@pytest.fixture
async def client(router: RunningRouter) -> AsyncIterator[openai.AsyncOpenAI]:
    async with _client(router) as client:
        yield client


async def _raw(router: RunningRouter, request: bytes) -> tuple[int, dict[str, Any]]:
    """Status and JSON body of the answer to these bytes."""
    host, port = router.router.http_address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body) if body.startswith(b"{") else {}


def _post(path: str, body: bytes, *headers: str) -> bytes:
    fields = ("host: x", "connection: close", f"content-length: {len(body)}", *headers)
    return "\r\n".join((f"POST {path} HTTP/1.1", *fields, "", "")).encode() + body


def _with_logprobs(text: str) -> decode_pb2.DecodeResponse:
    tokens = [
        inference_pb2.SampledToken(
            token_id=byte,
            logprob=-0.5,
            top_logprobs=[
                inference_pb2.TokenLogprob(token_id=byte, logprob=-0.5),
                inference_pb2.TokenLogprob(token_id=0x7A, logprob=float("-inf")),
            ],
        )
        for byte in text.encode()
    ]
    return decode_pb2.DecodeResponse(tokens=decode_pb2.DecodeTokens(tokens=tokens))


async def test_a_chat_is_answered_as_the_client_asked(client: openai.AsyncOpenAI, decode: FakeNode) -> None:
    answer = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hello"}],
        max_completion_tokens=9,
        temperature=0.5,
        top_p=0.25,
        seed=-1,
        stop="never",
        extra_body={"top_k": 3, "ignore_eos": True, "cache_salt": "mine"},
    )
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "abc", "stop")
    assert (answer.model, answer.object) == ("tiny", "chat.completion")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 2, 5)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
    (asked,) = decode.requests
    # The template of the tests puts the end token behind the message.
    assert list(asked.token_ids) == [*b"hello", EOS]
    assert (asked.max_tokens, asked.sampling.temperature, asked.sampling.top_p) == (9, 0.5, 0.25)
    assert (asked.sampling.top_k, asked.sampling.seed, list(asked.extra_keys)) == (3, 2**64 - 1, [b"mine"])
    assert not asked.stop_token_ids
    assert not asked.HasField("num_logprobs")


async def test_what_a_client_leaves_out_takes_the_defaults_of_the_api(
    client: openai.AsyncOpenAI, decode: FakeNode
) -> None:
    await client.completions.create(model="tiny", prompt="hi")
    (asked,) = decode.requests
    assert asked.sampling.temperature == 1.0
    assert not asked.sampling.HasField("top_k")
    assert not asked.sampling.HasField("top_p")
    assert list(asked.stop_token_ids) == [EOS]


async def test_a_stream_is_a_role_then_texts_then_a_reason_and_the_usage_if_it_is_wanted(
    client: openai.AsyncOpenAI, decode: FakeNode
) -> None:
    decode.script = [tokens_event(b"a\xc3"), tokens_event(b""), tokens_event(b"\xa9"), finish_event(LENGTH)]
    for with_usage in (True, False):
        options = {"stream_options": {"include_usage": True}} if with_usage else {}
        stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True, **options)
        chunks = [chunk async for chunk in stream]
        if with_usage:
            usage = chunks.pop()
            assert usage.choices == []
            assert usage.usage is not None
            assert usage.usage.total_tokens == 5
        assert all(chunk.usage is None for chunk in chunks)
        assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant", None, None, None]
        assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "a", "é", None]
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "length"]
        assert len({chunk.id for chunk in chunks}) == 1


async def test_the_synchronous_client_completes_a_text(router: RunningRouter, decode: FakeNode) -> None:
    def complete() -> tuple[str, str, list[str]]:
        url = f"http://{router.router.http_address}/v1"
        with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as client:
            whole = client.completions.create(model="tiny", prompt="hi")
            tokens = client.completions.create(model="tiny", prompt=[104, 105])
            stream = client.completions.create(model="tiny", prompt=["hi"], stream=True)
            return whole.choices[0].text, tokens.choices[0].text, [chunk.choices[0].text for chunk in stream]

    assert await asyncio.to_thread(complete) == ("abc", "abc", ["ab", "c", ""])
    assert [bytes(request.token_ids) for request in decode.requests] == [b"hi"] * 3


async def test_samples_are_choices_and_their_usage_adds_up(client: openai.AsyncOpenAI, decode: FakeNode) -> None:
    whole = await client.chat.completions.create(model="tiny", messages=HI, n=2, seed=5)
    assert [(choice.index, choice.message.content) for choice in whole.choices] == [(0, "abc"), (1, "abc")]
    assert sorted(request.sampling.seed for request in decode.requests) == [5, 6]
    assert whole.usage is not None
    # The node says that its prompt had 3 tokens and its completion 2.
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 4)
    stream = await client.completions.create(
        model="tiny", prompt="hi", n=2, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    usage = chunks.pop().usage
    assert usage is not None
    assert usage.total_tokens == 7
    for index in range(2):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(choice.text for choice in own) == "abc"
        assert [choice.finish_reason for choice in own][-1] == "stop"


async def test_penalties_and_biases_reach_the_nodes(client: openai.AsyncOpenAI, decode: FakeNode) -> None:
    await client.chat.completions.create(
        model="tiny",
        messages=HI,
        logit_bias={"7": -100},
        presence_penalty=0.5,
        frequency_penalty=-1,
        extra_body={"repetition_penalty": 1.25},
    )
    sampling = decode.requests[0].sampling
    assert dict(sampling.logit_bias) == {7: -100.0}
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -1.0, 1.25)


async def test_an_echo_is_the_prompt_before_each_text_with_its_log_probabilities(
    client: openai.AsyncOpenAI, decode: FakeNode
) -> None:
    admitted = admitted_event()
    admitted.admitted.prompt_logprobs.extend(_with_logprobs("i").tokens.tokens)
    decode.script = [admitted, _with_logprobs("a"), finish_event()]
    whole = await client.completions.create(model="tiny", prompt="hi", echo=True, logprobs=2)
    logprobs = whole.choices[0].logprobs
    assert whole.choices[0].text == "hia"
    assert logprobs is not None
    assert logprobs.tokens == ["h", "i", "a"]
    assert logprobs.token_logprobs == [None, -0.5, -0.5]
    assert logprobs.text_offset == [0, 1, 2]
    assert decode.requests[0].num_prompt_logprobs == 2
    stream = await client.completions.create(model="tiny", prompt=[104, 105], echo=True, logprobs=2, stream=True)
    chunks = [chunk.choices[0] async for chunk in stream]
    assert [chunk.text for chunk in chunks] == ["hi", "a", ""]
    assert [chunk.logprobs.text_offset for chunk in chunks if chunk.logprobs] == [[0, 1], [2]]
    decode.script = [tokens_event("a"), finish_event()]
    assert (await client.completions.create(model="tiny", prompt="hi", echo=True)).choices[0].text == "hia"


async def test_parts_roles_and_tools_reach_the_template(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    template = (
        "{% for tool in tools or () %}{{ tool.function.name }};{% endfor %}"
        "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}"
        "{% for call in message.tool_calls %}{{ call.function.arguments.x }}{% endfor %}{{ message.tool_call_id }};"
        "{% endfor %}"
    )
    router = await start_router(
        prefill, decode, http="127.0.0.1:0", tokenizer=make_tokenizer(chat_template=template, context_tokens=256)
    )
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "7", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "7", "content": "done"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    async with _client(router) as client:
        await client.chat.completions.create(model="tiny", messages=messages, tools=tools)  # type: ignore[arg-type]
        await client.chat.completions.create(model="tiny", messages=messages, tools=tools, tool_choice="none")
    shown = [bytes(request.token_ids).decode() for request in decode.requests]
    assert shown == ["f;s:be brief;u:a\nb;a:1;t:done7;", "s:be brief;u:a\nb;a:1;t:done7;"]


async def test_a_model_without_a_template_takes_no_chats(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    router = await start_router(prefill, decode, http="127.0.0.1:0", tokenizer=make_tokenizer(chat_template=None))
    async with _client(router) as client:
        with pytest.raises(openai.BadRequestError, match="no chat template") as caught:
            await client.chat.completions.create(model="tiny", messages=HI)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_schema": '{"type": "object"}'}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}},
            {"json_schema": '{"type": "integer"}'},
        ),
        ({"structured_outputs": {"regex": "[a-z]+"}}, {"regex": "[a-z]+"}),
        ({"response_format": {"type": "text"}}, None),
    ],
)
async def test_the_form_of_an_answer_reaches_the_nodes(
    client: openai.AsyncOpenAI, decode: FakeNode, fields: dict[str, object], form: dict[str, str] | None
) -> None:
    decode.script = [admitted_event(output_is_structured=form is not None), tokens_event("{}"), finish_event()]
    await client.chat.completions.create(model="tiny", messages=HI, extra_body=fields)
    await client.completions.create(model="tiny", prompt="hi", extra_body=fields)
    for request in decode.requests:
        assert request.sampling.HasField("structured_output") == (form is not None)
        assert request.sampling.structured_output == inference_pb2.StructuredOutput(**(form or {}))


async def test_a_node_that_knows_no_forms_is_not_taken_at_its_word(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match=r"knows no sampling\.structured_output") as caught:
        await client.chat.completions.create(
            model="tiny", messages=HI, response_format={"type": "json_object"}, stream=True
        )
    assert caught.value.status_code == 503


async def test_log_probabilities_come_in_the_shape_of_each_endpoint(
    client: openai.AsyncOpenAI, decode: FakeNode
) -> None:
    decode.script = [_with_logprobs("aé"), finish_event()]
    chat = await client.chat.completions.create(model="tiny", messages=HI, logprobs=True, top_logprobs=2)
    assert chat.choices[0].logprobs is not None
    first, second, third = chat.choices[0].logprobs.content or ()
    assert (first.token, first.bytes, first.logprob) == ("a", [97], -0.5)
    assert (second.bytes, third.bytes) == ([0xC3], [0xA9])
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("a", -0.5), ("z", -9999.0)]
    text = await client.completions.create(model="tiny", prompt="hi", logprobs=2)
    logprobs = text.choices[0].logprobs
    assert logprobs is not None
    assert (logprobs.tokens, logprobs.token_logprobs) == (["a", "�", "�"], [-0.5] * 3)
    assert logprobs.text_offset == [0, 1, 2]
    assert (logprobs.top_logprobs or [])[0] == {"a": -0.5, "z": -9999.0}
    assert [request.num_logprobs for request in decode.requests] == [2, 2]
    stream = await client.chat.completions.create(model="tiny", messages=HI, logprobs=True, stream=True)
    seen = [entry async for chunk in stream for entry in (chunk.choices[0].logprobs or EMPTY).content or ()]
    assert [entry.bytes for entry in seen] == [[97], [0xC3], [0xA9]]


EMPTY = openai.types.chat.chat_completion_chunk.ChoiceLogprobs(content=[])


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", '"robot"'),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type", "'text'"),
        ({"messages": HI, "temperature": -1}, "temperature", ">= 0"),
        ({"messages": HI, "top_p": 0}, "top_p", "(0, 1]"),
        ({"messages": HI, "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"messages": HI, "max_completion_tokens": 64}, "max_tokens", "a context of 64"),
        ({"messages": HI, "top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
        ({"messages": HI, "stop": [""]}, "stop[0]", "empty"),
        ({"messages": HI, "seed": 1.5}, "seed", "integer"),
        ({"messages": HI, "n": 65}, "n", "1 to 64"),
        (
            {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": BAD}}},
            "response_format.json_schema.schema",
            "Invalid type: colour",
        ),
        ({"messages": HI, "response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        ({"messages": HI, "structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
        (
            {"messages": HI, "structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "response_format",
        ),
        ({"messages": HI, "structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "end token"),
        ({"messages": HI, "frequency_penalty": 2.5}, "frequency_penalty", "[-2, 2]"),
        ({"messages": HI, "logit_bias": {"257": 5.0}}, "logit_bias", "[0, 257)"),
        ({"messages": HI, "logit_bias": {"a": 5.0}}, "logit_bias", "'a'"),
        ({"messages": HI, "stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"messages": HI, "colour": "red"}, "colour", "unknown field"),
        ({}, "messages", "required"),
    ],
)
async def test_a_bad_field_is_named_as_the_client_knows_it(
    client: openai.AsyncOpenAI, decode: FakeNode, fields: dict[str, object], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.post("/chat/completions", body={"model": "tiny", **fields}, cast_to=object)
    assert caught.value.param == param
    assert words in caught.value.message
    assert caught.value.type == "invalid_request_error"
    assert not decode.requests


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x" * 64}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, "b"]}, "prompt[1]"),
        ({"prompt": [257]}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
    ],
)
async def test_a_bad_field_of_a_completion_is_named(
    client: openai.AsyncOpenAI, fields: dict[str, object], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.post("/completions", body={"model": "tiny", **fields}, cast_to=object)
    assert caught.value.param == param


async def test_a_prompt_beyond_the_context_has_the_code_that_clients_look_for(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="tiny", prompt="x" * 64)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unknown_model_is_not_found(client: openai.AsyncOpenAI, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="big", messages=HI, stream=stream)
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_says_when_to_come_again(client: openai.AsyncOpenAI, decode: FakeNode, stream: bool) -> None:
    full = QueueFull("full")
    decode.script = [Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", full)]
    with pytest.raises(openai.RateLimitError) as caught:
        await client.chat.completions.create(model="tiny", messages=HI, stream=stream)
    assert caught.value.response.headers["retry-after"] == "1"
    assert caught.value.code == "rate_limit_exceeded"


async def test_a_request_that_fits_no_node_is_the_clients_to_change(
    start_router: StartRouter, start_node: StartNode
) -> None:
    fused = await start_node(mesh_pb2.NODE_ROLE_FUSED, "fused-1", max_request_tokens=30)
    router = await start_router(fused, http="127.0.0.1:0")
    async with _client(router) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="tiny", prompt="x", max_tokens=31)
    assert caught.value.param == "max_tokens"


async def test_without_usable_nodes_it_is_unavailable_and_says_so_in_its_health(
    start_router: StartRouter, decode: FakeNode
) -> None:
    router = await start_router(decode, prefill=("127.0.0.1:1",), http="127.0.0.1:0")
    async with _client(router) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="tiny", messages=HI)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "1"
    assert "no prefill node is usable" in caught.value.message
    assert (await _raw(router, b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"))[0] == 503


async def test_a_deadline_in_a_header_ends_the_request_everywhere(client: openai.AsyncOpenAI, decode: FakeNode) -> None:
    decode.script = [Hang()]
    with pytest.raises(openai.InternalServerError) as caught:
        await client.chat.completions.create(model="tiny", messages=HI, extra_headers={"x-pdmesh-timeout-ms": "300"})
    assert caught.value.status_code == 504
    await decode.cancelled.wait()
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model="tiny", messages=HI, extra_headers={"x-pdmesh-timeout-ms": "soon"})
    assert refused.value.param == "x-pdmesh-timeout-ms"


async def test_a_stream_that_breaks_ends_in_an_error_and_not_as_if_it_were_done(
    client: openai.AsyncOpenAI, decode: FakeNode
) -> None:
    decode.script = [tokens_event("ab"), Refusal(grpc.StatusCode.INTERNAL, "it broke")]
    stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True)
    chunks = aiter(stream)
    assert [(await anext(chunks)).choices[0].delta.content for _ in range(2)] == ["", "ab"]
    with pytest.raises(openai.APIError, match="it broke"):
        await anext(chunks)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request_on_the_nodes(
    router: RunningRouter, client: openai.AsyncOpenAI, decode: FakeNode, stream: bool
) -> None:
    decode.script = [tokens_event("a"), Hang()]
    headers = {"x-request-id": "mine"}
    call = client.chat.completions.create(model="tiny", messages=HI, stream=stream, extra_headers=headers)
    if stream:
        answer = await call
        chunks = aiter(answer)
        await anext(chunks)
        await answer.close()
    else:
        waiting = asyncio.create_task(call)
        while not decode.requests:
            await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait([waiting])
    await decode.cancelled.wait()
    while (await router.node.GetNodeStatus(mesh_pb2.GetNodeStatusRequest())).num_running_requests:
        await asyncio.sleep(0.01)
    decode.script = [tokens_event("b"), finish_event()]
    again = await client.chat.completions.create(model="tiny", messages=HI, extra_headers=headers)
    assert (again.id, again.choices[0].message.content) == ("chatcmpl-mine", "b")


async def test_a_live_request_id_is_a_conflict(client: openai.AsyncOpenAI, decode: FakeNode) -> None:
    decode.script = [tokens_event("a"), Hang()]
    headers = {"x-request-id": "mine"}
    stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True, extra_headers=headers)
    with pytest.raises(openai.ConflictError, match="mine"):
        await client.chat.completions.create(model="tiny", messages=HI, extra_headers=headers)
    await stream.close()


async def test_a_drain_finishes_what_runs_and_refuses_the_rest(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    release = asyncio.Event()
    decode.script = [tokens_event("a"), release, tokens_event("b"), finish_event()]
    router = await start_router(prefill, decode, http="127.0.0.1:0", drain_grace_s=20)
    async with _client(router) as client:
        stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True)
        chunks = aiter(stream)
        texts = [(await anext(chunks)).choices[0].delta.content for _ in range(2)]
        stopping = asyncio.create_task(router.router.stop())
        status = 200
        while status != 503:
            status, _ = await _raw(router, b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        with pytest.raises(openai.InternalServerError, match="draining"):
            await client.chat.completions.create(model="tiny", messages=HI)
        release.set()
        texts += [chunk.choices[0].delta.content async for chunk in chunks]
        assert texts == ["", "a", "b", None]
        await stopping


async def test_the_callers_trace_and_request_id_go_on_to_the_nodes(
    client: openai.AsyncOpenAI, decode: FakeNode
) -> None:
    trace = "0123456789abcdef0123456789abcdef"
    headers = {"traceparent": f"00-{trace}-0123456789abcdef-01", "x-request-id": "mine"}
    answer = await client.chat.completions.with_raw_response.create(model="tiny", messages=HI, extra_headers=headers)
    assert trace in str(decode.metadata[0]["traceparent"])
    assert decode.requests[0].request_id == "mine"
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["date"].endswith("GMT")


async def test_tenants_show_their_token_as_the_key_of_the_api(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode, tmp_path: Path
) -> None:
    digest = hashlib.sha256(b"open sesame").hexdigest()
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(f"tenants: [{{name: ali, token_sha256: [{digest}], max_live_requests: 1}}]")
    decode.script = [tokens_event("a"), Hang()]
    router = await start_router(prefill, decode, http="127.0.0.1:0", tenants=str(tenants))
    async with _client(router) as stranger:
        for call in (stranger.completions.create(model="tiny", prompt="hi"), stranger.models.retrieve("tiny")):
            with pytest.raises(openai.AuthenticationError) as refused:
                await call
            assert (refused.value.code, refused.value.response.headers["www-authenticate"]) == (
                "invalid_api_key",
                "Bearer",
            )
        assert not decode.requests
        ali = stranger.with_options(api_key="open sesame")
        stream = await ali.completions.create(model="tiny", prompt="hi", stream=True)
        assert decode.requests[0].extra_keys
        with pytest.raises(openai.RateLimitError, match="tenant ali already has 1 requests"):
            await ali.completions.create(model="tiny", prompt="hi")
        await stream.close()


async def test_with_a_certificate_it_is_https_and_takes_a_new_one_when_that_comes(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode, tmp_path: Path
) -> None:
    authority = MeshAuthority(tmp_path)
    router = await start_router(prefill, decode, http="127.0.0.1:0", **authority.settings("router"))
    host, port = router.router.http_address.split(":")
    trusting = ssl.create_default_context(cafile=str(authority.path))

    async def shown() -> object:
        reader, writer = await asyncio.open_connection(host, int(port), ssl=trusting, server_hostname="localhost")
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 ")
        certificate = writer.get_extra_info("peercert")
        writer.close()
        return certificate["serialNumber"]

    first = await shown()
    assert await shown() == first
    authority.issue("router")
    assert await shown() != first
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError, IndexError)):
        await _raw(router, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")


async def test_the_model_is_listed(client: openai.AsyncOpenAI) -> None:
    (model,) = (await client.models.list()).data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "pdmesh")
    assert (await client.models.retrieve("tiny")).to_dict()["max_model_len"] == 64
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("big/one")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (_post("/v1/completions", b'{"prompt": ', "content-type: application/json"), 400),
        (_post("/v1/completions", b"[" * 100_000, "content-type: application/json"), 400),
        (_post("/v1/completions", b'{"prompt": "\xff"}', "content-type: application/json"), 400),
        (_post("/v1/completions", b'{"prompt": "a"}', "content-type: text/plain"), 415),
        (_post("/v1/completions", b" " * 5000, "content-type: application/json"), 413),
        (_post("/v1/completions", b"{}", "content-type: application/json", "x-request-id: " + "a" * 129), 400),
        (_post("/v1/nothing", b"{}", "content-type: application/json"), 404),
        (b"GET /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", 405),
    ],
)
async def test_a_request_that_breaks_the_rules_of_http_is_refused_in_the_shape_of_the_api(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode, request_bytes: bytes, status: int
) -> None:
    router = await start_router(prefill, decode, http="127.0.0.1:0", max_message_bytes=4096)
    if b"[[[" in request_bytes:
        router = await start_router(prefill, decode, http="127.0.0.1:0")
    got, body = await _raw(router, request_bytes)
    assert got == status
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"]
    assert not decode.requests


async def test_an_http_port_in_use_is_named(
    start_router: StartRouter, router: RunningRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    with pytest.raises(PortInUse, match=router.router.http_address):
        await start_router(prefill, decode, http=router.router.http_address)


async def test_headers_beyond_the_bound_are_refused_before_they_are_kept(router: RunningRouter) -> None:
    status, _ = await _raw(router, _post("/v1/completions", b"{}", "x-much: " + "a" * MAX_HEADER_BYTES))
    assert status == 431

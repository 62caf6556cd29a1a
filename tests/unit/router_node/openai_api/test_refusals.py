"""How the HTTP API refuses and fails: in its shape, with its statuses, naming the field as the client knows it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import grpc
import openai
import pytest
from pdmesh.v1 import mesh_pb2
from support.byte_tokenizer import make_tokenizer
from unit.router_node.fakes import (
    FakeNode,
    Hang,
    Refusal,
    StartNode,
    StartRouter,
    tokens_event,
)
from unit.router_node.openai_api.clients import BAD_SCHEMA, HI, ask_raw, client_of

from node_runtime.errors import QueueFull


async def test_a_model_without_a_template_takes_no_chats(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    router = await start_router(prefill, decode, http="127.0.0.1:0", tokenizer=make_tokenizer(chat_template=None))
    async with client_of(router) as client:
        with pytest.raises(openai.BadRequestError, match="no chat template") as caught:
            await client.chat.completions.create(model="tiny", messages=HI)
    assert caught.value.param == "messages"


async def test_a_node_that_knows_no_forms_is_not_taken_at_its_word(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match=r"knows no sampling\.structured_output") as caught:
        await client.chat.completions.create(
            model="tiny", messages=HI, response_format={"type": "json_object"}, stream=True
        )
    assert caught.value.status_code == 503


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
            {
                "messages": HI,
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": BAD_SCHEMA}},
            },
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
    async with client_of(router) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="tiny", prompt="x", max_tokens=31)
    assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")


async def test_without_usable_nodes_it_is_unavailable_and_says_so_in_its_health(
    start_router: StartRouter, decode: FakeNode
) -> None:
    router = await start_router(decode, prefill=("127.0.0.1:1",), http="127.0.0.1:0")
    async with client_of(router) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="tiny", messages=HI)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "1"
    assert "no prefill node is usable" in caught.value.message
    assert (await ask_raw(router, b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"))[0] == 503


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


async def test_a_live_request_id_is_a_conflict(client: openai.AsyncOpenAI, decode: FakeNode) -> None:
    decode.script = [tokens_event("a"), Hang()]
    headers = {"x-request-id": "mine"}
    stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True, extra_headers=headers)
    with pytest.raises(openai.ConflictError, match="mine"):
        await client.chat.completions.create(model="tiny", messages=HI, extra_headers=headers)
    await stream.close()


async def test_tenants_show_their_token_as_the_key_of_the_api(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode, tmp_path: Path
) -> None:
    digest = hashlib.sha256(b"open sesame").hexdigest()
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(f"tenants: [{{name: ali, token_sha256: [{digest}], max_live_requests: 1}}]")
    decode.script = [tokens_event("a"), Hang()]
    router = await start_router(prefill, decode, http="127.0.0.1:0", tenants=str(tenants))
    async with client_of(router) as stranger:
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

"""What the HTTP API answers: the official clients, the router's own server, compute nodes that do as they are told."""

from __future__ import annotations

import asyncio

import openai
import pytest
from pdmesh.v1 import inference_pb2
from support.byte_tokenizer import make_tokenizer
from unit.router_node.fakes import (
    EOS,
    FakeNode,
    RunningRouter,
    StartRouter,
    admitted_event,
    finish_event,
    tokens_event,
)
from unit.router_node.openai_api.clients import HI, client_of, tokens_with_logprobs

LENGTH = inference_pb2.FINISH_REASON_LENGTH


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
    admitted.admitted.prompt_logprobs.extend(tokens_with_logprobs("i").tokens.tokens)
    decode.script = [admitted, tokens_with_logprobs("a"), finish_event()]
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
    async with client_of(router) as client:
        await client.chat.completions.create(model="tiny", messages=messages, tools=tools)  # type: ignore[arg-type]
        await client.chat.completions.create(model="tiny", messages=messages, tools=tools, tool_choice="none")
    shown = [bytes(request.token_ids).decode() for request in decode.requests]
    assert shown == ["f;s:be brief;u:a\nb;a:1;t:done7;", "s:be brief;u:a\nb;a:1;t:done7;"]


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


async def test_log_probabilities_come_in_the_shape_of_each_endpoint(
    client: openai.AsyncOpenAI, decode: FakeNode
) -> None:
    decode.script = [tokens_with_logprobs("aé"), finish_event()]
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


async def test_the_model_is_listed(client: openai.AsyncOpenAI) -> None:
    (model,) = (await client.models.list()).data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "pdmesh")
    assert (await client.models.retrieve("tiny")).to_dict()["max_model_len"] == 64
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("big/one")
    assert caught.value.code == "model_not_found"

"""Calls of tools: those that must be made, those found in what a model wrote, whole and in streams."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdmesh.v1 import decode_pb2, inference_pb2
from support.byte_tokenizer import make_tokenizer
from unit.router_node.fakes import EOS, FakeNode, RunningRouter, StartRouter, admitted_event, finish_event, tokens_event
from unit.router_node.openai_api.clients import HI, client_of

from model_runtime.output_form import FormKind, OutputForm
from model_runtime.text.grammar import GrammarCompiler, check_form
from router_node.openai_api.chat_messages import Function
from router_node.openai_api.tool_calls import CallRules, Found, FoundCall, forced_call_schema, joined

STOP = inference_pb2.FINISH_REASON_STOP
LENGTH = inference_pb2.FINISH_REASON_LENGTH
TEMPLATE = "{% for tool in tools or () %}{{ tool.function.name }};{% endfor %}{{ messages[0].content }}"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Graz"}}\n</tool_call>'
WEATHER = FoundCall(name="weather", arguments='{"city": "Graz"}')
# It could not be sent to anybody as text.
HALF_A_CHARACTER = '{"name": "weather", "arguments": {"city": "\\ud800"}}'
TIME = FoundCall(name="time", arguments="{}")


def read(pieces: Sequence[str], *, takes_several: bool = True) -> list[Found]:
    """What is found, with neighbouring texts as one."""
    reader = CallRules(names=frozenset({"weather", "time"}), takes_several=takes_several).reader()
    parts = [*(part for piece in pieces for part in reader.feed(piece)), *reader.finish()]
    joined: list[Found] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("hello", ["hello"]),
        ("", []),
        (" ", [" "]),
        (CALL, [WEATHER]),
        (f"\n{CALL}\n", [WEATHER]),
        (f"I look.\n{CALL}", ["I look.\n", WEATHER]),
        (f'{CALL}\n<tool_call>{{"name": "time"}}</tool_call>', [WEATHER, TIME]),
        (f"{CALL} and more", [WEATHER, " and more"]),
        ('{"name": "weather", "parameters": {"city": "Graz"}}', [WEATHER]),
        ('{"name": "weather", "arguments": "{\\"city\\": \\"Graz\\"}"}', [WEATHER]),
        (' [{"name": "weather", "arguments": {"city": "Graz"}}, {"name": "time", "arguments": {}}]', [WEATHER, TIME]),
        ('{"name": "Ada", "arguments": {}}', ['{"name": "Ada", "arguments": {}}']),
        ('{"answer": 42}', ['{"answer": 42}']),
        ("[]", ["[]"]),
        ("{ not JSON", ["{ not JSON"]),
        ("a <b> c <tool", ["a <b> c <tool"]),
        ("<tool_call>{no}</tool_call>", ["<tool_call>{no}</tool_call>"]),
        ('<tool_call>{"name": "weather", "argum', ['<tool_call>{"name": "weather", "argum']),
        ('<tool_call>["weather"]</tool_call>', ['<tool_call>["weather"]</tool_call>']),
        (HALF_A_CHARACTER, [HALF_A_CHARACTER]),
        (f"<tool_call>{HALF_A_CHARACTER}</tool_call>", [f"<tool_call>{HALF_A_CHARACTER}</tool_call>"]),
    ],
)
def test_calls_are_told_from_text_however_it_is_cut(text: str, found: list[Found]) -> None:
    assert read([text]) == read(list(text)) == found


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "{}", " ", "a", "<", '{"name": "time"}', "\n"])))
def test_a_text_reads_the_same_in_one_piece_and_in_many(pieces: list[str]) -> None:
    whole = "".join(pieces)
    assert read(pieces) == read([whole]) == read(list(whole))


def test_text_is_not_held_back_longer_than_it_may_be_a_call() -> None:
    reader = CallRules(names=frozenset({"weather"})).reader()
    assert reader.feed("so <to") == ["so "]
    assert reader.feed("ken>") == ["<token>"]
    assert reader.feed("x") == ["x"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"name": "weather", "arguments": {"city": "Graz"}}', [WEATHER]),
        (' {\n"name" : "time",\t"arguments": {} }\n', [FoundCall(name="time", arguments="{} ")]),
        ('{"name": "f", "arguments": "}\\"]"}', [FoundCall(name="f", arguments='"}\\"]"')]),
        (
            '{"name": "\\u0066", "arguments": [[1], {"a": "\\\\"}]}',
            [FoundCall(name="f", arguments='[[1], {"a": "\\\\"}]')],
        ),
        ('{"name": "f", "arguments": 12}', [FoundCall(name="f", arguments="12")]),
        ('{"name": "f", "arguments": {"a": [1', [FoundCall(name="f", arguments='{"a": [1')]),
        ('{"name": "f", "argu', ['{"name": "f", "argu']),
        ("", []),
    ],
)
def test_a_call_that_must_be_made_is_told_as_it_comes(text: str, found: list[Found]) -> None:
    for pieces in ([text], list(text)):
        reader = CallRules(names=frozenset("f"), is_forced=True).reader()
        assert joined([*(part for piece in pieces for part in reader.feed(piece)), *reader.finish()]) == found
    reader = CallRules(names=frozenset("f"), is_forced=True).reader()
    assert reader.feed('{"name": "f", "arguments": {"a":') == [FoundCall(name="f", arguments='{"a":')]


def test_where_one_call_is_wanted_further_ones_are_left_out() -> None:
    assert read([CALL * 2], takes_several=False) == [WEATHER]


def test_the_form_of_a_call_takes_every_function_with_its_own_arguments_and_nothing_else() -> None:
    tree = {
        "type": "object",
        "properties": {"next": {"$ref": "#/$defs/node"}},
        "required": ["next"],
        "$defs": {"node": {"type": "object", "properties": {"value": {"type": "integer"}}, "required": ["value"]}},
    }
    functions = [
        Function(name="weather", parameters=CITY),
        Function(name="tree", parameters=tree),
        Function(name="bare"),
    ]
    form = OutputForm(kind=FormKind.JSON_SCHEMA, source=forced_call_schema(functions))
    check_form(form)
    tokenizer = make_tokenizer()
    compiler = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size)

    def is_complete(text: str) -> bool:
        matcher = compiler.compile(form)
        for token_id in tokenizer.encode(text):
            if not matcher.allowed()[token_id]:
                return False
            matcher.accept([token_id])
        return bool(matcher.allowed()[EOS])

    assert is_complete('{"name": "weather", "arguments": {"city": "Graz"}}')
    assert is_complete('{"name": "tree", "arguments": {"next": {"value": 7}}}')
    assert is_complete('{"name": "bare", "arguments": {}}')
    assert not is_complete('{"name": "weather", "arguments": {"next": {"value": 7}}}')
    assert not is_complete('{"name": "tree", "arguments": {"next": {"value": "x"}}}')
    assert not is_complete('{"name": "other", "arguments": {}}')
    assert not is_complete("hello")


@pytest.fixture
async def client(start_router: StartRouter, prefill: FakeNode, decode: FakeNode) -> AsyncIterator[openai.AsyncOpenAI]:
    router = await start_router(
        prefill,
        decode,
        http="127.0.0.1:0",
        served_model_name="tiny",
        max_attempts=1,
        tokenizer=make_tokenizer(chat_template=TEMPLATE),
    )
    async with client_of(router) as client:
        yield client


def says(
    *pieces: str, reason: inference_pb2.FinishReason = STOP, is_formed: bool = False
) -> list[decode_pb2.DecodeResponse]:
    """The script of a decode node."""
    end = finish_event(reason, EOS if reason == STOP else None)
    return [admitted_event(output_is_structured=is_formed), *(tokens_event(piece) for piece in pieces), end]


async def test_a_call_comes_back_as_a_call_and_not_as_text(client: openai.AsyncOpenAI, decode: FakeNode) -> None:
    decode.script = says(CALL)
    answer = await client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS)  # type: ignore[call-overload]
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "weather",
        {"city": "Graz"},
    )
    assert call.id
    assert bytes(decode.requests[0].token_ids).decode() == "weather;time;hi"


async def test_a_stream_has_text_then_calls_each_with_its_number(client: openai.AsyncOpenAI, decode: FakeNode) -> None:
    pieces = ("I look.", "<tool_", 'call>{"name": "weather", "arg', 'uments": {"city": "Graz"}}</tool_call>')
    decode.script = says(*pieces, '<tool_call>{"name": "time"}</tool_call>')
    stream = await client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS, stream=True)  # type: ignore[call-overload]
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [
        (0, "weather", '{"city": "Graz"}'),
        (1, "time", "{}"),
    ]
    assert len({call.id for call in calls}) == 2
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_a_stream_that_the_client_assembles_holds_the_whole_call(
    client: openai.AsyncOpenAI, decode: FakeNode
) -> None:
    decode.script = says(*'{"name": "weather", "parameters": {"city": "Graz"}}')
    async with client.chat.completions.stream(model="tiny", messages=HI, tools=TOOLS) as stream:  # type: ignore[arg-type]
        answer = await stream.get_final_completion()
    (call,) = answer.choices[0].message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Graz"}')


async def test_without_tools_or_with_none_to_be_called_text_is_text(
    client: openai.AsyncOpenAI, decode: FakeNode
) -> None:
    decode.script = says(CALL)
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        answer = await client.chat.completions.create(model="tiny", messages=HI, **fields)  # type: ignore[call-overload]
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (CALL, "stop")
        assert bytes(decode.requests.pop().token_ids).decode() == "hi"
        assert not answer.choices[0].message.tool_calls


async def test_an_answer_that_is_cut_off_says_so_whatever_it_called(
    client: openai.AsyncOpenAI, decode: FakeNode
) -> None:
    decode.script = says(CALL, '<tool_call>{"na', reason=LENGTH)
    answer = await client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS)  # type: ignore[call-overload]
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert choice.message.content == '<tool_call>{"na'
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", ["weather", "time"]), ({"type": "function", "function": {"name": "time"}}, ["time"])],
)
async def test_a_call_that_must_be_made_is_a_form_of_the_output(
    client: openai.AsyncOpenAI, decode: FakeNode, choice: object, names: list[str]
) -> None:
    decode.script = says('{"name": "time", "argu', 'ments": {', "}", "}", is_formed=True)
    answer = await client.chat.completions.create(  # type: ignore[call-overload]
        model="tiny", messages=HI, tools=TOOLS, tool_choice=choice
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["time"]
    schema = json.loads(decode.requests[0].sampling.structured_output.json_schema)
    calls = schema.get("anyOf", [schema])
    assert [call["properties"]["name"]["const"] for call in calls] == names
    stream = await client.chat.completions.create(  # type: ignore[call-overload]
        model="tiny", messages=HI, tools=TOOLS, tool_choice=choice, stream=True
    )
    chunks = [chunk async for chunk in stream]
    parts = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [(part.index, part.function.name, part.function.arguments) for part in parts] == [
        (0, "time", "{"),
        (0, None, "}"),
    ]
    assert [bool(part.id) for part in parts] == [True, False]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("fields", "param", "complaint"),
    [
        ({"tool_choice": "required"}, "tool_choice", "required is only allowed with tools"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice.type", "'auto', 'none', 'required'"),
        ({"tools": TOOLS, "tool_choice": "function"}, "tool_choice", "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function", "required with the type"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
            '"x" is none of tools',
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
            "response_format and structured_outputs are not allowed",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "colour"}}}],
                "tool_choice": "required",
            },
            "tools",
            "tools: ",
        ),
    ],
)
async def test_a_choice_that_cannot_be_honoured_is_refused_by_name(
    client: openai.AsyncOpenAI, decode: FakeNode, fields: dict[str, object], param: str, complaint: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="tiny", messages=HI, extra_body=fields)  # type: ignore[call-overload]
    assert caught.value.param == param
    assert complaint in caught.value.message
    assert not decode.requests


async def test_tools_are_refused_where_the_template_knows_none(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    router: RunningRouter = await start_router(prefill, decode, http="127.0.0.1:0", served_model_name="tiny")
    async with client_of(router) as client:
        with pytest.raises(openai.BadRequestError, match="tools: the model's chat template knows no tools") as caught:
            await client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS)  # type: ignore[call-overload]
    assert caught.value.param == "tools"

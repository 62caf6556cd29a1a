"""Whatever a client sends becomes a request of the Inference service or a refusal, never a defect."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pdmesh.v1 import inference_pb2

from router_node.openai_api.bodies import ChatBody, CompletionBody, GenerationBody, parse_body
from router_node.openai_api.failures import BadBody

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "developer"])},
        optional={
            "content": st.text(max_size=5) | st.lists(st.fixed_dictionaries({"type": JSON, "text": JSON})) | JSON,
            "tool_calls": st.lists(
                st.fixed_dictionaries(
                    {
                        "id": st.text(max_size=3),
                        "type": st.just("function"),
                        "function": st.fixed_dictionaries({"name": st.text(max_size=3), "arguments": st.text()}),
                    }
                ),
                max_size=2,
            ),
        },
    ),
    max_size=3,
)
# Values that each field may have, beside anything at all.
LIKELY: dict[str, st.SearchStrategy[object]] = {
    "messages": MESSAGES,
    "prompt": st.text(max_size=5) | st.lists(st.integers(0, 300), max_size=4),
    "temperature": st.floats(),
    "top_p": st.floats(),
    "top_k": st.integers(),
    "seed": st.integers(),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
    "max_tokens": st.integers(),
    "n": st.integers(),
    "logprobs": st.booleans() | st.integers(),
    "stream": st.booleans(),
    "response_format": st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "json_object", "json_schema"])},
        optional={"json_schema": st.fixed_dictionaries({"name": st.text(max_size=3), "schema": JSON})},
    ),
    "cache_salt": st.text(max_size=5),
}


@settings(deadline=None)
@given(st.data(), st.sampled_from([ChatBody, CompletionBody]))
def test_any_body_is_a_request_or_a_refusal_that_names_a_field(data: st.DataObject, kind: type[GenerationBody]) -> None:
    names = data.draw(
        st.lists(st.sampled_from(sorted(LIKELY.keys() - {"messages", "prompt"})), max_size=4, unique=True)
    )
    prompt = "messages" if kind is ChatBody else "prompt"
    # Mostly right, so that what is wrong is met deep inside.
    body = {name: data.draw(LIKELY[name] | JSON if name == names[0] else LIKELY[name], label=name) for name in names}
    body[prompt] = data.draw(LIKELY[prompt], label=prompt)
    try:
        request = parse_body(kind, json.dumps(body).encode()).to_request("id")
    except BadBody:
        return
    assert inference_pb2.GenerateRequest.FromString(request.SerializeToString()).request_id == "id"


@pytest.mark.parametrize("content", [b'{"prompt": "\\ud800"}', b'{"prompt": "a", "stop": "\\udfff"}', b"\xff", b""])
def test_text_that_is_none_is_refused(content: bytes) -> None:
    with pytest.raises(BadBody):
        parse_body(CompletionBody, content)


@pytest.mark.parametrize("arguments", ['{"city": "\\ud800"}', '{"\\udfff": 1}', "[" * 100_000, "9" * 5_000])
def test_arguments_that_cannot_be_read_are_shown_to_the_model_as_it_wrote_them(arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    body = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
    request = parse_body(ChatBody, json.dumps(body).encode()).to_request("id")
    (shown,) = request.chat.messages[0].tool_calls_json
    assert json.loads(shown)["function"]["arguments"] == arguments


def test_more_samples_than_a_message_can_say_are_refused() -> None:
    with pytest.raises(BadBody, match="n: "):
        parse_body(CompletionBody, b'{"prompt": "a", "n": 5000000000}')


def test_two_biases_of_one_token_are_refused() -> None:
    with pytest.raises(BadBody, match="logit_bias: token 7 is given twice"):
        parse_body(CompletionBody, b'{"prompt": "a", "logit_bias": {"7": 1, "07": 2}}').to_request("id")

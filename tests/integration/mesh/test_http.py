"""The OpenAI-compatible API of a real mesh gives what its gRPC service gives."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from support.mesh import Mesh

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "population": {"type": "integer"}},
    "required": ["city", "population"],
    "additionalProperties": False,
}
QUESTION = "Name a city and how many people live there."


@pytest.fixture(scope="module")
def client(mesh: Mesh) -> Iterator[openai.OpenAI]:
    url = f"http://{mesh.router.announced['http_address']}/v1"
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as client:
        yield client


def test_text_chat_usage_and_log_probabilities_are_those_of_grpc(mesh: Mesh, client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    prompt = "The capital of France is"
    own = mesh.client.generate(text=prompt, max_tokens=12, num_logprobs=2)
    text = client.completions.create(model=model.id, prompt=prompt, max_tokens=12, temperature=0, logprobs=2)
    assert text.choices[0].text == own.text
    assert text.choices[0].logprobs is not None
    expected = [token.logprob for token in own.tokens]
    assert text.choices[0].logprobs.token_logprobs == pytest.approx(expected, abs=1e-6)
    own = mesh.client.generate(chat=[("user", QUESTION)], max_tokens=12)
    stream = client.chat.completions.create(
        model=model.id,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == own.text
    assert last.usage is not None
    assert own.finish is not None
    assert last.usage.prompt_tokens == own.finish.usage.prompt_tokens
    assert last.usage.completion_tokens == 12


def test_a_schema_is_kept_with_the_tokens_of_a_real_vocabulary(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="",
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=80,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}},
    )
    assert answer.choices[0].finish_reason == "stop"
    value = json.loads(answer.choices[0].message.content or "")
    assert isinstance(value["population"], int)
    assert set(value) == {"city", "population"}


def test_a_client_that_leaves_leaves_nothing_behind(mesh: Mesh, client: openai.OpenAI) -> None:
    stream = client.completions.create(model="", prompt="Once upon a time", max_tokens=2000, stream=True)
    for _ in range(3):
        next(stream)
    stream.close()
    mesh.assert_all_blocks_return()

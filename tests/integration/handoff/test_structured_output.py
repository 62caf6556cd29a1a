"""Outputs of a given form, on one node and across a handoff: the same tokens, however often a request moves."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator
from functools import partial

import grpc
import pytest
from pdmesh.v1 import inference_pb2
from support.fake_compute import Gate
from support.fake_mesh import Answer, FakeMesh, FakeNode, until
from support.fake_router import FakeRouter, RoutedAnswer
from support.model_core import model_core
from support.tiny_checkpoint import END_TOKEN, VOCAB_SIZE, write_tiny_checkpoint

from model_runtime.checkpoint import Checkpoint, open_checkpoint
from model_runtime.text.grammar import GrammarCompiler

PROMPT = list(b"a prompt of some tokens")
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 3}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
JSON = inference_pb2.StructuredOutput(json_schema=SCHEMA)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
async def mesh(checkpoint: Checkpoint) -> AsyncIterator[FakeMesh]:
    mesh = FakeMesh(partial(model_core, checkpoint=checkpoint))
    yield mesh
    await mesh.close()


def _fields(form: inference_pb2.StructuredOutput | None, **fields: object) -> dict[str, object]:
    sampling = inference_pb2.SamplingParams(temperature=1.0, seed=3, structured_output=form)
    return {"sampling": sampling, "stop_token_ids": [END_TOKEN], "max_tokens": 500, **fields}


def _text(answer: Answer) -> str:
    assert answer.token_ids[-1] == END_TOKEN
    assert answer.finish is not None
    assert answer.finish.matched_token_id == END_TOKEN
    assert END_TOKEN not in answer.token_ids[:-1]
    return bytes(answer.token_ids[:-1]).decode()


@pytest.mark.parametrize("cut", [1, 9])
async def test_json_of_a_schema_is_the_same_on_one_node_on_two_and_from_any_token_on(mesh: FakeMesh, cut: int) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    fused = await mesh.fused()
    alone = await mesh.generate(fused, PROMPT, **_fields(JSON))
    value = json.loads(_text(alone))
    assert set(value) == {"name", "age"}
    assert len(value["name"]) <= 3
    assert value["age"] >= 0
    handed = await mesh.generate(decode, PROMPT, prefill_address=prefill.address, **_fields(JSON))
    assert handed.token_ids == alone.token_ids
    assert handed.admitted is not None
    assert handed.admitted.output_is_structured
    # As a router goes on behind the tokens that were sent.
    for node, address in ((fused, ""), (decode, prefill.address)):
        rest = await mesh.generate(
            node,
            [*PROMPT, *alone.token_ids[:cut]],
            prefill_address=address,
            num_output_tokens=cut,
            **_fields(JSON, max_tokens=500 - cut),
        )
        assert rest.token_ids == alone.token_ids[cut:]
    for node in (prefill, decode, fused):
        await node.assert_all_blocks_return()


async def test_requests_with_and_without_a_form_do_not_touch_one_another(mesh: FakeMesh) -> None:
    fused = await mesh.fused()
    forms = [None, inference_pb2.StructuredOutput(regex="[a-c]{40}"), JSON, inference_pb2.StructuredOutput(regex="x+y")]
    alone = [await mesh.generate(fused, PROMPT, **_fields(form, max_tokens=60)) for form in forms]
    together = await asyncio.gather(*(mesh.generate(fused, PROMPT, **_fields(form, max_tokens=60)) for form in forms))
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    assert re.fullmatch("[a-c]{40}", _text(alone[1]))
    free = await mesh.generate(fused, PROMPT, **_fields(inference_pb2.StructuredOutput(regex="(?s).*"), max_tokens=60))
    assert free.token_ids != alone[1].token_ids


async def test_a_completion_that_is_cut_off_is_the_beginning_of_its_form(mesh: FakeMesh) -> None:
    fused = await mesh.fused()
    form = inference_pb2.StructuredOutput(regex="(ab)+")
    answer = await mesh.generate(fused, PROMPT, **_fields(form, max_tokens=7, stop_token_ids=[]))
    assert re.fullmatch(b"(ab)*a?", bytes(token for token in answer.token_ids if token != END_TOKEN))
    assert answer.finish is not None
    assert answer.finish.reason == inference_pb2.FINISH_REASON_LENGTH


async def test_log_probabilities_are_the_models_own(mesh: FakeMesh) -> None:
    fused = await mesh.fused()
    form = inference_pb2.StructuredOutput(regex="[a-z]{3}")
    formed = await mesh.generate(fused, PROMPT, **_fields(form, max_tokens=1, num_logprobs=3))
    free = await mesh.generate(fused, PROMPT, **_fields(None, max_tokens=1, num_logprobs=3))
    assert formed.tokens[0].top_logprobs == free.tokens[0].top_logprobs


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (inference_pb2.StructuredOutput(), "sampling.structured_output: one of json_schema and regex is required"),
        (inference_pb2.StructuredOutput(regex="("), "sampling.structured_output.regex: "),
        (inference_pb2.StructuredOutput(json_schema='{"type": 3}'), "sampling.structured_output.json_schema: "),
        (inference_pb2.StructuredOutput(regex="a" * 65537), "sampling.structured_output.regex: 65537 bytes given"),
    ],
)
async def test_a_bad_form_is_refused_by_name_and_leaves_nothing(
    mesh: FakeMesh, form: inference_pb2.StructuredOutput, words: str
) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    code, message = await mesh.error(decode, PROMPT, prefill_address=prefill.address, **_fields(form))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert words in message
    for node in (prefill, decode):
        await node.assert_all_blocks_return()


async def test_output_that_has_left_its_form_cannot_go_on(mesh: FakeMesh) -> None:
    fused = await mesh.fused()
    form = inference_pb2.StructuredOutput(regex="[a-z]+")
    code, message = await mesh.error(fused, [*PROMPT, ord("1")], num_output_tokens=1, **_fields(form))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "sampling.structured_output.regex" in message


async def test_streams_go_on_while_a_form_compiles(mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = await mesh.fused()
    reached, release = threading.Event(), threading.Event()
    compile_now = GrammarCompiler.compile

    def compile_slowly(self: GrammarCompiler, form: object) -> object:
        reached.set()
        assert release.wait(60)
        return compile_now(self, form)  # type: ignore[arg-type]

    monkeypatch.setattr(GrammarCompiler, "compile", compile_slowly)
    slow = asyncio.create_task(mesh.generate(fused, PROMPT, **_fields(JSON)))
    await until(reached.is_set, "the form compiles")
    other = await mesh.generate(fused, PROMPT, **_fields(None, max_tokens=8, stop_token_ids=[]))
    assert len(other.token_ids) == 8
    assert not slow.done()
    release.set()
    json.loads(_text(await slow))


async def test_a_first_token_against_the_form_is_not_taken_from_a_prefill_node_of_an_older_release(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)

    async def no_matcher(*_: object) -> None:
        return None

    monkeypatch.setattr(prefill.node._forms, "matcher", no_matcher)
    form = inference_pb2.StructuredOutput(regex="Z+")
    code, message = await mesh.error(decode, PROMPT, prefill_address=prefill.address, **_fields(form))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "first token of the prefill node breaks sampling.structured_output.regex" in message
    for node in (prefill, decode):
        await node.assert_all_blocks_return()


async def test_a_form_goes_on_behind_the_tokens_that_were_sent_when_a_decode_node_dies(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    nodes = [await mesh.decode(prefill), await mesh.decode(prefill)]
    await until(lambda: all(node.node.is_ready for node in nodes), "the decode nodes have their peer")
    fields: dict[str, object] = {"sampling": _fields(JSON)["sampling"], "ignore_eos": False, "max_tokens": 200}
    async with FakeRouter(prefill=[prefill], decode=nodes, vocab_size=VOCAB_SIZE) as router:
        undisturbed = await router.generate(PROMPT, **fields)
        gate = Gate()
        for node in nodes:
            stand_still_after(node, num_steps=10, gate=gate)
        stream, answer = aiter(router.call(PROMPT, **fields)), RoutedAnswer()
        while len(answer.token_ids) < 7:
            answer.take(await anext(stream))
        await until(gate.reached.is_set, "the decode node stands still")
        dying, living = sorted(nodes, key=lambda node: -node.node.engine.snapshot.num_running)
        stand_still_after(living, num_steps=None, gate=gate)
        killing = asyncio.ensure_future(mesh.kill(dying))
        async for response in stream:
            answer.take(response)
        gate.open()
        await killing
    assert answer.finish is not None
    assert answer.finish.num_replacements == 1
    assert answer.text == undisturbed.text
    assert set(json.loads(answer.text)) == {"name", "age"}
    for node in (prefill, living):
        await node.assert_all_blocks_return()


def stand_still_after(node: FakeNode, *, num_steps: int | None, gate: Gate) -> None:
    """The node's executor waits at the gate before the step after so many from now on; None: it does not."""
    executor, begun = node.core.executor, 0
    compute = type(executor).execute

    def execute(*arguments: object) -> object:
        nonlocal begun
        begun += 1
        if num_steps is not None and begun > num_steps:
            gate.wait()
        return compute(executor, *arguments)

    executor.execute = execute


async def test_a_client_gets_its_form_through_a_router(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    await until(lambda: decode.node.is_ready, "the decode node has its peer")
    async with FakeRouter(prefill=[prefill], decode=[decode], vocab_size=VOCAB_SIZE) as router:
        fields = _fields(JSON)
        answer = await router.generate(PROMPT, sampling=fields["sampling"], ignore_eos=False, max_tokens=200)
        assert set(json.loads(answer.text)) == {"name", "age"}
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.generate(PROMPT, sampling=fields["sampling"], ignore_eos=True)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "ignore_eos" in (caught.value.details() or "")

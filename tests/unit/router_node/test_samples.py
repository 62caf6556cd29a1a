"""Several samples of one request: one stream, told apart by an index, begun, counted and ended together."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from pdmesh.v1 import decode_pb2, inference_pb2, mesh_pb2
from support.fake_mesh import until
from unit.router_node.fakes import (
    FakeNode,
    Hang,
    Refusal,
    StartNode,
    StartRouter,
    Step,
    admitted_event,
    finish_event,
    tokens_event,
)

DECODE, PREFILL = mesh_pb2.NODE_ROLE_DECODE, mesh_pb2.NODE_ROLE_PREFILL
LENGTH = inference_pb2.FINISH_REASON_LENGTH


def _echo(request: decode_pb2.DecodeRequest) -> list[Step]:
    """A node that answers with the request's seed."""
    return [admitted_event(), tokens_event(str(request.sampling.seed)), finish_event(LENGTH)]


def _by_index(responses: list[inference_pb2.GenerateResponse]) -> dict[int, list[inference_pb2.GenerateResponse]]:
    found: dict[int, list[inference_pb2.GenerateResponse]] = {}
    for response in responses:
        found.setdefault(response.index, []).append(response)
    return found


async def test_each_sample_has_its_own_stream_and_seed_and_the_prompt_is_counted_once(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    decode.script_for = _echo
    router = await start_router(prefill, decode)
    sampling = inference_pb2.SamplingParams(temperature=1.0, seed=2**64 - 2)
    responses = await router.generate(text="hi", request_id="mine", num_samples=4, sampling=sampling)
    samples = _by_index(responses)
    assert sorted(samples) == [0, 1, 2, 3]
    for sample in samples.values():
        assert [response.WhichOneof("event") for response in sample] == ["placement", "delta", "finish"]
    texts = ["".join(response.delta.text for response in samples[index]) for index in range(4)]
    assert texts == [str(2**64 - 2), str(2**64 - 1), "0", "1"]
    assert {request.request_id for request in decode.requests} == {"mine", "mine+1", "mine+2", "mine+3"}
    usages = [samples[index][-1].finish.usage for index in range(4)]
    assert [usage.prompt_tokens for usage in usages] == [3, 0, 0, 0]
    assert [usage.cached.prefill_device for usage in usages] == [1, 0, 0, 0]
    assert all(usage.completion_tokens == 2 for usage in usages)


async def test_the_others_begin_where_the_first_one_runs_once_it_has_a_token(
    start_router: StartRouter, start_node: StartNode
) -> None:
    first_may_answer = asyncio.Event()

    def script_for(request: decode_pb2.DecodeRequest) -> list[Step]:
        return _echo(request) if "+" in request.request_id else [first_may_answer, *_echo(request)]

    nodes = [
        await start_node(PREFILL, "prefill-1"),
        await start_node(PREFILL, "prefill-2"),
        await start_node(DECODE, "decode-1", script_for=script_for),
        await start_node(DECODE, "decode-2", script_for=script_for),
    ]
    router = await start_router(*nodes)
    running = asyncio.ensure_future(router.generate(text="hi", num_samples=5))
    await until(lambda: sum(len(node.requests) for node in nodes) == 1, "the first sample is under way")
    await asyncio.wait((running,), timeout=0.2)
    assert sum(len(node.requests) for node in nodes) == 1
    first_may_answer.set()
    responses = await running
    assert len(_by_index(responses)) == 5
    (asked,) = (node for node in nodes if node.requests)
    assert len({request.prefill_address for request in asked.requests}) == 1


async def test_a_sample_whose_node_fails_goes_on_elsewhere_under_its_own_seed(
    start_router: StartRouter, start_node: StartNode, prefill: FakeNode
) -> None:
    died: list[str] = []

    def script_for(request: decode_pb2.DecodeRequest) -> list[Step]:
        if request.request_id.endswith("+1"):
            died.append(request.request_id)
            return [admitted_event(), tokens_event("x"), Refusal(grpc.StatusCode.UNAVAILABLE, "died")]
        return _echo(request)

    nodes = [await start_node(DECODE, name, script_for=script_for) for name in ("decode-1", "decode-2")]
    router = await start_router(prefill, *nodes)
    responses = await router.generate(
        text="hi", request_id="r" * 128, num_samples=3, sampling=inference_pb2.SamplingParams(seed=7), max_tokens=9
    )
    samples = _by_index(responses)
    assert "".join(response.delta.text for response in samples[1]) == "x8"
    assert [samples[index][-1].finish.num_replacements for index in range(3)] == [0, 1, 0]
    names = [request.request_id for node in nodes for request in node.requests]
    assert len(set(names)) == 4
    assert all(len(name) <= 128 for name in names)
    assert sum(name.endswith("+1~2") for name in names) == 1


async def test_when_one_sample_fails_for_good_the_request_does_and_the_others_are_cancelled(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    def script_for(request: decode_pb2.DecodeRequest) -> list[Step]:
        if request.request_id.endswith("+2"):
            return [Refusal(grpc.StatusCode.INTERNAL, "a defect")]
        return [admitted_event(), tokens_event("a"), Hang()]

    decode.script_for = script_for
    router = await start_router(prefill, decode)
    code, message = await router.refusal(text="hi", request_id="mine", num_samples=3)
    assert code is grpc.StatusCode.INTERNAL
    assert "a defect" in message
    await asyncio.wait_for(decode.cancelled.wait(), 10)
    decode.script_for = _echo
    # The name is free again.
    assert len(_by_index(await router.generate(text="hi", request_id="mine", num_samples=2))) == 2


async def test_a_client_that_leaves_cancels_all_samples(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    decode.script = [admitted_event(), tokens_event("a"), Hang()]
    router = await start_router(prefill, decode)
    call = router.stub.Generate(inference_pb2.GenerateRequest(text="hi", num_samples=3), timeout=20)
    seen = set()
    while len(seen) < 3:
        response = await call.read()
        if response.HasField("delta"):
            seen.add(response.index)
    call.cancel()
    await until(lambda: decode.num_running == 0, "no sample runs any more")
    status = await router.node.GetNodeStatus(mesh_pb2.GetNodeStatusRequest())
    assert status.num_running_requests == 0


@pytest.mark.parametrize("num_samples", [0, 65])
async def test_a_number_of_samples_out_of_bounds_is_refused_by_name(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode, num_samples: int
) -> None:
    router = await start_router(prefill, decode)
    code, message = await router.refusal(text="hi", num_samples=num_samples)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert f"num_samples: {num_samples} given, 1 to 64 allowed" in message
    assert not decode.requests


async def test_samples_count_as_live_requests(start_router: StartRouter, prefill: FakeNode, decode: FakeNode) -> None:
    decode.script = [admitted_event(), tokens_event("a"), Hang()]
    router = await start_router(prefill, decode, max_live_requests=4)
    code, message = await router.refusal(text="hi", num_samples=5)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "num_samples: 5 given" in message
    call = router.stub.Generate(inference_pb2.GenerateRequest(text="hi", num_samples=3), timeout=20)
    await call.read()
    code, message = await router.refusal(text="hi", num_samples=2)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "max_live_requests" in message
    call.cancel()


async def test_the_prompt_is_told_of_once_and_a_node_that_cannot_is_passed_by(
    start_router: StartRouter, start_node: StartNode, prefill: FakeNode
) -> None:
    told = admitted_event()
    told.admitted.prompt_logprobs.add(token_id=ord("i"), logprob=-0.5)

    def script_for(request: decode_pb2.DecodeRequest) -> list[Step]:
        return [told, tokens_event("a"), finish_event()]

    # Of a release that does not know the field.
    deaf = await start_node(DECODE, "decode-1", script=[admitted_event(), tokens_event("a"), finish_event()])
    knowing = await start_node(DECODE, "decode-2", script_for=script_for)
    router = await start_router(prefill, deaf, knowing)
    for _ in range(2):
        responses = await router.generate(text="hi", num_prompt_logprobs=0, num_samples=2)
        samples = _by_index(responses)
        kinds = [response.WhichOneof("event") for response in samples[0]]
        assert kinds == ["placement", "prompt_logprobs", "delta", "finish"]
        tokens = samples[0][1].prompt_logprobs.tokens
        assert [(token.token_id, token.HasField("logprob")) for token in tokens] == [
            (ord("h"), False),
            (ord("i"), True),
        ]
        assert [response.WhichOneof("event") for response in samples[1]] == ["placement", "delta", "finish"]
    asked = [request for request in knowing.requests if "+1" in request.request_id]
    assert asked
    assert not any(request.HasField("num_prompt_logprobs") for request in asked)

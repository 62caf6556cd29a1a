"""A decode node that says nothing any more is left, however well its connection looks; one that only waits is not."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from pdmesh.v1 import decode_pb2, inference_pb2, mesh_pb2
from unit.router_node.fakes import (
    FakeNode,
    Hang,
    StartNode,
    StartRouter,
    Step,
    admitted_event,
    finish_event,
    progress_event,
    tokens_event,
)

DECODE = mesh_pb2.NODE_ROLE_DECODE
SILENCE_S = 0.4


def _text(responses: list[inference_pb2.GenerateResponse]) -> str:
    return "".join(response.delta.text for response in responses)


def _pair(start_node: StartNode, first: list[Step]) -> list[asyncio.Future[FakeNode]]:
    """Two decode nodes: whichever is asked first does as `first` says, the other one answers with what is left."""
    taken: list[str] = []

    def script_for(request: decode_pb2.DecodeRequest) -> list[Step]:
        taken.append(request.request_id)
        if len(taken) == 1:
            return first
        return [admitted_event(), tokens_event(b"abcd"[request.num_output_tokens :]), finish_event()]

    names = ("decode-1", "decode-2")
    return [
        asyncio.ensure_future(start_node(DECODE, name, reports_progress=True, script_for=script_for)) for name in names
    ]


@pytest.mark.parametrize(
    ("first", "num_resumed"),
    [([Hang()], 0), ([progress_event(), Hang()], 0), ([admitted_event(), tokens_event("ab"), Hang()], 2)],
)
async def test_a_stream_that_hangs_goes_on_at_another_node_without_a_seam(
    start_router: StartRouter, start_node: StartNode, prefill: FakeNode, first: list[Step], num_resumed: int
) -> None:
    nodes = [await node for node in _pair(start_node, first)]
    router = await start_router(prefill, *nodes, silence_timeout_s=SILENCE_S)
    responses = await router.generate(text="hi", max_tokens=20)
    assert _text(responses) == "abcd"
    assert responses[-1].finish.num_replacements == 1
    requests = [request for node in nodes for request in node.requests]
    assert sorted(request.num_output_tokens for request in requests) == [0, num_resumed]
    assert {request.progress_interval_ms for request in requests} == {100}
    hung = next(node for node in nodes if node.requests[0].num_output_tokens == 0 and node.cancelled.is_set())
    assert len(hung.requests) == 1


async def test_the_client_hears_which_node_hung_when_there_is_no_other(
    start_router: StartRouter, start_node: StartNode, prefill: FakeNode
) -> None:
    node = await start_node(DECODE, "decode-1", reports_progress=True, script=[Hang()])
    router = await start_router(prefill, node, silence_timeout_s=SILENCE_S, max_attempts=1)
    code, message = await router.refusal(text="hi")
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "decode-1" in message
    assert "no sign of life for 0.4 s" in message
    await node.cancelled.wait()


async def test_a_request_that_waits_for_longer_than_the_silence_is_left_where_it_is(
    start_router: StartRouter, start_node: StartNode, prefill: FakeNode
) -> None:
    steps = [asyncio.Event() for _ in range(4)]
    script: list[Step] = []
    for step in steps:
        script += [step, progress_event()]
    nodes = [
        await start_node(DECODE, name, reports_progress=True, script=[*script, tokens_event("ab"), finish_event()])
        for name in ("decode-1", "decode-2")
    ]
    router = await start_router(prefill, *nodes, silence_timeout_s=SILENCE_S)
    running = asyncio.ensure_future(router.generate(text="hi"))
    # The last sign comes when the first is older than the bound.
    for step in steps:
        await asyncio.sleep(SILENCE_S / 2)
        step.set()
    responses = await running
    assert _text(responses) == "ab"
    assert [response.WhichOneof("event") for response in responses] == ["placement", "delta", "finish"]
    assert sum(len(node.requests) for node in nodes) == 1


@pytest.mark.parametrize(("reports", "silence_timeout_s"), [(False, 0.1), (True, 0.0)])
async def test_where_silence_says_nothing_the_deadline_alone_bounds_it(
    start_router: StartRouter, start_node: StartNode, prefill: FakeNode, reports: bool, silence_timeout_s: float
) -> None:
    node = await start_node(DECODE, "decode-1", reports_progress=reports, script=[Hang()])
    router = await start_router(prefill, node, silence_timeout_s=silence_timeout_s)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in router.stub.Generate(inference_pb2.GenerateRequest(text="hi"), timeout=0.8):
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert [request.progress_interval_ms for request in node.requests] == [0]

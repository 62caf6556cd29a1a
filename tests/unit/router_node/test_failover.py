"""The router in front of nodes that fail: the client sees one answer, or the status of the node that failed it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pdmesh.v1 import inference_pb2, mesh_pb2
from unit.router_node.fakes import (
    EOS,
    FakeNode,
    Hang,
    Refusal,
    StartNode,
    StartRouter,
    Step,
    admitted_event,
    blames_prefill,
    finish_event,
    tokens_event,
)

from node_runtime.errors import QueueFull
from node_runtime.rpc import Telemetry

DECODE, PREFILL = mesh_pb2.NODE_ROLE_DECODE, mesh_pb2.NODE_ROLE_PREFILL
UNAVAILABLE, EXHAUSTED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED
GOOD: Sequence[Step] = (admitted_event(), tokens_event("ab"), finish_event())


def _kinds(responses: Sequence[inference_pb2.GenerateResponse]) -> list[str | None]:
    return [response.WhichOneof("event") for response in responses]


def _text(responses: Sequence[inference_pb2.GenerateResponse]) -> str:
    return "".join(response.delta.text for response in responses)


def _retry_delay_ms(error: grpc.aio.AioRpcError) -> int:
    metadata = dict(error.trailing_metadata() or ())
    status, retry = status_pb2.Status.FromString(metadata["grpc-status-details-bin"]), error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(retry)
    return retry.retry_delay.ToMilliseconds()


@pytest.fixture
async def others(start_node: StartNode) -> tuple[FakeNode, FakeNode]:
    """A second prefill node and a second decode node, which answers."""
    return await start_node(PREFILL, "prefill-2"), await start_node(DECODE, "decode-2", script=GOOD)


@pytest.mark.parametrize(
    "code", [UNAVAILABLE, EXHAUSTED, grpc.StatusCode.DATA_LOSS, grpc.StatusCode.FAILED_PRECONDITION]
)
async def test_when_the_prefill_node_fails_only_that_node_is_replaced(
    start_router: StartRouter,
    prefill: FakeNode,
    decode: FakeNode,
    others: tuple[FakeNode, FakeNode],
    code: grpc.StatusCode,
) -> None:
    prefill_2, decode_2 = others
    # The decode nodes fail with the first prefill node and answer with the second.
    for node in (decode, decode_2):
        node.script_for = lambda request: (
            GOOD if request.prefill_address == prefill_2.address else [blames_prefill(code, "no")]
        )
    router = await start_router(prefill, prefill_2, decode, decode_2)
    responses = await router.generate(
        text="hi", request_id="mine", sampling=inference_pb2.SamplingParams(temperature=1)
    )
    assert _kinds(responses) == ["placement", "delta", "finish"]
    assert _text(responses) == "ab"
    assert responses[-1].finish.num_replacements == 1
    first, second = (request for node in (decode, decode_2) for request in node.requests)
    assert {first.prefill_address, second.prefill_address} == {prefill.address, prefill_2.address}
    assert first.sampling.HasField("seed")
    # Another attempt is the same request: above all its random stream is the same.
    second.prefill_address = first.prefill_address
    assert {first.request_id, second.request_id} == {"mine", "mine~2"}
    second.request_id = first.request_id
    assert first == second


async def test_a_decode_node_that_dies_mid_stream_is_replaced_behind_what_was_sent(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode, others: tuple[FakeNode, FakeNode]
) -> None:
    _, decode_2 = others
    decode.script = [admitted_event(), tokens_event(b"one\xc3"), Hang()]
    decode_2.script = [admitted_event(), tokens_event(b"\xa9 E"), tokens_event("NDx"), Hang()]
    router = await start_router(prefill, decode, decode_2)
    call = router.stub.Generate(inference_pb2.GenerateRequest(text="hi", stop=["END"], max_tokens=20), timeout=20)
    stream = aiter(call)
    responses = [await anext(stream), await anext(stream)]
    await decode.stop()
    responses += [response async for response in stream]
    assert _kinds(responses) == ["placement", "delta", "delta", "delta", "finish"]
    assert _text(responses) == "oneé "
    (request,) = decode_2.requests
    assert (bytes(request.token_ids), request.num_output_tokens, request.max_tokens) == (b"hione\xc3", 4, 16)
    finish = responses[-1].finish
    assert (finish.matched_stop, finish.num_replacements) == ("END", 1)
    assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (2, 9)


async def test_a_decode_node_that_refuses_is_passed_by(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode, others: tuple[FakeNode, FakeNode]
) -> None:
    decode.script = [Refusal(EXHAUSTED, "full", QueueFull("full"))]
    router = await start_router(prefill, decode, others[1])
    responses = await asyncio.gather(*(router.generate(text="hi") for _ in range(6)))
    assert all(_text(each) == "ab" for each in responses)
    assert decode.requests


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL, grpc.StatusCode.ALREADY_EXISTS]
)
async def test_what_would_fail_everywhere_is_not_tried_again(
    start_router: StartRouter,
    prefill: FakeNode,
    decode: FakeNode,
    others: tuple[FakeNode, FakeNode],
    code: grpc.StatusCode,
) -> None:
    for node in (decode, others[1]):
        node.script = [Refusal(code, "no")]
    router = await start_router(prefill, decode, others[1])
    got, message = await router.refusal(text="hi")
    assert (got, len(decode.requests) + len(others[1].requests)) == (code, 1)
    assert "attempt" not in message


async def test_attempts_are_bounded_and_the_last_status_is_passed_on(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    decode.script = [Refusal(UNAVAILABLE, "out of order")]
    router = await start_router(prefill, decode, max_attempts=3)
    code, message = await router.refusal(text="hi")
    assert code is UNAVAILABLE
    for word in ("out of order", "decode-1", "(attempt 3)"):
        assert word in message
    assert len(decode.requests) == 3


async def test_a_mesh_in_trouble_is_spared_retries_beyond_the_budget(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    decode.script = [Refusal(UNAVAILABLE, "out of order")]
    router = await start_router(prefill, decode, retry_burst=2, retry_ratio=0.0)
    for _ in range(5):
        await router.refusal(text="hi")
    assert len(decode.requests) == 5 + 2
    assert (await router.node.GetNodeStatus(mesh_pb2.GetNodeStatusRequest())).num_retries == 2


async def test_an_overloaded_mesh_tells_the_client_when_to_come_back(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    decode.script = [Refusal(EXHAUSTED, "full", QueueFull("full"))]
    router = await start_router(prefill, decode)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.generate(text="hi")
    assert caught.value.code() is EXHAUSTED
    assert _retry_delay_ms(caught.value) == 1000
    assert len(decode.requests) == 1


async def test_without_nodes_the_client_hears_when_to_come_back(start_router: StartRouter, decode: FakeNode) -> None:
    router = await start_router(decode, prefill=("127.0.0.1:1",))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.generate(text="hi")
    assert caught.value.code() is UNAVAILABLE
    assert _retry_delay_ms(caught.value) == 1000


async def test_a_deadline_that_passes_while_nodes_fail_ends_the_request(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    decode.script = [tokens_event("a"), Hang()]
    router = await start_router(prefill, decode, max_attempts=100)
    call = router.stub.Generate(inference_pb2.GenerateRequest(text="hi"), timeout=1.0)
    await call.read()
    await call.read()
    await decode.stop()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    # Whichever comes first: the deadline, or the last attempt that fits before it.
    assert caught.value.code() in (UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    assert (await router.node.GetNodeStatus(mesh_pb2.GetNodeStatusRequest())).num_running_requests == 0


@pytest.mark.parametrize(("content", "matched"), [([0x61, 0x62], 0), ([EOS], EOS)])
async def test_a_decode_node_that_dies_behind_its_last_token_costs_nothing(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode, content: list[int], matched: int
) -> None:
    event = tokens_event("")
    event.tokens.tokens.extend(inference_pb2.SampledToken(token_id=token_id) for token_id in content)
    decode.script = [admitted_event(), event, Refusal(UNAVAILABLE, "died")]
    router = await start_router(prefill, decode)
    responses = await router.generate(text="hi", max_tokens=2)
    finish = responses[-1].finish
    assert (finish.matched_token_id, finish.usage.completion_tokens) == (matched, len(content))
    assert (finish.num_replacements, len(decode.requests)) == (0, 1)


async def test_the_trace_shows_the_attempt_that_failed_and_where_the_request_went(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode, others: tuple[FakeNode, FakeNode]
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    decode.script = [tokens_event("ab"), Refusal(UNAVAILABLE, "died")]
    router = await start_router(prefill, decode, others[1], telemetry=Telemetry(provider), served_model_name="tiny")
    await router.generate(text="hi", max_tokens=20)
    spans = exporter.get_finished_spans()
    (root,) = (span for span in spans if span.name == "text_completion tiny")
    (failed,) = (span for span in spans if span.name == "pdmesh.failed_attempt")
    assert failed.parent == root.context
    attributes = dict(failed.attributes or {})
    assert attributes["pdmesh.decode_node"] == "decode-1"
    assert attributes["error.type"] == "UNAVAILABLE"
    assert (attributes["pdmesh.attempt"], attributes["pdmesh.resumed_tokens"]) == (1, 2)
    assert dict(root.attributes or {})["pdmesh.decode_node"] == "decode-2"
    assert dict(root.attributes or {})["pdmesh.attempt"] == 2
    assert sum(span.name == "pdmesh.place" for span in spans) == 2
    # Both attempts hang under the one request.
    assert f"-{root.context.span_id:016x}-" in str(others[1].metadata[0]["traceparent"])

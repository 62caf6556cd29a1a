"""The Traces service: what it tells of requests, whom, and when it has nothing to tell."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from pathlib import Path

import grpc
import pytest
from pdmesh.v1 import inference_pb2, traces_pb2, traces_pb2_grpc
from unit.router_node.fakes import FakeNode, Hang, RunningRouter, StartRouter, tokens_event

from node_runtime.rpc import Telemetry
from router_node.trace_messages import span_of
from router_node.trace_summary import RequestSummary, summary_of


def traces_of(router: RunningRouter) -> traces_pb2_grpc.TracesAsyncStub:
    return traces_pb2_grpc.TracesStub(router.channel)  # type: ignore[return-value]


async def summaries_of(router: RunningRouter, **fields: int) -> list[RequestSummary]:
    answer = await traces_of(router).ListRequests(traces_pb2.ListRequestsRequest(**fields), timeout=20)
    return [summary_of(span_of(message)) for message in answer.requests]


async def refusal_of(router: RunningRouter, name: str) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await traces_of(router).GetTrace(traces_pb2.GetTraceRequest(id=name), timeout=20)
    return caught.value.code().name, caught.value.details() or ""


@pytest.fixture
async def keeper(start_router: StartRouter, prefill: FakeNode, decode: FakeNode) -> RunningRouter:
    return await start_router(prefill, decode, keep_traces=5)


@pytest.fixture
def telemetry(keeper: RunningRouter) -> Telemetry:
    return Telemetry.setup("pdmesh-router", "router-2", keeper.router.address)


@pytest.fixture
async def traced(start_router: StartRouter, prefill: FakeNode, decode: FakeNode, telemetry: Telemetry) -> RunningRouter:
    """Another router, which sends its spans to the keeper."""
    return await start_router(prefill, decode, telemetry=telemetry)


async def test_a_request_is_listed_with_its_tokens_its_nodes_and_its_first_token(
    keeper: RunningRouter, traced: RunningRouter, telemetry: Telemetry
) -> None:
    await traced.generate(text="hi", max_tokens=5, request_id="mine")
    await asyncio.to_thread(telemetry.shutdown)
    (summary,) = await summaries_of(keeper)
    assert (summary.request_id, summary.status, summary.error) == ("mine", "ok", "")
    assert (summary.input_tokens, summary.output_tokens) == (3, 2)
    assert (summary.prefill_node, summary.decode_node) == ("prefill-1", "decode-1")
    assert summary.first_token_ms is not None
    assert 0 < summary.first_token_ms <= summary.duration_ms
    by_request = await traces_of(keeper).GetTrace(traces_pb2.GetTraceRequest(id="mine"), timeout=20)
    by_beginning = await traces_of(keeper).GetTrace(traces_pb2.GetTraceRequest(id=summary.trace_id[:9]), timeout=20)
    assert by_request.trace_id == by_beginning.trace_id == summary.trace_id
    names = {span.name: span_of(span) for span in by_request.spans}
    assert names.keys() == {"text_completion tiny", "pdmesh.tokenize", "pdmesh.place"}
    assert names["pdmesh.place"].attributes["pdmesh.place.policy"] == "cache_aware"
    assert names["pdmesh.place"].attributes["pdmesh.decode_node"] == "decode-1"


async def test_refused_and_abandoned_requests_say_so(
    keeper: RunningRouter, traced: RunningRouter, decode: FakeNode, telemetry: Telemetry
) -> None:
    decode.script = [tokens_event("a"), Hang()]
    await traced.refusal(text="", max_tokens=5)
    call = traced.stub.Generate(inference_pb2.GenerateRequest(text="hi", max_tokens=5), timeout=20)
    async for response in call:
        if response.HasField("delta"):
            break
    call.cancel()
    await asyncio.wait_for(decode.cancelled.wait(), 20)
    await asyncio.to_thread(telemetry.shutdown)
    statuses = {summary.status: summary for summary in await summaries_of(keeper)}
    assert statuses.keys() == {"InvalidRequest", "cancelled"}
    assert statuses["InvalidRequest"].error
    assert statuses["InvalidRequest"].first_token_ms is None
    assert statuses["cancelled"].first_token_ms is not None


async def test_the_newest_requests_come_first_and_no_more_than_asked_for(
    keeper: RunningRouter, traced: RunningRouter, telemetry: Telemetry
) -> None:
    for name in ("first", "second", "third"):
        await traced.generate(text="hi", max_tokens=5, request_id=name)
        await asyncio.to_thread(telemetry.flush)
    assert [summary.request_id for summary in await summaries_of(keeper, max_requests=2)] == ["third", "second"]
    with pytest.raises(grpc.aio.AioRpcError, match="max_requests: 1001 given, at most 1000"):
        await summaries_of(keeper, max_requests=1001)
    await asyncio.to_thread(telemetry.shutdown)


async def test_a_follower_hears_of_requests_as_they_end_and_goes_on_where_it_was(
    keeper: RunningRouter, traced: RunningRouter, telemetry: Telemetry
) -> None:
    async def run(name: str) -> None:
        await traced.generate(text="hi", max_tokens=5, request_id=name)
        await asyncio.to_thread(telemetry.flush)

    stub = traces_of(keeper)
    await run("before")
    following = stub.FollowRequests(traces_pb2.FollowRequestsRequest(), timeout=60)
    heard = asyncio.ensure_future(following.read())
    num_run = 0
    while not heard.done():
        # What ends before the call has arrived is not for it.
        num_run += 1
        await run(f"request {num_run}")
        await asyncio.wait((heard,), timeout=0.1)
    first = heard.result()
    assert summary_of(span_of(first.request)).request_id != "before"
    resumed = stub.FollowRequests(traces_pb2.FollowRequestsRequest(sequence=first.sequence - 1), timeout=60)
    assert await resumed.read() == first
    for call in (following, resumed):
        call.cancel()
    await asyncio.to_thread(telemetry.shutdown)


async def test_a_follower_does_not_keep_a_router_from_leaving(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    router = await start_router(prefill, decode, keep_traces=5, drain_grace_s=60)
    following = traces_of(router).FollowRequests(traces_pb2.FollowRequestsRequest(), timeout=60)
    heard = asyncio.ensure_future(following.read())
    await traces_of(router).ListRequests(traces_pb2.ListRequestsRequest(), timeout=20)
    await asyncio.wait_for(router.router.stop(), 20)
    with pytest.raises(grpc.aio.AioRpcError):
        await heard


async def test_what_is_not_held_is_named_and_the_log_does_not_repeat_it(
    keeper: RunningRouter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert await refusal_of(keeper, "nobody") == (
        "NOT_FOUND",
        'id: no trace or request "nobody" is held; only the newest are kept',
    )
    assert await refusal_of(keeper, "") == ("INVALID_ARGUMENT", "id: 0 bytes given, [1, 128] required")
    assert [record.getMessage().split(": ")[0] for record in caplog.records if "ended in" in record.getMessage()] == [
        "/pdmesh.v1.Traces/GetTrace ended in INVALID_ARGUMENT"
    ]


async def test_a_router_that_keeps_no_traces_says_how_it_would(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    router = await start_router(prefill, decode)
    status, message = await refusal_of(router, "any")
    assert status == "FAILED_PRECONDITION"
    assert "--keep-traces 256" in message


async def test_with_tenants_only_operators_see_traces(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode, tmp_path: Path
) -> None:
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("client", "operator")}
    tenants = [
        {"name": name, "token_sha256": [sha], "is_operator": name == "operator"} for name, sha in digests.items()
    ]
    (tmp_path / "tenants.yaml").write_text(json.dumps({"tenants": tenants}))
    router = await start_router(prefill, decode, keep_traces=5, tenants=str(tmp_path / "tenants.yaml"))
    asked = traces_pb2.ListRequestsRequest()
    for token, status in (("", "UNAUTHENTICATED"), ("client", "PERMISSION_DENIED")):
        shown = (("authorization", f"Bearer {token}"),) if token else ()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await traces_of(router).ListRequests(asked, timeout=20, metadata=shown)
        assert caught.value.code().name == status
    shown = (("authorization", "Bearer operator"),)
    assert not (await traces_of(router).ListRequests(asked, timeout=20, metadata=shown)).requests

"""Deadlines, cancellation, statuses and limits of the RPC layer over real sockets."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import aclosing, suppress
from typing import TypeVar

import grpc
import pytest
from google.protobuf import empty_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from pdmesh.v1 import decode_pb2, handoff_pb2, mesh_pb2, mesh_pb2_grpc

from node_runtime import errors
from node_runtime.config import NodeConfig
from node_runtime.rpc import RpcContext, RpcServer, Telemetry, connect
from node_runtime.rpc.health import LIVENESS_SERVICE
from tests.unit.node_runtime.probe_service import (
    FixedReporter,
    Probe,
    ScriptedDecode,
    ScriptedPrefill,
    one_response_then_never,
    serving,
    tokens,
    two_responses,
)

ResponseT = TypeVar("ResponseT")
Requests = AsyncIterator[handoff_pb2.HandoffRequest]


def failing_with(error: BaseException) -> ScriptedDecode:
    async def body(request: decode_pb2.DecodeRequest, context: RpcContext) -> AsyncIterator[decode_pb2.DecodeResponse]:
        yield tokens(1)
        raise error

    return ScriptedDecode(body)


async def collect(responses: AsyncIterable[ResponseT], into: list[ResponseT] | None = None) -> list[ResponseT]:
    received = [] if into is None else into
    async for response in responses:
        received.append(response)
    return received


def generate(probe: Probe, timeout_s: float = 10.0) -> AsyncIterator[decode_pb2.DecodeResponse]:
    return probe.channel.server_stream(probe.decode.Generate, decode_pb2.DecodeRequest(), timeout_s=timeout_s)


async def test_a_stream_arrives_whole_and_in_order() -> None:
    async with serving(decode=ScriptedDecode(two_responses)) as probe:
        stream = generate(probe)
        assert [response async for response in stream] == [tokens(1), tokens(2)]


async def test_messages_flow_both_ways_on_one_call() -> None:
    async def echo(requests: Requests, context: RpcContext) -> AsyncIterator[handoff_pb2.HandoffResponse]:
        async for request in requests:
            yield handoff_pb2.HandoffResponse(quiesced=handoff_pb2.Quiesced(handoff_id=request.abort.handoff_id))

    async with (
        serving(prefill=ScriptedPrefill(echo)) as probe,
        probe.channel.duplex(probe.prefill.Handoff, timeout_s=10) as call,
    ):
        answers = aiter(call)
        for name in (b"a" * 16, b"b" * 16):
            await call.send(handoff_pb2.HandoffRequest(abort=handoff_pb2.Abort(handoff_id=name)))
            assert (await anext(answers)).quiesced.handoff_id == name
        await call.done_sending()
        assert [answer async for answer in answers] == []


async def test_a_refusal_in_the_middle_of_a_stream_reaches_the_client_with_its_text() -> None:
    async with serving(decode=failing_with(errors.QueueFull("256 requests wait already"))) as probe:
        received: list[decode_pb2.DecodeResponse] = []
        with pytest.raises(errors.RemoteError, match=r"^256 requests wait already$") as caught:
            await collect(generate(probe), received)
        assert caught.value.code_name == "RESOURCE_EXHAUSTED"
        assert received == [tokens(1)]


async def test_a_refusal_on_a_stream_both_ways_is_mapped_too() -> None:
    async def refuse(requests: Requests, context: RpcContext) -> AsyncIterator[handoff_pb2.HandoffResponse]:
        async for request in requests:
            raise errors.DuplicateRequest(request.start.request_id)
            yield

    async with (
        serving(prefill=ScriptedPrefill(refuse)) as probe,
        probe.channel.duplex(probe.prefill.Handoff, timeout_s=10) as call,
    ):
        await call.send(handoff_pb2.HandoffRequest(start=handoff_pb2.Start(request_id="r1")))
        with pytest.raises(errors.RemoteError, match='request_id "r1" is already live') as caught:
            await anext(aiter(call))
        assert caught.value.code_name == "ALREADY_EXISTS"


async def test_sending_on_a_call_that_the_peer_refused_raises_the_refusal() -> None:
    async def refuse(requests: Requests, context: RpcContext) -> AsyncIterator[handoff_pb2.HandoffResponse]:
        raise errors.NotBootstrapped("unknown incarnation")
        yield

    async with (
        serving(prefill=ScriptedPrefill(refuse)) as probe,
        probe.channel.duplex(probe.prefill.Handoff, timeout_s=10) as call,
    ):
        with pytest.raises(errors.RemoteError, match="unknown incarnation"):
            await anext(aiter(call))
        with pytest.raises(errors.RemoteError, match="unknown incarnation"):
            await call.send(handoff_pb2.HandoffRequest())


async def test_an_unknown_exception_is_internal_and_shows_its_traceback_only_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with serving(decode=failing_with(KeyError("secret table"))) as probe:
        with pytest.raises(errors.RemoteError) as caught:
            await collect(generate(probe))
    assert caught.value.code_name == "INTERNAL"
    assert caught.value.message == "internal error; the log of node probe has the details"
    assert "secret table" in caplog.text
    assert "Traceback" in caplog.text


async def test_a_timeout_error_of_the_handler_itself_is_internal_not_a_deadline() -> None:
    async with serving(decode=failing_with(TimeoutError("disk"))) as probe:
        with pytest.raises(errors.RemoteError) as caught:
            await collect(generate(probe))
    assert caught.value.code_name == "INTERNAL"


async def test_a_cancelled_inner_task_ends_the_call_instead_of_leaving_the_client_waiting() -> None:
    async with serving(decode=failing_with(asyncio.CancelledError())) as probe:
        with pytest.raises(errors.RequestCancelled, match="the work of this call was cancelled"):
            await collect(generate(probe, 60))


async def test_a_client_that_leaves_cancels_the_handler_at_once() -> None:
    script = ScriptedDecode(one_response_then_never)
    async with serving(decode=script) as probe:
        stream = generate(probe, 60)
        async with aclosing(stream) as responses:
            assert await anext(responses) == tokens(1)
        await script.ended.wait()
        assert script.was_cancelled
        assert probe.server.num_running_calls == 0


async def test_a_closed_channel_cancels_the_handler_of_a_stream_both_ways() -> None:
    ended = asyncio.Event()

    async def wait(requests: Requests, context: RpcContext) -> AsyncIterator[handoff_pb2.HandoffResponse]:
        try:
            async for _ in requests:
                yield handoff_pb2.HandoffResponse()
        finally:
            ended.set()

    async with serving(prefill=ScriptedPrefill(wait)) as probe:
        call = probe.channel.duplex(probe.prefill.Handoff, timeout_s=60)
        await call.send(handoff_pb2.HandoffRequest())
        await anext(aiter(call))
        call.cancel()
        await ended.wait()


async def test_a_handler_that_outlives_the_clients_deadline_is_cancelled() -> None:
    script = ScriptedDecode(one_response_then_never)
    async with serving(decode=script) as probe:
        with pytest.raises(errors.DeadlineExceeded):
            await collect(generate(probe, 0.2))
        await script.ended.wait()
        assert script.was_cancelled


async def test_the_servers_default_deadline_ends_calls_of_clients_that_set_none() -> None:
    script = ScriptedDecode(one_response_then_never)
    async with serving(decode=script, config=NodeConfig(node_id="probe", default_deadline_s=0.2)) as probe:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(probe.decode.Generate(decode_pb2.DecodeRequest()))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert caught.value.details() == "deadline of 0.200 s exceeded"
        assert script.was_cancelled


async def test_the_default_deadline_ends_a_call_whose_client_stopped_reading() -> None:
    async def flood(request: decode_pb2.DecodeRequest, context: RpcContext) -> AsyncIterator[decode_pb2.DecodeResponse]:
        while True:
            yield tokens(*range(10_000))

    script = ScriptedDecode(flood)
    async with serving(decode=script, config=NodeConfig(node_id="probe", default_deadline_s=0.5)) as probe:
        responses = aiter(probe.decode.Generate(decode_pb2.DecodeRequest()))
        await anext(responses)
        await script.ended.wait()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(responses)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_handler_sees_the_time_that_is_left() -> None:
    seen: list[float] = []

    async def body(request: decode_pb2.DecodeRequest, context: RpcContext) -> AsyncIterator[decode_pb2.DecodeResponse]:
        seen.append(context.time_remaining_s())
        assert context.peer()
        yield tokens(1)

    async with serving(decode=ScriptedDecode(body)) as probe:
        stream = generate(probe, 30)
        assert [response async for response in stream]
    # gRPC rounds a deadline up.
    assert 20 < seen[0] < 31


async def test_a_call_made_by_a_handler_inherits_the_callers_deadline() -> None:
    seen: list[float] = []

    async def inner(request: decode_pb2.DecodeRequest, context: RpcContext) -> AsyncIterator[decode_pb2.DecodeResponse]:
        seen.append(context.time_remaining_s())
        yield tokens(1)

    async with serving(decode=ScriptedDecode(inner)) as back:

        async def outer(
            request: decode_pb2.DecodeRequest, context: RpcContext
        ) -> AsyncIterator[decode_pb2.DecodeResponse]:
            async for response in back.channel.server_stream(back.decode.Generate, request):
                yield response

        async with serving(decode=ScriptedDecode(outer)) as front:
            stream = generate(front, 30)
            assert [response async for response in stream] == [tokens(1)]
    # gRPC rounds a deadline up.
    assert 20 < seen[0] < 31


async def test_a_call_without_any_deadline_is_refused_where_it_is_made() -> None:
    async with serving() as probe:
        with pytest.raises(ValueError, match="needs timeout_s or a deadline"):
            await probe.channel.unary(probe.node.GetNodeInfo, mesh_pb2.GetNodeInfoRequest())


async def test_an_oversized_request_is_resource_exhausted_and_harms_nobody() -> None:
    async with serving(
        decode=ScriptedDecode(two_responses), config=NodeConfig(node_id="probe", max_message_bytes=4096)
    ) as probe:
        large = decode_pb2.DecodeRequest(token_ids=[100_000] * 4096)
        with pytest.raises(errors.RemoteError, match="4096") as caught:
            await collect(probe.channel.server_stream(probe.decode.Generate, large, timeout_s=10))
        assert caught.value.code_name == "RESOURCE_EXHAUSTED"
        small = generate(probe)
        assert len([response async for response in small]) == 2


async def test_headers_have_a_limit_and_what_exceeds_it_harms_nobody() -> None:
    async with serving(decode=ScriptedDecode(two_responses)) as probe, grpc.aio.insecure_channel(probe.address) as raw:
        call = raw.unary_stream("/pdmesh.v1.Decode/Generate")

        async def status_with(num_bytes: int) -> grpc.StatusCode:
            running = call(b"", timeout=10, metadata=(("note", "x" * num_bytes),))
            with suppress(grpc.aio.AioRpcError):
                await collect(running)
            return await running.code()

        # By default gRPC refuses some headers of this size, at random.
        assert {await status_with(15 * 1024) for _ in range(10)} == {grpc.StatusCode.OK}
        assert await status_with(64 * 1024) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await status_with(100) is grpc.StatusCode.OK
        assert len(await collect(generate(probe))) == 2


async def test_an_oversized_response_is_resource_exhausted() -> None:
    async with serving(decode=ScriptedDecode(two_responses), client_max_message_bytes=2) as probe:
        with pytest.raises(errors.RemoteError) as caught:
            await collect(generate(probe))
        assert caught.value.code_name == "RESOURCE_EXHAUSTED"


async def test_bytes_that_are_no_message_are_an_invalid_argument() -> None:
    async with serving(decode=ScriptedDecode(two_responses)) as probe, grpc.aio.insecure_channel(probe.address) as raw:
        call = raw.unary_stream("/pdmesh.v1.Decode/Generate")
        with pytest.raises(grpc.aio.AioRpcError, match="not a valid protobuf message") as caught:
            await collect(call(b"\xff\xff\xff", timeout=10))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_bytes_that_are_no_message_on_a_request_stream_are_an_invalid_argument() -> None:
    async def drain(requests: Requests, context: RpcContext) -> AsyncIterator[handoff_pb2.HandoffResponse]:
        async for _ in requests:
            yield handoff_pb2.HandoffResponse()

    async with (
        serving(prefill=ScriptedPrefill(drain)) as probe,
        grpc.aio.insecure_channel(probe.address) as raw,
    ):
        call = raw.stream_stream("/pdmesh.v1.Prefill/Handoff")(timeout=10)
        await call.write(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError, match="not a valid protobuf message") as caught:
            await collect(call)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_unknown_method_is_unimplemented() -> None:
    async with serving() as probe, grpc.aio.insecure_channel(probe.address) as raw:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw.unary_unary("/pdmesh.v1.Node/Nothing")(empty_pb2.Empty().SerializeToString(), timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_second_server_on_the_same_port_is_told_which_port_is_taken() -> None:
    async with serving() as probe:
        config = NodeConfig(node_id="second", port=probe.server.port)
        with pytest.raises(errors.PortInUse, match=f"127.0.0.1:{probe.server.port}"):
            await RpcServer(config, Telemetry.off()).start()


async def test_a_host_of_another_machine_is_a_configuration_error() -> None:
    config = NodeConfig(node_id="stray", host="192.0.2.1", port=45678)
    with pytest.raises(errors.BadConfig, match=r"host, port: cannot listen on 192\.0\.2\.1:45678"):
        await RpcServer(config, Telemetry.off()).start()


async def test_health_follows_set_serving_for_the_node_and_for_each_service() -> None:
    async with serving() as probe, grpc.aio.insecure_channel(probe.address) as raw:
        stub = health_pb2_grpc.HealthStub(raw)
        for is_serving in (True, False):
            probe.server.set_serving(is_serving)
            for service in ("", "pdmesh.v1.Node"):
                reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
                assert (reply.status == health_pb2.HealthCheckResponse.SERVING) is is_serving
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=10)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_says_not_serving_until_the_node_says_otherwise() -> None:
    async with serving() as probe, grpc.aio.insecure_channel(probe.address) as raw:
        reply = await health_pb2_grpc.HealthStub(raw).Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_node_that_does_not_serve_or_drains_is_alive_until_it_is_said_not_to_be() -> None:
    async with serving() as probe, grpc.aio.insecure_channel(probe.address) as raw:
        stub = health_pb2_grpc.HealthStub(raw)

        async def statuses() -> list[str]:
            replies = [
                await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
                for service in ("", LIVENESS_SERVICE)
            ]
            return [health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status) for reply in replies]

        assert await statuses() == ["NOT_SERVING", "SERVING"]
        probe.server.set_serving(True)
        await probe.server.begin_drain()
        probe.server.set_serving(True)
        assert await statuses() == ["NOT_SERVING", "SERVING"]
        probe.server.set_alive(False)
        assert await statuses() == ["NOT_SERVING", "NOT_SERVING"]


async def test_a_health_watcher_outlives_the_default_deadline_and_does_not_hold_up_a_stop() -> None:
    async with (
        serving(config=NodeConfig(node_id="probe", default_deadline_s=0.01)) as probe,
        grpc.aio.insecure_channel(probe.address) as raw,
    ):
        watch = health_pb2_grpc.HealthStub(raw).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        probe.server.set_serving(True)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        await asyncio.wait_for(probe.server.stop(60), 10)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_reflection_lists_the_services() -> None:
    async with serving(decode=ScriptedDecode(two_responses)) as probe, grpc.aio.insecure_channel(probe.address) as raw:
        call = reflection_pb2_grpc.ServerReflectionStub(raw).ServerReflectionInfo(timeout=10)
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        names = {service.name for service in (await call.read()).list_services_response.service}
        assert {"pdmesh.v1.Node", "pdmesh.v1.Decode", "grpc.health.v1.Health"} <= names


async def test_the_node_service_reports_and_clears() -> None:
    async with serving() as probe:
        info = await probe.channel.unary(probe.node.GetNodeInfo, mesh_pb2.GetNodeInfoRequest(), timeout_s=10)
        status = await probe.channel.unary(probe.node.GetNodeStatus, mesh_pb2.GetNodeStatusRequest(), timeout_s=10)
        await probe.channel.unary(probe.node.ClearCache, mesh_pb2.ClearCacheRequest(), timeout_s=10)
        assert (info.node_id, status.num_steps) == ("probe", 7)


async def test_clearing_the_cache_of_a_busy_node_is_a_failed_precondition() -> None:
    async with serving(reporter=FixedReporter(is_idle=False)) as probe:
        with pytest.raises(errors.RemoteError, match="while requests or transfers are live") as caught:
            await probe.channel.unary(probe.node.ClearCache, mesh_pb2.ClearCacheRequest(), timeout_s=10)
        assert caught.value.code_name == "FAILED_PRECONDITION"


async def test_a_refused_connection_is_unavailable_at_once_and_names_the_address() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        channel = connect(address, max_message_bytes=4096)
        stub = channel.stub(mesh_pb2_grpc.NodeStub)
        with pytest.raises(errors.PeerUnavailable, match=address) as caught:
            await asyncio.wait_for(
                channel.unary(stub.GetNodeInfo, mesh_pb2.GetNodeInfoRequest(), timeout_s=60), timeout=10
            )
        assert caught.value.address == address
        await channel.close()


async def test_the_end_of_the_time_that_a_node_is_followed_for_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pdmesh.rpc")
    async with serving(decode=ScriptedDecode(one_response_then_never)) as probe:
        following = probe.channel.server_stream(probe.node.Follow, mesh_pb2.FollowRequest(), timeout_s=0.2)
        with pytest.raises(errors.DeadlineExceeded):
            await collect(following)
        with pytest.raises(errors.DeadlineExceeded):
            await collect(generate(probe, timeout_s=0.2))
        # The caller's clock ran out as well: its cancellation may come before the server's own timer fires.
        while not re.search("Decode/Generate (ended in DEADLINE_EXCEEDED|cancelled by the caller)", caplog.text):
            await asyncio.sleep(0.01)
    assert "Follow" not in caplog.text

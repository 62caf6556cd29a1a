"""A server that drains: what it finishes, what it refuses and how a caller knows, what it tells and logs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc
import pytest
from pdmesh.v1 import decode_pb2, decode_pb2_grpc, handoff_pb2, mesh_pb2, prefill_pb2
from support.fake_mesh import until

from node_runtime import errors
from node_runtime.config import NodeConfig
from node_runtime.rpc import DuplexCall, RpcContext, watch_health
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

Requests = AsyncIterator[handoff_pb2.HandoffRequest]


async def collect(responses: AsyncIterator[decode_pb2.DecodeResponse]) -> list[decode_pb2.DecodeResponse]:
    return [response async for response in responses]


def generate(probe: Probe, timeout_s: float = 10.0) -> AsyncIterator[decode_pb2.DecodeResponse]:
    return probe.channel.server_stream(probe.decode.Generate, decode_pb2.DecodeRequest(), timeout_s=timeout_s)


async def bootstrap_until_refused(probe: Probe) -> None:
    while True:
        await probe.channel.unary(probe.prefill.Bootstrap, prefill_pb2.BootstrapRequest(), timeout_s=10)


async def never_called(requests: Requests, context: RpcContext) -> AsyncIterator[handoff_pb2.HandoffResponse]:
    raise AssertionError("a draining node began a handoff")
    yield


async def node_status(probe: Probe) -> mesh_pb2.NodeStatus:
    return await probe.channel.unary(probe.node.GetNodeStatus, mesh_pb2.GetNodeStatusRequest(), timeout_s=10)


async def one_health(probe: Probe) -> AsyncIterator[bool]:
    async with aclosing(watch_health(probe.channel, timeout_s=10)) as healths:
        yield await anext(healths)


async def test_stopping_lets_a_running_call_finish_and_refuses_new_ones() -> None:
    may_finish = asyncio.Event()

    async def body(request: decode_pb2.DecodeRequest, context: RpcContext) -> AsyncIterator[decode_pb2.DecodeResponse]:
        yield tokens(1)
        await may_finish.wait()
        yield tokens(2)

    async with serving(decode=ScriptedDecode(body), prefill=ScriptedPrefill(never_called)) as probe:
        running = generate(probe, 60)
        assert await anext(running) == tokens(1)
        stopping = asyncio.create_task(probe.server.stop(60))
        with pytest.raises(errors.PeerDraining, match="node probe is draining") as caught:
            await bootstrap_until_refused(probe)
        assert caught.value.node_id == "probe"
        may_finish.set()
        assert [response async for response in running] == [tokens(2)]
        await stopping


async def test_a_stream_both_ways_hears_that_the_node_drains_where_it_reads_and_where_it_sends() -> None:
    async with serving(prefill=ScriptedPrefill(never_called)) as probe:
        await probe.server.begin_drain()
        async with probe.channel.duplex(probe.prefill.Handoff, timeout_s=10) as call:
            with pytest.raises(errors.PeerDraining, match="node probe is draining"):
                await anext(aiter(call))
            with pytest.raises(errors.PeerDraining, match="node probe is draining"):
                await call.send(handoff_pb2.HandoffRequest())


async def test_a_refusal_that_meets_a_write_is_never_taken_for_a_defect_of_the_peer() -> None:
    async def send_for_ever(call: DuplexCall[handoff_pb2.HandoffRequest, handoff_pb2.HandoffResponse]) -> None:
        while True:
            await call.send(handoff_pb2.HandoffRequest())

    async def one_call(probe: Probe) -> None:
        async with probe.channel.duplex(probe.prefill.Handoff, timeout_s=30) as call:
            sending = asyncio.create_task(send_for_ever(call))
            with pytest.raises(errors.PeerUnavailable):
                await anext(aiter(call))
            with pytest.raises(errors.PeerUnavailable):
                await sending

    async with serving(prefill=ScriptedPrefill(never_called)) as probe:
        await probe.server.begin_drain()
        for _ in range(20):
            await asyncio.gather(*(one_call(probe) for _ in range(5)))


async def test_a_refusal_by_a_node_further_on_still_names_the_node_that_drains() -> None:
    async with serving(decode=ScriptedDecode(two_responses)) as back:

        async def outer(
            request: decode_pb2.DecodeRequest, context: RpcContext
        ) -> AsyncIterator[decode_pb2.DecodeResponse]:
            async for response in back.channel.server_stream(back.decode.Generate, request):
                yield response

        config = NodeConfig(node_id="front")
        async with serving(decode=ScriptedDecode(outer), config=config) as front:
            await back.server.begin_drain()
            with pytest.raises(errors.PeerDraining) as caught:
                await collect(generate(front))
    assert caught.value.node_id == "probe"
    assert caught.value.address == front.address


async def test_the_drain_call_makes_the_node_refuse_work_and_say_so_before_it_answers() -> None:
    config = NodeConfig(node_id="probe", drain_grace_s=7)
    async with serving(decode=ScriptedDecode(one_response_then_never), config=config) as probe:
        probe.server.set_serving(True)
        running = generate(probe, 60)
        assert await anext(running) == tokens(1)
        answers = [await probe.channel.unary(probe.node.Drain, mesh_pb2.DrainRequest(), timeout_s=10) for _ in range(2)]
        expected = mesh_pb2.DrainResponse(node_id="probe", num_running_calls=1, grace_s=7)
        assert answers[0] == expected
        expected.was_draining = True
        assert answers[1] == expected
        with pytest.raises(errors.PeerDraining):
            await collect(generate(probe))
        status = await node_status(probe)
        assert (status.serving, status.draining, status.num_steps) == (False, True, 7)
        assert [health async for health in one_health(probe)] == [False]
        # A peer that comes and goes changes nothing any more.
        probe.server.set_serving(True)
        assert [health async for health in one_health(probe)] == [False]
        assert all(reason.startswith("told to drain by ") for reason in probe.drains)
        assert len(probe.drains) == 2


async def test_a_node_that_does_not_drain_says_so() -> None:
    async with serving() as probe:
        status = await node_status(probe)
        assert (status.serving, status.draining) == (True, False)


async def test_a_watcher_of_the_health_hears_of_a_drain_while_calls_still_run() -> None:
    async with serving(decode=ScriptedDecode(one_response_then_never)) as probe:
        probe.server.set_serving(True)
        running = generate(probe, 60)
        assert await anext(running) == tokens(1)
        async with aclosing(watch_health(probe.channel, timeout_s=10)) as healths:
            while not await anext(healths):
                pass
            await probe.server.begin_drain()
            assert not await anext(healths)
        assert probe.server.num_running_calls == 1


async def test_the_end_of_a_node_ends_the_watch_of_its_health() -> None:
    async with serving() as probe, aclosing(watch_health(probe.channel, timeout_s=60)) as healths:
        assert not await anext(healths)
        await probe.server.stop(0)
        with pytest.raises(errors.PeerUnavailable):
            await anext(healths)


async def test_a_drain_waits_for_no_question_about_the_node() -> None:
    class SlowReporter(FixedReporter):
        async def status(self) -> mesh_pb2.NodeStatus:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

    asked = asyncio.Event()
    async with serving(reporter=SlowReporter()) as probe:
        asking = asyncio.create_task(node_status(probe))
        await asked.wait()
        await asyncio.wait_for(probe.server.stop(60), 10)
        with pytest.raises(errors.NodeError):
            await asking


async def test_the_log_tells_what_a_drain_waited_for_and_what_became_of_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving(decode=ScriptedDecode(one_response_then_never)) as probe:
        running = [generate(probe, 60) for _ in range(2)]
        for stream in running:
            assert await anext(stream) == tokens(1)
        stopping = asyncio.create_task(probe.server.stop(0.1))
        for stream in running:
            with pytest.raises(errors.PeerDraining):
                await anext(stream)
        await stopping
    assert "draining: waiting for 2 pdmesh.v1.Decode/Generate, at most 0.1 s" in caplog.text
    assert "2 pdmesh.v1.Decode/Generate outlived the grace period of 0.1 s and were cut off" in caplog.text
    assert ": 0 of 2 calls finished" in caplog.text


async def test_a_call_that_ignores_its_end_does_not_keep_the_node_from_stopping(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node_runtime.rpc.calls._CUT_OFF_S", 0.1)
    may_end = asyncio.Event()

    async def deaf(request: decode_pb2.DecodeRequest, context: RpcContext) -> AsyncIterator[decode_pb2.DecodeResponse]:
        yield tokens(1)
        while not may_end.is_set():
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                continue

    async with serving(decode=ScriptedDecode(deaf)) as probe:
        running = generate(probe, 60)
        assert await anext(running) == tokens(1)
        stopping = asyncio.create_task(probe.server.stop(0))
        done, _ = await asyncio.wait({stopping}, timeout=20)
        may_end.set()
        assert done
        await stopping
    assert "1 pdmesh.v1.Decode/Generate go on though they were cut off" in caplog.text


async def test_a_server_that_does_not_come_to_an_end_is_left_behind(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node_runtime.rpc.server._STOP_BOUND_S", 0.1)
    async with serving() as probe:
        server = probe.server._server
        assert server is not None
        stop, may_end = server.stop, asyncio.Event()

        async def wait_for_ever(grace: float | None) -> None:
            await may_end.wait()
            await stop(grace)

        monkeypatch.setattr(server, "stop", wait_for_ever)
        stopping = asyncio.create_task(probe.server.stop(0))
        done, _ = await asyncio.wait({stopping}, timeout=20)
        may_end.set()
        assert done
        await stopping
    assert "the server is left with 0 calls: it has not stopped within 0.1 s" in caplog.text


@pytest.mark.parametrize("num_before", [0, 1])
async def test_a_call_that_is_cut_off_in_the_middle_of_a_message_still_hears_why(
    num_before: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A message that the caller is slow to take is under way for as long as the test likes."""
    begun = asyncio.Event()

    async def body(request: decode_pb2.DecodeRequest, context: RpcContext) -> AsyncIterator[decode_pb2.DecodeResponse]:
        for number in range(num_before):
            yield tokens(number)
        begun.set()
        yield tokens(*range(100_000))
        await asyncio.Event().wait()

    small_window = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536))
    async with (
        serving(decode=ScriptedDecode(body)) as probe,
        grpc.aio.insecure_channel(probe.address, options=small_window) as channel,
    ):
        call = decode_pb2_grpc.DecodeStub(channel).Generate(decode_pb2.DecodeRequest(), timeout=60)
        for number in range(num_before):
            assert await call.read() == tokens(number)
        await begun.wait()
        stopping = asyncio.create_task(probe.server.stop(0))
        await until(lambda: "were cut off" in caplog.text, "the call is cut off")
        response = await call.read()
        assert len(response.tokens.tokens) == 100_000
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert caught.value.details() == "node probe stopped before the call was done"
        assert dict(caught.value.trailing_metadata() or ())["pdmesh-draining"] == "probe"
        await stopping


async def test_calls_that_outlive_the_grace_period_end_in_unavailable() -> None:
    async with serving(decode=ScriptedDecode(one_response_then_never)) as probe:
        running = generate(probe, 60)
        assert await anext(running) == tokens(1)
        stopping = asyncio.create_task(probe.server.stop(0))
        with pytest.raises(errors.PeerDraining, match="node probe stopped before the call was done"):
            await anext(running)
        await stopping

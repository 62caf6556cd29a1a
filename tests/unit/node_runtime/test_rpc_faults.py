"""Peers that freeze, vanish and come back, as real processes; and what an idle node costs."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import grpc
import pytest
from pdmesh.v1 import decode_pb2, decode_pb2_grpc, mesh_pb2, mesh_pb2_grpc, prefill_pb2_grpc

from node_runtime.errors import PeerUnavailable
from node_runtime.rpc import Channel, ChannelPool, connect

pytestmark = pytest.mark.mesh

SERVER = """
import asyncio, sys
from pdmesh.v1 import decode_pb2, decode_pb2_grpc
from node_runtime.config import NodeConfig
from node_runtime.rpc import RpcServer, Telemetry

class Decode:
    async def Generate(self, request, context):
        try:
            yield decode_pb2.DecodeResponse()
            await asyncio.Event().wait()
        finally:
            print("handler ended", flush=True)

async def main():
    server = RpcServer(NodeConfig(node_id="peer", port=int(sys.argv[1])), Telemetry.off())
    server.add(decode_pb2_grpc.add_DecodeServicer_to_server, Decode())
    print(await server.start(), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@contextmanager
def peer_process(port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(port)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


async def first_response(channel: Channel) -> decode_pb2.DecodeResponse:
    stub = channel.stub(decode_pb2_grpc.DecodeStub)
    return await anext(channel.server_stream(stub.Generate, decode_pb2.DecodeRequest(), timeout_s=60))


async def first_response_when_back(channel: Channel) -> decode_pb2.DecodeResponse:
    while True:
        try:
            return await first_response(channel)
        except PeerUnavailable:
            await asyncio.sleep(0)


def cpu_ticks_of(process: subprocess.Popen[str]) -> int:
    with open(f"/proc/{process.pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


async def test_a_frozen_peer_is_noticed_long_before_the_deadline() -> None:
    with peer_process() as (process, port):
        channel = connect(f"127.0.0.1:{port}", max_message_bytes=4096)
        stub = channel.stub(decode_pb2_grpc.DecodeStub)
        stream = channel.server_stream(stub.Generate, decode_pb2.DecodeRequest(), timeout_s=600)
        await anext(stream)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(PeerUnavailable):
            await anext(stream)
        await channel.close()


async def test_a_killed_peer_fails_its_calls_at_once_and_serves_again_when_it_is_back() -> None:
    pool = ChannelPool(max_message_bytes=4096)
    with peer_process() as (process, port):
        channel = pool.get(f"127.0.0.1:{port}")
        stub = channel.stub(decode_pb2_grpc.DecodeStub)
        stream = channel.server_stream(stub.Generate, decode_pb2.DecodeRequest(), timeout_s=600)
        await anext(stream)
        process.kill()
        with pytest.raises(PeerUnavailable, match=f"127.0.0.1:{port}"):
            await anext(stream)
    with peer_process(port):
        assert await first_response_when_back(channel) == decode_pb2.DecodeResponse()
    await pool.close()


async def test_a_listener_that_never_speaks_is_unavailable_long_before_the_deadline() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        channel = connect(f"127.0.0.1:{listener.getsockname()[1]}", max_message_bytes=4096)
        with pytest.raises(PeerUnavailable):
            await first_response(channel)
        await channel.close()


async def test_a_peer_whose_answers_are_no_messages_is_unavailable(caplog: pytest.LogCaptureFixture) -> None:
    async def answer(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        await context.write(b"\xff\xff")

    class Garbling(grpc.GenericRpcHandler):
        def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            return grpc.stream_stream_rpc_method_handler(answer)

    server = grpc.aio.server(handlers=(Garbling(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = connect(f"127.0.0.1:{port}", max_message_bytes=4096)
    with pytest.raises(PeerUnavailable, match="not a message of the call"):
        await first_response(channel)
    stub = channel.stub(mesh_pb2_grpc.NodeStub)
    with pytest.raises(PeerUnavailable, match="not a message of the call"):
        await channel.unary(stub.GetNodeInfo, mesh_pb2.GetNodeInfoRequest(), timeout_s=10)
    async with channel.duplex(channel.stub(prefill_pb2_grpc.PrefillStub).Handoff, timeout_s=10) as call:
        with pytest.raises(PeerUnavailable, match="not a message of the call"):
            await anext(aiter(call))
    await channel.close()
    await server.stop(None)
    assert not caplog.records


async def test_a_closed_pool_cancels_the_calls_of_its_channels_on_the_peer() -> None:
    pool = ChannelPool(max_message_bytes=4096)
    with peer_process() as (process, port):
        channel = pool.get(f"127.0.0.1:{port}")
        assert pool.get(f"127.0.0.1:{port}") is channel
        stub = channel.stub(decode_pb2_grpc.DecodeStub)
        stream = channel.server_stream(stub.Generate, decode_pb2.DecodeRequest(), timeout_s=600)
        await anext(stream)
        await pool.close()
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == "handler ended\n"


async def test_an_idle_node_uses_no_cpu() -> None:
    with peer_process() as (process, port):
        channel = connect(f"127.0.0.1:{port}", max_message_bytes=4096)
        await first_response(channel)
        ticks_before = cpu_ticks_of(process)
        with pytest.raises(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, 2)
        used_s = (cpu_ticks_of(process) - ticks_before) / os.sysconf("SC_CLK_TCK")
        assert used_s <= 0.05
        await channel.close()

"""gRPC calls without sockets: what node_runtime.rpc needs of gRPC's channels and servers, over a wire that is supplied.

The generated stubs and servicers, the call guard and the channel wrapper run on it unchanged, messages are serialised,
and calls fail as gRPC's do: at once when the peer is down, with UNAVAILABLE when the connection breaks, with CANCELLED
and DEADLINE_EXCEEDED by whoever notices first. Flow control, compression and metadata of responses are left out. It
knows no fault, no latency and no clock but the event loop's: those belong to the wire.
"""

from __future__ import annotations

from typing import cast

import grpc

from node_runtime.rpc.loopback_client import LoopbackChannel
from node_runtime.rpc.loopback_server import LoopbackServer
from node_runtime.rpc.loopback_wire import Wire


class LoopbackTransport:
    """A `Transport` over a wire."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def channel(self, address: str, *, max_message_bytes: int) -> grpc.aio.Channel:
        del max_message_bytes
        return cast("grpc.aio.Channel", LoopbackChannel(self._wire, address))

    def server(self, interceptor: grpc.aio.ServerInterceptor, *, max_message_bytes: int) -> grpc.aio.Server:
        del max_message_bytes
        return cast("grpc.aio.Server", LoopbackServer(self._wire, interceptor))

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        return server.add_insecure_port(address)

    def credentials_stamp(self) -> object:
        return None

"""Where channels and servers come from: gRPC over sockets, or something that behaves like it inside one process."""

from __future__ import annotations

from typing import Protocol

import grpc

from node_runtime.rpc.options import channel_options, server_options


class Transport(Protocol):
    """Makes the two ends of every call of a node."""

    def channel(self, address: str, *, max_message_bytes: int) -> grpc.aio.Channel:
        """A channel to `host:port`; nothing is dialled yet."""
        ...

    def server(self, interceptor: grpc.aio.ServerInterceptor, *, max_message_bytes: int) -> grpc.aio.Server:
        """A server that asks `interceptor` for the handler of every call; it listens nowhere yet."""
        ...

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Makes a server of this transport listen at `host:port`; the port. Raises RuntimeError when it cannot."""
        ...

    def credentials_stamp(self) -> object:
        """Changes when channels should be made anew because their credentials were replaced."""
        ...


class SocketTransport:
    """gRPC as it is."""

    __slots__ = ()

    def channel(self, address: str, *, max_message_bytes: int) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(address, options=channel_options(max_message_bytes))

    def server(self, interceptor: grpc.aio.ServerInterceptor, *, max_message_bytes: int) -> grpc.aio.Server:
        return grpc.aio.server(interceptors=(interceptor,), options=server_options(max_message_bytes))

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        return server.add_insecure_port(address)

    def credentials_stamp(self) -> object:
        return None

"""Channels to other nodes.

Every call made here carries a deadline (its own, cut to that of the call being served) and the trace context, fails at
once when the peer is down, and raises NodeError only. Lives on one event loop; `ChannelPool` owns the channels.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from typing import Final, Generic, TypeVar, cast

import grpc

from node_runtime.address import parse_address
from node_runtime.errors import NodeError, PeerUnavailable
from node_runtime.rpc.deadlines import call_timeout_s
from node_runtime.rpc.errors import error_from_rpc
from node_runtime.rpc.parsing_channel import ParsingChannel, Unreadable
from node_runtime.rpc.telemetry import rpc_metadata
from node_runtime.rpc.transport import SocketTransport, Transport

# How long calls may go on over a connection whose certificate was replaced.
_RETIREMENT_S: Final = 3600.0

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
StubT = TypeVar("StubT")


class Channel:
    """A connection to one node, made when it is first used and remade when it broke."""

    def __init__(
        self,
        address: str,
        *,
        max_message_bytes: int,
        transport: Transport | None = None,
        metadata: Iterable[tuple[str, str]] = (),
    ) -> None:
        """`transport` makes the connection; by default gRPC's own. `metadata` goes with every call."""
        self.address = address
        self._metadata = tuple(metadata)
        # By their classes: making one takes longer than many a call.
        self._stubs: dict[object, object] = {}
        self._channel = (transport or SocketTransport()).channel(address, max_message_bytes=max_message_bytes)

    def stub(self, stub_class: Callable[[grpc.aio.Channel], StubT]) -> StubT:
        """The generated stub on this channel. Pass its methods to the calls below."""
        stub = self._stubs.get(stub_class)
        if stub is None:
            stub = self._stubs[stub_class] = stub_class(cast("grpc.aio.Channel", ParsingChannel(self._channel)))
        return cast("StubT", stub)

    async def unary(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT],
        request: RequestT,
        *,
        timeout_s: float | None = None,
    ) -> ResponseT:
        """One request, one response. Raises NodeError."""
        try:
            response = await method(request, timeout=call_timeout_s(timeout_s), metadata=self._sent_metadata())
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, self.address) from None
        return _readable(response, self.address)

    async def server_stream(
        self,
        method: grpc.aio.UnaryStreamMultiCallable[RequestT, ResponseT],
        request: RequestT,
        *,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[ResponseT, None]:
        """One request, many responses. Raises NodeError. Leaving the iteration early (`aclosing`) cancels the call."""
        call = method(request, timeout=call_timeout_s(timeout_s), metadata=self._sent_metadata())
        try:
            async for response in call:
                yield _readable(response, self.address)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, self.address) from None
        finally:
            call.cancel()

    def duplex(
        self,
        method: grpc.aio.StreamStreamMultiCallable[RequestT, ResponseT],
        *,
        timeout_s: float | None = None,
    ) -> DuplexCall[RequestT, ResponseT]:
        """Opens a stream both ways. Raises DeadlineExceeded when no time is left."""
        call = method(timeout=call_timeout_s(timeout_s), metadata=self._sent_metadata())
        return DuplexCall(call, self.address)

    async def close(self, grace_s: float | None = None) -> None:
        """Cancels what still runs on it, after `grace_s`."""
        await self._channel.close(grace_s)

    def _sent_metadata(self) -> tuple[tuple[str, str], ...]:
        return (*rpc_metadata(), *self._metadata)


class DuplexCall(Generic[RequestT, ResponseT]):
    """A stream both ways: send from one coroutine, iterate over the responses in another. Ends when the peer ends it.

    As an async context manager it cancels the call on the way out, which is without effect on a finished one.
    """

    def __init__(self, call: grpc.aio.StreamStreamCall[RequestT, ResponseT], address: str) -> None:
        self._call = call
        self._address = address

    async def send(self, request: RequestT) -> None:
        """Raises NodeError when the call has ended."""
        try:
            await self._call.write(request)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, self._address) from None
        except asyncio.InvalidStateError:
            raise await self._end() from None

    async def done_sending(self) -> None:
        """Tells the peer that no message follows. Without effect on a call that has ended."""
        if not self._call.done():
            await self._call.done_writing()

    async def __aiter__(self) -> AsyncIterator[ResponseT]:
        try:
            async for response in self._call:
                yield _readable(response, self._address)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, self._address) from None

    def cancel(self) -> None:
        """The peer's handler is cancelled too."""
        self._call.cancel()

    async def __aenter__(self) -> DuplexCall[RequestT, ResponseT]:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._call.cancel()

    async def _end(self) -> NodeError:
        code = await self._call.code()
        if code is grpc.StatusCode.OK:
            return PeerUnavailable(self._address, "the peer ended the stream")
        details, trailers = await self._call.details(), await self._call.trailing_metadata()
        return error_from_rpc(grpc.aio.AioRpcError(code, trailing_metadata=trailers, details=details), self._address)


def _readable(response: ResponseT, address: str) -> ResponseT:
    """Raises PeerUnavailable: with one that answers in another tongue there is no talking either."""
    if isinstance(response, Unreadable):
        raise PeerUnavailable(address, "what it answers is not a message of the call")
    return response


def connect(
    address: str,
    *,
    max_message_bytes: int,
    transport: Transport | None = None,
    metadata: Iterable[tuple[str, str]] = (),
) -> Channel:
    """A channel of its own to `host:port`; nothing is dialled yet. Raises InvalidRequest for a malformed address."""
    parse_address(address)
    return Channel(address, max_message_bytes=max_message_bytes, transport=transport, metadata=metadata)


class ChannelPool:
    """One shared channel per address."""

    def __init__(self, *, max_message_bytes: int, transport: Transport | None = None) -> None:
        self._max_message_bytes = max_message_bytes
        self._transport = transport or SocketTransport()
        self._stamp = self._transport.credentials_stamp()
        self._channels: dict[str, Channel] = {}
        self._retired: set[asyncio.Task[None]] = set()

    def get(self, address: str) -> Channel:
        """The channel to `address`, made on first use. Raises InvalidRequest for a malformed address."""
        self._retire_if_renewed()
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = connect(
                address, max_message_bytes=self._max_message_bytes, transport=self._transport
            )
        return channel

    async def drop(self, address: str) -> None:
        """Closes the channel to `address`, with what still runs on it. Without effect when there is none."""
        channel = self._channels.pop(address, None)
        if channel is not None:
            await channel.close()

    async def close(self) -> None:
        """Closes every channel. The pool can be used again."""
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()
        for retired in self._retired:
            retired.cancel()
        await asyncio.gather(*self._retired, return_exceptions=True)

    def _retire_if_renewed(self) -> None:
        """With new credentials, new channels; what runs on the old ones is finished."""
        stamp = self._transport.credentials_stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            task = asyncio.get_running_loop().create_task(channel.close(_RETIREMENT_S))
            self._retired.add(task)
            task.add_done_callback(self._retired.discard)

"""The calling side of a loopback transport: a channel and its calls, as grpc.aio has them."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable

import grpc

from node_runtime.rpc.loopback_wire import (
    CancelCall,
    Connection,
    Data,
    Deserializer,
    EndCall,
    Frame,
    Metadata,
    OpenCall,
    Serializer,
    Wire,
)
from node_runtime.rpc.options import CONNECT_TIMEOUT_S

# How long a channel fails calls at once after it could not connect.
_BACKOFF_S = 0.1


class LoopbackChannel:
    """grpc.aio.Channel to one address."""

    def __init__(self, wire: Wire, address: str) -> None:
        self._wire = wire
        self._address = address
        self._connection: Connection | None = None
        # The newest attempt to connect; what becomes of older ones is nobody's concern.
        self._line: _Line | None = None
        self._is_dialling = False
        self._dial_timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._failed_until_s = 0.0
        self._failure = ""
        self._call_ids = itertools.count(1)
        self._calls: dict[int, _ClientCall] = {}
        self._unsent: list[Frame] = []

    def unary_unary(
        self,
        method: str,
        request_serializer: Serializer,
        response_deserializer: Deserializer,
        _registered_method: bool = False,
    ) -> Callable[..., _ClientCall]:
        """How generated stubs make the callable of a method; the other three kinds differ in nothing here."""

        def call(
            request: object = None, *, timeout: float | None = None, metadata: Iterable[tuple[str, str | bytes]] = ()
        ) -> _ClientCall:
            data = None if request is None else request_serializer(request)
            return self._open(method, data, timeout, tuple(metadata), request_serializer, response_deserializer)

        return call

    unary_stream = stream_unary = stream_stream = unary_unary

    async def close(self, grace: float | None = None) -> None:
        del grace
        self._is_closed = True
        for call in list(self._calls.values()):
            call.cancel()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _open(
        self,
        method: str,
        data: bytes | None,
        timeout_s: float | None,
        metadata: Metadata,
        serialize: Serializer,
        deserialize: Deserializer,
    ) -> _ClientCall:
        call = _ClientCall(self, next(self._call_ids), serialize, deserialize, timeout_s)
        if self._is_closed:
            call.end(grpc.StatusCode.CANCELLED, "the channel is closed")
        elif self._connection is None and asyncio.get_running_loop().time() < self._failed_until_s:
            call.end(grpc.StatusCode.UNAVAILABLE, self._failure)
        else:
            self._calls[call.call_id] = call
            self.send(OpenCall(call.call_id, method, metadata, timeout_s, data))
        return call

    def send(self, frame: Frame) -> None:
        if self._connection is not None:
            self._connection.send(frame)
            return
        self._unsent.append(frame)
        if not self._is_dialling:
            self._is_dialling = True
            line = self._line = _Line(self)
            self._dial_timer = asyncio.get_running_loop().call_later(
                CONNECT_TIMEOUT_S, line.on_dialled, "connection timed out"
            )
            self._wire.dial(self._address, line, line.on_dialled)

    def forget(self, call_id: int) -> None:
        self._calls.pop(call_id, None)

    def on_dialled(self, line: _Line, end: Connection | str) -> None:
        if line is not self._line or not self._is_dialling:
            if not isinstance(end, str):
                end.close()
            return
        self._is_dialling = False
        if self._dial_timer is not None:
            self._dial_timer.cancel()
        frames, self._unsent = self._unsent, []
        if isinstance(end, str):
            self._failure = f"failed to connect to all addresses; last error: {end}"
            self._failed_until_s = asyncio.get_running_loop().time() + _BACKOFF_S
            self._end_all(self._failure)
        elif self._is_closed:
            end.close()
        else:
            self._connection = end
            for frame in frames:
                end.send(frame)

    def on_frame(self, frame: Frame) -> None:
        call = self._calls.get(frame.call_id)
        if call is None:
            return
        if isinstance(frame, Data):
            call.receive(frame.data)
        elif isinstance(frame, EndCall):
            call.end(frame.code, frame.details, frame.metadata)

    def on_broken(self, line: _Line, reason: str) -> None:
        if line is not self._line:
            return
        if self._is_dialling:
            self.on_dialled(line, reason)
        else:
            self._connection = None
            self._end_all(reason)

    def _end_all(self, reason: str) -> None:
        for call in list(self._calls.values()):
            call.end(grpc.StatusCode.UNAVAILABLE, reason)


class _Line:
    """One attempt to connect, and the connection that comes of it."""

    def __init__(self, channel: LoopbackChannel) -> None:
        self._channel = channel

    def on_dialled(self, end: Connection | str) -> None:
        self._channel.on_dialled(self, end)

    def on_frame(self, frame: Frame) -> None:
        self._channel.on_frame(frame)

    def on_broken(self, reason: str) -> None:
        self._channel.on_broken(self, reason)


class _ClientCall:
    """What the four kinds of call objects of grpc.aio have in common with one another."""

    def __init__(
        self,
        channel: LoopbackChannel,
        call_id: int,
        serialize: Serializer,
        deserialize: Deserializer,
        timeout_s: float | None,
    ) -> None:
        self.call_id = call_id
        self._channel = channel
        self._serialize = serialize
        self._deserialize = deserialize
        self._messages: deque[bytes] = deque()
        self._end: EndCall | None = None
        self._is_cancelled_here = False
        self._waiters: list[asyncio.Future[None]] = []
        self._event_loop = asyncio.get_running_loop()
        self._timer = None if timeout_s is None else self._event_loop.call_later(max(0.0, timeout_s), self._expire)

    # From the channel.

    def receive(self, data: bytes) -> None:
        self._messages.append(data)
        self._wake()

    def end(self, code: grpc.StatusCode, details: str, metadata: Metadata = ()) -> None:
        if self._end is not None:
            return
        self._end = EndCall(self.call_id, code, details, metadata)
        if self._timer is not None:
            self._timer.cancel()
        self._channel.forget(self.call_id)
        self._wake()

    # As grpc.aio has it.

    def cancel(self) -> bool:
        if self._end is not None:
            return False
        self._is_cancelled_here = True
        self._give_up(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
        return True

    def done(self) -> bool:
        return self._end is not None

    async def write(self, request: object) -> None:
        if self._end is not None:
            raise asyncio.InvalidStateError("RPC already finished.")
        self._channel.send(Data(self.call_id, self._serialize(request)))

    async def done_writing(self) -> None:
        return None

    async def code(self) -> grpc.StatusCode:
        return (await self._ended()).code

    async def details(self) -> str:
        return (await self._ended()).details

    def __await__(self) -> Generator[object, None, object]:
        return self._response().__await__()

    async def __aiter__(self) -> AsyncIterator[object]:
        while True:
            while self._messages:
                yield self._deserialize(self._messages.popleft())
            if self._end is not None:
                self._raise_unless_ok(self._end)
                return
            await self._wait()

    async def _response(self) -> object:
        self._raise_unless_ok(await self._ended())
        return self._deserialize(self._messages.popleft())

    async def _ended(self) -> EndCall:
        while self._end is None:
            await self._wait()
        return self._end

    async def _wait(self) -> None:
        """Until something has come. Cancelling whoever waits cancels the call, as in gRPC."""
        waiter = self._event_loop.create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _expire(self) -> None:
        self._give_up(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _give_up(self, code: grpc.StatusCode, details: str) -> None:
        self.end(code, details)
        self._channel.send(CancelCall(self.call_id))

    def _raise_unless_ok(self, end: EndCall) -> None:
        if self._is_cancelled_here:
            raise asyncio.CancelledError
        if end.code is not grpc.StatusCode.OK:
            trailing = grpc.aio.Metadata(*end.metadata)
            raise grpc.aio.AioRpcError(end.code, grpc.aio.Metadata(), trailing, details=end.details)

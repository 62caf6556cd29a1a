"""The serving side of a loopback transport: a server, its connections and calls, as grpc.aio has them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import NamedTuple, NoReturn, cast

import grpc

from node_runtime.rpc.loopback_wire import (
    CancelCall,
    Connection,
    Data,
    EndCall,
    Frame,
    Metadata,
    OpenCall,
    Receiver,
    Serializer,
    Wire,
)


class _CallDetails(NamedTuple):
    """grpc.HandlerCallDetails."""

    method: str
    invocation_metadata: Metadata


class LoopbackServer:
    """grpc.aio.Server on one address."""

    def __init__(self, wire: Wire, interceptor: grpc.aio.ServerInterceptor) -> None:
        self._wire = wire
        # The annotations of grpcio are those of a generator.
        self._intercept = cast(
            "Callable[..., Awaitable[grpc.RpcMethodHandler[object, object] | None]]", interceptor.intercept_service
        )
        self._handlers: dict[str, grpc.RpcMethodHandler[object, object]] = {}
        self._address = ""
        # In the order in which they came: a set's would be another one in each process.
        self._connections: dict[_ServerConnection, None] = {}

    def add_generic_rpc_handlers(self, handlers: tuple[grpc.GenericRpcHandler, ...]) -> None:
        """Not needed: generated code registers every method by name as well."""

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, grpc.RpcMethodHandler[object, object]]
    ) -> None:
        for name, handler in method_handlers.items():
            self._handlers[f"/{service_name}/{name}"] = handler

    def add_insecure_port(self, address: str) -> int:
        self._wire.listen(address, self._accept)
        self._address = address
        return int(address.rpartition(":")[2])

    async def start(self) -> None:
        return None

    async def stop(self, grace: float | None) -> None:
        del grace
        self._wire.close_listener(self._address)
        for connection in list(self._connections):
            connection.close()
        self._connections.clear()

    def _accept(self, connection: Connection) -> Receiver:
        accepted = _ServerConnection(self, connection)
        self._connections[accepted] = None
        return accepted

    def forget(self, connection: _ServerConnection) -> None:
        self._connections.pop(connection, None)

    async def handler_of(self, details: _CallDetails) -> grpc.RpcMethodHandler[object, object] | None:
        return await self._intercept(self._find, details)

    async def _find(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[object, object] | None:
        return self._handlers.get(details.method)


class _ServerConnection:
    def __init__(self, server: LoopbackServer, connection: Connection) -> None:
        self._server = server
        self._connection = connection
        self._calls: dict[int, _ServerCall] = {}

    def on_frame(self, frame: Frame) -> None:
        match frame:
            case OpenCall():
                self._calls[frame.call_id] = _ServerCall(self._server, self, self._connection, frame)
            case Data():
                if (call := self._calls.get(frame.call_id)) is not None:
                    call.receive(frame.data)
            case CancelCall():
                if (call := self._calls.get(frame.call_id)) is not None:
                    call.task.cancel()
            case EndCall():
                raise RuntimeError("a client ended a call")

    def on_broken(self, reason: str) -> None:
        del reason
        self._server.forget(self)
        for call in self._calls.values():
            call.task.cancel()

    def close(self) -> None:
        self._connection.close()
        self.on_broken("closed")

    def forget(self, call_id: int) -> None:
        self._calls.pop(call_id, None)


class _ServerCall:
    """One call and its servicer context."""

    def __init__(
        self, server: LoopbackServer, owner: _ServerConnection, connection: Connection, opened: OpenCall
    ) -> None:
        self._server = server
        self._owner = owner
        self._connection = connection
        self._opened = opened
        self._event_loop = asyncio.get_running_loop()
        self._opened_at_s = self._event_loop.time()
        self._requests: asyncio.Queue[bytes] = asyncio.Queue()
        self._serialize: Serializer | None = None
        self._end = EndCall(opened.call_id, grpc.StatusCode.OK, "", ())
        self.task = self._event_loop.create_task(self._run())

    def receive(self, data: bytes) -> None:
        self._requests.put_nowait(data)

    # The servicer context, as far as handlers use it.

    def time_remaining(self) -> float | None:
        timeout_s = self._opened.timeout_s
        if timeout_s is None:
            return None
        return max(0.0, self._opened_at_s + timeout_s - self._event_loop.time())

    def peer(self) -> str:
        return "loopback"

    def invocation_metadata(self) -> Metadata:
        return self._opened.metadata

    async def write(self, response: object) -> None:
        if self._serialize is not None:
            self._connection.send(Data(self._opened.call_id, self._serialize(response)))

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Iterable[tuple[str, str | bytes]] = ()
    ) -> NoReturn:
        self._end = EndCall(self._opened.call_id, code, details, tuple(trailing_metadata))
        raise grpc.aio.AbortError("the handler aborted the call")

    async def _run(self) -> None:
        try:
            await self._serve()
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            self._end = EndCall(self._opened.call_id, grpc.StatusCode.CANCELLED, "the call was cancelled", ())
        self._owner.forget(self._opened.call_id)
        self._connection.send(self._end)

    async def _serve(self) -> None:
        handler = await self._server.handler_of(_CallDetails(self._opened.method, self._opened.metadata))
        if handler is None:
            await self.abort(grpc.StatusCode.UNIMPLEMENTED, f"method {self._opened.method} is not there")
        self._serialize = cast("Serializer", handler.response_serializer)
        behaviour = cast(
            "Callable[[object, _ServerCall], asyncio.Future[object]]",
            handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream,
        )
        request = self._stream() if handler.request_streaming else self._request(handler)
        response = await behaviour(request, self)
        if not handler.response_streaming:
            await self.write(response)

    def _request(self, handler: grpc.RpcMethodHandler[object, object]) -> object:
        """Guarded handlers take bytes, those of gRPC's own services a message."""
        parse = handler.request_deserializer
        data = self._opened.data or b""
        return data if parse is None else parse(data)

    async def _stream(self) -> AsyncIterator[bytes]:
        while True:
            yield await self._requests.get()

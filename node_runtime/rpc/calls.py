"""What surrounds every handler: deadline, cancellation, error-to-status mapping, trace and log context.

The interceptor replaces each handler by a guarded one. Handlers stay plain coroutines and async generators: they raise
NodeError for a refusal and otherwise need to know nothing of gRPC. Owned by `RpcServer`; runs on its event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from functools import partial
from typing import Generic, NoReturn, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError

from node_runtime.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NodeDraining,
    NodeError,
    RequestCancelled,
)
from node_runtime.log_context import call_scope
from node_runtime.rpc.access import ENGINE_PROTOCOL, AccessPolicy, Caller, Credentials
from node_runtime.rpc.deadlines import deadline_within, remaining_s
from node_runtime.rpc.errors import detail_of, status_of, trailers_of
from node_runtime.rpc.status_details import make_details
from node_runtime.rpc.telemetry import Telemetry

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
ResultT = TypeVar("ResultT")

# The servicers of gRPC itself. Their streams stay open for as long as the client likes, so no deadline is put on them.
_INFRASTRUCTURE = ("/grpc.health.", "/grpc.reflection.")
# Questions about the node itself: answered until the end, and never what a drain waits for.
_ABOUT_THE_NODE = ("/pdmesh.v1.Node/", "/pdmesh.v1.Traces/")
_ENGINE_PROTOCOL = f"/{ENGINE_PROTOCOL}/"

# How long a call that was cut off may take to end, and the first message of one to be on its way.
_CUT_OFF_S = 3.0
_FIRST_WRITE_S = 2.0

_log = logging.getLogger("pdmesh.rpc")


class ServerCall:
    """The RpcContext of one call."""

    __slots__ = ("_caller", "_peer")

    def __init__(self, peer: str, caller: Caller) -> None:
        self._peer = peer
        self._caller = caller

    def time_remaining_s(self) -> float:
        return remaining_s() or 0.0

    def peer(self) -> str:
        return self._peer

    def caller(self) -> Caller:
        return self._caller


class _ShownCredentials:
    """What the caller of one call shows."""

    __slots__ = ("_metadata", "_transport")

    def __init__(
        self,
        transport: grpc.aio.ServicerContext[bytes, ResponseT],
        metadata: Iterable[tuple[str, str | bytes]],
    ) -> None:
        self._transport = transport
        self._metadata = metadata

    @property
    def authorization(self) -> str:
        value = dict(self._metadata).get("authorization", "")
        return value if isinstance(value, str) else ""

    @property
    def certificate_names(self) -> frozenset[str]:
        shown = self._transport.auth_context()
        return frozenset(name.decode("ascii", "replace") for name in shown.get("peer_dns", ()))


class CallGuard(grpc.aio.ServerInterceptor):
    """Guards every handler of a server and knows which calls are running."""

    def __init__(self, *, node_id: str, default_deadline_s: float, telemetry: Telemetry, access: AccessPolicy) -> None:
        self._node_id = node_id
        self._default_deadline_s = default_deadline_s
        self._telemetry = telemetry
        self._access = access
        # By method: the handler that was registered, and the one that takes its place.
        self._handlers: dict[str, tuple[object, object]] = {}
        self._running: dict[asyncio.Task[object], str] = {}
        self._evicted: set[asyncio.Task[object]] = set()
        self._is_draining = False

    @property
    def num_running(self) -> int:
        """Calls being served, those of gRPC's own services and questions about the node not counted."""
        return len(self._running)

    @property
    def is_draining(self) -> bool:
        """Whether new calls are refused."""
        return self._is_draining

    def begin_drain(self) -> None:
        """Refuses new calls from now on, questions about the node excepted."""
        self._is_draining = True

    async def drain(self, grace_s: float) -> None:
        """Refuses new calls and waits for the running ones; what still runs after `grace_s` ends in UNAVAILABLE."""
        self.begin_drain()
        if not self._running:
            return
        event_loop = asyncio.get_running_loop()
        began_s, num_calls = event_loop.time(), len(self._running)
        _log.info("draining: waiting for %s, at most %g s", self._describe_running(), grace_s)
        await asyncio.wait(set(self._running), timeout=grace_s)
        # In the order in which they came, so that a simulated node cuts them off in the same order each time.
        late = tuple(self._running)
        if late:
            described = self._describe_running()
            _log.warning("%s outlived the grace period of %g s and were cut off", described, grace_s)
            self._evicted.update(late)
            for task in late:
                task.cancel()
            _, deaf = await asyncio.wait(late, timeout=_CUT_OFF_S)
            if deaf:
                _log.error("%s go on though they were cut off", self._describe_running())
        waited_s = event_loop.time() - began_s
        _log.info("drained in %.1f s: %d of %d calls finished", waited_s, num_calls - len(late), num_calls)

    def _describe_running(self) -> str:
        by_method = sorted(Counter(self._running.values()).items())
        return ", ".join(f"{count} {method.removeprefix('/')}" for method, count in by_method)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[RequestT, ResponseT] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[RequestT, ResponseT] | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(_INFRASTRUCTURE):
            return handler
        known = self._handlers.get(method)
        if known is None or known[0] is not handler:
            known = self._handlers[method] = (handler, _GuardedHandler(self, handler, method).replacement())
        return cast("grpc.RpcMethodHandler[RequestT, ResponseT]", known[1])

    async def run(
        self,
        body: Callable[[ServerCall], Awaitable[ResultT]],
        transport: grpc.aio.ServicerContext[bytes, ResponseT],
        method: str,
    ) -> ResultT:
        """Runs one gRPC handler to its end and turns whatever it raises into a status."""
        # Of a call without metadata there are none.
        metadata = transport.invocation_metadata() or ()
        try:
            return await self.guarded(
                body,
                method=method,
                peer=transport.peer(),
                limit_s=cast("float | None", transport.time_remaining()),
                metadata=metadata,
                credentials=_ShownCredentials(transport, metadata),
            )
        except NodeError as error:
            await _refuse(transport, error)

    async def guarded(
        self,
        body: Callable[[ServerCall], Awaitable[ResultT]],
        *,
        method: str,
        peer: str,
        limit_s: float | None,
        metadata: Iterable[tuple[str, str | bytes]],
        credentials: Credentials,
    ) -> ResultT:
        """Runs a call, whatever it came over: admitted, counted, under a deadline, in its caller's trace, refused while
        draining.

        `limit_s` None takes the default deadline. Raises NodeError for all that goes wrong, and CancelledError when the
        running task was cancelled because its caller gave up.
        """
        task = cast("asyncio.Task[object]", asyncio.current_task())
        if not _is_about_the_node(method):
            self._running[task] = method
        try:
            with call_scope(), self._telemetry.continued(metadata):
                try:
                    caller = self._access.admit(method, credentials)
                    call = ServerCall(peer, caller)
                    limit_s = self._default_deadline_s if limit_s is None else limit_s
                    return await self._run_bounded(lambda: body(call), method, limit_s)
                except NodeError as error:
                    _log.log(_log_level(method, error), "%s ended in %s: %s", method, status_of(error).name, error)
                    raise
        finally:
            self._running.pop(task, None)
            self._evicted.discard(task)

    async def _run_bounded(self, body: Callable[[], Awaitable[ResultT]], method: str, limit_s: float) -> ResultT:
        timeout = asyncio.timeout(limit_s)
        try:
            if self._is_draining and not _is_about_the_node(method):
                raise NodeDraining(self._node_id, f"node {self._node_id} is draining")
            with deadline_within(limit_s):
                async with timeout:
                    return await body()
        except asyncio.CancelledError:
            raise self._why_cancelled(method) from None
        except NodeError:
            raise
        except Exception as error:
            if timeout.expired() and isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"deadline of {limit_s:.3f} s exceeded") from None
            _log.exception("%s failed", method)
            raise InternalError(f"internal error; the log of node {self._node_id} has the details") from error

    def _why_cancelled(self, method: str) -> BaseException:
        """What a cancelled call raises: CancelledError only when its caller gave up."""
        task = cast("asyncio.Task[object]", asyncio.current_task())
        if task in self._evicted:
            task.uncancel()
            return NodeDraining(self._node_id, f"node {self._node_id} stopped before the call was done")
        if task.cancelling():
            _log.log(_log_level(method), "%s cancelled by the caller", method)
            return asyncio.CancelledError()
        # Nobody cancelled the call: something the handler awaited was cancelled. gRPC would leave the client waiting.
        return RequestCancelled("the work of this call was cancelled")


def _is_about_the_node(method: str) -> bool:
    """Whether it asks about the node itself: such calls are answered to the end, and never what a drain waits for."""
    if method.startswith(_ENGINE_PROTOCOL):
        return method != f"{_ENGINE_PROTOCOL}Generate"
    return method.startswith(_ABOUT_THE_NODE)


def _log_level(method: str, error: NodeError | None = None) -> int:
    """Of a call that failed, or (None) was cancelled. No news: who follows a node asks for a while and then again;
    who looks up what is not there, or not yet.
    """
    is_planned = (
        error is None
        or isinstance(error, DeadlineExceeded | RequestCancelled)
        or status_of(error) is grpc.StatusCode.NOT_FOUND
    )
    return logging.DEBUG if _is_about_the_node(method) and is_planned else logging.INFO


async def _refuse(transport: grpc.aio.ServicerContext[bytes, ResponseT], error: NodeError) -> NoReturn:
    code = status_of(error)
    message = detail_of(error)
    try:
        await transport.abort(code, message, (*make_details(error, code.value[0], message), *trailers_of(error)))
    except grpc.aio.InternalError:
        # The caller is gone, as when its deadline has passed on its side first. Of anything else gRPC logs a traceback.
        raise asyncio.CancelledError from None


class _GuardedHandler(Generic[RequestT, ResponseT]):
    """The handler of one method with the guard around it.

    It takes requests as bytes: what cannot be parsed is the client's mistake and becomes INVALID_ARGUMENT here, where
    gRPC would answer UNKNOWN. It writes responses itself, so a generator is closed the moment its call ends.
    """

    def __init__(
        self,
        guard: CallGuard,
        handler: grpc.RpcMethodHandler[RequestT, ResponseT],
        method: str,
    ) -> None:
        self._guard = guard
        self._handler = handler
        self._method = method

    def replacement(self) -> grpc.RpcMethodHandler[RequestT, ResponseT]:
        handler = self._handler
        make, behaviour = {
            (False, False): (grpc.unary_unary_rpc_method_handler, self._unary_unary),
            (False, True): (grpc.unary_stream_rpc_method_handler, self._unary_stream),
            (True, False): (grpc.stream_unary_rpc_method_handler, self._stream_unary),
            (True, True): (grpc.stream_stream_rpc_method_handler, self._stream_stream),
        }[handler.request_streaming, handler.response_streaming]
        # The stubs of grpcio describe the synchronous handlers only.
        untyped_make = cast("Callable[..., grpc.RpcMethodHandler[RequestT, ResponseT]]", make)
        return untyped_make(behaviour, request_deserializer=None, response_serializer=handler.response_serializer)

    async def _unary_unary(self, data: bytes, transport: grpc.aio.ServicerContext[bytes, ResponseT]) -> ResponseT:
        serve = cast("Callable[[RequestT, ServerCall], Awaitable[ResponseT]]", self._handler.unary_unary)
        return await self._guard.run(lambda call: serve(self._parse(data), call), transport, self._method)

    async def _stream_unary(
        self, messages: AsyncIterable[bytes], transport: grpc.aio.ServicerContext[bytes, ResponseT]
    ) -> ResponseT:
        serve = cast(
            "Callable[[AsyncIterator[RequestT], ServerCall], Awaitable[ResponseT]]", self._handler.stream_unary
        )
        return await self._guard.run(lambda call: serve(self._parse_all(messages), call), transport, self._method)

    async def _unary_stream(self, data: bytes, transport: grpc.aio.ServicerContext[bytes, ResponseT]) -> None:
        serve = cast("Callable[[RequestT, ServerCall], AsyncGenerator[ResponseT, None]]", self._handler.unary_stream)
        await self._guard.run(
            lambda call: _write_all(serve(self._parse(data), call), transport), transport, self._method
        )

    async def _stream_stream(
        self, messages: AsyncIterable[bytes], transport: grpc.aio.ServicerContext[bytes, ResponseT]
    ) -> None:
        serve = cast(
            "Callable[[AsyncIterator[RequestT], ServerCall], AsyncGenerator[ResponseT, None]]",
            self._handler.stream_stream,
        )
        await self._guard.run(
            lambda call: _write_all(serve(self._parse_all(messages), call), transport), transport, self._method
        )

    def _parse(self, data: bytes) -> RequestT:
        deserialize = cast("Callable[[bytes], RequestT]", self._handler.request_deserializer)
        try:
            return deserialize(data)
        except DecodeError:
            raise InvalidRequest(f"request of {self._method}: not a valid protobuf message") from None

    async def _parse_all(self, messages: AsyncIterable[bytes]) -> AsyncIterator[RequestT]:
        async for data in messages:
            yield self._parse(data)


async def _write_all(
    generator: AsyncGenerator[ResponseT, None], transport: grpc.aio.ServicerContext[bytes, ResponseT]
) -> None:
    write: Callable[[ResponseT], Awaitable[None]] = partial(_write_first, transport)
    async with aclosing(generator) as responses:
        async for response in responses:
            try:
                await write(response)
            except grpc.aio.InternalError:
                raise RequestCancelled("the caller is gone") from None
            write = transport.write


async def _write_first(transport: grpc.aio.ServicerContext[bytes, ResponseT], response: ResponseT) -> None:
    """Finished even if the call is cut off meanwhile, and then told as any end is.

    To gRPC the metadata of a call are unsent until its first write is over. It would send them once more with the
    status of a call that ends before that, fail at it, and leave the caller without a status.
    """
    writing = asyncio.ensure_future(transport.write(response))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        # Not for ever: the caller may read nothing.
        await asyncio.wait({writing}, timeout=_FIRST_WRITE_S)
        writing.cancel()
        raise

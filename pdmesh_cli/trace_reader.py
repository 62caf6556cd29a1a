"""Asks a router for the traces that it keeps. Shows nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager

from pdmesh.v1 import traces_pb2, traces_pb2_grpc

from node_runtime.rpc.channel import Channel
from pdmesh_cli.client import client_errors
from pdmesh_cli.client_types import PdmeshError
from router_node.trace_messages import span_of
from router_node.trace_store import Span, is_complete

# Nodes export every 200 ms: what has just ended is whole a moment later.
_SETTLE_S = 1.0
_SETTLE_POLL_S = 0.1
# Of one stream; the next one goes on where it ended.
_STREAM_S = 300.0


class TraceReader:
    """The traces of one router. Does not own the channel."""

    def __init__(self, channel: Channel, *, timeout_s: float) -> None:
        """`timeout_s` is the deadline of each question."""
        self._channel = channel
        self._stub = channel.stub(traces_pb2_grpc.TracesStub)
        self._timeout_s = timeout_s

    async def newest_requests(self, max_requests: int) -> tuple[Span, ...]:
        """The spans of the last requests, the newest first. Raises PdmeshError."""
        with self._errors():
            asked = traces_pb2.ListRequestsRequest(max_requests=max_requests)
            answer = await self._channel.unary(self._stub.ListRequests, asked, timeout_s=self._timeout_s)
            return tuple(span_of(message) for message in answer.requests)

    async def trace(self, name: str) -> tuple[Span, ...]:
        """All spans of the trace that an id of a request or of a trace means, by start; waits a moment for those that
        are on their way. Raises PdmeshError.
        """
        loop = asyncio.get_running_loop()
        settled_at_s = loop.time() + _SETTLE_S
        while True:
            is_last = loop.time() >= settled_at_s
            try:
                spans = await self._trace(name)
            except PdmeshError as error:
                if error.code != "NOT_FOUND" or is_last:
                    raise
            else:
                if is_last or is_complete(spans, ()):
                    return spans
            await asyncio.sleep(_SETTLE_POLL_S)

    async def _trace(self, name: str) -> tuple[Span, ...]:
        with self._errors():
            asked = traces_pb2.GetTraceRequest(id=name)
            answer = await self._channel.unary(self._stub.GetTrace, asked, timeout_s=self._timeout_s)
            return tuple(span_of(message) for message in answer.spans)

    async def ended_requests(self) -> AsyncGenerator[Span, None]:
        """The spans of requests as they end, until it is closed. Raises PdmeshError."""
        sequence = 0
        while True:
            asked = traces_pb2.FollowRequestsRequest(sequence=sequence)
            try:
                with self._errors():
                    stream = self._channel.server_stream(self._stub.FollowRequests, asked, timeout_s=_STREAM_S)
                    async with aclosing(stream) as answers:
                        async for answer in answers:
                            sequence = answer.sequence
                            yield span_of(answer.request)
            except PdmeshError as error:
                if error.code != "DEADLINE_EXCEEDED":
                    raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns what the block raises into PdmeshError."""
        try:
            with client_errors():
                yield
        except PdmeshError as error:
            if error.code == "UNIMPLEMENTED":
                message = f"{self._channel.address} shows no traces: it is no router, or one of an older release"
                raise PdmeshError(error.code, message) from None
            raise
        except ValueError as error:
            raise PdmeshError("INTERNAL", f"{self._channel.address} sent a span that is none: {error}") from None

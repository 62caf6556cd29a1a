"""The Traces service of a router: what its trace store holds, for those who may ask a node about itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from pdmesh.v1 import traces_pb2

from node_runtime.errors import InvalidRequest, TracesNotKept, UnknownTrace
from node_runtime.rpc import RpcContext
from router_node.trace_messages import message_of
from router_node.trace_store import TraceStore

_DEFAULT_LISTED: Final = 20
_MAX_LISTED: Final = 1000
_MAX_ID_BYTES: Final = 128


class TraceService:
    """Servicer of pdmesh.v1.Traces."""

    def __init__(self, store: TraceStore | None) -> None:
        """`store` is None on a router that keeps no traces."""
        self._store = store

    async def ListRequests(
        self, request: traces_pb2.ListRequestsRequest, context: RpcContext
    ) -> traces_pb2.ListRequestsResponse:
        store = self._kept()
        if request.max_requests > _MAX_LISTED:
            raise InvalidRequest(f"max_requests: {request.max_requests} given, at most {_MAX_LISTED} allowed")
        newest = store.newest_requests(request.max_requests or _DEFAULT_LISTED)
        return traces_pb2.ListRequestsResponse(requests=[message_of(span) for span in newest])

    async def GetTrace(self, request: traces_pb2.GetTraceRequest, context: RpcContext) -> traces_pb2.GetTraceResponse:
        store = self._kept()
        num_bytes = len(request.id.encode())
        if not 1 <= num_bytes <= _MAX_ID_BYTES:
            raise InvalidRequest(f"id: {num_bytes} bytes given, [1, {_MAX_ID_BYTES}] required")
        found = store.find(request.id)
        if not found:
            raise UnknownTrace(f'id: no trace or request "{request.id}" is held; only the newest are kept')
        if len(found) > 1:
            raise InvalidRequest(f'id: {len(found)} traces begin with "{request.id}"; give more of it')
        (trace_id,) = found
        spans = [message_of(span) for span in store.spans(trace_id)]
        return traces_pb2.GetTraceResponse(trace_id=trace_id, spans=spans)

    async def FollowRequests(
        self, request: traces_pb2.FollowRequestsRequest, context: RpcContext
    ) -> AsyncIterator[traces_pb2.FollowRequestsResponse]:
        async for ended in self._kept().ended_requests(request.sequence or None):
            yield traces_pb2.FollowRequestsResponse(sequence=ended.sequence, request=message_of(ended.span))

    def _kept(self) -> TraceStore:
        if self._store is None:
            raise TracesNotKept(
                "this router keeps no traces; start it with --keep-traces 256, and give it and its nodes its gRPC "
                "address as --otlp-endpoint"
            )
        return self._store

"""The Node service, the same on every role. Knows only the small reporter that each role implements."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Final, Protocol

from pdmesh.v1 import mesh_pb2

from node_runtime.errors import NodeBusy
from node_runtime.node_updates import UpdateStream, interval_s_of
from node_runtime.prefix_feed import PrefixFeed
from node_runtime.rpc.context import RpcContext
from node_runtime.rpc.server import RpcServer

# A node of which nothing is new is looked at this many times less often.
_MAX_SLOWING: Final = 8


class NodeReporter(Protocol):
    """What a node tells about itself."""

    def info(self) -> mesh_pb2.NodeInfo:
        """Facts that hold for the life of the process."""
        ...

    async def status(self) -> mesh_pb2.NodeStatus:
        """Gauges of this instant; cheap."""
        ...

    async def clear_cache(self) -> bool:
        """Drops every cached prefix. False, with nothing changed, while requests or transfers are live."""
        ...

    @property
    def prefix_feed(self) -> PrefixFeed | None:
        """Which prefixes are cached; None where there is no cache."""
        ...


class NodeService:
    """Servicer of pdmesh.v1.Node."""

    def __init__(self, reporter: NodeReporter, server: RpcServer, on_drain: Callable[[str], None]) -> None:
        """`server` is the one that serves this; `on_drain` is told, once or more, why the node is to stop."""
        self._reporter = reporter
        self._server = server
        self._on_drain = on_drain

    async def GetNodeInfo(self, request: mesh_pb2.GetNodeInfoRequest, context: RpcContext) -> mesh_pb2.NodeInfo:
        return self._reporter.info()

    async def GetNodeStatus(self, request: mesh_pb2.GetNodeStatusRequest, context: RpcContext) -> mesh_pb2.NodeStatus:
        return await self.current_status()

    async def current_status(self) -> mesh_pb2.NodeStatus:
        """What the reporter says, and whether the node leaves."""
        status = await self._reporter.status()
        if self._server.is_draining:
            status.serving, status.draining = False, True
        return status

    async def Follow(self, request: mesh_pb2.FollowRequest, context: RpcContext) -> AsyncIterator[mesh_pb2.NodeUpdate]:
        interval_s = interval_s_of(request)
        stream = UpdateStream(request, incarnation=self._reporter.info().incarnation, feed=self._reporter.prefix_feed)
        slowing = 1
        while True:
            is_new = False
            for update in stream.updates(await self.current_status()):
                is_new = True
                yield update
            slowing = 1 if is_new else min(_MAX_SLOWING, 2 * slowing)
            await asyncio.sleep(interval_s * slowing)

    async def ClearCache(self, request: mesh_pb2.ClearCacheRequest, context: RpcContext) -> mesh_pb2.ClearCacheResponse:
        if not await self._reporter.clear_cache():
            raise NodeBusy("the cache cannot be cleared while requests or transfers are live")
        return mesh_pb2.ClearCacheResponse()

    async def Drain(self, request: mesh_pb2.DrainRequest, context: RpcContext) -> mesh_pb2.DrainResponse:
        server = self._server
        was_draining = server.is_draining
        await server.begin_drain()
        self._on_drain(f"told to drain by {context.peer()}")
        return mesh_pb2.DrainResponse(
            node_id=server.node_id,
            was_draining=was_draining,
            num_running_calls=server.num_running_calls,
            grace_s=server.drain_grace_s,
        )

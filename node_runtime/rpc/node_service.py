"""The Node service, the same on every role. Knows only the small reporter that each role implements."""

from __future__ import annotations

from typing import Protocol

from pdmesh.v1 import mesh_pb2

from node_runtime.errors import NodeBusy
from node_runtime.rpc.context import RpcContext


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


class NodeService:
    """Servicer of pdmesh.v1.Node."""

    def __init__(self, reporter: NodeReporter) -> None:
        self._reporter = reporter

    async def GetNodeInfo(self, request: mesh_pb2.GetNodeInfoRequest, context: RpcContext) -> mesh_pb2.NodeInfo:
        return self._reporter.info()

    async def GetNodeStatus(self, request: mesh_pb2.GetNodeStatusRequest, context: RpcContext) -> mesh_pb2.NodeStatus:
        return await self._reporter.status()

    async def ClearCache(self, request: mesh_pb2.ClearCacheRequest, context: RpcContext) -> mesh_pb2.ClearCacheResponse:
        if not await self._reporter.clear_cache():
            raise NodeBusy("the cache cannot be cleared while requests or transfers are live")
        return mesh_pb2.ClearCacheResponse()

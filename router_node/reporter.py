"""What a router tells about itself through the Node service."""

from __future__ import annotations

import secrets
from importlib.metadata import version

from pdmesh.v1 import mesh_pb2

from router_node.live_requests import LiveRequests
from router_node.node_pool import NodePool
from router_node.routed_request import RoutingParts

_INCARNATION_BITS = 64


class RouterReporter:
    """NodeReporter of a router: it has peers and requests, but no arena and no cache."""

    def __init__(self, *, node_id: str, pool: NodePool, live: LiveRequests, routing: RoutingParts) -> None:
        self._node_id = node_id
        self._pool = pool
        self._live = live
        self._routing = routing
        self._incarnation = secrets.randbits(_INCARNATION_BITS)

    def info(self) -> mesh_pb2.NodeInfo:
        return mesh_pb2.NodeInfo(
            node_id=self._node_id,
            incarnation=self._incarnation,
            role=mesh_pb2.NODE_ROLE_ROUTER,
            version=version("pdmesh"),
        )

    @property
    def prefix_feed(self) -> None:
        """A router caches nothing."""
        return None

    async def status(self) -> mesh_pb2.NodeStatus:
        peers = [
            mesh_pb2.PeerStatus(
                node_id="" if condition.facts is None else condition.facts.node_id,
                address=condition.address,
                incarnation=0 if condition.facts is None else condition.facts.incarnation,
                state=condition.state.value,
                detail=condition.detail,
            )
            for condition in self._pool.conditions()
        ]
        return mesh_pb2.NodeStatus(
            serving=self._pool.is_ready,
            num_running_requests=self._live.num_live,
            peers=peers,
            num_retries=self._routing.retry_budget.num_spent,
            num_hedges=self._routing.hedges.num_begun,
            num_won_hedges=self._routing.hedges.num_won,
        )

    async def clear_cache(self) -> bool:
        """A router caches nothing, so there is nothing to drop."""
        return self._live.num_live == 0

"""Embedded OpenTelemetry collector of `up` and `demo`: what the nodes of this machine send, in the supervisor's memory.

It passes everything on to the router, whose page shows the same traces.
"""

from __future__ import annotations

from node_runtime.config import NodeConfig
from node_runtime.rpc import RpcServer
from router_node.otlp_receiver import TraceForwarder, add_otlp_services
from router_node.trace_store import TraceStore

_MAX_MESSAGE_BYTES = 64 * 2**20


class Collector:
    """An OTLP/gRPC endpoint on a free port of the loopback interface."""

    def __init__(self, store: TraceStore) -> None:
        self.store = store
        config = NodeConfig(node_id="collector", host="127.0.0.1", port=0, max_message_bytes=_MAX_MESSAGE_BYTES)
        self._forwarder = TraceForwarder(max_message_bytes=_MAX_MESSAGE_BYTES)
        self._server = RpcServer(config)
        add_otlp_services(self._server, store, self._forwarder)

    async def start(self) -> str:
        """Listens and returns the OTLP endpoint as a URL."""
        port = await self._server.start()
        return f"http://127.0.0.1:{port}"

    def forward_to(self, address: str) -> None:
        """From now on the receiver at host:port gets a copy of everything."""
        self._forwarder.forward_to(address)

    async def stop(self) -> None:
        await self._server.stop(grace_s=1.0)
        await self._forwarder.close()

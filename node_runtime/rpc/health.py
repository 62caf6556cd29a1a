"""The standard health and reflection services of a node, and the health of another node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable
from contextlib import aclosing
from typing import cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from node_runtime.rpc.channel import Channel

LIVENESS_SERVICE = "pdmesh.liveness"
"""What the health service calls the question whether the process should be left to live."""


class Health:
    """Serving status of the whole node and of each of its services, which are always equal, and apart from it its
    liveness: a node that waits for peers or drains is alive, one that has stopped making progress is not.
    """

    def __init__(self, service_names: Iterable[str]) -> None:
        self._names = (health.OVERALL_HEALTH, *service_names)
        self._servicer = health.aio.HealthServicer()
        self._updates: set[asyncio.Task[None]] = set()
        self._has_shut_down = False

    def set_serving(self, is_serving: bool) -> None:
        """Tells watchers and pollers, in the order of the calls. Without effect after `shut_down`."""
        self._soon(self.apply(is_serving))

    def set_alive(self, is_alive: bool) -> None:
        """Likewise for the liveness, also after `shut_down`."""
        self._soon(self.apply_liveness(is_alive))

    def _soon(self, work: Coroutine[object, object, None]) -> None:
        update = asyncio.get_running_loop().create_task(work)
        self._updates.add(update)
        update.add_done_callback(self._updates.discard)

    async def apply(self, is_serving: bool) -> None:
        """Like `set_serving`, and done when it returns."""
        for name in self._names:
            if not self._has_shut_down:
                await self._servicer.set(name, _status(is_serving))

    async def apply_liveness(self, is_alive: bool) -> None:
        """Like `set_alive`, and done when it returns."""
        await self._servicer.set(LIVENESS_SERVICE, _status(is_alive))

    async def shut_down(self) -> None:
        """NOT_SERVING from now on, which watchers have been told when this returns. Idempotent."""
        await asyncio.gather(*self._updates)
        self._has_shut_down = True
        for name in self._names:
            await self._servicer.set(name, _status(False))

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the service."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)


def _status(is_good: bool) -> int:
    return health_pb2.HealthCheckResponse.SERVING if is_good else health_pb2.HealthCheckResponse.NOT_SERVING


async def watch_health(channel: Channel, *, timeout_s: float) -> AsyncGenerator[bool, None]:
    """Whether the node at the other end serves: now, and whenever that changes. Raises NodeError, at the latest when
    `timeout_s` has passed. Close it (`aclosing`) to stop watching.
    """
    stub = channel.stub(health_pb2_grpc.HealthStub)
    # The published annotations of the stub know only Check.
    watch = cast(
        "grpc.aio.UnaryStreamMultiCallable[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]",
        stub.Watch,  # type: ignore[attr-defined]
    )
    replies = channel.server_stream(watch, health_pb2.HealthCheckRequest(), timeout_s=timeout_s)
    async with aclosing(replies):
        async for reply in replies:
            yield reply.status == health_pb2.HealthCheckResponse.SERVING


def add_reflection(service_names: Iterable[str], server: grpc.aio.Server) -> None:
    """Lets tools such as grpcurl list and describe the services."""
    names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)

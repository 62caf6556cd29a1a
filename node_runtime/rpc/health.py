"""The standard health and reflection services of a node, and the health of another node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from node_runtime.rpc.channel import Channel


class Health:
    """Serving status of the whole node and of each of its services; they are always equal."""

    def __init__(self, service_names: Iterable[str]) -> None:
        self._names = (health.OVERALL_HEALTH, *service_names)
        self._servicer = health.aio.HealthServicer()
        self._updates: set[asyncio.Task[None]] = set()

    def set_serving(self, is_serving: bool) -> None:
        """Tells watchers and pollers, in the order of the calls. Without effect after `shut_down`."""
        update = asyncio.get_running_loop().create_task(self.apply(is_serving))
        self._updates.add(update)
        update.add_done_callback(self._updates.discard)

    async def apply(self, is_serving: bool) -> None:
        """Like `set_serving`, and done when it returns."""
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._servicer.set(name, status)

    async def shut_down(self) -> None:
        """NOT_SERVING from now on, which watchers have been told when this returns. Idempotent."""
        await asyncio.gather(*self._updates)
        await self._servicer.enter_graceful_shutdown()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the service."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)


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

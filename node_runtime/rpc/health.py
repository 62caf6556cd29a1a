"""The standard health and reflection services of a node."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection


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
        """NOT_SERVING from now on."""
        await asyncio.gather(*self._updates)
        await self._servicer.enter_graceful_shutdown()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the service."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)


def add_reflection(service_names: Iterable[str], server: grpc.aio.Server) -> None:
    """Lets tools such as grpcurl list and describe the services."""
    names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)

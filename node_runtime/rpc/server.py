"""The gRPC server of a node.

Knows no service: the composition root adds them. Owns the listening port, health, reflection and the guard around
every handler. Lives on one event loop.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeVar, cast

import grpc

from node_runtime.address import format_address
from node_runtime.config import NodeConfig
from node_runtime.errors import BadConfig, NodeError, PortInUse
from node_runtime.rpc.access import AccessPolicy, Credentials, MeshAccess, OpenAccess
from node_runtime.rpc.calls import CallGuard
from node_runtime.rpc.context import RpcContext
from node_runtime.rpc.health import Health, add_reflection
from node_runtime.rpc.options import server_options
from node_runtime.rpc.telemetry import Telemetry
from node_runtime.rpc.tls import transport_for
from node_runtime.rpc.transport import Transport

ServicerT = TypeVar("ServicerT")
ResultT = TypeVar("ResultT")

_FAREWELL_S = 0.2
# gRPC waits for calls of its own accord.
_STOP_BOUND_S = 2.0

_log = logging.getLogger("pdmesh.rpc")


class RpcServer:
    """Serves what was added, from `start` to `stop`."""

    def __init__(
        self,
        config: NodeConfig,
        telemetry: Telemetry | None = None,
        *,
        transport: Transport | None = None,
        access: AccessPolicy | None = None,
    ) -> None:
        """Without `telemetry` nothing is recorded here; a caller's trace is handed on either way. `transport` makes the
        server, `access` decides who may call; by default what the configuration asks for. Raises BadConfig.
        """
        self._config = config
        self._transport = transport or transport_for(config)
        own_access: AccessPolicy = MeshAccess(config.tls_domain) if config.tls_cert else OpenAccess()
        self._guard = CallGuard(
            node_id=config.node_id,
            default_deadline_s=config.default_deadline_s,
            telemetry=telemetry or Telemetry.off(),
            access=access or own_access,
        )
        self._adders: list[Callable[[grpc.aio.Server], None]] = []
        self._server: grpc.aio.Server | None = None
        self._health: Health | None = None
        self._health_server: grpc.aio.Server | None = None
        self._port = 0

    @property
    def num_running_calls(self) -> int:
        """Calls being served, those of health, reflection and the Node service not counted."""
        return self._guard.num_running

    @property
    def node_id(self) -> str:
        """Name of the node that serves."""
        return self._config.node_id

    @property
    def drain_grace_s(self) -> float:
        """How long running calls may go on once the node drains."""
        return self._config.drain_grace_s

    @property
    def is_draining(self) -> bool:
        """Whether new calls are refused."""
        return self._guard.is_draining

    @property
    def port(self) -> int:
        """The port listened on; 0 before `start`."""
        return self._port

    @property
    def advertised_address(self) -> str:
        """host:port under which other nodes reach this server. Meaningful after `start`."""
        return format_address(self._config.advertised_host(), self._port)

    def add(self, adder: Callable[[ServicerT, grpc.aio.Server], None], servicer: object) -> None:
        """Adds a service before `start`: the generated `add_XServicer_to_server` and an object with its methods.

        Each method takes the request message (or an async iterator of them) and an RpcContext; it is a coroutine, or
        an async generator when responses are streamed.
        """
        self._adders.append(lambda server: adder(cast("ServicerT", servicer), server))

    async def run_call(
        self,
        body: Callable[[RpcContext], Awaitable[ResultT]],
        *,
        method: str,
        peer: str,
        limit_s: float | None,
        metadata: Iterable[tuple[str, str | bytes]],
        credentials: Credentials,
    ) -> ResultT:
        """Runs a call that came by another way than gRPC under the rules of this server: who may call `method`, default
        deadline, the caller's trace, drain. `peer` is for the log.

        Raises NodeError for all that goes wrong, and CancelledError when the running task was cancelled because its
        caller gave up.
        """
        return await self._guard.guarded(
            body, method=method, peer=peer, limit_s=limit_s, metadata=metadata, credentials=credentials
        )

    async def start(self) -> int:
        """Listens and serves; health says NOT_SERVING until `set_serving`. Returns the port.

        Raises PortInUse, or BadConfig when the configured host is not an address of this machine.
        """
        config = self._config
        server = self._transport.server(self._guard, max_message_bytes=config.max_message_bytes)
        registrar = _Registrar(server)
        for add_to in self._adders:
            add_to(cast("grpc.aio.Server", registrar))
        self._health = Health(registrar.service_names)
        self._health.add_to(server)
        add_reflection(registrar.service_names, server)
        await self._health.apply(False)
        await self._health.apply_liveness(True)
        try:
            self._port = self._transport.listen(server, format_address(config.host, config.port))
        except RuntimeError:
            raise _why_not_bound(config.host, config.port) from None
        await server.start()
        self._server = server
        if config.health_port is not None:
            await self._start_health_server(self._health, config.health_port)
        return self._port

    async def _start_health_server(self, health: Health, port: int) -> None:
        """The health service alone, in the open. Raises PortInUse or BadConfig."""
        host = self._config.host
        server = grpc.aio.server(options=server_options(self._config.max_message_bytes))
        health.add_to(server)
        try:
            taken = server.add_insecure_port(format_address(host, port))
        except RuntimeError:
            raise _why_not_bound(host, port) from None
        await server.start()
        self._health_server = server
        _log.info("health is at %s", format_address(host, taken))

    def set_serving(self, is_serving: bool) -> None:
        """Sets the health of the node and all its services. Requires `start`; without effect once it drains."""
        if self._health is None:
            raise RuntimeError("set_serving before start")
        self._health.set_serving(is_serving)

    def set_alive(self, is_alive: bool) -> None:
        """Sets the liveness of the node, which is true from `start` on and which draining does not touch."""
        if self._health is None:
            raise RuntimeError("set_alive before start")
        self._health.set_alive(is_alive)

    async def begin_drain(self) -> None:
        """Refuses new calls and is NOT_SERVING from now on; those who watch have been told when it returns. Questions
        about the node itself are answered on. Idempotent.
        """
        self._guard.begin_drain()
        if self._health is not None:
            await self._health.shut_down()

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, lets running ones finish for `grace_s`, then ends them with UNAVAILABLE. Calls that go on
        nevertheless are left behind after some seconds. Idempotent.
        """
        await self.begin_drain()
        server, self._server = self._server, None
        if server is None:
            return
        await self._guard.drain(grace_s)
        stopping = asyncio.create_task(self._stop_listening(server), name="server stop")
        if not (await asyncio.wait({stopping}, timeout=_STOP_BOUND_S))[0]:
            num_left = self.num_running_calls
            _log.error("the server is left with %d calls: it has not stopped within %g s", num_left, _STOP_BOUND_S)
            return
        await stopping

    async def _stop_listening(self, server: grpc.aio.Server) -> None:
        # No call of ours is left; those who watch the health get the time to hear of it.
        await server.stop(grace=_FAREWELL_S)
        if self._health_server is not None:
            await self._health_server.stop(grace=None)


class _Registrar:
    """Stands in for the server while services are added, to learn their names."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server
        self.service_names: list[str] = []

    def add_generic_rpc_handlers(self, handlers: tuple[grpc.GenericRpcHandler, ...]) -> None:
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, grpc.RpcMethodHandler[object, object]]
    ) -> None:
        self.service_names.append(service_name)
        self._server.add_registered_method_handlers(service_name, method_handlers)


def _why_not_bound(host: str, port: int) -> NodeError:
    """gRPC does not say why it could not listen; the operating system does."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                probe.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return PortInUse(host, port)
        return BadConfig(f"host, port: cannot listen on {format_address(host, port)}: {error.strerror or error}")
    return PortInUse(host, port)

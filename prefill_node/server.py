"""Composition root of a prefill node: makes the parts, passes each what it needs, starts and stops them in order."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor

from pdmesh.v1 import mesh_pb2, mesh_pb2_grpc, prefill_pb2_grpc

from cache_runtime.transfer.checksums import RUNNABLE_DIGEST_KINDS
from cache_runtime.transfer.peer_hasher import NodeHasher
from node_runtime.clock import Clock, SystemClock
from node_runtime.engine.core import ComputeCore, load_core
from node_runtime.engine.delivery import deliver_on, feed_on
from node_runtime.engine.loop import EngineLoop
from node_runtime.engine.node_info import describe_node
from node_runtime.engine.output_forms import OutputForms, compiler_for
from node_runtime.engine.pulse import STALL_BOUND_S, EngineWatch
from node_runtime.engine.reporter import ComputeReporter
from node_runtime.handoff.probe import ProbeBuffer
from node_runtime.lifecycle import EXIT_FAILURE, StopRequest, announce_ready, run_until_stopped
from node_runtime.prefix_feed import PrefixFeed
from node_runtime.rpc import NodeService, RpcServer, StatusMetrics, Telemetry, Transport
from prefill_node.config import PrefillNodeConfig
from prefill_node.handoff import ChecksumTools, HandoffTools
from prefill_node.peers import DecodePeers
from prefill_node.sender import PrefillSender
from prefill_node.service import PrefillLimits, PrefillService
from scheduler_core import Role

_log = logging.getLogger(__name__)


class PrefillNode:
    """One prefill node. Made inside a running event loop, which it belongs to.

    By default `transport` is gRPC's own, `engine_class` the one with a thread, and `hashing` a thread for checksums.
    """

    def __init__(
        self,
        config: PrefillNodeConfig,
        core: ComputeCore,
        *,
        telemetry: Telemetry,
        on_fatal: Callable[[BaseException], None],
        on_drain: Callable[[str], None],
        clock: Clock | None = None,
        transport: Transport | None = None,
        engine_class: type[EngineLoop] = EngineLoop,
        hashing: Executor | None = None,
        stall_bound_s: float = STALL_BOUND_S,
    ) -> None:
        """`on_drain` is told why the node is to stop when a caller asked it to. `stall_bound_s`: how long the engine
        may stand still before the node gives up what it has and serves nothing new.
        """
        clock = clock or SystemClock()
        data_plane = core.require_data_plane()
        self._config = config
        self._core = core
        self._on_fatal = on_fatal
        self._planes = data_plane.planes
        self._is_serving = False
        self._hashing = hashing or ThreadPoolExecutor(max_workers=1, thread_name_prefix="checksums")
        incarnation = secrets.randbits(64) or 1
        probes = ProbeBuffer()
        self._planes.register(probes.base_address, probes.num_bytes, shared_descriptor=probes.shared_descriptor)
        sender = PrefillSender(
            logical=data_plane.manifest.logical,
            sources=data_plane.manifest.ranks,
            block_tables=core.scheduler.block_tables,
        )
        prefix_feed = PrefixFeed()
        self.engine = engine_class(
            core.scheduler,
            core.executor,
            group_ids=core.group_ids,
            clock=clock,
            deliver=deliver_on(asyncio.get_running_loop()),
            on_fatal=on_fatal,
            hooks=sender,
            on_prefixes=feed_on(asyncio.get_running_loop(), prefix_feed),
        )
        self._forms = OutputForms(compiler_for(core.facts.path, core.facts.vocab_size))
        self._engine_watch = EngineWatch(self.engine, on_change=self._update_health, stall_bound_s=stall_bound_s)
        self._watching: asyncio.Task[None] | None = None
        self._peers = DecodePeers(self._planes, data_plane.manifest, probes)
        self.service = PrefillService(
            node_id=config.node_id,
            incarnation=incarnation,
            manifest=data_plane.manifest,
            limits=PrefillLimits(
                vocab_size=core.facts.vocab_size,
                context_tokens=core.facts.context_tokens,
                max_request_tokens=core.scheduler.max_request_tokens,
                max_waiting_requests=config.max_waiting_requests,
            ),
            tools=HandoffTools(
                engine=self.engine,
                sender=sender,
                peers=self._peers,
                clock=clock,
                checksums=ChecksumTools(
                    hasher=NodeHasher(data_plane.manifest.logical, data_plane.manifest.ranks),
                    executor=self._hashing,
                    kinds=RUNNABLE_DIGEST_KINDS,
                ),
                grant_bound_s=config.grant_timeout_s,
            ),
            telemetry=telemetry,
            forms=self._forms,
            watch=self._engine_watch,
            adapters=core.facts.adapters,
        )
        reporter = ComputeReporter(
            info=describe_node(core, node_id=config.node_id, incarnation=incarnation, role=mesh_pb2.NODE_ROLE_PREFILL),
            engine=self.engine,
            prefix_feed=prefix_feed,
            clear_cache=core.scheduler.clear_cache,
            is_serving=lambda: self._is_serving and not self._engine_watch.is_stalled,
            num_handoffs=lambda: self.service.num_handoffs,
            peers=self._peers.statuses,
        )
        self._server = RpcServer(config, transport=transport)
        self._server.add(prefill_pb2_grpc.add_PrefillServicer_to_server, self.service)
        node_service = NodeService(reporter, self._server, on_drain)
        self._server.add(mesh_pb2_grpc.add_NodeServicer_to_server, node_service)
        self._status_metrics = StatusMetrics(telemetry.metrics, node_service.current_status)

    @property
    def address(self) -> str:
        """host:port under which other nodes reach this one. Meaningful after `start`."""
        return self._server.advertised_address

    async def start(self) -> None:
        """Listens and serves. Raises PortInUse or BadConfig."""
        await self._server.start()
        self.engine.start()
        if self._core.ranks is not None:
            self._core.ranks.watch(self._on_fatal)
        self._watching = asyncio.create_task(self._engine_watch.run(), name="engine watch")
        self._is_serving = True
        self._server.set_serving(True)
        self._status_metrics.start()
        for line in self._core.describe():
            _log.info("%s", line)

    async def watch_liveness(self) -> None:
        """Keeps the liveness of the node true to its engine, until it is cancelled. Requires `start`."""
        watch = EngineWatch(
            self.engine,
            on_change=lambda: self._server.set_alive(not watch.is_stalled),
            stall_bound_s=self._config.stall_timeout_s,
        )
        await watch.run()

    async def stop(self) -> None:
        """Accepts nothing new, finishes what runs within the grace period, then leaves. Idempotent."""
        self._is_serving = False
        await self._server.stop(self._config.drain_grace_s)
        if self._watching is not None:
            self._watching.cancel()
        await self._status_metrics.close()
        self._forms.close()
        await asyncio.to_thread(self.engine.stop)
        self._hashing.shutdown(wait=False, cancel_futures=True)
        self._peers.close()
        self._planes.close()
        if self._core.ranks is not None:
            await asyncio.to_thread(self._core.ranks.close)

    def _update_health(self) -> None:
        """The engine has come to a standstill, which its handoffs do not survive, or moved again."""
        is_stalled = self._engine_watch.is_stalled
        self._server.set_serving(self._is_serving and not is_stalled)
        if is_stalled:
            self.service.give_all_up()


async def serve(config: PrefillNodeConfig) -> int:
    """Runs a prefill node until it is told to stop. Returns the exit status."""
    telemetry = Telemetry.for_node(config)
    stop_request = StopRequest()
    nodes: list[PrefillNode] = []
    watches: list[asyncio.Task[None]] = []

    async def start() -> None:
        # Off the event loop, so that a signal is heard while the weights load.
        core = await asyncio.to_thread(load_core, config, Role.PREFILL, max_ready_ungranted=config.max_ready_ungranted)
        node = PrefillNode(
            config,
            core,
            telemetry=telemetry,
            on_fatal=lambda error: stop_request.ask(f"the engine broke down: {error}", EXIT_FAILURE),
            on_drain=stop_request.ask,
        )
        nodes.append(node)
        await node.start()
        telemetry.serve_metrics(config)
        watches.append(asyncio.create_task(node.watch_liveness()))
        announce_ready(role="prefill", node_id=config.node_id, address=node.address)

    async def stop() -> None:
        for node in nodes:
            await node.stop()
        for watch in watches:
            watch.cancel()
        await asyncio.to_thread(telemetry.shutdown)

    return await run_until_stopped(start, stop, stop_request)

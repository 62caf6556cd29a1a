"""Composition root of decode and fused nodes: makes the parts, connects, starts and stops them."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdmesh.v1 import decode_pb2_grpc, mesh_pb2, mesh_pb2_grpc

from decode_node.bootstrap import PeerBootstrap
from decode_node.config import DecodeNodeConfig, FusedNodeConfig
from decode_node.engine_protocol.assembly import NodeParts, add_engine_protocol, check_installed
from decode_node.engine_protocol.kv_feed import SEQUENCE_STEP, KvFeed
from decode_node.local_prefill import LocalPrefill
from decode_node.membership import PrefillMembership
from decode_node.peers import PrefillPeers
from decode_node.remote_prefill import RemotePrefill
from decode_node.service import DecodeLimits, DecodeService
from decode_node.verification import TransferVerifier
from node_runtime.adapters import ServedAdapters
from node_runtime.clock import Clock, SystemClock
from node_runtime.engine.core import ComputeCore, load_core
from node_runtime.engine.delivery import deliver_on, feed_on, told_on
from node_runtime.engine.loop import EngineLoop
from node_runtime.engine.node_info import describe_node
from node_runtime.engine.output_forms import OutputForms, compiler_for
from node_runtime.engine.pulse import STALL_BOUND_S, EngineWatch
from node_runtime.engine.reporter import ComputeReporter
from node_runtime.handoff.probe import ProbeBuffer
from node_runtime.lifecycle import EXIT_FAILURE, StopRequest, announce_ready, run_until_stopped
from node_runtime.prefix_feed import PrefixFeed
from node_runtime.rpc import NodeService, RpcServer, StatusMetrics, Telemetry, Transport, transport_for
from node_runtime.rpc.options import PEER_NOTICE_BOUND_S
from scheduler_core import PrefixEvent, Role

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Receiving:
    """The parts that only a decode node has."""

    peers: PrefillPeers
    remote: RemotePrefill
    verifier: TransferVerifier
    local: LocalPrefill
    membership: PrefillMembership
    has_listed_peers: bool


class DecodeNode:
    """One decode or fused node. Made inside a running event loop, which it belongs to.

    By default `transport` is gRPC's own, and `engine_class` the one with a thread.
    """

    def __init__(
        self,
        config: DecodeNodeConfig | FusedNodeConfig,
        core: ComputeCore,
        *,
        telemetry: Telemetry,
        on_fatal: Callable[[BaseException], None],
        on_drain: Callable[[str], None],
        clock: Clock | None = None,
        peer_notice_bound_s: float = PEER_NOTICE_BOUND_S,
        transport: Transport | None = None,
        engine_class: type[EngineLoop] = EngineLoop,
        stall_bound_s: float = STALL_BOUND_S,
    ) -> None:
        """`on_drain` is told why the node is to stop when a caller asked it to. Raises BadConfig when what the
        configuration asks for is not installed.

        `stall_bound_s`: how long the engine may stand still before the node serves nothing new.
        `peer_notice_bound_s`: how long a prefill node that knows no leases may go on after its stream broke.
        """
        check_installed(config)
        self._peer_notice_bound_s = peer_notice_bound_s
        self._config = config
        self._on_fatal = on_fatal
        self._core = core
        self._telemetry = telemetry
        self._clock = clock or SystemClock()
        self._incarnation = secrets.randbits(64) or 1
        transport = transport or transport_for(config)
        self._server = RpcServer(config, transport=transport)
        self._prefix_feed = PrefixFeed()
        self._kv_feed = None if config.engine_protocol == "off" else _make_kv_feed()
        self.engine = engine_class(
            core.scheduler,
            core.executor,
            group_ids=core.group_ids,
            clock=self._clock,
            deliver=deliver_on(asyncio.get_running_loop()),
            on_fatal=on_fatal,
            on_prefixes=feed_on(asyncio.get_running_loop(), self._prefix_feed),
            on_prefix_events=None if self._kv_feed is None else told_on(asyncio.get_running_loop(), self._tell_kv_feed),
        )
        self._forms = OutputForms(compiler_for(core.facts.path, core.facts.vocab_size))
        self._engine_watch = EngineWatch(self.engine, on_change=self._update_health, stall_bound_s=stall_bound_s)
        self._watching: asyncio.Task[None] | None = None
        self._receiving = self._make_receiving(config, transport) if isinstance(config, DecodeNodeConfig) else None
        self.service = DecodeService(
            node_id=config.node_id,
            model_name=core.facts.name,
            limits=DecodeLimits(
                vocab_size=core.facts.vocab_size,
                context_tokens=core.facts.context_tokens,
                max_request_tokens=core.scheduler.max_request_tokens,
                max_waiting_requests=config.max_waiting_requests,
            ),
            engine=self.engine,
            clock=self._clock,
            telemetry=telemetry,
            remote=self._receiving.remote if self._receiving else None,
            local=self._receiving.local if self._receiving else None,
            forms=self._forms,
            watch=self._engine_watch,
            adapters=ServedAdapters(config.node_id, core.facts.adapters),
        )
        self._server.add(decode_pb2_grpc.add_DecodeServicer_to_server, self.service)
        self._reporter = self._make_reporter()
        node_service = NodeService(self._reporter, self._server, on_drain)
        self._server.add(mesh_pb2_grpc.add_NodeServicer_to_server, node_service)
        self._status_metrics = StatusMetrics(telemetry.metrics, node_service.current_status)

    @property
    def address(self) -> str:
        """host:port under which other nodes reach this one. Meaningful after `start`."""
        return self._server.advertised_address

    @property
    def is_ready(self) -> bool:
        """Whether a prompt can be computed now. With no prefill node configured, the first request finds out."""
        if self._engine_watch.is_stalled:
            return False
        receiving = self._receiving
        if receiving is None or receiving.local.is_fallback:
            return True
        return not receiving.has_listed_peers or receiving.peers.has_ready

    @property
    def num_handoffs(self) -> int:
        """Handoffs that are under way or whose blocks are quarantined; 0 on a fused node."""
        return self._receiving.remote.num_handoffs if self._receiving else 0

    async def start(self) -> None:
        """Listens and serves. Raises PortInUse or BadConfig."""
        await self._add_engine_protocol()
        await self._server.start()
        self.engine.start()
        self._watching = asyncio.create_task(self._engine_watch.run(), name="engine watch")
        if self._core.ranks is not None:
            self._core.ranks.watch(self._on_fatal)
        for line in self._core.describe():
            _log.info("%s", line)
        self._server.set_serving(self.is_ready)
        self._status_metrics.start()
        if self._receiving is not None:
            await self._receiving.membership.start()

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
        await self._server.stop(self._config.drain_grace_s)
        if self._watching is not None:
            self._watching.cancel()
        await self._status_metrics.close()
        if self._receiving is not None:
            await self._receiving.membership.close()
            await self._receiving.remote.close()
            await self._receiving.peers.close()
        self._forms.close()
        await asyncio.to_thread(self.engine.stop)
        if self._core.data_plane is not None:
            self._core.data_plane.planes.close()
        if self._core.ranks is not None:
            await asyncio.to_thread(self._core.ranks.close)

    def _make_receiving(self, config: DecodeNodeConfig, transport: Transport | None) -> _Receiving:
        data_plane = self._core.require_data_plane()
        probes = ProbeBuffer()
        planes = data_plane.planes
        planes.register(probes.base_address, probes.num_bytes, shared_descriptor=probes.shared_descriptor)
        bootstrap = PeerBootstrap(
            node_id=config.node_id,
            incarnation=self._incarnation,
            planes=planes,
            manifest=data_plane.manifest,
            probes=probes,
            max_message_bytes=config.max_message_bytes,
            transport=transport,
            adapters=self._core.facts.adapters,
        )
        peers = PrefillPeers(bootstrap, self._update_health)
        verifier = TransferVerifier(
            data_plane.manifest.logical,
            data_plane.manifest.ranks,
            fraction=config.verified_fraction,
            seed=secrets.randbits(64),
        )
        remote = RemotePrefill(
            incarnation=self._incarnation,
            peers=peers,
            engine=self.engine,
            clock=self._clock,
            telemetry=self._telemetry,
            manifest=data_plane.manifest,
            notice_bound_s=self._peer_notice_bound_s,
            lease_s=config.handoff_lease_s,
            vocab_size=self._core.facts.vocab_size,
            verifier=verifier,
        )
        local = LocalPrefill(
            is_fallback=config.local_prefill == "fallback",
            max_uncached_tokens=config.max_local_prefill_tokens,
            scheduler=self._core.scheduler,
            engine=self.engine,
        )
        return _Receiving(
            peers=peers,
            remote=remote,
            verifier=verifier,
            local=local,
            membership=PrefillMembership(config.prefill, peers, interval_s=config.resolve_interval_s),
            has_listed_peers=bool(config.prefill),
        )

    def _make_reporter(self) -> ComputeReporter:
        receiving = self._receiving
        role = mesh_pb2.NODE_ROLE_FUSED if receiving is None else mesh_pb2.NODE_ROLE_DECODE
        info = describe_node(self._core, node_id=self._config.node_id, incarnation=self._incarnation, role=role)
        info.reports_progress = True
        info.prefills_locally = receiving is not None and receiving.local.is_fallback
        data_plane = self._core.data_plane
        return ComputeReporter(
            info=info,
            engine=self.engine,
            prefix_feed=self._prefix_feed,
            clear_cache=self._core.scheduler.clear_cache,
            is_serving=lambda: self.is_ready,
            num_handoffs=lambda: self.num_handoffs,
            num_local_prefills=lambda: receiving.local.num_prompts if receiving else 0,
            num_refused_runs=lambda: data_plane.planes.num_refused_runs if data_plane else 0,
            peers=lambda: receiving.peers.statuses() if receiving else (),
            verifications=lambda: (
                (receiving.verifier.num_verified, receiving.verifier.num_damaged) if receiving else (0, 0)
            ),
        )

    async def _add_engine_protocol(self) -> None:
        if self._kv_feed is None:
            return
        receiving = self._receiving
        parts = NodeParts(
            config=self._config,
            core=self._core,
            info=self._reporter.info(),
            decode=self.service,
            peers=None if receiving is None else receiving.peers,
            prefills_locally=receiving is None or receiving.local.is_fallback,
            engine=self.engine,
            kv_feed=self._kv_feed,
            clear_cache=self._reporter.clear_cache,
            why_unhealthy=self._why_unhealthy,
            clock=self._clock,
        )
        await add_engine_protocol(parts, self._server)

    def _tell_kv_feed(self, events: Sequence[PrefixEvent]) -> None:
        if self._kv_feed is not None:
            self._kv_feed.apply(events, unix_s=self._clock.unix_ns_at(self._clock.now_s()) / 1e9)

    def _why_unhealthy(self) -> str:
        if self._server.is_draining:
            return f"node {self._config.node_id} is draining"
        return "" if self.is_ready else f"node {self._config.node_id} is not ready"

    def _update_health(self) -> None:
        """A peer may have come or gone, the engine come to a standstill or moved again."""
        self._server.set_serving(self.is_ready)


def _make_kv_feed() -> KvFeed:
    """Its numbers are unlike those of any process before at the same address."""
    return KvFeed(first_sequence=SEQUENCE_STEP * (1 + secrets.randbits(24)))


async def serve(config: DecodeNodeConfig | FusedNodeConfig) -> int:
    """Runs a decode or fused node until it is told to stop. Returns the exit status."""
    role = Role.DECODE if isinstance(config, DecodeNodeConfig) else Role.FUSED
    telemetry = Telemetry.for_node(config)
    stop_request = StopRequest()
    nodes: list[DecodeNode] = []
    watches: list[asyncio.Task[None]] = []

    async def start() -> None:
        # Before the weights: a machine that lacks what is asked for is told so at once.
        check_installed(config)
        # Off the event loop, so that a signal is heard while the weights load.
        core = await asyncio.to_thread(load_core, config, role)
        node = DecodeNode(
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
        announce_ready(role=config.role_name, node_id=config.node_id, address=node.address)

    async def stop() -> None:
        for node in nodes:
            await node.stop()
        for watch in watches:
            watch.cancel()
        await asyncio.to_thread(telemetry.shutdown)

    return await run_until_stopped(start, stop, stop_request)

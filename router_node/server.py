"""Composition root of a router: makes every part, starts, serves, stops. The only module that knows all of them."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from pathlib import Path

from pdmesh.v1 import inference_pb2_grpc, mesh_pb2_grpc, traces_pb2_grpc

from model_runtime.text.errors import ChatTemplateError, TokenizerError
from model_runtime.text.tokenizer import Tokenizer, load_tokenizer
from node_runtime.clock import Clock, SystemClock
from node_runtime.errors import BadConfig
from node_runtime.lifecycle import EXIT_FAILURE, StopRequest, announce_ready, run_until_stopped
from node_runtime.rpc import (
    ChannelPool,
    MeshAccess,
    NodeService,
    RpcServer,
    StatusMetrics,
    Telemetry,
    Transport,
    parse_address,
    tls_files_of,
    transport_for,
)
from router_node.attendance import Attendance
from router_node.config import RouterConfig
from router_node.descriptors import allow_connections
from router_node.discovery import Discovery
from router_node.health_watch import HealthWatch
from router_node.hedging import HedgePolicy, Hedges
from router_node.live_requests import LiveRequests
from router_node.membership import Membership
from router_node.node_follower import NodeFollower
from router_node.node_pool import ComputeRole, NodePool
from router_node.observations import Observations
from router_node.openai_api import (
    ApiParts,
    BodyLimits,
    BodyReader,
    ConnectionLimits,
    HttpsContexts,
    HttpServer,
    make_app,
)
from router_node.otlp_receiver import add_otlp_services
from router_node.placement import Placer
from router_node.reporter import RouterReporter
from router_node.request_metrics import RequestMetrics
from router_node.request_preparation import PromptLimits, RequestPreparer
from router_node.retry import RetryBudget, RetryPolicy
from router_node.routed_request import RoutingParts
from router_node.service import InferenceService, RouterParts
from router_node.tenants import RouterAccess, Tenants
from router_node.trace_service import TraceService
from router_node.trace_store import TraceStore
from router_node.ui import MeshView, UiParts, ui_routes

_log = logging.getLogger("pdmesh.router")

# A request has about a dozen.
_MAX_SPANS_PER_TRACE = 256
_PARTING_POLL_S = 1.0
# Of requests over HTTP that are being received.
_MAX_BODY_BYTES_OF_ALL = 256 * 2**20


async def serve(config: RouterConfig) -> int:
    """Runs a router until it is told to stop. Returns the exit status."""
    telemetry = Telemetry.for_node(config)
    stop_request = StopRequest()
    routers: list[Router] = []

    async def start() -> None:
        if config.http:
            allow_connections(config.http_max_connections)
        # Off the event loop, so that a signal is heard while the vocabulary loads.
        tokenizer = await asyncio.to_thread(_load_tokenizer, config.model)
        router = Router(
            config,
            tokenizer,
            telemetry=telemetry,
            on_fatal=lambda error: stop_request.ask(f"discovery of nodes broke down: {error}", EXIT_FAILURE),
            on_drain=stop_request.ask,
        )
        routers.append(router)
        await router.start()
        telemetry.serve_metrics(config)
        announce_ready(role="router", node_id=config.node_id, address=router.address, http_address=router.http_address)

    async def stop() -> None:
        for router in routers:
            await router.stop()
        await asyncio.to_thread(telemetry.shutdown)

    return await run_until_stopped(start, stop, stop_request)


def _load_tokenizer(model: str) -> Tokenizer:
    try:
        return load_tokenizer(model)
    except (TokenizerError, ChatTemplateError, OSError) as error:
        raise BadConfig(f"model: {error}") from error


class Router:
    """A whole router inside one event loop.

    By default `clock` is the system's and `transport` gRPC's own; `draw` gives random numbers in [0, 1).
    """

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: Tokenizer,
        *,
        telemetry: Telemetry,
        on_fatal: Callable[[BaseException], None],
        on_drain: Callable[[str], None],
        clock: Clock | None = None,
        transport: Transport | None = None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`on_fatal` is told of a defect with which the router would serve an ever older picture of its nodes,
        `on_drain` why the router is to stop when a caller asked it to.
        """
        self._clock = clock or SystemClock()
        self._draw = draw
        self._config = config
        self._on_fatal = on_fatal
        self._on_drain = on_drain
        self._tokenizer = tokenizer
        self._telemetry = telemetry
        transport = transport or transport_for(config)
        self._channels = ChannelPool(max_message_bytes=config.max_message_bytes, transport=transport)
        self._pool = NodePool({}, vocab_size=tokenizer.vocab_size)
        self._membership = Membership(
            {
                ComputeRole.PREFILL: config.prefill,
                ComputeRole.DECODE: config.decode,
                ComputeRole.FUSED: config.fused,
            },
            self._pool,
            interval_s=config.resolve_interval_s,
            on_change=self._update_members,
        )
        self.observations = Observations(max_keys_per_node=config.max_prefixes_per_node)
        self._discovery = Discovery(
            self._pool,
            self._channels,
            poll_interval_s=config.poll_interval_s,
            idle_poll_interval_s=config.idle_poll_interval_s,
            on_change=self._update_health,
        )
        self._tenants = Tenants(Path(config.tenants), self._clock) if config.tenants else None
        access = RouterAccess(self._tenants, MeshAccess(config.tls_domain) if config.tls_cert else None)
        self._server = RpcServer(config, self._telemetry, transport=transport, access=access)
        self._placer = Placer(
            self._pool, policy=config.placement_policy, observations=self.observations, clock=self._clock
        )
        self._attendance = Attendance(self._make_attendants(), on_end=self._end_of_background)
        self._background: list[asyncio.Task[None]] = []
        self._partings: set[asyncio.Task[None]] = set()
        self._is_serving = False
        self._http: HttpServer | None = None
        self._is_started = False
        self._add_services()

    @property
    def address(self) -> str:
        """host:port; meaningful after `start`."""
        return self._server.advertised_address

    @property
    def http_address(self) -> str:
        """host:port of the HTTP API; empty where there is none. Meaningful after `start`."""
        return "" if self._http is None else self._http.advertised_address

    def _add_services(self) -> None:
        config = self._config
        live = LiveRequests(config.max_live_requests)
        limits = PromptLimits(max_prompt_bytes=config.max_prompt_bytes, max_stop_bytes=config.max_stop_bytes)
        routing = self._make_routing()
        parts = RouterParts(
            model_name=config.model_name(),
            preparer=RequestPreparer(self._tokenizer, model_name=config.model_name(), limits=limits),
            live=live,
            routing=routing,
            metrics=RequestMetrics(self._telemetry.metrics, self._clock, config.model_name()),
            tenants=self._tenants,
        )
        reporter = RouterReporter(node_id=config.node_id, pool=self._pool, live=live, routing=routing)
        inference = InferenceService(parts)
        self._server.add(inference_pb2_grpc.add_InferenceServicer_to_server, inference)
        traces = self._make_traces()
        self._server.add(traces_pb2_grpc.add_TracesServicer_to_server, TraceService(traces))
        if config.http:
            self._http = self._make_http(inference, reporter, traces)
        node_service = NodeService(reporter, self._server, self._on_drain)
        self._server.add(mesh_pb2_grpc.add_NodeServicer_to_server, node_service)
        self._status_metrics = StatusMetrics(self._telemetry.metrics, node_service.current_status)

    def _make_traces(self) -> TraceStore | None:
        """What the nodes send, if the router is to keep it."""
        if not self._config.keep_traces:
            return None
        traces = TraceStore(max_traces=self._config.keep_traces, max_spans_per_trace=_MAX_SPANS_PER_TRACE)
        add_otlp_services(self._server, traces)
        return traces

    def _make_http(
        self, inference: InferenceService, reporter: RouterReporter, traces: TraceStore | None
    ) -> HttpServer:
        config = self._config
        parts = ApiParts(
            calls=self._server,
            inference=inference,
            tokenizer=self._tokenizer,
            clock=self._clock,
            model_name=config.model_name(),
            bodies=BodyReader(
                BodyLimits(
                    max_bytes=config.max_message_bytes,
                    max_bytes_of_all=max(config.max_message_bytes, _MAX_BODY_BYTES_OF_ALL),
                )
            ),
            is_ready=lambda: self._pool.is_ready,
        )
        host, port = parse_address(config.http, min_port=0)
        pages = ui_routes(
            UiParts(
                calls=self._server,
                mesh=MeshView(self._pool, self._channels, reporter, self._clock),
                traces=traces,
                model_name=config.model_name(),
            )
        )
        files, tls = tls_files_of(config), None
        if files is not None:
            tls = HttpsContexts(files, demands_client_certificate=config.demands_client_certificates).listening
        return HttpServer(
            make_app(parts, pages),
            host=host,
            port=port,
            advertise_host=config.advertise_host,
            tls=tls,
            limits=ConnectionLimits(max_connections=config.http_max_connections),
        )

    def _make_routing(self) -> RoutingParts:
        config = self._config
        budget = RetryBudget(ratio=config.retry_ratio, burst=config.retry_burst)
        return RoutingParts(
            tokenizer=self._tokenizer,
            pool=self._pool,
            placer=self._placer,
            discovery=self._discovery,
            channels=self._channels,
            telemetry=self._telemetry,
            clock=self._clock,
            retry_policy=RetryPolicy(max_attempts=config.max_attempts),
            retry_budget=budget,
            draw=self._draw,
            hedges=Hedges(HedgePolicy(after_s=config.hedge_after_s, percentile=config.hedge_percentile), budget),
            silence_timeout_s=config.silence_timeout_s or None,
        )

    async def start(self) -> None:
        """Listens and asks every node once; returns whether or not they answered. Raises PortInUse or BadConfig."""
        config = self._config
        await self._server.start()
        if self._http is not None:
            await self._http.start()
            base = f"{'https' if config.tls_cert else 'http'}://{self.http_address}"
            _log.info("OpenAI-compatible API at %s/v1, live page at %s/ui", base, base)
        _log.info("model %s: vocab_size %d", config.model_name(), self._tokenizer.vocab_size)
        _log.info(
            "nodes: prefill %s, decode %s, fused %s", *map(_listing, (config.prefill, config.decode, config.fused))
        )
        await self._membership.refresh()
        await self._discovery.ask_all()
        self._attendance.attend_to(self._pool.addresses)
        self._is_started = True
        if not self._pool.is_ready:
            _log.warning("not serving yet: %s", self._pool.describe_lack())
        self._status_metrics.start()
        for work in (self._discovery.run(), self._membership.run()):
            task = asyncio.create_task(work)
            task.add_done_callback(self._end_of_background)
            self._background.append(task)

    async def stop(self) -> None:
        """Lets running requests finish for the grace period, then stops everything. Copes with a failed start."""
        await self._server.stop(self._config.drain_grace_s)
        if self._http is not None:
            await self._http.stop()
        ending = (*self._background, *self._partings)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await self._attendance.close()
        await self._status_metrics.close()
        await self._channels.close()

    def _end_of_background(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            _log.error("discovery of nodes broke down", exc_info=error)
            self._on_fatal(error)

    def _make_attendants(self) -> list[Callable[[str], Coroutine[object, object, None]]]:
        """What is done about each node while it is a member."""
        config = self._config

        health = HealthWatch(self._channels, retry_interval_s=config.poll_interval_s, on_change=self._discovery.wake)
        if config.follow_interval_s == 0:
            return [health.watch]
        follower = NodeFollower(
            self._channels,
            self.observations,
            capacity_tokens=self._capacity_tokens,
            interval_s=config.follow_interval_s,
            retry_interval_s=config.poll_interval_s,
            wants_prefixes=config.placement_policy == "cache_aware",
        )
        return [health.watch, follower.follow]

    def _capacity_tokens(self, address: str) -> int:
        facts = self._pool.facts_of(address)
        return 0 if facts is None else facts.capacity_tokens

    def _update_members(self) -> None:
        """Nodes came or went."""
        if self._is_started:
            for address in self._attendance.attend_to(self._pool.addresses):
                self.observations.forget(address)
                parting = asyncio.create_task(self._part_with(address))
                self._partings.add(parting)
                parting.add_done_callback(self._partings.discard)
            self._discovery.wake()

    async def _part_with(self, address: str) -> None:
        """Hangs up once the last request on a node that is no member any more is over."""
        while self._placer.num_in_flight(address):
            await asyncio.sleep(_PARTING_POLL_S)
        if address not in self._pool.addresses:
            await self._channels.drop(address)

    def _update_health(self) -> None:
        if self._pool.is_ready != self._is_serving:
            self._is_serving = self._pool.is_ready
            self._server.set_serving(self._is_serving)


def _listing(addresses: tuple[str, ...]) -> str:
    return ", ".join(addresses) or "none"

"""Hosts of prefill and decode nodes: a real scheduler and engine loop around a fake model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial

from cache_runtime.scheduler_bridge import pool_to_cache_groups
from cache_runtime.transfer.manifest_builder import build_manifest
from cache_runtime.transfer.plane_set import PlaneSet
from decode_node.server import DecodeNode
from node_runtime.engine.core import ComputeCore, DataPlane
from node_runtime.engine.loop import EngineLoop
from node_runtime.rpc import Telemetry
from prefill_node.server import PrefillNode
from scheduler_core import Event, Plan, Role, SchedulerConfig
from simulation.engine import stepped_engine
from simulation.hosts import Host, Surroundings
from simulation.kernel import CallbackExecutor, Process, ProcessKilled, VirtualClock
from simulation.ledger import WatchedScheduler
from simulation.model import PREFIX_GRANULARITY, FakeExecutor, memory_plan
from simulation.plane import SimulatedPlane
from simulation.settings import ComputeSettings, decode_config, model_facts, prefill_config

_LAYER_S = (0.0001, 0.0008)
_MAX_SLEEP_S = 60.0


class ComputeHost(Host):
    """A host of a compute node."""

    def __init__(self, name: str, address: str, surroundings: Surroundings, settings: ComputeSettings) -> None:
        super().__init__(name, address, surroundings)
        self.settings = settings
        self.num_starts = 0
        self.max_request_tokens = 0
        self.core: ComputeCore | None = None
        self.node: PrefillNode | DecodeNode | None = None

    @property
    def endpoint(self) -> str:
        """Of the data plane of the process that runs now."""
        return f"{self.name}/{self.num_starts}"

    def is_quiet(self) -> bool:
        """Nothing is held for a request."""
        if self.core is None or self.node is None:
            return False
        capacity = self.core.scheduler.capacity()
        return (
            capacity.num_live_requests == 0
            and capacity.active_lcm_blocks == capacity.quarantined_lcm_blocks == 0
            and self.num_handoffs() == 0
        )

    @abstractmethod
    def num_handoffs(self) -> int:
        """Handoffs under way, or whose blocks are still held."""

    def describe(self) -> str:
        if self.core is None:
            return f"{self.name} is down"
        capacity = self.core.scheduler.capacity()
        return (
            f"{self.name}: {capacity.num_live_requests} live requests, {self.num_handoffs()} handoffs, "
            f"{capacity.active_lcm_blocks} active and {capacity.quarantined_lcm_blocks} quarantined of "
            f"{capacity.total_lcm_blocks} LCM blocks"
        )

    def clear_cache(self) -> None:
        """After quiescence: every block must be free."""
        if self.core is None:
            return
        cleared = self.core.scheduler.clear_cache()
        capacity = self.core.scheduler.capacity()
        if not cleared or capacity.empty_lcm_blocks != capacity.total_lcm_blocks:
            text = (
                f"{self.name} has {capacity.empty_lcm_blocks} of {capacity.total_lcm_blocks} LCM blocks free at the end"
            )
            self.around.journal.find("leak", text)

    def kill(self, *, silently: bool = False) -> None:
        super().kill(silently=silently)
        self.core = self.node = None

    def drain(self, restart_after_s: float) -> None:
        """The node stops in good order; then its process ends, and later another one starts."""
        node, process = self.node, self.process
        if node is None or process is None or self.is_draining:
            return
        self.is_draining = True
        self.around.journal.note(self.name, lambda: "is asked to stop")

        async def leave() -> None:
            await node.stop()
            # Not from inside the coroutine that is to die with the process.
            self.around.director.call_soon(self._leave, process, restart_after_s)

        process.create_task(leave())

    def _leave(self, process: Process, restart_after_s: float) -> None:
        if self.process is process:
            self.kill()
            self.around.director.call_later(restart_after_s, self.boot)

    def make_core(self, process: Process, role: Role) -> ComputeCore:
        settings, around = self.settings, self.around
        self.num_starts += 1
        endpoint = self.endpoint
        plan = memory_plan(settings.kind, settings.num_lcm_blocks)
        executor = FakeExecutor(settings.kind, plan, partial(self._let_time_pass, process))
        ledger = around.ledger if role is Role.DECODE else None
        if ledger is not None:
            ledger.add_memory(endpoint, process, plan, executor.arena.base_address)

        def on_plan(made: Plan) -> None:
            self._watch_capacity()
            if ledger is not None:
                ledger.on_plan(endpoint, made)

        def on_events(events: Sequence[Event]) -> None:
            if ledger is not None:
                ledger.on_events(endpoint, events)

        scheduler = WatchedScheduler(
            SchedulerConfig(
                role=role,
                prefix_granularity=PREFIX_GRANULARITY,
                num_lcm_blocks=settings.num_lcm_blocks,
                max_batch_size=settings.max_batch_size,
                token_budget=settings.token_budget,
                cache_groups=pool_to_cache_groups(executor.contract),
                max_ready_ungranted=settings.max_ready_ungranted,
            ),
            on_plan,
            on_events,
        )
        self.max_request_tokens = scheduler.max_request_tokens
        plane = SimulatedPlane(around.data, process, endpoint)
        planes = PlaneSet((plane,))
        planes.register(executor.arena.base_address, plan.num_arena_bytes)
        manifest = build_manifest(
            plan,
            stages=executor.stages,
            model_fingerprint=settings.kind.value,
            weight_version="",
            arena_base=executor.arena.base_address,
            data_plane=plane.name,
            endpoint=endpoint,
            planes=planes.offers,
        )
        self.core = ComputeCore(
            executor=executor,
            scheduler=scheduler,
            group_ids=tuple(executor.contract.group_ids),
            facts=model_facts(settings, plan.num_arena_bytes, plan.layout.token_capacity(settings.num_lcm_blocks)),
            data_plane=DataPlane(planes=planes, manifest=manifest),
        )
        return self.core

    def engine_class(self, process: Process) -> type[EngineLoop]:
        return stepped_engine(process, self.on_fatal)

    def _watch_capacity(self) -> None:
        """Every parent is in exactly one place."""
        if self.core is None:
            return
        capacity = self.core.scheduler.capacity()
        counts = (
            capacity.empty_lcm_blocks,
            capacity.active_lcm_blocks,
            capacity.cached_lcm_blocks,
            capacity.quarantined_lcm_blocks,
        )
        if sum(counts) != capacity.total_lcm_blocks:
            text = f"{self.name}: empty, active, cached, quarantined {counts} of {capacity.total_lcm_blocks} LCM blocks"
            self.around.journal.find("block count", text)

    def _let_time_pass(self, process: Process) -> None:
        """One layer is computed, and the rest of the world goes on meanwhile."""
        world = self.around.world
        world.run_until(world.now_s + self.around.rng.uniform(*_LAYER_S) * self.around.compute_factor * self.slowness)
        # A process sleeps in mid-step, too; not while somebody else's step waits for this one to return.
        if process.is_asleep and world.depth == 1:
            world.run_until(world.now_s + _MAX_SLEEP_S, lambda: process.is_dead or not process.is_asleep)
        if process.is_dead:
            raise ProcessKilled


class PrefillHost(ComputeHost):
    """Runs a PrefillNode."""

    def _start(self, process: Process) -> None:
        node = self.node = PrefillNode(
            prefill_config(self.name, self.hostname(), self.port(), self.settings),
            self.make_core(process, Role.PREFILL),
            telemetry=Telemetry.off(),
            on_fatal=self.on_fatal,
            on_drain=self.on_drain,
            clock=VirtualClock(self.around.world),
            transport=self.transport(process),
            engine_class=self.engine_class(process),
            hashing=CallbackExecutor(process),
        )
        process.create_task(node.start())

    def num_handoffs(self) -> int:
        return self.node.service.num_handoffs if isinstance(self.node, PrefillNode) else 0


class DecodeHost(ComputeHost):
    """Runs a DecodeNode that watches the given prefill nodes."""

    def __init__(
        self,
        name: str,
        address: str,
        surroundings: Surroundings,
        settings: ComputeSettings,
        prefill_addresses: Sequence[str],
    ) -> None:
        super().__init__(name, address, surroundings, settings)
        self._prefill_addresses = tuple(prefill_addresses)

    def _start(self, process: Process) -> None:
        node = self.node = DecodeNode(
            decode_config(self.name, self.hostname(), self.port(), self.settings, self._prefill_addresses),
            self.make_core(process, Role.DECODE),
            telemetry=Telemetry.off(),
            on_fatal=self.on_fatal,
            on_drain=self.on_drain,
            clock=VirtualClock(self.around.world),
            transport=self.transport(process),
            engine_class=self.engine_class(process),
        )
        process.create_task(node.start())

    def num_handoffs(self) -> int:
        return self.node.num_handoffs if isinstance(self.node, DecodeNode) else 0

"""Hosts of prefill, decode and fused nodes: a real scheduler and engine loop around a fake model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from typing_extensions import override

from cache_runtime.recipes.partition import TensorRank
from cache_runtime.transfer.manifest_builder import place_rank
from cache_runtime.transfer.plane_set import PlaneSet
from cache_runtime.transfer.schema import PlacementManifest
from decode_node.config import DecodeNodeConfig, FusedNodeConfig
from decode_node.server import DecodeNode
from node_runtime.engine.core import ComputeCore, DataPlane
from node_runtime.engine.loop import EngineLoop
from node_runtime.engine.messages import Command, SubmitRequest
from node_runtime.engine.ranks.leader import MirroredExecutor, MirroredScheduler
from node_runtime.rpc import Telemetry
from prefill_node.config import PrefillNodeConfig
from prefill_node.server import PrefillNode
from scheduler_core import Capacity, Plan, RequestSpec, Role, Scheduler, SchedulerConfig
from simulation.engine import stepped_engine
from simulation.hosts import Host, Surroundings
from simulation.kernel import CallbackExecutor, Process, ProcessKilled, VirtualClock
from simulation.ledger import GrantWatch
from simulation.model import PREFIX_GRANULARITY, FakeExecutor, cache_shape
from simulation.plane import SimulatedPlane
from simulation.ranks import SimulatedRanks
from simulation.settings import ComputeSettings, decode_config, fused_config, model_facts, prefill_config
from simulation.waiting_line import WaitingLine
from simulation.watched import SchedulerWatch, WatchedScheduler

_LAYER_S = (0.0001, 0.0008)
_MAX_SLEEP_S = 60.0
# When a supervisor starts a node again that left by itself.
_SUPERVISOR_S = 0.5


class ComputeHost(Host):
    """A host of a compute node."""

    role: Role

    def __init__(self, name: str, address: str, surroundings: Surroundings, settings: ComputeSettings) -> None:
        super().__init__(name, address, surroundings)
        self.settings = settings
        self.shape = cache_shape(settings.kind, settings.num_lcm_blocks)
        self.max_request_tokens = 0
        # That of the first rank.
        self.scheduler: WatchedScheduler | None = None
        self.node: PrefillNode | DecodeNode | None = None
        self.ranks: SimulatedRanks | None = None
        self._line: WaitingLine | None = None
        self._hangs_until_s = 0.0
        self._layer_dice = surroundings.dice.of("layer", name)

    @property
    def endpoint(self) -> str:
        """Of the data plane of the process that runs now."""
        return f"{self.name}/{self.num_boots}"

    def is_quiet(self) -> bool:
        """Nothing is held for a request."""
        if self.scheduler is None or self.node is None:
            return False
        capacity = self.scheduler.capacity()
        return (
            capacity.num_live_requests == 0
            and capacity.active_lcm_blocks == capacity.quarantined_lcm_blocks == 0
            and self.num_handoffs() == 0
            and (self.ranks is None or self.ranks.num_under_way == 0)
        )

    @abstractmethod
    def num_handoffs(self) -> int:
        """Handoffs under way, or whose blocks are still held."""

    def describe(self) -> str:
        if self.scheduler is None:
            return f"{self.name} is down"
        capacity = self.scheduler.capacity()
        return (
            f"{self.name}: {capacity.num_live_requests} live requests, {self.num_handoffs()} handoffs, "
            f"{capacity.active_lcm_blocks} active and {capacity.quarantined_lcm_blocks} quarantined of "
            f"{capacity.total_lcm_blocks} LCM blocks"
        )

    def clear_cache(self) -> None:
        """After quiescence: every block of every rank must be free."""
        schedulers: list[Scheduler | None] = [self.scheduler, None if self.ranks is None else self.ranks.scheduler]
        for rank, scheduler in enumerate(schedulers):
            if scheduler is None:
                continue
            cleared = scheduler.clear_cache()
            capacity = scheduler.capacity()
            if not cleared or capacity.empty_lcm_blocks != capacity.total_lcm_blocks:
                counts = f"{capacity.empty_lcm_blocks} of {capacity.total_lcm_blocks} LCM blocks"
                self.around.journal.find("leak", f"{self.name} has {counts} of rank {rank} free at the end")

    @override
    def _end_process(self, *, silently: bool = False) -> None:
        super()._end_process(silently=silently)
        if self.ranks is not None:
            self.ranks.close()
        self.scheduler = self.node = self.ranks = self._line = None
        self._hangs_until_s = 0.0

    def hang(self, for_s: float) -> None:
        """The engine of the process that runs now does nothing for so long."""
        if self.process is not None:
            self._hangs_until_s = self.around.world.now_s + for_s

    # Tensor ranks.

    @property
    def is_rank_lost(self) -> bool:
        """Whether the node must leave because one of its ranks is gone."""
        return self.ranks is not None and self.ranks.process.is_dead

    def kill_rank(self, restart_after_s: float) -> None:
        """Without effect on a node of one rank."""
        if self.ranks is not None and not self.is_rank_lost:
            self.around.journal.note(self.name, lambda: "loses its rank 1")
            self.around.journal.count("rank lost")
            # What follows is no defect, and said as one all the same.
            self.around.journal.excused.add(self.name)
            self.expect_to_leave(restart_after_s)
            self.ranks.die(-9)

    def delay_rank(self, seconds: float) -> None:
        """Without effect on a node of one rank."""
        if self.ranks is not None:
            self.ranks.lateness_s = seconds

    @override
    def on_fatal(self, error: BaseException) -> None:
        if not self.is_rank_lost or not self.is_asked_to_leave:
            super().on_fatal(error)
            self.expect_to_leave(_SUPERVISOR_S)
        # As `serve` does, with a status of failure.
        self.leave(str(error))

    # The parts of a node.

    def make_core(self, process: Process) -> ComputeCore:
        settings, around = self.settings, self.around
        executor, *followers = executors = self._make_executors(process)
        shape = self.shape
        plan = shape.plan
        config = SchedulerConfig(
            role=self.role,
            prefix_granularity=PREFIX_GRANULARITY,
            num_lcm_blocks=settings.num_lcm_blocks,
            max_batch_size=settings.max_batch_size,
            token_budget=settings.token_budget,
            cache_groups=shape.cache_groups,
            max_ready_ungranted=settings.max_ready_ungranted,
        )
        line = self._line = WaitingLine(
            needs_ready=self.role is Role.DECODE, find=partial(around.journal.find, "overtaken")
        )
        scheduler = self.scheduler = WatchedScheduler(
            config, (_Gauges(self), line, *self._make_watches(process, executors))
        )
        self.max_request_tokens = scheduler.max_request_tokens
        core = ComputeCore(
            executor=executor,
            scheduler=scheduler,
            group_ids=shape.group_ids,
            facts=model_facts(settings, plan.num_arena_bytes, plan.layout.token_capacity(settings.num_lcm_blocks)),
            data_plane=self._make_data_plane(process, executors),
        )
        if self.ranks is not None:
            links = self.ranks.follow(Scheduler(config), followers[0])
            core = replace(
                core,
                executor=MirroredExecutor(executor, links),
                scheduler=MirroredScheduler(scheduler, links),
                ranks=self.ranks,
            )
        return core

    def _make_executors(self, process: Process) -> Sequence[FakeExecutor]:
        """By rank. The first one's passes take time, and the other's end before it may go on."""
        settings, around = self.settings, self.around
        on_time = partial(self._let_time_pass, process)
        if settings.num_tensor_ranks == 1:
            return [FakeExecutor(self.shape, on_time)]
        rank = Process(around.world, f"{self.name}/rank1", partial(self._on_error, f"{self.name}/rank1"))
        self.ranks = SimulatedRanks(process, rank, around.dice.of("rank", self.name))
        leader = FakeExecutor(self.shape, on_time, self.ranks.gather, self.ranks.meet)
        return [leader, FakeExecutor(self.shape, lambda: None)]

    def _make_watches(self, process: Process, executors: Sequence[FakeExecutor]) -> Sequence[SchedulerWatch]:
        """What this role has to look at besides."""
        del process, executors
        return ()

    def _make_data_plane(self, process: Process, executors: Sequence[FakeExecutor]) -> DataPlane | None:
        """One for the arenas of all ranks."""
        plan = self.shape.plan
        plane = SimulatedPlane(self.around.data, process, self.endpoint)
        planes = PlaneSet((plane,))
        ranks = []
        for rank, executor in enumerate(executors):
            planes.register(executor.arena.base_address, plan.num_arena_bytes)
            placement = place_rank(
                plan,
                TensorRank(rank=rank, size=len(executors)),
                arena_base=executor.arena.base_address,
                data_plane=plane.name,
                endpoint=self.endpoint,
                planes=planes.offers,
            )
            ranks.append(placement)
        return DataPlane(planes=planes, manifest=PlacementManifest(logical=self.shape.logical, ranks=tuple(ranks)))

    def engine_class(self, process: Process) -> type[EngineLoop]:
        line, settings = self._line, self.settings

        def receive(command: Command) -> Command:
            if settings.is_overcommitted and isinstance(command, SubmitRequest):
                command = replace(command, spec=_without_length(command.spec))
            if line is not None:
                line.on_posted(command)
            return command

        return stepped_engine(process, receive, lambda: self._hangs_until_s)

    def _let_time_pass(self, process: Process) -> None:
        """One layer is computed, and the rest of the world goes on meanwhile."""
        world, factor = self.around.world, self.around.compute_factor * self.slowness
        world.run_until(world.now_s + self._layer_dice.uniform(*_LAYER_S) * factor)
        # A process sleeps in mid-step, too; not while somebody else's step waits for this one to return.
        if process.is_asleep and world.depth == 1:
            world.run_until(world.now_s + _MAX_SLEEP_S, lambda: process.is_dead or not process.is_asleep)
        if process.is_dead:
            raise ProcessKilled


def _without_length(spec: RequestSpec) -> RequestSpec:
    return RequestSpec(
        request_id=spec.request_id,
        tokens=spec.tokens,
        max_new_tokens=None,
        extra_keys=spec.extra_keys,
        local_prefill=spec.local_prefill,
    )


class _Gauges(SchedulerWatch):
    """What holds of every scheduler's numbers, and what a run has seen."""

    def __init__(self, host: ComputeHost) -> None:
        self._host = host
        self._journal = host.around.journal

    @override
    def on_submit(self, requests: Sequence[RequestSpec]) -> None:
        if self._host.role is Role.FUSED:
            self._journal.count("fused prompt")
        elif any(request.local_prefill for request in requests):
            self._journal.count("local prefill")

    @override
    def on_plan(self, plan: Plan, capacity: Capacity) -> None:
        """Every parent is in exactly one place."""
        counts = (
            capacity.empty_lcm_blocks,
            capacity.active_lcm_blocks,
            capacity.cached_lcm_blocks,
            capacity.quarantined_lcm_blocks,
        )
        if sum(counts) != capacity.total_lcm_blocks:
            text = f"empty, active, cached, quarantined {counts} of {capacity.total_lcm_blocks} LCM blocks"
            self._journal.find("block count", f"{self._host.name}: {text}")
        if counts[-1]:
            self._journal.count("quarantine")
        if plan.retracted:
            self._journal.count("retraction")

    @override
    def on_clear(self, *, was_cleared: bool, before: Capacity, after: Capacity) -> None:
        if was_cleared:
            self._host.num_clears += 1
        if was_cleared and after.empty_lcm_blocks != after.total_lcm_blocks:
            num_held = after.total_lcm_blocks - after.empty_lcm_blocks
            self._journal.find(
                "clear", f"{self._host.name} still holds {num_held} LCM blocks after its cache was cleared"
            )
        if not was_cleared and before.cached_lcm_blocks != after.cached_lcm_blocks:
            self._journal.find("clear", f"{self._host.name} refused to clear its cache, and lost some of it")


class PrefillHost(ComputeHost):
    """Runs a PrefillNode."""

    role = Role.PREFILL
    config: PrefillNodeConfig

    def __init__(self, name: str, address: str, surroundings: Surroundings, settings: ComputeSettings) -> None:
        super().__init__(name, address, surroundings, settings)
        self.config = prefill_config(name, self.hostname(), self.port(), settings)

    def _start(self, process: Process) -> None:
        node = self.node = PrefillNode(
            self.config,
            self.make_core(process),
            telemetry=Telemetry.off(),
            on_fatal=self.on_fatal,
            on_drain=self.on_drain,
            clock=VirtualClock(self.around.world),
            transport=self.transport(process),
            engine_class=self.engine_class(process),
            hashing=CallbackExecutor(process),
        )
        self.run_node(process, node.start(), node.stop)

    def num_handoffs(self) -> int:
        return self.node.service.num_handoffs if isinstance(self.node, PrefillNode) else 0


class DecodeHost(ComputeHost):
    """Runs a DecodeNode that watches the given prefill nodes."""

    role = Role.DECODE
    config: DecodeNodeConfig

    def __init__(
        self,
        name: str,
        address: str,
        surroundings: Surroundings,
        settings: ComputeSettings,
        prefill_addresses: Sequence[str],
    ) -> None:
        super().__init__(name, address, surroundings, settings)
        self.config = decode_config(name, self.hostname(), self.port(), settings, tuple(prefill_addresses))

    def _start(self, process: Process) -> None:
        node = self.node = DecodeNode(
            self.config,
            self.make_core(process),
            telemetry=Telemetry.off(),
            on_fatal=self.on_fatal,
            on_drain=self.on_drain,
            clock=VirtualClock(self.around.world),
            transport=self.transport(process),
            engine_class=self.engine_class(process),
        )
        self.run_node(process, node.start(), node.stop)

    @override
    def _make_watches(self, process: Process, executors: Sequence[FakeExecutor]) -> Sequence[SchedulerWatch]:
        ledger, arenas = self.around.ledger, [executor.arena for executor in executors]
        ledger.add_memory(self.endpoint, process, arenas[0].plan, tuple(arena.base_address for arena in arenas))
        return (GrantWatch(ledger, self.endpoint),)

    def num_handoffs(self) -> int:
        return self.node.num_handoffs if isinstance(self.node, DecodeNode) else 0


class FusedHost(ComputeHost):
    """Runs a fused node."""

    role = Role.FUSED
    config: FusedNodeConfig

    def __init__(self, name: str, address: str, surroundings: Surroundings, settings: ComputeSettings) -> None:
        super().__init__(name, address, surroundings, settings)
        self.config = fused_config(name, self.hostname(), self.port(), settings)

    def _start(self, process: Process) -> None:
        node = self.node = DecodeNode(
            self.config,
            self.make_core(process),
            telemetry=Telemetry.off(),
            on_fatal=self.on_fatal,
            on_drain=self.on_drain,
            clock=VirtualClock(self.around.world),
            transport=self.transport(process),
            engine_class=self.engine_class(process),
        )
        self.run_node(process, node.start(), node.stop)

    @override
    def _make_data_plane(self, process: Process, executors: Sequence[FakeExecutor]) -> DataPlane | None:
        return None

    def num_handoffs(self) -> int:
        return 0

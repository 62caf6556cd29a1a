"""Simulated nodes in virtual time: the native scheduler of a role, and forward passes that take what they cost."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from pdmesh.v1 import mesh_pb2

import scheduler_core as sc
from node_runtime.engine.rates import StepRates
from node_runtime.prefix_feed import PrefixFeed
from placement.costs import Machine
from placement.trace import BLOCK_TOKENS


def make_scheduler(role: sc.Role, num_lcm_blocks: int, *, token_budget: int, max_batch_size: int = 1) -> sc.Scheduler:
    """For a model whose only cache is that of full attention, in blocks as the traces have them."""
    group = sc.CacheGroupConfig(
        group_id="full",
        family=sc.Family.HISTORY,
        retention=sc.Retention.FULL_HISTORY,
        block_granularity=BLOCK_TOKENS,
    )
    return sc.Scheduler(
        sc.SchedulerConfig(
            role=role,
            prefix_granularity=BLOCK_TOKENS,
            num_lcm_blocks=num_lcm_blocks,
            max_batch_size=max_batch_size,
            token_budget=token_budget,
            cache_groups=[group],
        )
    )


class Agenda:
    """What happens when. `now_s` and `unix_ns_at` make it a Clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._num_planned = 0
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def unix_ns_at(self, monotonic_s: float) -> int:
        return round(monotonic_s * 1e9)

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        self._num_planned += 1
        heapq.heappush(self._heap, (when_s, self._num_planned, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self._now_s + delay_s, action)

    def run(self, is_done: Callable[[], bool]) -> None:
        while self._heap and not is_done():
            self._now_s, _, action = heapq.heappop(self._heap)
            action()


@dataclass(slots=True)
class Served:
    """One request on its way. Times are virtual seconds."""

    name: str
    tokens: npt.NDArray[np.int32]
    prompt_tokens: int
    output_tokens: int
    arrival_s: float
    result: sc.ResultEvent
    prefill: SimulatedNode | None = None
    decode: SimulatedNode | None = None
    prefill_hit_tokens: int = 0
    started_at_s: float = 0.0
    granted_at_s: float | None = None
    from_token: int = 0
    computed_at_s: float | None = None
    first_token_at_s: float = 0.0
    ended_at_s: float = 0.0
    num_generated: int = 0


class Watcher:
    """What a node tells about its requests."""

    def on_admitted(self, node: SimulatedNode, request_id: str, hit_tokens: int) -> None: ...

    def on_granted(self, node: SimulatedNode, request_id: str, from_token: int) -> None: ...

    def on_handover(self, node: SimulatedNode, request_id: str) -> None: ...

    def on_token(self, node: SimulatedNode, request_id: str) -> bool:
        """Whether it was the last one."""
        return False


@dataclass(slots=True)
class SimulatedNode:
    """One node. Its scheduler decides; time passes by what its plans cost."""

    name: str
    role: sc.Role
    machine: Machine
    agenda: Agenda
    watcher: Watcher
    num_lcm_blocks: int
    token_budget: int
    max_batch_size: int
    scheduler: sc.Scheduler = field(init=False)
    feed: PrefixFeed = field(default_factory=PrefixFeed)
    rates: StepRates = field(default_factory=StepRates)
    results: dict[str, sc.ResultEvent] = field(default_factory=dict)
    is_busy: bool = False
    busy_s: float = 0.0
    link_free_at_s: float = 0.0
    num_requests: int = 0
    num_generated_tokens: int = 0

    def __post_init__(self) -> None:
        self.scheduler = make_scheduler(
            self.role, self.num_lcm_blocks, token_budget=self.token_budget, max_batch_size=self.max_batch_size
        )
        self.scheduler.track_prefix_keys()

    def submit(self, request: Served, max_new_tokens: int) -> None:
        self.num_requests += 1
        self.results[request.name] = request.result
        self.scheduler.submit(
            [sc.RequestSpec(request_id=request.name, tokens=request.tokens, max_new_tokens=max_new_tokens)]
        )
        self.kick()

    def tell(self, event: sc.Event) -> None:
        self.scheduler.advance([event])
        self.kick()

    def kick(self) -> None:
        """Starts the next pass unless one is under way."""
        if not self.is_busy:
            self.is_busy = True
            self.agenda.after(0.0, self._step)

    def status(self) -> mesh_pb2.NodeStatus:
        """As a real node tells it."""
        capacity = self.scheduler.capacity()
        return mesh_pb2.NodeStatus(
            serving=True,
            num_waiting_requests=capacity.num_waiting,
            num_running_requests=capacity.num_running,
            arena=mesh_pb2.ArenaStatus(
                total_lcm_blocks=capacity.total_lcm_blocks,
                empty_lcm_blocks=capacity.empty_lcm_blocks,
                active_lcm_blocks=capacity.active_lcm_blocks,
                cached_lcm_blocks=capacity.cached_lcm_blocks,
            ),
            prefill_tokens_per_s=self.rates.prefill_tokens_per_s,
            decode_step_ms=self.rates.decode_step_s * 1000,
        )

    def _step(self) -> None:
        plan = self.scheduler.next_plan()
        for admission in plan.admissions:
            self.watcher.on_admitted(self, admission.request_id, admission.device_hit_tokens)
        for remote in plan.remote_prefills:
            self.watcher.on_granted(self, remote.request_id, remote.from_token)
        for handover in plan.handovers:
            self.watcher.on_handover(self, handover.request_id)
        for request_id in plan.finished:
            del self.results[request_id]
        if plan.num_rows == 0:
            self.is_busy = False
            self._tell_prefixes()
            if not plan.is_empty:
                self.kick()
            return
        duration_s = self.machine.pass_s(plan)
        self.busy_s += duration_s
        self.rates.note_pass(
            num_prefill_rows=plan.num_prefill_rows,
            num_tokens=int(plan.input_lengths.sum()),
            duration_s=duration_s,
        )
        self.agenda.after(duration_s, lambda: self._land(plan))

    def _land(self, plan: sc.Plan) -> None:
        events: list[sc.Event] = []
        results = self.results
        for request_id, is_wanted in zip(plan.request_ids, plan.logits_wanted.tolist(), strict=True):
            if not is_wanted:
                events.append(sc.ResultEvent(request_id, []))
                continue
            events.append(results[request_id])
            if self.role is not sc.Role.PREFILL:
                self.num_generated_tokens += 1
                if self.watcher.on_token(self, request_id):
                    events.append(sc.FinishEvent(request_id))
        self.scheduler.advance(events)
        self._tell_prefixes()
        self._step()

    def _tell_prefixes(self) -> None:
        changes = self.scheduler.drain_prefix_keys()
        if changes:
            self.feed.apply(is_cleared=changes.is_cleared, removed=changes.removed, stored=changes.stored)

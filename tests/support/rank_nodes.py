"""Nodes of several tensor ranks as threads of this process: rank 0 has an engine loop, the others follow it.

Every rank has a model part, a scheduler, an arena and a data plane of its own, as processes would.
"""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass
from types import TracebackType

from unit.model_runtime.thread_ranks import Meeting

from cache_runtime.recipes.partition import TensorRank
from cache_runtime.scheduler_bridge import pool_to_cache_groups
from cache_runtime.transfer.manifest_builder import describe_cache, place_rank
from cache_runtime.transfer.memory_engine import MemoryEngine, MemoryFabric
from cache_runtime.transfer.schema import LogicalManifest, PlacementManifest, RankPlacement
from model_runtime.checkpoint import Checkpoint
from model_runtime.executor import ModelExecutor
from model_runtime.rank_group import RankGroup
from model_runtime.sampler import SampledToken, SamplingParams
from node_runtime.clock import ManualClock
from node_runtime.engine.delivery import deliver_now
from node_runtime.engine.loop import EngineLoop
from node_runtime.engine.messages import StopRule, SubmitRequest, TokenGenerated, Update
from node_runtime.engine.ranks.follower import Follower
from node_runtime.engine.ranks.leader import Followers, MirroredExecutor, MirroredScheduler
from node_runtime.engine.ranks.link import RankLink
from prefill_node.sender import PrefillSender
from scheduler_core import RequestSpec, Role, Scheduler, SchedulerConfig

JOIN_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParts:
    """One rank."""

    executor: ModelExecutor
    scheduler: Scheduler
    engine: MemoryEngine
    logical: LogicalManifest
    placement: RankPlacement
    sender: PrefillSender | None


class RankNode:
    """One node. A context manager, which ends its threads and data planes."""

    def __init__(
        self,
        role: Role,
        checkpoint: Checkpoint,
        num_ranks: int,
        fabric: MemoryFabric,
        *,
        memory_bytes: int = 2 << 20,
        prefix_granularity: int = 8,
        token_budget: int = 9,
    ) -> None:
        self._role = role
        self._meeting = Meeting(num_ranks)
        self.failures: list[BaseException] = []
        self.updates: dict[str, list[Update]] = {}
        self.parts = [
            _make_rank(role, checkpoint, ranks, fabric, memory_bytes, prefix_granularity, token_budget)
            for ranks in self._meeting.ranks()
        ]
        self.manifest = PlacementManifest(
            logical=self.parts[0].logical, ranks=tuple(part.placement for part in self.parts)
        )
        self._links: list[RankLink] = []
        self._threads: list[threading.Thread] = []
        for rank in range(1, num_ranks):
            self._start(rank)
        followers = Followers(self._links)
        leader = self.parts[0]
        self.scheduler = MirroredScheduler(leader.scheduler, followers)
        self.loop = EngineLoop(
            self.scheduler,
            MirroredExecutor(leader.executor, followers),
            group_ids=leader.executor.arena.contract.group_ids,
            clock=ManualClock(),
            deliver=deliver_now,
            on_fatal=self.failures.append,
            hooks=leader.sender,
        )

    def __enter__(self) -> RankNode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_followers()
        for part in self.parts:
            part.engine.close()

    def end_followers(self) -> None:
        """Closes the leader's links and waits until everything that was ordered is carried out."""
        for link in self._links:
            link.close()
        for thread in self._threads:
            thread.join(JOIN_TIMEOUT_S)
            assert not thread.is_alive()

    def submit(self, request_id: str, prompt: list[int], num_tokens: int, *, num_logprobs: int = 3) -> None:
        updates = self.updates.setdefault(request_id, [])
        is_prefill = self._role is Role.PREFILL
        self.loop.post(
            SubmitRequest(
                spec=RequestSpec(request_id=request_id, tokens=prompt, max_new_tokens=1 if is_prefill else num_tokens),
                sampling=SamplingParams(num_logprobs=num_logprobs),
                stop=None if is_prefill else StopRule(max_new_tokens=num_tokens),
                sink=updates.append,
            )
        )

    def run(self) -> None:
        """Until there is nothing to do; what the followers broke on is raised here."""
        try:
            self.loop.run_until_idle()
        except BaseException:
            self._raise_first()
            raise
        self._raise_first()

    def tokens(self, request_id: str) -> list[SampledToken]:
        return [update.token for update in self.updates[request_id] if isinstance(update, TokenGenerated)]

    def _raise_first(self) -> None:
        if self.failures:
            raise self.failures[0]

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        self._links.append(RankLink(ours, f"tensor rank {rank}"))
        part = self.parts[rank]
        link = RankLink(theirs, "tensor rank 0")
        follower = Follower(link, part.scheduler, part.executor, part.sender)

        def run() -> None:
            try:
                follower.run()
            except BaseException as error:
                self.failures.append(error)
                self._meeting.barrier.abort()
            finally:
                link.close()

        self._threads.append(threading.Thread(target=run, name=f"tensor rank {rank}", daemon=True))
        self._threads[-1].start()


def _make_rank(
    role: Role,
    checkpoint: Checkpoint,
    ranks: RankGroup,
    fabric: MemoryFabric,
    memory_bytes: int,
    prefix_granularity: int,
    token_budget: int,
) -> RankParts:
    executor = ModelExecutor(
        checkpoint,
        memory_bytes=memory_bytes,
        prefix_granularity=prefix_granularity,
        kernel_page_size=4,
        num_threads=1,
        tensor_ranks=ranks,
    )
    contract = executor.arena.contract
    scheduler = Scheduler(
        SchedulerConfig(
            role=role,
            prefix_granularity=contract.prefix_granularity,
            num_lcm_blocks=contract.num_lcm_blocks,
            max_batch_size=8,
            token_budget=token_budget,
            cache_groups=pool_to_cache_groups(contract),
        )
    )
    engine = MemoryEngine(fabric)
    engine.register(executor.arena.base_address, executor.arena.num_bytes)
    logical = describe_cache(executor.plan, stages=executor.stages, model_fingerprint="tiny", weight_version="")
    placement = place_rank(
        executor.plan,
        TensorRank(rank=ranks.rank, size=ranks.size),
        arena_base=executor.arena.base_address,
        data_plane=engine.name,
        endpoint=engine.endpoint,
    )
    sender = (
        PrefillSender(logical=logical, source=placement, block_tables=scheduler.block_tables)
        if role is Role.PREFILL
        else None
    )
    return RankParts(
        executor=executor,
        scheduler=scheduler,
        engine=engine,
        logical=logical,
        placement=placement,
        sender=sender,
    )

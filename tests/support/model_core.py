"""A ComputeCore around a real model, the real scheduler and the in-memory data plane."""

from __future__ import annotations

from collections.abc import Sequence

from unit.model_runtime.thread_ranks import Meeting

from cache_runtime.recipes.partition import TensorRank
from cache_runtime.scheduler_bridge import pool_to_cache_groups
from cache_runtime.transfer.engine import PlaneKind
from cache_runtime.transfer.manifest_builder import describe_cache, place_rank
from cache_runtime.transfer.memory_engine import MemoryEngine, MemoryFabric
from cache_runtime.transfer.plane_set import PlaneSet
from cache_runtime.transfer.schema import PlacementManifest
from model_runtime.checkpoint import Checkpoint
from model_runtime.executor import ModelExecutor
from model_runtime.lora.peft_files import LoraAdapter
from model_runtime.rank_group import RankGroup, SingleRank
from node_runtime.adapters import AdapterId
from node_runtime.engine.core import ComputeCore, DataPlane, ModelFacts
from node_runtime.engine.ranks.leader import MirroredExecutor, MirroredScheduler
from scheduler_core import Role, Scheduler, SchedulerConfig
from support.rank_threads import RankPart, RankThreads


def model_core(
    role: Role,
    *,
    checkpoint: Checkpoint,
    fabric: MemoryFabric | None = None,
    num_ranks: int = 1,
    memory_bytes: int = 4 << 20,
    prefix_granularity: int = 8,
    token_budget: int = 16,
    adapters: Sequence[LoraAdapter] = (),
) -> ComputeCore:
    """`memory_bytes` is that of each of `num_ranks` tensor ranks."""

    def make_part(ranks: RankGroup) -> RankPart:
        return _make_part(role, checkpoint, ranks, memory_bytes, prefix_granularity, token_budget, adapters)

    if num_ranks == 1:
        part = make_part(SingleRank())
        return _core(part, part.executor, part.scheduler, [part], checkpoint, fabric, None)
    meeting = Meeting(num_ranks)
    parts = [make_part(ranks) for ranks in meeting.ranks()]
    threads = RankThreads(meeting, parts)
    return _core(
        parts[0],
        MirroredExecutor(parts[0].executor, threads.followers),
        MirroredScheduler(parts[0].scheduler, threads.followers),
        parts,
        checkpoint,
        fabric,
        threads,
    )


def _make_part(
    role: Role,
    checkpoint: Checkpoint,
    ranks: RankGroup,
    memory_bytes: int,
    prefix_granularity: int,
    token_budget: int,
    adapters: Sequence[LoraAdapter],
) -> RankPart:
    executor = ModelExecutor(
        checkpoint,
        memory_bytes=memory_bytes,
        prefix_granularity=prefix_granularity,
        kernel_page_size=4,
        num_threads=1,
        tensor_ranks=ranks,
        adapters=adapters,
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
    return RankPart(executor=executor, scheduler=scheduler)


def _core(
    leader: RankPart,
    executor: ModelExecutor | MirroredExecutor,
    scheduler: Scheduler | MirroredScheduler,
    parts: Sequence[RankPart],
    checkpoint: Checkpoint,
    fabric: MemoryFabric | None,
    ranks: RankThreads | None,
) -> ComputeCore:
    return ComputeCore(
        executor=executor,
        scheduler=scheduler,
        group_ids=leader.executor.arena.contract.group_ids,
        facts=_facts(checkpoint, leader.executor),
        data_plane=None if fabric is None else _data_plane(parts, fabric),
        ranks=ranks,
    )


def _data_plane(parts: Sequence[RankPart], fabric: MemoryFabric) -> DataPlane:
    # Receiver-fenced: what lands was granted, on every rank.
    engine = MemoryEngine(fabric, kind=PlaneKind.TWO_SIDED)
    for part in parts:
        engine.register(part.executor.arena.base_address, part.executor.arena.num_bytes)
    leader = parts[0].executor
    logical = describe_cache(leader.plan, stages=leader.stages, model_fingerprint="tiny", weight_version="")
    ranks = tuple(
        place_rank(
            part.executor.plan,
            TensorRank(rank=rank, size=len(parts)),
            arena_base=part.executor.arena.base_address,
            data_plane=engine.name,
            endpoint=engine.endpoint,
        )
        for rank, part in enumerate(parts)
    )
    return DataPlane(planes=PlaneSet((engine,)), manifest=PlacementManifest(logical=logical, ranks=ranks))


def _facts(checkpoint: Checkpoint, executor: ModelExecutor) -> ModelFacts:
    return ModelFacts(
        name="tiny",
        path=str(checkpoint.path),
        fingerprint="tiny",
        vocab_size=executor.config.vocab_size,
        context_tokens=executor.config.max_position_tokens,
        prefix_granularity=executor.plan.prefix_granularity,
        arena_bytes=executor.arena.num_bytes,
        num_lcm_blocks=executor.plan.num_lcm_blocks,
        capacity_tokens=executor.token_capacity,
        weight_formats=executor.weights.formats,
        device="cpu",
        is_batch_invariant=True,
        weight_bytes=executor.weights.num_bytes,
        float32_weight_bytes=executor.weights.float32_bytes,
        adapters=tuple(AdapterId(name=name, digest=digest) for name, digest in executor.adapter_digests.items()),
        num_threads=1,
    )

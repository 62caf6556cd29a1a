"""Builds the parts of a compute node from its configuration: checkpoint, executor, scheduler, data plane.

Every fault of the configuration, the model file or the machine becomes BadConfig here, so that a node that cannot start
says why in one line. Blocking: opens files, reads weights, allocates the arena.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cache_runtime.device import Device, open_device
from cache_runtime.errors import CacheError
from cache_runtime.recipes.partition import TensorRank
from cache_runtime.scheduler_bridge import SchedulerLimits, pool_to_cache_groups
from cache_runtime.transfer.engine import DataPlaneError
from cache_runtime.transfer.manifest_builder import describe_cache, place_rank
from cache_runtime.transfer.manifest_rules import ManifestError
from cache_runtime.transfer.placement import MAX_LINKED_RANKS
from cache_runtime.transfer.plane_set import PlaneSet
from cache_runtime.transfer.schema import PlacementManifest
from model_runtime.checkpoint import Checkpoint, open_checkpoint
from model_runtime.errors import ModelError
from model_runtime.executor import ModelExecutor
from model_runtime.lora.peft_files import open_adapter
from model_runtime.rank_group import RankGroup
from model_runtime.weight_choice import WeightChoice
from node_runtime.adapters import AdapterId
from node_runtime.config import ComputeNodeConfig
from node_runtime.engine.cache_plan import plan_cache, scheduler_limits
from node_runtime.engine.core import ComputeCore, DataPlane, ModelFacts
from node_runtime.engine.data_planes import known_to_older_releases, open_planes
from node_runtime.engine.ranks.leader import MirroredExecutor, MirroredScheduler
from node_runtime.engine.ranks.processes import FollowerArena, FollowerProcesses
from node_runtime.errors import BadConfig
from scheduler_core import ConfigError, EvictionPolicy, Role, Scheduler, SchedulerConfig

_BUILD_ERRORS = (ModelError, CacheError, ManifestError, DataPlaneError, ConfigError, ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """What every rank of a node has: the model with its cache, and a scheduler of its own."""

    checkpoint: Checkpoint
    executor: ModelExecutor
    scheduler: Scheduler
    limits: SchedulerLimits


def build_core(config: ComputeNodeConfig, role: Role, *, max_ready_ungranted: int = 64) -> ComputeCore:
    """The real parts of a node. Raises BadConfig naming the culprit."""
    try:
        return _build(config, role, max_ready_ungranted)
    except _BUILD_ERRORS as error:
        raise BadConfig(str(error)) from error


def build_rank(config: ComputeNodeConfig, role: Role, *, max_ready_ungranted: int, tensor_ranks: RankGroup) -> RankPart:
    """The parts of one of several ranks of a node. Raises BadConfig naming the culprit."""
    try:
        checkpoint = open_checkpoint(config.model)
        # The leader's data plane reaches into the arenas of all ranks.
        device = open_device(config.device, is_shared=role is not Role.FUSED)
        return _build_rank(config, role, checkpoint, device, max_ready_ungranted, tensor_ranks)
    except _BUILD_ERRORS as error:
        raise BadConfig(str(error)) from error


def _build(config: ComputeNodeConfig, role: Role, max_ready_ungranted: int) -> ComputeCore:
    _check_device(config, role)
    _check_ranks(config, role)
    if config.tensor_parallel > 1:
        return _build_leader(config, role, max_ready_ungranted)
    checkpoint = open_checkpoint(config.model)
    # Before the weights: a machine that lacks what the data plane needs is told so at once.
    planes = None if role is Role.FUSED else open_planes(config)
    device = open_device(config.device, is_shared=planes is not None and planes.find("shm") is not None)
    part = _build_rank(config, role, checkpoint, device, max_ready_ungranted, None)
    return ComputeCore(
        executor=part.executor,
        scheduler=part.scheduler,
        group_ids=tuple(part.executor.arena.contract.group_ids),
        facts=_facts(config, part),
        data_plane=None if planes is None else _data_plane(config, planes, part, ()),
    )


def _build_leader(config: ComputeNodeConfig, role: Role, max_ready_ungranted: int) -> ComputeCore:
    """Rank 0 of several, and the processes of the others."""
    plan_cache(config, role)  # says what is wrong with the model or the settings before a process is started
    planes = None if role is Role.FUSED else open_planes(config)
    processes = FollowerProcesses(config, role, max_ready_ungranted=max_ready_ungranted)
    try:
        part = build_rank(config, role, max_ready_ungranted=max_ready_ungranted, tensor_ranks=processes.group)
        processes.wait_until_ready(part.executor.plan.num_lcm_blocks)
        return ComputeCore(
            executor=MirroredExecutor(part.executor, processes.followers),
            scheduler=MirroredScheduler(part.scheduler, processes.followers),
            group_ids=tuple(part.executor.arena.contract.group_ids),
            facts=_facts(config, part),
            data_plane=None if planes is None else _data_plane(config, planes, part, processes.arenas),
            ranks=processes,
        )
    except BaseException:
        processes.close()
        raise


def _build_rank(
    config: ComputeNodeConfig,
    role: Role,
    checkpoint: Checkpoint,
    device: Device,
    max_ready_ungranted: int,
    tensor_ranks: RankGroup | None,
) -> RankPart:
    limits = scheduler_limits(config, role, checkpoint)
    adapters = tuple(open_adapter(name, path, checkpoint.source) for name, path in config.adapters().items())
    executor = ModelExecutor(
        checkpoint,
        dtype=config.dtype,
        weights=WeightChoice(config.weights),
        memory_bytes=config.memory,
        prefix_granularity=config.prefix_granularity,
        kernel_page_size=config.kernel_page_size,
        num_threads=_num_threads(config),
        scheduler_limits=limits,
        tensor_ranks=tensor_ranks,
        device=device,
        adapters=adapters,
    )
    contract = executor.arena.contract
    scheduler_config = SchedulerConfig(
        role=role,
        prefix_granularity=contract.prefix_granularity,
        num_lcm_blocks=contract.num_lcm_blocks,
        max_batch_size=config.max_batch_size,
        token_budget=config.token_budget,
        cache_groups=pool_to_cache_groups(contract),
        enable_prefix_cache=config.enable_prefix_cache,
        eviction_policy=EvictionPolicy[config.eviction_policy.upper()],
        max_ready_ungranted=max_ready_ungranted,
    )
    scheduler_config.validate()
    return RankPart(checkpoint=checkpoint, executor=executor, scheduler=Scheduler(scheduler_config), limits=limits)


def _num_threads(config: ComputeNodeConfig) -> int:
    """Ranks share the cores of the machine."""
    return config.num_threads or max(1, len(os.sched_getaffinity(0)) // config.tensor_parallel)


def _check_ranks(config: ComputeNodeConfig, role: Role) -> None:
    if role is not Role.FUSED and config.tensor_parallel > MAX_LINKED_RANKS:
        raise BadConfig(
            f"tensor_parallel: {config.tensor_parallel} given, peers of a {role.name.lower()} node link at most "
            f"{MAX_LINKED_RANKS} ranks"
        )
    if config.tensor_parallel > 1 and config.device != "cpu":
        raise BadConfig(f"tensor_parallel: {config.tensor_parallel} given, ranks need cpu, not {config.device}")


def _check_device(config: ComputeNodeConfig, role: Role) -> None:
    """The data planes read and write host memory only."""
    if role is not Role.FUSED and config.device != "cpu":
        raise BadConfig(f"device: {config.device} computes on fused nodes only, a {role.name.lower()} node needs cpu")


def _data_plane(
    config: ComputeNodeConfig, planes: PlaneSet, part: RankPart, others: Sequence[FollowerArena]
) -> DataPlane:
    """Of all ranks: their arenas are alike, and all of them are in this process's reach."""
    executor = part.executor
    plan, own = executor.plan, executor.arena
    planes.register(own.base_address, own.num_bytes, shared_descriptor=own.shared_descriptor)
    for arena in others:
        planes.register(arena.base_address, arena.num_bytes, shared_descriptor=arena.descriptor)
    fallback = known_to_older_releases(planes)
    logical = describe_cache(
        plan,
        stages=executor.stages,
        model_fingerprint=part.checkpoint.fingerprint,
        weight_version=config.weight_version,
    )
    ranks = tuple(
        place_rank(
            plan,
            TensorRank(rank=rank, size=config.tensor_parallel),
            arena_base=arena_base,
            data_plane=fallback.name,
            endpoint=fallback.endpoint,
            planes=planes.offers,
        )
        for rank, arena_base in enumerate((own.base_address, *(arena.base_address for arena in others)))
    )
    return DataPlane(planes=planes, manifest=PlacementManifest(logical=logical, ranks=ranks))


def _facts(config: ComputeNodeConfig, part: RankPart) -> ModelFacts:
    executor = part.executor
    name = config.served_model_name or Path(config.model).stem
    if name in executor.adapter_digests:
        raise BadConfig(f'adapter: "{name}" is the name of the model')
    return ModelFacts(
        name=name,
        adapters=tuple(AdapterId(name=own, digest=digest) for own, digest in executor.adapter_digests.items()),
        path=str(part.checkpoint.path),
        fingerprint=part.checkpoint.fingerprint,
        vocab_size=executor.config.vocab_size,
        context_tokens=part.limits.context_tokens,
        prefix_granularity=executor.plan.prefix_granularity,
        arena_bytes=executor.arena.num_bytes,
        num_lcm_blocks=executor.plan.num_lcm_blocks,
        capacity_tokens=executor.token_capacity,
        adapter_bytes=executor.weights.adapter_bytes,
        weight_formats=executor.weights.formats,
        weight_bytes=executor.weights.num_bytes,
        float32_weight_bytes=executor.weights.float32_bytes,
        num_threads=_num_threads(config),
        device=str(executor.arena.device.torch_device),
        is_batch_invariant=executor.is_batch_invariant,
        num_tensor_ranks=config.tensor_parallel,
    )

"""A ComputeCore around a real model, the real scheduler and the in-memory data plane."""

from __future__ import annotations

from cache_runtime.scheduler_bridge import pool_to_cache_groups
from cache_runtime.transfer.manifest_builder import build_manifest
from cache_runtime.transfer.memory_engine import MemoryEngine, MemoryFabric
from cache_runtime.transfer.plane_set import PlaneSet
from model_runtime.checkpoint import Checkpoint
from model_runtime.executor import ModelExecutor
from node_runtime.engine.core import ComputeCore, DataPlane, ModelFacts
from scheduler_core import Role, Scheduler, SchedulerConfig


def model_core(
    role: Role,
    *,
    checkpoint: Checkpoint,
    fabric: MemoryFabric | None = None,
    memory_bytes: int = 4 << 20,
    prefix_granularity: int = 8,
    token_budget: int = 16,
) -> ComputeCore:
    executor = ModelExecutor(
        checkpoint,
        memory_bytes=memory_bytes,
        prefix_granularity=prefix_granularity,
        kernel_page_size=4,
        num_threads=1,
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
    return ComputeCore(
        executor=executor,
        scheduler=scheduler,
        group_ids=contract.group_ids,
        facts=_facts(checkpoint, executor),
        data_plane=None if fabric is None else _data_plane(executor, fabric),
    )


def _data_plane(executor: ModelExecutor, fabric: MemoryFabric) -> DataPlane:
    engine = MemoryEngine(fabric)
    engine.register(executor.arena.base_address, executor.arena.num_bytes)
    manifest = build_manifest(
        executor.plan,
        stages=executor.stages,
        model_fingerprint="tiny",
        weight_version="",
        arena_base=executor.arena.base_address,
        data_plane=engine.name,
        endpoint=engine.endpoint,
    )
    return DataPlane(planes=PlaneSet((engine,)), manifest=manifest)


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
        num_threads=1,
    )

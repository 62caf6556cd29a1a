"""What the cache of a node would look like: its groups, their packing and its capacity, without allocating any of it.

Opens the model's files and reads their headers only.
"""

from __future__ import annotations

from dataclasses import dataclass

from cache_runtime.errors import CacheError
from cache_runtime.recipes.base import CacheSetup
from cache_runtime.recipes.partition import TensorRank
from cache_runtime.scheduler_bridge import CapacityModel, SchedulerLimits
from model_runtime.checkpoint import Checkpoint, open_checkpoint
from model_runtime.config import ModelConfig
from model_runtime.errors import ModelError
from model_runtime.family import CacheBudget
from model_runtime.head_ranks import check_head_ranks
from model_runtime.registry import find_family
from node_runtime.config import ComputeNodeConfig
from node_runtime.errors import BadConfig
from scheduler_core import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCache:
    """The cache that a node of this configuration would have, on each of its tensor ranks."""

    model: ModelConfig
    limits: SchedulerLimits
    setup: CacheSetup

    def concurrent_requests(self, request_tokens: int) -> int:
        """Requests of so many tokens that fit at a time, up to the batch size."""
        model = CapacityModel(self.setup.plan.layout, self.limits)
        return model.concurrent_requests(self.setup.plan.num_lcm_blocks, request_tokens)


def plan_cache(config: ComputeNodeConfig, role: Role) -> PlannedCache:
    """Raises BadConfig naming the culprit."""
    try:
        checkpoint = open_checkpoint(config.model)
        check_head_ranks(checkpoint.config, num_tensor_ranks=config.tensor_parallel)
        limits = scheduler_limits(config, role, checkpoint)
        budget = CacheBudget(
            memory_bytes=config.memory,
            prefix_granularity=config.prefix_granularity,
            dtype=config.dtype,
            scheduler_limits=limits,
            tensor_rank=TensorRank(size=config.tensor_parallel),
        )
        recipe = find_family(checkpoint.config.architecture).cache_recipe(checkpoint.config, budget)
        return PlannedCache(model=checkpoint.config, limits=limits, setup=recipe.setup())
    except (ModelError, CacheError) as error:
        raise BadConfig(str(error)) from error


def scheduler_limits(config: ComputeNodeConfig, role: Role, checkpoint: Checkpoint) -> SchedulerLimits:
    """Raises BadConfig when more context is asked for than the model has."""
    return SchedulerLimits(
        role=role,
        max_batch_size=config.max_batch_size,
        token_budget=config.token_budget,
        context_tokens=_context_tokens(config, checkpoint),
        enable_prefix_cache=config.enable_prefix_cache,
    )


def _context_tokens(config: ComputeNodeConfig, checkpoint: Checkpoint) -> int:
    """Prompt and completion together."""
    context_tokens = checkpoint.config.max_position_tokens
    if config.max_model_len is None:
        return context_tokens
    if config.max_model_len > context_tokens:
        raise BadConfig(f"max_model_len={config.max_model_len} is above the model's context of {context_tokens} tokens")
    return config.max_model_len

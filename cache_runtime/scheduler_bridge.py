"""The single folding point from cache groups to the native scheduler, and the way back for what it alone can size.

Only spans in tokens and virtual packing cross; rows, pages, checkpoints and bytes stay on this side.
"""

from __future__ import annotations

from dataclasses import dataclass

import scheduler_core
from cache_runtime.contract import CacheRuntimeContract
from cache_runtime.recipes.plan import CacheLayout
from cache_runtime.recipes.spec import CacheFamily, CacheGroupSpec, CacheRetention


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What a pool is sized by besides its bytes: whom it serves, how many at a time, and how much a step reserves.

    `context_tokens` bounds prompt and completion of one request. The one place where a recipe reads any of it.
    """

    role: scheduler_core.Role
    max_batch_size: int
    token_budget: int
    context_tokens: int
    enable_prefix_cache: bool = True


class CapacityModel:
    """The scheduler's own answer to what requests need of a layout. Holds no formula."""

    def __init__(self, layout: CacheLayout, limits: SchedulerLimits) -> None:
        """Raises scheduler_core.ConfigError for limits or groups that the scheduler would refuse."""
        self._limits = limits
        self._model = scheduler_core.CapacityModel(
            scheduler_core.SchedulerConfig(
                role=limits.role,
                prefix_granularity=layout.prefix_granularity,
                num_lcm_blocks=0,
                max_batch_size=limits.max_batch_size,
                token_budget=limits.token_budget,
                cache_groups=[_fold(group.spec, group.virtual_blocks_per_lcm_block) for group in layout.groups],
                enable_prefix_cache=limits.enable_prefix_cache,
            )
        )

    @property
    def context_tokens(self) -> int:
        """Most tokens of one request."""
        return self._limits.context_tokens

    def parents_needed(self, num_requests: int, num_tokens: int) -> int:
        """LCM blocks that so many requests hold at most, `num_tokens` in all and none beyond the context."""
        return self._model.lcm_blocks_for_concurrency(
            num_requests=num_requests, num_tokens=num_tokens, context_tokens=self._limits.context_tokens
        )

    def parents_of_one(self, num_tokens: int) -> int:
        """LCM blocks that one request of `num_tokens` holds at most when it is alone."""
        return self._model.lcm_blocks(num_tokens)

    def concurrent_requests(self, num_lcm_blocks: int, request_tokens: int) -> int:
        """Requests of `request_tokens` that fit at a time, up to the batch size."""
        if self.parents_of_one(request_tokens) > num_lcm_blocks:
            return 0

        def fits(num_requests: int) -> bool:
            needed = self._model.lcm_blocks_for_concurrency(
                num_requests=num_requests, num_tokens=num_requests * request_tokens, context_tokens=request_tokens
            )
            return needed <= num_lcm_blocks

        # One alone fits; the model for several counts the worst offset of each and may be more careful.
        return next((count for count in range(self._limits.max_batch_size, 1, -1) if fits(count)), 1)


def pool_to_cache_groups(contract: CacheRuntimeContract) -> list[scheduler_core.CacheGroupConfig]:
    """One boundary config per group, in contract order: a group's index is its scheduler-side id."""
    return [_fold(group.spec, group.virtual_packing) for group in contract.groups]


def _fold(spec: CacheGroupSpec, virtual_packing: int) -> scheduler_core.CacheGroupConfig:
    return scheduler_core.CacheGroupConfig(
        group_id=spec.group_id,
        family=_family(spec.family),
        retention=_retention(spec.retention),
        block_granularity=spec.block_granularity,
        cache_blocks_per_lcm_block=virtual_packing,
        sliding_window_tokens=spec.sliding_window_tokens,
        replayable=spec.replayable,
        shard_count=spec.shard_count,
    )


def _family(family: CacheFamily) -> scheduler_core.Family:
    match family:
        case CacheFamily.HISTORY:
            return scheduler_core.Family.HISTORY
        case CacheFamily.STATE:
            return scheduler_core.Family.STATE


def _retention(retention: CacheRetention) -> scheduler_core.Retention:
    match retention:
        case CacheRetention.FULL_HISTORY:
            return scheduler_core.Retention.FULL_HISTORY
        case CacheRetention.SLIDING_WINDOW:
            return scheduler_core.Retention.SLIDING_WINDOW

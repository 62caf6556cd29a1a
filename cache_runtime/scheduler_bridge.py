"""The single folding point from cache groups to the native scheduler.

Only spans in tokens and virtual packing cross; rows, pages, checkpoints and bytes stay on this side.
"""

from __future__ import annotations

import scheduler_core
from cache_runtime.contract import CacheGroupContract, CacheRuntimeContract
from cache_runtime.recipes.spec import CacheFamily, CacheRetention


def pool_to_cache_groups(contract: CacheRuntimeContract) -> list[scheduler_core.CacheGroupConfig]:
    """One boundary config per group, in contract order: a group's index is its scheduler-side id."""
    return [_fold(group) for group in contract.groups]


def _fold(group: CacheGroupContract) -> scheduler_core.CacheGroupConfig:
    spec = group.spec
    return scheduler_core.CacheGroupConfig(
        group_id=spec.group_id,
        family=_family(spec.family),
        retention=_retention(spec.retention),
        block_granularity=spec.block_granularity,
        cache_blocks_per_lcm_block=group.virtual_packing,
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

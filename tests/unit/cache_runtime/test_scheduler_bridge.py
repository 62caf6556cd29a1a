"""Folding group contracts into the native scheduler, and routing the plans it emits."""

from __future__ import annotations

import numpy as np
import pytest

import scheduler_core
from cache_runtime.contract import CacheRuntimeContract
from cache_runtime.mapping.batch_metadata import CacheBatchMetadata
from cache_runtime.mapping.router import CacheGroupRouter
from cache_runtime.recipes.dense import FULL_GROUP_ID, DenseCacheRecipe
from cache_runtime.recipes.plan import pack
from cache_runtime.recipes.rows import key_value_fields
from cache_runtime.recipes.spec import CacheFamily, CacheFieldSpec, CacheGroupSpec, CacheRetention, GroupDeclaration
from cache_runtime.scheduler_bridge import pool_to_cache_groups


def declare(spec: CacheGroupSpec, num_bytes: int) -> GroupDeclaration:
    rows = () if spec.rows_per_page is None else (spec.rows_per_page,)
    width = num_bytes // (spec.rows_per_page or 1)
    return spec, (CacheFieldSpec(field_id=f"{spec.group_id}.0", dtype="uint8", block_shape=(*rows, width)),)


FULL = CacheGroupSpec(
    group_id="full",
    family=CacheFamily.HISTORY,
    retention=CacheRetention.FULL_HISTORY,
    rows_per_page=16,
    entry_stride_tokens=4,
)
SLIDING = CacheGroupSpec(
    group_id="sliding",
    family=CacheFamily.HISTORY,
    retention=CacheRetention.SLIDING_WINDOW,
    rows_per_page=16,
    entry_stride_tokens=1,
    sliding_window_tokens=48,
    replayable=True,
    shard_count=2,
)
STATE = CacheGroupSpec(
    group_id="ssm", family=CacheFamily.STATE, retention=CacheRetention.FULL_HISTORY, checkpoint_granularity=32
)


def test_each_shape_folds_to_its_block_granularity_and_virtual_packing() -> None:
    plan = pack(
        [declare(FULL, 256), declare(SLIDING, 64), declare(STATE, 128)], prefix_granularity=64, alignment_bytes=64
    ).bind(10)
    full, sliding, state = pool_to_cache_groups(CacheRuntimeContract.from_plan(plan))
    assert (full.group_id, full.block_granularity, full.cache_blocks_per_lcm_block) == ("full", 64, 1)
    assert (full.family, full.retention) == (scheduler_core.Family.HISTORY, scheduler_core.Retention.FULL_HISTORY)
    assert (full.sliding_window_tokens, full.replayable, full.shard_count) == (None, False, 1)
    assert (sliding.group_id, sliding.block_granularity, sliding.cache_blocks_per_lcm_block) == ("sliding", 16, 8)
    assert sliding.retention == scheduler_core.Retention.SLIDING_WINDOW
    assert (sliding.sliding_window_tokens, sliding.replayable, sliding.shard_count) == (48, True, 2)
    assert (state.group_id, state.block_granularity, state.cache_blocks_per_lcm_block) == ("ssm", 32, 2)
    assert (state.family, state.retention) == (scheduler_core.Family.STATE, scheduler_core.Retention.FULL_HISTORY)


@pytest.mark.parametrize("block_granularity", [16, 4])
def test_a_plan_of_the_native_scheduler_is_routed_to_distinct_rows_of_its_own_blocks(block_granularity: int) -> None:
    plan = (
        DenseCacheRecipe(
            num_layers=1,
            row_fields=key_value_fields(1, 4),
            dtype="float32",
            prefix_granularity=16,
            memory_bytes=1 << 16,
            block_granularity=block_granularity,
        )
        .setup()
        .plan
    )
    contract = CacheRuntimeContract.from_plan(plan)
    scheduler = scheduler_core.Scheduler(
        scheduler_core.SchedulerConfig(
            role=scheduler_core.Role.FUSED,
            prefix_granularity=contract.prefix_granularity,
            num_lcm_blocks=contract.num_lcm_blocks,
            max_batch_size=4,
            token_budget=64,
            cache_groups=pool_to_cache_groups(contract),
        )
    )
    lengths = {"a": 21, "b": 16}
    scheduler.submit(
        [
            scheduler_core.RequestSpec(
                request_id=request_id, tokens=np.arange(length, dtype=np.int32), max_new_tokens=4
            )
            for request_id, length in lengths.items()
        ]
    )
    batch = scheduler.next_plan()
    assert dict(zip(batch.request_ids, batch.input_lengths.tolist(), strict=True)) == lengths
    metadata = CacheBatchMetadata.from_plan(batch, contract)
    routed = CacheGroupRouter(contract, {FULL_GROUP_ID: 4}).route(metadata)
    locations = routed.write_locations(FULL_GROUP_ID).tolist()
    assert len(set(locations)) == len(locations) == sum(lengths.values())
    granted = {int(block) for block in np.unique(batch.block_tables[0]) if block > 0}
    assert {location // block_granularity for location in locations} <= granted

"""Two groups in one arena: sliding layers and full layers, in the shapes of published models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import scheduler_core
from cache_runtime.contract import CacheRuntimeContract
from cache_runtime.errors import CacheConfigError
from cache_runtime.recipes.rows import key_value_fields
from cache_runtime.recipes.sliding_full import SlidingFullCacheRecipe
from cache_runtime.recipes.spec import CacheRetention
from cache_runtime.scheduler_bridge import CapacityModel, SchedulerLimits, pool_to_cache_groups

WINDOW = 512


def recipe(num_layers: int, *, num_kv_heads: int = 1, memory_bytes: int = 1 << 30) -> SlidingFullCacheRecipe:
    """Every sixth layer is full."""
    return SlidingFullCacheRecipe(
        num_layers=num_layers,
        row_fields=key_value_fields(num_kv_heads, 256),
        dtype="float32",
        prefix_granularity=64,
        memory_bytes=memory_bytes,
        is_sliding=tuple(bool((layer + 1) % 6) for layer in range(num_layers)),
        sliding_window_tokens=WINDOW,
    )


def test_layers_ride_the_group_that_keeps_what_they_see() -> None:
    plan = recipe(12).setup().plan
    kept = {spec.group_id: (spec.retention, spec.sliding_window_tokens) for spec in plan.groups}
    assert kept == {
        "sliding": (CacheRetention.SLIDING_WINDOW, WINDOW),
        "full": (CacheRetention.FULL_HISTORY, None),
    }
    full = {field.field_id for field in plan.fields if field.group_id == "full"}
    assert full == {"layers.5.k", "layers.5.v", "layers.11.k", "layers.11.v"}


@pytest.mark.parametrize("num_layers", [6, 18, 26, 34, 48, 62])
def test_every_published_depth_packs_within_the_bound_and_into_a_small_parent(num_layers: int) -> None:
    layout = recipe(num_layers, memory_bytes=1 << 33).setup().plan.layout
    largest_block_bytes = max(group.block_bytes for group in layout.groups)
    for group in layout.groups:
        assert layout.padding_bytes(group) <= 0.125 * layout.lcm_block_bytes
    assert layout.lcm_block_bytes <= 1.125 * largest_block_bytes


def test_blocks_of_full_layers_stay_neighbours_so_that_they_move_as_one_run() -> None:
    plan = recipe(18).setup().plan
    for field in plan.fields:
        if field.group_id == "full":
            assert field.block_stride_bytes == field.block_bytes


def test_capacity_counts_the_groups_that_grow() -> None:
    setup = recipe(18).setup()
    assert setup.token_capacity == setup.plan.num_lcm_blocks * 5 * 64
    assert setup.plan.num_arena_bytes <= 1 << 30


def test_flags_that_do_not_match_the_layers_are_refused_with_both_numbers() -> None:
    with pytest.raises(CacheConfigError, match="is_sliding names 1 layers, num_layers is 12"):
        replace(recipe(12), is_sliding=(True,))


def test_a_window_without_tokens_is_refused_by_group() -> None:
    with pytest.raises(CacheConfigError, match='group "sliding": needs a positive sliding_window_tokens, got 0'):
        replace(recipe(12), sliding_window_tokens=0).setup()


def limits(**changes: object) -> SchedulerLimits:
    settings: dict[str, object] = {
        "role": scheduler_core.Role.FUSED,
        "max_batch_size": 16,
        "token_budget": 512,
        "context_tokens": 4096,
    }
    return SchedulerLimits(**{**settings, **changes})


def test_capacity_is_the_most_tokens_whose_windows_fit_as_well() -> None:
    sized = replace(recipe(18), scheduler_limits=limits())
    setup = sized.setup()
    layout, num_lcm_blocks = setup.plan.layout, setup.plan.num_lcm_blocks
    assert 0 < setup.token_capacity < recipe(18).setup().token_capacity
    model = CapacityModel(layout, limits())
    assert sized.parents_needed(model, setup.token_capacity) <= num_lcm_blocks
    assert sized.parents_needed(model, setup.token_capacity + layout.prefix_granularity) > num_lcm_blocks


def test_a_pool_of_the_reported_capacity_takes_that_many_tokens_in_whole_contexts() -> None:
    """The scheduler itself admits what the recipe promises."""
    setup = replace(recipe(6, memory_bytes=1 << 27), scheduler_limits=limits(context_tokens=1024)).setup()
    scheduler = scheduler_core.Scheduler(
        scheduler_core.SchedulerConfig(
            role=scheduler_core.Role.FUSED,
            prefix_granularity=64,
            num_lcm_blocks=setup.plan.num_lcm_blocks,
            max_batch_size=16,
            token_budget=512,
            cache_groups=pool_to_cache_groups(CacheRuntimeContract.from_plan(setup.plan)),
        )
    )
    num_requests = setup.token_capacity // 1024
    assert num_requests >= 2
    scheduler.submit(
        [
            scheduler_core.RequestSpec(
                request_id=str(index), tokens=np.full(1000, index, dtype=np.int32), max_new_tokens=24
            )
            for index in range(num_requests)
        ]
    )
    admitted: set[str] = set()
    while len(admitted) < num_requests:
        plan = scheduler.next_plan()
        assert not plan.is_empty, f"only {len(admitted)} of {num_requests} were admitted"
        admitted |= {admission.request_id for admission in plan.admissions}
        scheduler.advance(
            [
                scheduler_core.ResultEvent(request_id, [7] if wanted else [])
                for request_id, wanted in zip(plan.request_ids, plan.logits_wanted, strict=True)
            ]
        )


def test_more_requests_fit_at_a_time_the_shorter_they_are_up_to_the_batch_size() -> None:
    setup = recipe(18, memory_bytes=1 << 28).setup()
    model = CapacityModel(setup.plan.layout, limits())
    counts = [model.concurrent_requests(setup.plan.num_lcm_blocks, tokens) for tokens in (64, 512, 4096, 40_000)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 16
    assert counts[-1] == 0
    assert counts[1] > counts[2] >= 1


def test_limits_that_the_scheduler_refuses_are_refused_before_anything_is_sized() -> None:
    with pytest.raises(CacheConfigError, match="token_budget"):
        replace(recipe(18), scheduler_limits=limits(token_budget=0)).setup()


def test_memory_too_small_for_a_grain_in_both_groups_is_refused_with_the_bytes_it_takes() -> None:
    too_small = recipe(18, memory_bytes=3 << 20)
    with pytest.raises(CacheConfigError, match=r"memory_bytes 3145728 is too small: one prefix grain of 64 tokens"):
        too_small.setup()
    with pytest.raises(CacheConfigError, match=r"memory_bytes 3145728 is too small"):
        replace(too_small, scheduler_limits=limits()).setup()

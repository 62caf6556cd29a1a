"""Two groups in one arena: sliding layers and full layers, in the shapes of published models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cache_runtime.errors import CacheConfigError
from cache_runtime.recipes.sliding_full import SlidingFullCacheRecipe
from cache_runtime.recipes.spec import CacheRetention

WINDOW = 512


def recipe(num_layers: int, *, num_kv_heads: int = 1, memory_bytes: int = 1 << 30) -> SlidingFullCacheRecipe:
    """Every sixth layer is full."""
    return SlidingFullCacheRecipe(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=256,
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

"""Recurrent and attention layers in one arena, in the shapes of published models, and the pools that read it."""

from __future__ import annotations

from dataclasses import replace

import pytest

import scheduler_core
from cache_runtime.arena import CacheArena
from cache_runtime.device import CpuDevice
from cache_runtime.errors import CacheConfigError, UnknownFieldError
from cache_runtime.pools.cache_pools import CachePools
from cache_runtime.recipes.base import CacheLayerType
from cache_runtime.recipes.hybrid import HybridCacheRecipe, StateField
from cache_runtime.recipes.rows import RowField, key_value_fields
from cache_runtime.recipes.spec import CacheFamily
from cache_runtime.scheduler_bridge import SchedulerLimits

FULL, STATE = CacheLayerType.FULL, CacheLayerType.STATE


def hybrid(kinds: tuple[CacheLayerType, ...], **changes: object) -> HybridCacheRecipe:
    recipe = HybridCacheRecipe(
        prefix_granularity=8,
        memory_bytes=1 << 16,
        num_layers=len(kinds),
        row_fields=key_value_fields(2, 4),
        dtype="float32",
        layer_kinds=kinds,
        state_fields=(
            StateField(name="conv_state", block_shape=(3, 6), partition_axis=1),
            StateField(name="recurrent_state", block_shape=(2, 4, 4), partition_axis=0),
        ),
    )
    return replace(recipe, **changes)  # type: ignore[arg-type]


def published(num_layers: int, period: int, rows: tuple[RowField, ...], *states: StateField) -> HybridCacheRecipe:
    """The last of every `period` layers is full."""
    kinds = tuple(FULL if (layer + 1) % period == 0 else STATE for layer in range(num_layers))
    return hybrid(
        kinds, prefix_granularity=64, memory_bytes=64 << 30, dtype="bfloat16", row_fields=rows, state_fields=states
    )


QWEN3_NEXT = published(
    48,
    4,
    key_value_fields(2, 256),
    StateField(name="conv_state", block_shape=(3, 8192), dtype="bfloat16"),
    StateField(name="recurrent_state", block_shape=(32, 128, 128)),
)
KIMI_LINEAR = published(
    27,
    4,
    (RowField(name="latent", row_shape=(576,)),),
    StateField(name="conv_state", block_shape=(3, 12288), dtype="bfloat16"),
    StateField(name="recurrent_state", block_shape=(32, 128, 128)),
)


def test_each_layer_deposits_what_its_kind_keeps() -> None:
    plan = hybrid((STATE, STATE, FULL, STATE)).setup().plan
    by_group = {
        spec.group_id: [field.field_id for field in plan.fields if field.group_id == spec.group_id]
        for spec in plan.groups
    }
    assert by_group == {
        "state": [f"layers.{layer}.{name}_state" for layer in (0, 1, 3) for name in ("conv", "recurrent")],
        "full": ["layers.2.k", "layers.2.v"],
    }
    families = {spec.group_id: (spec.family, spec.block_granularity) for spec in plan.groups}
    assert families == {"state": (CacheFamily.STATE, 8), "full": (CacheFamily.HISTORY, 8)}


@pytest.mark.parametrize("recipe", [QWEN3_NEXT, KIMI_LINEAR], ids=["qwen3_next", "kimi_linear"])
def test_published_shapes_pack_within_the_bound(recipe: HybridCacheRecipe) -> None:
    layout = recipe.setup().plan.layout
    for group in layout.groups:
        assert layout.padding_bytes(group) <= 0.125 * layout.lcm_block_bytes
    assert layout.lcm_block_bytes <= 1.125 * max(group.block_bytes for group in layout.groups)


def test_capacity_counts_the_snapshots_that_requests_hold_at_a_time() -> None:
    recipe = hybrid((STATE, FULL), memory_bytes=1 << 20)
    flat = recipe.setup()
    limits = SchedulerLimits(role=scheduler_core.Role.FUSED, max_batch_size=4, token_budget=64, context_tokens=256)
    known = replace(recipe, scheduler_limits=limits).setup()
    assert known.plan == flat.plan
    assert 0 < known.token_capacity <= flat.token_capacity


def test_pools_are_views_of_the_layers_that_have_their_fields() -> None:
    arena = CacheArena(hybrid((STATE, FULL)).setup().plan, CpuDevice())
    pools = CachePools.of(arena)
    conv, recurrent = pools.state.conv_state(0), pools.state.recurrent_state(0)
    assert conv.shape == (arena.plan.num_blocks("state"), 3, 6)
    assert recurrent.shape == (arena.plan.num_blocks("state"), 2, 4, 4)
    recurrent[2, 1] = 3.0
    assert (arena.field("layers.0.recurrent_state")[2, 1] == 3.0).all()
    assert pools.kv.k_buffer(1).data_ptr() == arena.field("layers.1.k").data_ptr()
    with pytest.raises(UnknownFieldError, match=r"layer 1 has no state in this pool \(layers: \[0\]\)"):
        pools.state.recurrent_state(1)
    with pytest.raises(UnknownFieldError, match=r'layer 1 has no "latent" in this pool \(layers: \[\]\)'):
        pools.latent.rows(1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_kinds": (STATE,)}, "layer_kinds names 1 layers, num_layers is 2"),
        ({"layer_kinds": (STATE, CacheLayerType.SLIDING)}, r"layer_kinds\[1\] must be full or state, got sliding"),
        ({"state_fields": ()}, "state_fields must not be empty"),
        ({"checkpoint_granularity": 0}, '"state": a state group needs a positive checkpoint_granularity, got 0'),
        ({"checkpoint_granularity": 3}, "3"),
    ],
)
def test_declarations_that_cannot_work_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CacheConfigError, match=message):
        hybrid((STATE, FULL), **changes).setup()

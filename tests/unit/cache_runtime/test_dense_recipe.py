"""The dense recipe and the recipe template: sizing, refusal of small budgets, steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from cache_runtime.errors import CacheConfigError
from cache_runtime.recipes.base import CacheSetup
from cache_runtime.recipes.dense import FULL_GROUP_ID, DenseCacheRecipe
from cache_runtime.recipes.rows import RowField, key_value_fields

RECIPE = DenseCacheRecipe(
    num_layers=3, row_fields=key_value_fields(2, 8), dtype="float32", prefix_granularity=16, memory_bytes=1 << 20
)
BLOCK_BYTES = 16 * 2 * 8 * 4


def test_keys_and_values_of_every_layer_ride_one_full_history_group() -> None:
    plan = RECIPE.setup().plan
    assert [field.field_id for field in plan.fields] == [
        f"layers.{layer}.{name}" for layer in range(3) for name in ("k", "v")
    ]
    assert {field.group_id for field in plan.fields} == {FULL_GROUP_ID}
    assert {field.block_shape for field in plan.fields} == {(16, 2, 8)}
    assert {field.block_stride_bytes for field in plan.fields} == {BLOCK_BYTES}
    assert plan.groups[0].block_granularity == 16


def test_each_layer_is_one_producer_step() -> None:
    setup = RECIPE.setup()
    assert setup.num_layers == 3
    assert setup.producer_fields_by_step == tuple((f"layers.{i}.k", f"layers.{i}.v") for i in range(3))


def test_the_arena_uses_the_budget_and_never_exceeds_it() -> None:
    plan = RECIPE.setup().plan
    assert plan.num_arena_bytes <= RECIPE.memory_bytes < plan.layout.num_arena_bytes(plan.num_lcm_blocks + 1)
    assert RECIPE.setup().token_capacity == plan.num_lcm_blocks * 16


def test_a_finer_block_gives_the_same_tokens_in_more_blocks() -> None:
    setup = replace(RECIPE, block_granularity=4).setup()
    plan = setup.plan
    assert plan.groups[0].block_granularity == 4
    assert setup.token_capacity % 16 == 0
    assert plan.num_lcm_blocks > RECIPE.setup().plan.num_lcm_blocks


@pytest.mark.parametrize("block_granularity", [16, 4])
def test_the_smallest_useful_budget_is_accepted_and_one_byte_less_is_refused_naming_both(
    block_granularity: int,
) -> None:
    recipe = replace(RECIPE, block_granularity=block_granularity)
    blocks_per_grain = 16 // block_granularity
    needed = recipe.setup().plan.layout.num_arena_bytes(blocks_per_grain)
    exact = replace(recipe, memory_bytes=needed).setup()
    assert exact.token_capacity >= 16
    too_small = needed - 1
    if exact.plan.layout.num_lcm_blocks_within(too_small) >= blocks_per_grain:
        pytest.fail("the bound is not tight")
    with pytest.raises(CacheConfigError, match=f"memory_bytes {too_small} is too small.* need {needed} bytes"):
        replace(recipe, memory_bytes=too_small).setup()


@pytest.mark.parametrize(("num_kv_heads", "head_dim", "field"), [(0, 8, "num_kv_heads"), (2, 0, "head_dim")])
def test_rows_without_elements_are_refused_by_name(num_kv_heads: int, head_dim: int, field: str) -> None:
    with pytest.raises(CacheConfigError, match=f"{field} must be at least 1, got 0"):
        key_value_fields(num_kv_heads, head_dim)
    with pytest.raises(CacheConfigError, match=r'row field "latent": row_shape needs positive dimensions, got \(0,\)'):
        RowField(name="latent", row_shape=(0,))


@pytest.mark.parametrize("field", ["num_layers", "prefix_granularity", "memory_bytes", "block_granularity"])
def test_non_positive_parameters_are_refused_by_name(field: str) -> None:
    with pytest.raises(CacheConfigError, match=f"{field} must be at least 1, got 0"):
        replace(RECIPE, **{field: 0})  # type: ignore[arg-type]


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(CacheConfigError, match=r'dtype must be one of .*got "int4"'):
        replace(RECIPE, dtype="int4").setup()


@pytest.mark.parametrize(
    "steps", [(("layers.0.k",),), (("layers.0.k", "layers.0.v"), ("layers.0.v",)), (("layers.0.k", "layers.0.v", "x"),)]
)
def test_producer_steps_must_cover_every_field_exactly_once(steps: tuple[tuple[str, ...], ...]) -> None:
    plan = replace(RECIPE, num_layers=1).setup().plan
    whole = (tuple(field.field_id for field in plan.fields),)
    layers = {"num_target_layers": 1, "num_draft_layers": 0, "token_capacity": 16}
    with pytest.raises(CacheConfigError, match=r"producer_fields_by_step.*(layers\.0\.v|x)"):
        CacheSetup(plan=plan, cache_fields_by_stage=whole, producer_fields_by_step=steps, **layers)
    with pytest.raises(CacheConfigError, match=r"cache_fields_by_stage.*(layers\.0\.v|x)"):
        CacheSetup(plan=plan, cache_fields_by_stage=steps, producer_fields_by_step=whole, **layers)


class _Interleaved(DenseCacheRecipe):
    """Layers that are dealt out to two stages, and a first step that ends two of them."""

    def num_draft_layers(self) -> int:
        return 1

    def layers_by_stage(self) -> Sequence[Sequence[int]]:
        return ((0, 2), (1,))

    def layers_by_step(self) -> Sequence[Sequence[int]]:
        return ((2, 0), (1,))


def test_stages_and_steps_need_not_be_neighbouring_layers() -> None:
    setup = _Interleaved(
        num_layers=3, row_fields=key_value_fields(2, 8), dtype="float32", prefix_granularity=16, memory_bytes=1 << 20
    ).setup()
    assert setup.cache_fields_by_stage == (
        ("layers.0.k", "layers.0.v", "layers.2.k", "layers.2.v"),
        ("layers.1.k", "layers.1.v"),
    )
    assert setup.producer_fields_by_step[0] == ("layers.2.k", "layers.2.v", "layers.0.k", "layers.0.v")
    assert (setup.num_target_layers, setup.num_draft_layers) == (2, 1)

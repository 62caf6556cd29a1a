"""Every seam of the recipe template: what a family fills in there is what `setup` goes by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

import scheduler_core
from cache_runtime.errors import CacheConfigError
from cache_runtime.recipes.base import CacheLayerType
from cache_runtime.recipes.dense import DenseCacheRecipe
from cache_runtime.recipes.plan import CacheLayout
from cache_runtime.recipes.rows import key_value_fields
from cache_runtime.recipes.sliding_full import SlidingFullCacheRecipe
from cache_runtime.recipes.spec import CacheFieldSpec, CacheGroupSpec
from cache_runtime.scheduler_bridge import CapacityModel, SchedulerLimits

MEMORY_BYTES = 1 << 20
WORKSPACE_BYTES = 300_000


def made(recipe: type[DenseCacheRecipe], **changes: object) -> DenseCacheRecipe:
    settings = {"num_layers": 3, "dtype": "float32", "prefix_granularity": 16, "memory_bytes": MEMORY_BYTES}
    return recipe(row_fields=key_value_fields(2, 8), **(settings | changes))  # type: ignore[arg-type]


class _Dealt(DenseCacheRecipe):
    """Layers of one label in two groups, which come in the order in which layers name them."""

    def group_ids(self) -> Sequence[str]:
        return ("odd", "even", "odd")

    def packing(self) -> Mapping[str, int] | None:
        return {"odd": 2, "even": 4}


def test_group_ids_decide_who_shares_a_group_and_packing_how_many_blocks_a_parent_holds() -> None:
    layout = made(_Dealt).setup().plan.layout
    assert [group.group_id for group in layout.groups] == ["odd", "even"]
    fields = {group.group_id: [field.field_id for field in group.fields] for group in layout.groups}
    assert fields == {"odd": [f"layers.{i}.{n}" for i in (0, 2) for n in "kv"], "even": ["layers.1.k", "layers.1.v"]}
    assert [group.cache_blocks_per_lcm_block for group in layout.groups] == [2, 4]


class _Cramped(_Dealt):
    """The smaller group leaves half of each parent empty."""

    def packing(self) -> Mapping[str, int] | None:
        return {"odd": 1, "even": 1}


class _Generous(_Cramped):
    def max_padding_fraction(self) -> float:
        return 0.5


def test_padding_is_bounded_by_what_the_family_allows_and_the_group_and_both_values_are_named() -> None:
    with pytest.raises(CacheConfigError, match=r'group "even": wastes 2048 of 4096 bytes .* max_padding_fraction 0\.0'):
        made(_Cramped).setup()
    layout = made(_Generous).setup().plan.layout
    assert layout.padding_bytes(layout.groups[1]) == layout.lcm_block_bytes // 2


class _Aligned(DenseCacheRecipe):
    def alignment(self) -> int:
        return 1 << 16


def test_planes_begin_where_the_alignment_of_the_family_allows() -> None:
    plan = made(_Aligned).setup().plan
    offsets = plan.layout.plane_offsets_bytes(plan.num_lcm_blocks)
    assert len(offsets) > 1
    assert all(offset % (1 << 16) == 0 for offset in offsets)
    plain = made(DenseCacheRecipe).setup().plan
    assert any(offset % (1 << 16) for offset in plain.layout.plane_offsets_bytes(plain.num_lcm_blocks))


class _Misshapen(DenseCacheRecipe):
    """Blocks of one row more than the group declares."""

    def fields_for_layer(self, layer: int) -> tuple[CacheFieldSpec, ...]:
        fields = DenseCacheRecipe.fields_for_layer(self, layer)
        return tuple(replace(field, block_shape=(17, *field.block_shape[1:])) for field in fields)


class _Refusing(DenseCacheRecipe):
    """Its kernels read blocks of 8 rows; nothing may be sized before that is said."""

    def check_layout(self, layout: CacheLayout) -> None:
        for group in layout.groups:
            if group.spec.rows_per_page != 8:
                raise CacheConfigError(f'group "{group.group_id}": rows_per_page {group.spec.rows_per_page}, only 8')

    def num_lcm_blocks(self, layout: CacheLayout) -> int:
        assert layout.groups[0].spec.rows_per_page == 8
        return 5


def test_a_layout_that_kernels_cannot_use_is_refused_before_anything_is_sized() -> None:
    with pytest.raises(
        CacheConfigError,
        match=r'field "layers\.0\.k": block_shape \(17, 2, 8\) does not start with the rows of group "full" '
        r"\(rows_per_page 16\)",
    ):
        made(_Misshapen).setup()
    with pytest.raises(CacheConfigError, match='group "full": rows_per_page 16, only 8'):
        made(_Refusing).setup()
    assert made(_Refusing, block_granularity=8).setup().plan.num_lcm_blocks == 5


class _WithWorkspace(DenseCacheRecipe):
    def workspace_bytes(self) -> int:
        return WORKSPACE_BYTES


def test_workspace_is_set_aside_before_the_arena_is_sized() -> None:
    plan = made(_WithWorkspace).setup().plan
    assert plan == made(DenseCacheRecipe, memory_bytes=MEMORY_BYTES - WORKSPACE_BYTES).setup().plan
    assert plan.num_arena_bytes + WORKSPACE_BYTES <= MEMORY_BYTES
    for memory_bytes in (WORKSPACE_BYTES, WORKSPACE_BYTES + 1):
        needed_bytes = plan.layout.num_arena_bytes(1) + WORKSPACE_BYTES
        with pytest.raises(CacheConfigError, match=f"memory_bytes {memory_bytes} is too small: .*need {needed_bytes} "):
            made(_WithWorkspace, memory_bytes=memory_bytes).setup()


class _Counted(DenseCacheRecipe):
    def token_capacity(self, layout: CacheLayout, num_lcm_blocks: int) -> int:
        return 7 * num_lcm_blocks


def test_a_family_may_count_its_own_capacity() -> None:
    setup = made(_Counted).setup()
    assert setup.token_capacity == 7 * setup.plan.num_lcm_blocks


class _Wasteful(SlidingFullCacheRecipe):
    """Keeps everything twice."""

    def parents_needed(self, model: CapacityModel, num_tokens: int) -> int:
        return 2 * SlidingFullCacheRecipe.parents_needed(self, model, num_tokens)


def test_capacity_is_the_inverse_of_the_parents_that_tokens_need() -> None:
    limits = SchedulerLimits(role=scheduler_core.Role.FUSED, max_batch_size=16, token_budget=512, context_tokens=1024)
    settings = {
        "num_layers": 6,
        "row_fields": key_value_fields(1, 16),
        "dtype": "float32",
        "prefix_granularity": 64,
        "memory_bytes": 16 << 20,
        "is_sliding": (True,) * 5 + (False,),
        "sliding_window_tokens": 128,
        "scheduler_limits": limits,
    }
    usual = SlidingFullCacheRecipe(**settings).setup()  # type: ignore[arg-type]
    wasteful = _Wasteful(**settings).setup()  # type: ignore[arg-type]
    assert wasteful.plan == usual.plan
    assert 0 < wasteful.token_capacity <= usual.token_capacity // 2


class _Labelled(DenseCacheRecipe):
    """The second layer sees a window: its label alone says so."""

    def layer_types(self) -> Sequence[CacheLayerType]:
        return (CacheLayerType.FULL, CacheLayerType.SLIDING, CacheLayerType.FULL)

    def group_spec(self, group_id: str) -> CacheGroupSpec:
        return self.rows_group(group_id, sliding_window_tokens=64 if group_id == "sliding" else None)


def test_a_layer_rides_the_group_of_its_label_unless_the_family_says_otherwise() -> None:
    plan = made(_Labelled).setup().plan
    assert {field.field_id: field.group_id for field in plan.fields if field.field_id.endswith("k")} == {
        "layers.0.k": "full",
        "layers.1.k": "sliding",
        "layers.2.k": "full",
    }

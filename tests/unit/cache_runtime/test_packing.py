"""Solved parents: groups with unlike numbers and sizes of fields share their bytes within the bound."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.cache_runtime.slow_packing import best_parent
from unit.cache_runtime.test_memory_plan import packed, rows_group, state_group

from cache_runtime.errors import CacheConfigError
from cache_runtime.recipes import packing as packing_module
from cache_runtime.recipes.packing import MAX_SOLVED_PACKING, solve_packing
from cache_runtime.recipes.plan import CacheLayout, CacheMemoryPlan
from cache_runtime.recipes.spec import GroupDeclaration

FIELD_BYTES = 64 * 8 * 2
# Few enough to try every parent.
SMALL_PACKING = 12


def blocks_per_parent(layout: CacheLayout) -> dict[str, int]:
    return {group.group_id: group.cache_blocks_per_lcm_block for group in layout.groups}


def stride_blocks(layout: CacheLayout) -> dict[str, int]:
    return {group.group_id: layout.block_stride_rows(group) // 64 for group in layout.groups}


def test_five_fields_of_the_larger_group_share_each_plane_of_the_smaller_one() -> None:
    layout = packed(rows_group("full", 64, 6), rows_group("sliding", 64, 30))
    assert blocks_per_parent(layout) == {"full": 5, "sliding": 1}
    assert layout.plane_bytes == (5 * FIELD_BYTES,) * 6
    assert stride_blocks(layout) == {"full": 1, "sliding": 5}
    assert [layout.padding_bytes(group) for group in layout.groups] == [0, 0]


@pytest.mark.parametrize(
    ("bound", "expected", "strides"),
    [
        (0.0, {"full": 11, "sliding": 2}, {"full": 2, "sliding": 11}),
        (0.1, {"full": 6, "sliding": 1}, {"full": 1, "sliding": 6}),
        (0.5, {"full": 4, "sliding": 1}, {"full": 1, "sliding": 4}),
    ],
)
def test_a_looser_bound_buys_a_smaller_parent(bound: float, expected: dict[str, int], strides: dict[str, int]) -> None:
    layout = packed(rows_group("full", 64, 8), rows_group("sliding", 64, 44), max_padding_fraction=bound)
    assert blocks_per_parent(layout) == expected
    assert stride_blocks(layout) == strides


def test_a_bound_that_no_parent_keeps_is_refused_naming_the_group_and_both_values() -> None:
    # Only 100 blocks of the small group would fill what one block of the large one takes; that many are not tried.
    with pytest.raises(CacheConfigError, match=r'group "many": wastes .* of .* bytes .* max_padding_fraction 0\.0$'):
        packed(rows_group("few", 64, 3), rows_group("many", 64, 400), max_padding_fraction=0.0)


def test_fields_of_two_sizes_get_planes_in_proportion() -> None:
    spec, wide = rows_group("latent", 64, 3, width=32)
    _, narrow = rows_group("rope", 64, 3, width=4)
    layout = packed((spec, wide + narrow))
    assert layout.plane_bytes == (64 * 32 * 2,) * 3 + (64 * 4 * 2,) * 3
    assert stride_blocks(layout) == {"latent": 1}


def test_state_rides_in_the_planes_of_rows_with_little_waste() -> None:
    # Six layers with a large and a small state beside two layers of keys and values.
    layout = packed(rows_group("full", 64, 4), state_group("ssm", [20_000, 1_000] * 6), max_padding_fraction=0.05)
    packing = blocks_per_parent(layout)
    assert packing["ssm"] == 1
    assert packing["full"] * 4 * FIELD_BYTES == layout.lcm_block_bytes
    assert all(layout.padding_bytes(group) <= 0.05 * layout.lcm_block_bytes for group in layout.groups)


def test_a_state_that_no_parent_of_rows_holds_is_refused_with_the_sizes() -> None:
    with pytest.raises(
        CacheConfigError, match=r'of up to 256 blocks .* "full" with 1024 bytes, "ssm" with 1048576 bytes'
    ):
        packed(rows_group("full", 64, 1), state_group("ssm", [1 << 20]), max_padding_fraction=0.5)


def test_a_fixed_packing_below_one_is_refused() -> None:
    with pytest.raises(CacheConfigError, match='group "full": cache_blocks_per_lcm_block must be at least 1, got 0'):
        packed(rows_group("full", 16, 1), packing={"full": 0})


@st.composite
def declarations(draw: st.DrawFn) -> list[GroupDeclaration]:
    groups = [
        rows_group(
            f"rows{index}", draw(st.sampled_from([16, 64])), draw(st.integers(1, 7)), width=draw(st.integers(1, 3))
        )
        for index in range(draw(st.integers(1, 3)))
    ]
    if draw(st.booleans()):
        groups.append(state_group("state", draw(st.lists(st.integers(1, 300), min_size=1, max_size=4))))
    return groups


@st.composite
def small_declarations(draw: st.DrawFn) -> list[GroupDeclaration]:
    """Fields of up to two sizes and dtypes in each group; groups of state stand anywhere among those of rows."""
    groups: list[GroupDeclaration] = []
    for index in range(draw(st.integers(1, 2))):
        spec, wide = rows_group(f"rows{index}", 16, draw(st.integers(1, 5)), width=draw(st.integers(1, 3)))
        _, narrow = rows_group(f"more{index}", 16, draw(st.sampled_from([0, 0, 1, 2])), width=1)
        groups.append((spec, wide + narrow))
    for index in range(draw(st.integers(0, 2))):
        spec, few = state_group(f"state{index}", draw(st.lists(st.integers(1, 90), min_size=1, max_size=3)))
        _, wider = rows_group(
            f"words{index}", draw(st.integers(1, 9)), draw(st.integers(0, 2)), width=1, dtype="float32"
        )
        groups.insert(draw(st.integers(0, len(groups))), (spec, few + wider))
    return groups


@settings(max_examples=40)
@given(small_declarations(), st.sampled_from([0.0, 0.02, 0.1, 0.3, 1.0]))
def test_the_parent_is_the_one_that_trying_everything_finds(
    groups: list[GroupDeclaration], max_padding_fraction: float
) -> None:
    expected = best_parent(groups, max_padding_fraction, SMALL_PACKING)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing_module, "MAX_SOLVED_PACKING", SMALL_PACKING)
        if expected is None:
            with pytest.raises(CacheConfigError, match="no LCM block"):
                solve_packing(groups, max_padding_fraction=max_padding_fraction, packing=None)
        else:
            assert solve_packing(groups, max_padding_fraction=max_padding_fraction, packing=None) == expected


@settings(max_examples=60)
@given(declarations(), st.integers(1, 3))
def test_blocks_of_a_group_never_share_a_byte_and_never_leave_their_parent(
    groups: list[GroupDeclaration], num_lcm_blocks: int
) -> None:
    plan = packed(*groups, max_padding_fraction=1.0).bind(num_lcm_blocks)
    for group in plan.layout.groups:
        assert group.cache_blocks_per_lcm_block <= MAX_SOLVED_PACKING
        seen: set[int] = set()
        for block in range(plan.num_blocks(group.group_id)):
            mine = block_range(plan, group.group_id, block)
            assert len(mine) == group.block_bytes
            assert not mine & seen
            seen |= mine
        assert max(seen) < plan.num_arena_bytes
    for parent in range(1, num_lcm_blocks + 1):
        for group in plan.layout.groups:
            k = group.cache_blocks_per_lcm_block
            bytes_of_parent = set().union(
                *(block_range(plan, group.group_id, 1 + (parent - 1) * k + slot) for slot in range(k))
            )
            for plane, offset in enumerate(plan.layout.plane_offsets_bytes(num_lcm_blocks)):
                span = plan.layout.plane_bytes[plane]
                bytes_of_parent -= set(range(offset + parent * span, offset + (parent + 1) * span))
            assert not bytes_of_parent


def block_range(plan: CacheMemoryPlan, group_id: str, block: int) -> set[int]:
    covered: set[int] = set()
    for field in plan.fields:
        if field.group_id == group_id:
            begin = field.offset_bytes + block * field.block_stride_bytes
            covered |= set(range(begin, begin + field.block_bytes))
    return covered

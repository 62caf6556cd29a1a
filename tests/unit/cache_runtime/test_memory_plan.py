"""pack and bind: byte layout of parents and arenas, against brute force; the wire form of a plan."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_runtime.errors import CacheConfigError, UnknownFieldError, UnknownGroupError
from cache_runtime.recipes.plan import CacheLayout, CacheMemoryPlan, pack
from cache_runtime.recipes.plane_slots import PlaneSlot
from cache_runtime.recipes.spec import CacheFamily, CacheFieldSpec, CacheGroupSpec, CacheRetention, GroupDeclaration

PREFIX_GRANULARITY = 64


def rows_group(
    group_id: str, rows: int, num_fields: int, *, width: int = 8, dtype: str = "float16"
) -> GroupDeclaration:
    spec = CacheGroupSpec(
        group_id=group_id,
        family=CacheFamily.HISTORY,
        retention=CacheRetention.FULL_HISTORY,
        rows_per_page=rows,
        entry_stride_tokens=1,
    )
    fields = tuple(
        CacheFieldSpec(field_id=f"{group_id}.{index}", dtype=dtype, block_shape=(rows, width), partition_axis=1)
        for index in range(num_fields)
    )
    return spec, fields


def state_group(group_id: str, block_bytes: Sequence[int]) -> GroupDeclaration:
    spec = CacheGroupSpec(
        group_id=group_id,
        family=CacheFamily.STATE,
        retention=CacheRetention.FULL_HISTORY,
        checkpoint_granularity=PREFIX_GRANULARITY,
    )
    fields = tuple(
        CacheFieldSpec(field_id=f"{group_id}.{index}", dtype="uint8", block_shape=(num_bytes,))
        for index, num_bytes in enumerate(block_bytes)
    )
    return spec, fields


def packed(*declarations: GroupDeclaration, **options: object) -> CacheLayout:
    return pack(declarations, prefix_granularity=PREFIX_GRANULARITY, **options)  # type: ignore[arg-type]


def parent_ranges(plan: CacheMemoryPlan, group_id: str, parent: int) -> list[tuple[int, int]]:
    """Byte ranges of one parent's blocks of a group, straight from the id formula."""
    k = plan.group_layout(group_id).cache_blocks_per_lcm_block
    ranges = []
    for field in plan.fields:
        if field.group_id == group_id:
            for slot in range(k):
                begin = field.offset_bytes + (1 + (parent - 1) * k + slot) * field.block_stride_bytes
                ranges.append((begin, begin + field.block_bytes))
    return ranges


def test_a_group_alone_fills_its_parent_with_one_block() -> None:
    layout = packed(rows_group("full", 64, 4))
    assert layout.groups[0].cache_blocks_per_lcm_block == 1
    assert layout.plane_bytes == (64 * 8 * 2,) * 4


def test_packing_is_solved_so_that_groups_of_different_grain_fill_the_same_parent() -> None:
    layout = packed(rows_group("full", 64, 2), rows_group("small", 16, 2), rows_group("mid", 32, 2))
    assert [group.cache_blocks_per_lcm_block for group in layout.groups] == [1, 4, 2]
    assert layout.lcm_block_bytes == 2 * 64 * 8 * 2


def test_explicit_packing_overrides_the_solved_one() -> None:
    layout = packed(rows_group("full", 16, 1), packing={"full": 3})
    assert layout.plane_bytes == (3 * 16 * 8 * 2,)


def test_explicit_packing_must_name_every_group() -> None:
    with pytest.raises(CacheConfigError, match='group "full": packing names no'):
        packed(rows_group("full", 16, 1), packing={})


@pytest.mark.parametrize("fraction", [0.0, 0.24])
def test_padding_over_the_bound_is_refused_naming_group_and_bytes(fraction: float) -> None:
    with pytest.raises(CacheConfigError, match=r'group "b": wastes 100 of 400 bytes .*max_padding_fraction'):
        packed(
            state_group("a", [400]), state_group("b", [150]), packing={"a": 1, "b": 2}, max_padding_fraction=fraction
        )


def test_padding_within_the_bound_is_accepted() -> None:
    layout = packed(
        state_group("a", [400]), state_group("b", [150]), packing={"a": 1, "b": 2}, max_padding_fraction=0.25
    )
    assert layout.plane_bytes == (400,)


def test_rows_keep_strides_of_whole_blocks() -> None:
    layout = packed(rows_group("rows", 64, 1))
    with pytest.raises(CacheConfigError, match=r'field "rows\.0": rows need strides of whole blocks.*1024.*1536 bytes'):
        replace(layout, plane_bytes=(1536,))


def test_rows_of_a_group_are_equally_far_apart_in_every_plane() -> None:
    layout = packed(rows_group("rows", 64, 2))
    with pytest.raises(
        CacheConfigError, match=r'one stride, but it is 1 blocks for field "rows\.0" and 2 for field "rows\.1"'
    ):
        replace(layout, plane_bytes=(1024, 2048))


def test_fields_of_a_group_may_not_share_bytes_of_a_plane() -> None:
    layout = packed(state_group("s", [8, 8]))
    (group,) = layout.groups
    slots = (PlaneSlot(plane=0, offset_bytes=0), PlaneSlot(plane=0, offset_bytes=4))
    with pytest.raises(CacheConfigError, match=r'group "s": fields "s\.0" and "s\.1" overlap'):
        replace(layout, plane_bytes=(16,), groups=(replace(group, slots=slots),))


def test_every_field_needs_a_slot() -> None:
    (group,) = packed(state_group("s", [8, 8])).groups
    with pytest.raises(CacheConfigError, match='group "s": 1 slots for 2 fields'):
        replace(group, slots=group.slots[:1])


def test_block_granularity_must_divide_the_prefix_granularity() -> None:
    with pytest.raises(CacheConfigError, match=r'group "odd": block_granularity 24 .*prefix_granularity 64'):
        packed(rows_group("odd", 24, 1))


def test_ids_are_unique() -> None:
    with pytest.raises(CacheConfigError, match='group_id "a" is declared more than once'):
        packed(state_group("a", [8]), state_group("a", [8]))
    spec, fields = state_group("a", [8])
    with pytest.raises(CacheConfigError, match=r'field_id "a\.0" is declared more than once'):
        packed((spec, fields + fields))


@pytest.mark.parametrize("declarations", [(), ((state_group("a", [8])[0], ()),)])
def test_an_empty_declaration_is_refused(declarations: tuple[GroupDeclaration, ...]) -> None:
    with pytest.raises(CacheConfigError, match=r"at least one group|declares no fields"):
        packed(*declarations)


@given(
    rows=st.lists(st.sampled_from([4, 8, 16, 32, 64]), min_size=1, max_size=4),
    num_fields=st.integers(1, 3),
    num_lcm_blocks=st.integers(1, 5),
    dtype=st.sampled_from(["float32", "float16", "uint8"]),
)
def test_no_two_parents_share_a_byte_and_all_groups_of_a_parent_share_all_bytes(
    rows: list[int], num_fields: int, num_lcm_blocks: int, dtype: str
) -> None:
    declarations = [rows_group(f"g{index}", num_rows, num_fields, dtype=dtype) for index, num_rows in enumerate(rows)]
    plan = packed(*declarations).bind(num_lcm_blocks)
    taken: set[int] = set()
    for parent in range(num_lcm_blocks + 1):
        covered = [
            {byte for begin, end in parent_ranges(plan, spec.group_id, parent) for byte in range(begin, end)}
            for spec in plan.groups
        ]
        if parent:
            assert all(bytes_of_group == covered[0] for bytes_of_group in covered)
            assert len(covered[0]) == plan.layout.lcm_block_bytes
        assert not taken & covered[0]
        taken |= covered[0]
    assert max(taken) < plan.num_arena_bytes


@given(
    packings=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    num_lcm_blocks=st.integers(1, 4),
)
def test_padded_blocks_never_overlap_within_a_group_and_never_leave_their_parent(
    packings: list[int], sizes: list[int], num_lcm_blocks: int
) -> None:
    declarations = [state_group(f"g{index}", sizes[: index + 1]) for index in range(len(packings))]
    plan = packed(*declarations, packing={f"g{i}": k for i, k in enumerate(packings)}, max_padding_fraction=1.0).bind(
        num_lcm_blocks
    )
    for spec in plan.groups:
        seen: set[int] = set()
        for parent in range(1, num_lcm_blocks + 1):
            mine = {b for begin, end in parent_ranges(plan, spec.group_id, parent) for b in range(begin, end)}
            assert len(mine) == plan.group_layout(spec.group_id).payload_bytes_per_lcm_block
            others = {
                b
                for other in plan.groups
                for other_parent in range(1, num_lcm_blocks + 1)
                if other_parent != parent
                for begin, end in parent_ranges(plan, other.group_id, other_parent)
                for b in range(begin, end)
            }
            assert not mine & others
            assert not mine & seen
            seen |= mine


def test_planes_start_on_alignment_boundaries() -> None:
    plan = packed(rows_group("full", 16, 3, width=5), alignment_bytes=256).bind(3)
    assert [field.offset_bytes % 256 for field in plan.fields] == [0, 0, 0]
    assert plan.num_arena_bytes == 3 * 768


@pytest.mark.parametrize("alignment_bytes", [0, 3, 100])
def test_alignment_must_be_a_power_of_two(alignment_bytes: int) -> None:
    with pytest.raises(CacheConfigError, match=f"alignment_bytes must be a power of two, got {alignment_bytes}"):
        packed(rows_group("full", 16, 1), alignment_bytes=alignment_bytes)


@given(memory_bytes=st.integers(0, 40_000), num_fields=st.integers(1, 3))
def test_the_largest_parent_count_within_a_budget_is_found(memory_bytes: int, num_fields: int) -> None:
    layout = packed(rows_group("full", 16, num_fields, width=3), alignment_bytes=512)
    fitting = [n for n in range(500) if layout.num_arena_bytes(n) <= memory_bytes]
    assert layout.num_lcm_blocks_within(memory_bytes) == max(fitting, default=-1)


def test_token_capacity_is_what_all_full_history_groups_hold_together_in_whole_grains() -> None:
    assert packed(rows_group("full", 64, 1)).token_capacity(5) == 5 * 64
    assert packed(rows_group("a", 64, 1), rows_group("b", 16, 1)).token_capacity(5) == 2 * 64
    assert packed(rows_group("a", 16, 1)).token_capacity(7) == 64
    assert packed(state_group("s", [8])).token_capacity(5) == 0


def test_block_counts_include_the_null_block() -> None:
    plan = packed(rows_group("full", 64, 1), rows_group("small", 16, 1)).bind(10)
    assert (plan.num_blocks("full"), plan.num_blocks("small")) == (11, 41)


def test_unknown_ids_are_refused_by_name() -> None:
    plan = packed(rows_group("full", 64, 1)).bind(1)
    with pytest.raises(UnknownGroupError, match=r'"sliding".*groups: full'):
        plan.num_blocks("sliding")
    with pytest.raises(UnknownFieldError, match='"nope"'):
        plan.field("nope")


def test_a_plan_needs_a_usable_parent() -> None:
    with pytest.raises(CacheConfigError, match="num_lcm_blocks must be at least 1, got 0"):
        packed(rows_group("full", 64, 1)).bind(0)


def test_a_plan_survives_json() -> None:
    plan = packed(
        rows_group("full", 64, 2, dtype="bfloat16"), state_group("s", [2048, 2048]), packing={"full": 2, "s": 1}
    ).bind(9)
    decoded = CacheMemoryPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert decoded == plan
    assert decoded.fields == plan.fields


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("num_lcm_blocks",), 0, "num_lcm_blocks must be at least 1, got 0"),
        (("num_lcm_blocks",), "9", "num_lcm_blocks"),
        (("num_lcm_blocks",), None, "num_lcm_blocks"),
        (("surprise",), 1, "surprise"),
        (
            ("layout", "plane_bytes"),
            [1000],
            "1 blocks of 1024 bytes at offset_bytes 0 do not split a plane of 1000 bytes",
        ),
        (("layout", "plane_bytes"), [], "plane_bytes names 0 planes, the groups need 1"),
        (("layout", "plane_bytes"), [1024, -4096], "plane_bytes names 2 planes, the groups need 1"),
        (("layout", "plane_bytes"), [0], "do not split"),
        (("layout", "groups"), [], "at least one group"),
        (("layout", "prefix_granularity"), 0, "prefix_granularity must be at least 1"),
        (("layout", "prefix_granularity"), {1}, "not JSON"),
    ],
)
def test_a_damaged_plan_is_refused_naming_the_entry(path: tuple[str, ...], value: object, message: str) -> None:
    encoded = packed(rows_group("full", 64, 1)).bind(9).to_dict()
    target: dict[str, object] = encoded
    for key in path[:-1]:
        inner = target[key]
        assert isinstance(inner, dict)
        target = inner
    target[path[-1]] = value
    with pytest.raises(CacheConfigError, match=message):
        CacheMemoryPlan.from_dict(encoded)


def test_plans_are_read_without_torch() -> None:
    code = "import sys, cache_runtime.recipes.dense; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

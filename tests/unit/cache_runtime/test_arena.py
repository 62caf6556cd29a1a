"""The arena: views over one allocation, zeroing after bounds checks; KV pools over it; device allocation."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache_runtime.arena import CacheArena
from cache_runtime.device import CpuDevice
from cache_runtime.errors import (
    ArenaAllocationError,
    BlockIdError,
    UnknownFieldError,
    UnknownGroupError,
)
from cache_runtime.pools.kv_pool import KvPool
from cache_runtime.recipes.dense import DenseCacheRecipe
from cache_runtime.recipes.plan import CacheMemoryPlan, pack
from cache_runtime.recipes.rows import key_value_fields
from cache_runtime.recipes.sliding_full import SlidingFullCacheRecipe
from cache_runtime.recipes.spec import CacheFamily, CacheFieldSpec, CacheGroupSpec, CacheRetention

TRANSPARENT_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def dense_arena(num_layers: int = 2) -> CacheArena:
    recipe = DenseCacheRecipe(
        num_layers=num_layers,
        row_fields=key_value_fields(2, 4),
        dtype="float32",
        prefix_granularity=8,
        memory_bytes=1 << 16,
    )
    return CacheArena(recipe.setup().plan, CpuDevice())


def padded_plan() -> CacheMemoryPlan:
    """Two state groups of which the second leaves a gap behind each block."""
    declarations = tuple(
        (
            CacheGroupSpec(
                group_id=group_id,
                family=CacheFamily.STATE,
                retention=CacheRetention.FULL_HISTORY,
                checkpoint_granularity=8,
            ),
            (CacheFieldSpec(field_id=f"layers.0.{group_id}", dtype="float32", block_shape=shape),),
        )
        for group_id, shape in (("wide", (4, 3)), ("narrow", (5,)))
    )
    layout = pack(
        declarations,
        prefix_granularity=8,
        packing={"wide": 1, "narrow": 2},
        max_padding_fraction=0.5,
        alignment_bytes=64,
    )
    return layout.bind(3)


def test_fields_are_views_of_one_aligned_allocation_at_their_planned_place() -> None:
    arena = dense_arena()
    assert arena.base_address % 4096 == 0
    assert arena.num_bytes == arena.plan.num_arena_bytes
    for field in arena.plan.fields:
        view = arena.field(field.field_id)
        assert view.shape == (field.num_blocks, *field.block_shape)
        assert view.dtype == torch.float32
        assert view[3].data_ptr() == arena.base_address + field.offset_bytes + 3 * field.block_stride_bytes


def test_fresh_memory_reads_as_zero() -> None:
    assert not dense_arena().field("layers.1.v").any()


def test_padded_fields_keep_their_stride() -> None:
    arena = CacheArena(padded_plan(), CpuDevice())
    field = arena.plan.field("layers.0.narrow")
    view = arena.field("layers.0.narrow")
    assert view.shape == (7, 5)
    assert view.stride(0) * 4 == field.block_stride_bytes == 24


def test_groups_of_one_parent_share_its_bytes() -> None:
    arena = CacheArena(padded_plan(), CpuDevice())
    arena.field("layers.0.wide")[2].fill_(7.0)
    narrow = arena.field("layers.0.narrow")
    assert (narrow[3:5] == 7.0).all()
    assert not narrow[:3].any()
    assert not narrow[5:].any()


@given(ids=st.lists(st.integers(0, 9)))
def test_zeroing_clears_exactly_the_named_blocks_in_every_field(ids: list[int]) -> None:
    arena = dense_arena()
    for field in arena.plan.fields:
        arena.field(field.field_id).fill_(1.0)
    arena.zero_blocks("full", np.array(ids, dtype=np.int32))
    for field in arena.plan.fields:
        cleared = ~arena.field(field.field_id).flatten(1).any(dim=1)
        kept = arena.field(field.field_id).flatten(1).all(dim=1)
        assert set(torch.nonzero(cleared).flatten().tolist()) == set(ids)
        assert (cleared ^ kept).all()


@pytest.mark.parametrize("bad", [-1, 10_000])
def test_zeroing_refuses_a_bad_id_before_touching_any_block(bad: int) -> None:
    arena = dense_arena()
    arena.field("layers.0.k").fill_(1.0)
    num_blocks = arena.plan.num_blocks("full")
    with pytest.raises(BlockIdError, match=rf'group "full": block id {bad} is outside \[0, {num_blocks}\)'):
        arena.zero_blocks("full", [1, 2, bad])
    assert arena.field("layers.0.k").all()


def test_the_last_block_is_in_range_and_the_next_is_not() -> None:
    arena = dense_arena()
    num_blocks = arena.plan.num_blocks("full")
    arena.zero_blocks("full", [num_blocks - 1])
    with pytest.raises(BlockIdError):
        arena.zero_blocks("full", [num_blocks])


def test_zeroing_refuses_ids_that_are_not_integers_and_groups_it_does_not_know() -> None:
    with pytest.raises(BlockIdError, match="must be integers, got float64"):
        dense_arena().zero_blocks("full", [1.5])
    with pytest.raises(UnknownGroupError, match='"sliding"'):
        dense_arena().zero_blocks("sliding", [1])


def test_zeroing_a_group_leaves_another_groups_parents_alone() -> None:
    arena = CacheArena(padded_plan(), CpuDevice())
    arena.field("layers.0.wide").fill_(1.0)
    arena.zero_blocks("narrow", [1, 2])
    wide = arena.field("layers.0.wide")
    assert not wide[1].flatten()[:5].any()
    assert wide[2:].all()


def test_an_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(UnknownFieldError, match=r"layers\.7\.k"):
        dense_arena().field("layers.7.k")


def test_a_view_keeps_the_memory_alive() -> None:
    view = dense_arena().field("layers.0.k")
    view.fill_(3.0)
    assert (view == 3.0).all()


def test_pool_rows_are_the_blocks_of_the_field_one_after_another() -> None:
    arena = dense_arena()
    pool = KvPool(arena, (0, 1))
    pool.k_buffer(1)[5 * 8 + 3] = 2.0
    pool.v_buffer(0)[9] = 4.0
    assert pool.k_buffer(1).shape == (arena.plan.num_blocks("full") * 8, 2, 4)
    assert pool.k_buffer(1).is_contiguous()
    assert (arena.field("layers.1.k")[5, 3] == 2.0).all()
    assert (arena.field("layers.0.v")[1, 1] == 4.0).all()
    assert not arena.field("layers.0.k").any()


def test_pool_pages_are_the_same_rows_in_runs_of_the_kernels_size() -> None:
    pool = KvPool(dense_arena(), (0, 1))
    pool.k_buffer(1)[5 * 8 + 3] = 2.0
    pool.v_pages(0, 4)[2, 1] = 4.0
    assert pool.k_pages(1, 4).shape == (pool.k_buffer(1).shape[0] // 4, 4, 2, 4)
    assert (pool.k_pages(1, 4)[10, 3] == 2.0).all()
    assert (pool.k_pages(1, 8)[5, 3] == 2.0).all()
    assert (pool.v_buffer(0)[9] == 4.0).all()


def test_a_pool_serves_only_its_layers() -> None:
    pool = KvPool(dense_arena(num_layers=3), (1, 2))
    assert pool.k_buffer(2).data_ptr() == pool.arena.field("layers.2.k").data_ptr()
    for layer in (0, 3):
        with pytest.raises(UnknownFieldError, match=rf'layer {layer} has no "v" in this pool \(layers: \[1, 2\]\)'):
            pool.v_buffer(layer)


def test_a_pool_refuses_layers_without_planned_rows() -> None:
    with pytest.raises(UnknownFieldError, match=r"layers\.2\.k"):
        KvPool(dense_arena(num_layers=2), (0, 1, 2))


def test_an_arena_larger_than_the_memory_is_refused_naming_both() -> None:
    plan = dense_arena().plan.layout.bind(1 << 40)
    with pytest.raises(ArenaAllocationError, match=rf"arena of {plan.num_arena_bytes} bytes does not fit: \d+ bytes"):
        CacheArena(plan, CpuDevice())


def test_the_contract_publishes_physical_and_virtual_counts_of_the_plan() -> None:
    spec, fields = (
        CacheGroupSpec(
            group_id="sharded",
            family=CacheFamily.HISTORY,
            retention=CacheRetention.FULL_HISTORY,
            rows_per_page=8,
            entry_stride_tokens=1,
            shard_count=3,
        ),
        (CacheFieldSpec(field_id="layers.0.k", dtype="uint8", block_shape=(8, 2)),),
    )
    plan = pack([(spec, fields)], prefix_granularity=16, packing={"sharded": 2}).bind(5)
    group = CacheArena(plan, CpuDevice()).contract.group("sharded")
    assert (group.packing, group.num_blocks) == (2, 11)
    assert (group.virtual_packing, group.num_virtual_blocks) == (6, 31)
    assert group.block_granularity == 8


def test_cpu_streams_and_events_are_always_done() -> None:
    device = CpuDevice()
    event = device.current_stream().record_event()
    stream = device.new_stream()
    stream.wait_event(event)
    with stream.activate():
        pinned = device.alloc_pinned(16)
    device.synchronize()
    assert event.is_done()
    assert pinned.shape == (16,)


def test_cpu_memory_cannot_be_aligned_beyond_a_memory_page() -> None:
    with pytest.raises(ArenaAllocationError, match="alignment of 1048576 bytes"):
        CpuDevice().alloc(10, 1 << 20)


@pytest.mark.skipif(not TRANSPARENT_HUGE_PAGES.exists(), reason="this system has no transparent huge pages")
@pytest.mark.parametrize("is_shared", [False, True])
def test_an_arena_asks_for_huge_pages(is_shared: bool) -> None:
    buffer = CpuDevice(is_shared=is_shared).alloc(8 << 20, 64)
    assert "hg" in mapping_flags(buffer.data_ptr())


def mapping_flags(address: int) -> list[str]:
    """What the system has noted of the mapping that holds an address of this process."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds is not None:
            is_inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif is_inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise LookupError(f"no mapping holds {address:#x}")


def interleaved_arena() -> CacheArena:
    """Five layers keep a window and one keeps everything, so that the window's fields share planes."""
    recipe = SlidingFullCacheRecipe(
        num_layers=6,
        row_fields=key_value_fields(2, 4),
        dtype="float32",
        prefix_granularity=8,
        memory_bytes=1 << 16,
        is_sliding=(True,) * 5 + (False,),
        sliding_window_tokens=16,
    )
    return CacheArena(recipe.setup().plan, CpuDevice())


def test_a_field_between_others_is_one_array_of_rows_at_the_contracts_distance() -> None:
    arena = interleaved_arena()
    stride_rows = arena.contract.group("sliding").block_stride_rows
    assert stride_rows == 5 * 8
    rows, blocks = arena.rows("layers.3.v"), arena.field("layers.3.v")
    assert rows.is_contiguous()
    assert rows.shape == ((blocks.shape[0] - 1) * stride_rows + 8, 2, 4)
    rows[2 * stride_rows + 5] = 1.0
    assert blocks[2, 5].eq(1.0).all()
    assert int(blocks.sum()) == 8


def test_rows_of_a_field_between_others_stay_inside_the_arena_and_its_blocks_apart() -> None:
    arena = interleaved_arena()
    for field in arena.plan.fields:
        end = arena.rows(field.field_id).data_ptr() + arena.rows(field.field_id).nbytes
        assert end <= arena.base_address + arena.num_bytes
        for other in arena.plan.fields:
            if other.group_id == field.group_id:
                arena.field(other.field_id).zero_()
        arena.field(field.field_id).fill_(1.0)
        for other in arena.plan.fields:
            if other.group_id == field.group_id and other != field:
                assert not arena.field(other.field_id).any(), (field.field_id, other.field_id)


def test_zeroing_a_block_between_others_clears_all_its_fields_and_no_neighbour() -> None:
    arena = interleaved_arena()
    for field in arena.plan.fields:
        if field.group_id == "sliding":
            arena.field(field.field_id).fill_(1.0)
    arena.zero_blocks("sliding", [2])
    for field in arena.plan.fields:
        if field.group_id == "sliding":
            is_set = arena.field(field.field_id).flatten(1).all(dim=1).tolist()
            assert is_set == [block != 2 for block in range(field.num_blocks)]


def test_a_state_group_has_no_rows() -> None:
    with pytest.raises(TypeError, match='group "narrow": a state group has no rows'):
        CacheArena(padded_plan(), CpuDevice()).rows("layers.0.narrow")

"""Who holds a block of a sharded group, and under which id: over all ranks every block, row and page is there once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.cache_runtime.test_mapping import FakePlan, array, contract, group, plan, state

import scheduler_core
from cache_runtime.contract import CacheGroupContract, CacheRuntimeContract
from cache_runtime.errors import BatchContractError, BlockIdError, CacheConfigError
from cache_runtime.mapping.batch_metadata import CacheBatchMetadata, Int32Array
from cache_runtime.mapping.block_placement import BlockPlacement, place_blocks
from cache_runtime.mapping.router import CacheGroupRouter, RoutedBatch
from cache_runtime.mapping.write_locations import span_tokens
from cache_runtime.recipes.dense import FULL_GROUP_ID, DenseCacheRecipe
from cache_runtime.recipes.rows import key_value_fields
from cache_runtime.scheduler_bridge import pool_to_cache_groups

SHARDS = st.integers(1, 5)


def placement(shard_count: int, shard: int, num_virtual_blocks: int = 100) -> BlockPlacement:
    return BlockPlacement(group_id="full", shard_count=shard_count, shard=shard, num_virtual_blocks=num_virtual_blocks)


def sharded_contract(shard_count: int, *, num_lcm_blocks: int = 12) -> CacheRuntimeContract:
    recipe = _recipe(shard_count=shard_count, memory_bytes=1 << 20)
    return CacheRuntimeContract.from_plan(recipe.setup().plan.layout.bind(num_lcm_blocks))


def route(batch: FakePlan, batch_contract: CacheRuntimeContract, rank: int, num_ranks: int) -> RoutedBatch:
    placements = place_blocks(batch_contract, context_rank=rank, num_context_ranks=num_ranks)
    router = CacheGroupRouter(batch_contract, {FULL_GROUP_ID: 4}, placements=placements)
    return router.route(CacheBatchMetadata.from_plan(batch, batch_contract))


@given(SHARDS, st.integers(1, 30))
def test_every_block_is_held_by_one_rank_and_fills_its_arena_without_a_gap(shard_count: int, num_blocks: int) -> None:
    num_virtual_blocks = num_blocks * shard_count + 1
    ids = np.arange(1, num_virtual_blocks, dtype=np.int32)
    ranks = [placement(shard_count, shard, num_virtual_blocks) for shard in range(shard_count)]
    held = [(rank.physical_table(ids[None])[0] > 0).tolist() for rank in ranks]
    assert all(sum(holders) == 1 for holders in zip(*held, strict=True))
    for rank in ranks:
        assert rank.held_blocks(ids).tolist() == list(range(1, num_blocks + 1))


@given(SHARDS, st.lists(st.integers(-1, 60), min_size=1, max_size=20))
def test_a_table_is_translated_entry_by_entry(shard_count: int, table: list[int]) -> None:
    """Against the words of the rule: deal the ids 1, 2, 3, ... to the ranks in turn."""
    dealt = {block: ((block - 1) % shard_count, (block + shard_count - 1) // shard_count) for block in range(1, 61)}
    for shard in range(shard_count):
        expected = [dealt[block][1] if block > 0 and dealt[block][0] == shard else 0 for block in table]
        assert placement(shard_count, shard).physical_table(array([table])).tolist() == [expected]


def test_the_null_block_and_padding_lie_nowhere() -> None:
    assert placement(3, 0).shards(array([-1, 0, 1, 2, 3, 4])).tolist() == [-1, -1, 0, 1, 2, 0]
    assert placement(1, 0).shards(array([-1, 0, 1, 2])).tolist() == [-1, -1, 0, 0]
    assert placement(3, 0).held_blocks(array([0, 0])).tolist() == []


def test_a_replicated_group_translates_to_itself_minus_the_null_block() -> None:
    assert placement(1, 0).physical_table(array([[5, 0, 3, -1]])).tolist() == [[5, 0, 3, 0]]
    assert placement(1, 0).held_blocks(array([5, 0, 3])).tolist() == [5, 3]


@pytest.mark.parametrize("bad_id", [-1, 100, 2**31 - 1])
@pytest.mark.parametrize("shard", [0, 1])
def test_an_id_outside_the_blocks_of_all_ranks_is_refused_by_every_rank(bad_id: int, shard: int) -> None:
    assert placement(2, shard).held_blocks(array([99, 98])).tolist() == ([50] if shard == 0 else [49])
    with pytest.raises(BlockIdError, match=rf'"full": block id {bad_id} is outside \[0, 100\)'):
        placement(2, shard).held_blocks(array([99, bad_id]))


def test_a_group_is_sharded_over_all_ranks_or_not_at_all() -> None:
    groups = contract(group("full", 8, shard_count=2), group("side", 8))
    placements = place_blocks(groups, context_rank=1, num_context_ranks=2)
    assert (placements["full"].shard, placements["full"].is_sharded) == (1, True)
    assert (placements["side"].shard, placements["side"].is_sharded) == (0, False)
    with pytest.raises(CacheConfigError, match="shard_count 2 is neither 1 nor the number of context ranks, 3"):
        place_blocks(groups, context_rank=1, num_context_ranks=3)


@pytest.mark.parametrize(
    ("sharded", "message"),
    [
        (group("g", 8, shard_count=2, window_tokens=16), "history with retention sliding_window"),
        (state(shard_count=2), "state with retention full_history"),
    ],
)
def test_what_somebody_must_read_whole_cannot_be_sharded(sharded: CacheGroupContract, message: str) -> None:
    with pytest.raises(CacheConfigError, match=message):
        place_blocks(contract(sharded), context_rank=0, num_context_ranks=2)


@pytest.mark.parametrize(("rank", "num_ranks"), [(2, 2), (-1, 2)])
def test_a_rank_outside_the_ranks_is_refused(rank: int, num_ranks: int) -> None:
    with pytest.raises(CacheConfigError, match=f"context_rank {rank} is outside"):
        place_blocks(contract(group("full", 8)), context_rank=rank, num_context_ranks=num_ranks)
    with pytest.raises(CacheConfigError, match=r"shard 3 is outside \[0, 3\)"):
        placement(3, 3)


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, list[int], list[int], list[list[int]]]:
    """(ranks, begins, lengths, virtual block table), each block used once."""
    shard_count = draw(SHARDS)
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    begins = draw(st.lists(st.integers(0, 20), min_size=len(lengths), max_size=len(lengths)))
    free = draw(st.permutations(range(1, 12 * shard_count + 1)))
    sizes = [-(-(begin + length) // 8) for begin, length in zip(begins, lengths, strict=True)]
    if sum(sizes) > len(free):
        return shard_count, [0], [1], [[free[0], -1]]
    blocks = iter(free)
    table = [[next(blocks) if slot < size else -1 for slot in range(max(sizes) + 1)] for size in sizes]
    return shard_count, begins, lengths, table


@given(batches())
def test_over_all_ranks_every_row_is_written_once_where_its_block_lies(
    batch: tuple[int, list[int], list[int], list[list[int]]],
) -> None:
    shard_count, begins, lengths, table = batch
    batch_contract = sharded_contract(shard_count)
    token_rows, positions = span_tokens(array(begins), array(lengths))
    num_tokens = sum(lengths)
    written: list[tuple[int, int]] = []
    for rank in range(shard_count):
        routed = route(plan(begins, lengths, table), batch_contract, rank, shard_count)
        locations = routed.write_locations(FULL_GROUP_ID).tolist()
        held = routed.held_tokens(FULL_GROUP_ID)
        tokens = range(num_tokens) if held is None else held.tolist()
        assert [token for token, location in enumerate(locations) if location != -1] == list(tokens)
        for token in tokens:
            block = table[token_rows[token]][positions[token] // 8]
            assert (block - 1) % shard_count == rank
            assert locations[token] == ((block - 1) // shard_count + 1) * 8 + positions[token] % 8
        written += [(rank, locations[token]) for token in tokens]
    assert len(written) == len(set(written)) == num_tokens


@given(batches())
def test_over_all_ranks_every_page_with_rows_is_present_once(
    batch: tuple[int, list[int], list[int], list[list[int]]],
) -> None:
    shard_count, begins, lengths, table = batch
    batch_contract = sharded_contract(shard_count)
    tables = np.stack(
        [
            route(plan(begins, lengths, table), batch_contract, rank, shard_count).page_table(FULL_GROUP_ID).numpy()
            for rank in range(shard_count)
        ]
    )
    has_rows = np.repeat(array(table) > 0, 2, axis=1)
    assert ((tables > 0).sum(axis=0) == has_rows).all()
    elsewhere = -1 if shard_count > 1 else 0
    assert (tables[tables <= 0] == elsewhere).all()


def test_ids_of_all_ranks_are_checked_against_the_blocks_of_all_ranks() -> None:
    batch_contract = sharded_contract(2, num_lcm_blocks=3)
    assert (batch_contract.groups[0].num_blocks, batch_contract.groups[0].num_virtual_blocks) == (4, 7)
    for rank in (0, 1):
        route(plan([0], [1], [[6]]), batch_contract, rank, 2)
        with pytest.raises(BatchContractError, match=r"block id 7 is outside \[-1, 7\)"):
            route(plan([0], [1], [[7]]), batch_contract, rank, 2)


def test_the_scheduler_balances_the_shards_that_blocks_are_placed_on() -> None:
    batch_contract = sharded_contract(3)
    scheduler = scheduler_core.Scheduler(
        scheduler_core.SchedulerConfig(
            role=scheduler_core.Role.FUSED,
            prefix_granularity=8,
            num_lcm_blocks=batch_contract.num_lcm_blocks,
            max_batch_size=2,
            token_budget=256,
            cache_groups=pool_to_cache_groups(batch_contract),
        )
    )
    scheduler.submit([scheduler_core.RequestSpec(request_id="a", tokens=array(range(9 * 8)), max_new_tokens=1)])
    table = scheduler.next_plan().block_tables[0]
    loads = _loads(table, 3)
    assert sum(loads) >= 9
    assert max(loads) - min(loads) <= 1


def _loads(table: Int32Array, shard_count: int) -> Sequence[int]:
    shards = placement(shard_count, 0).shards(table)
    return [int((shards == shard).sum()) for shard in range(shard_count)]


def test_ranks_that_share_a_group_hold_that_many_times_the_tokens() -> None:
    """Three ranks with a third of the memory each hold what one holds alone."""
    alone = _recipe(shard_count=1, memory_bytes=3 << 20).setup()
    shared = _recipe(shard_count=3, memory_bytes=1 << 20).setup()
    assert shared.plan.num_arena_bytes <= 1 << 20
    assert alone.token_capacity <= shared.token_capacity + 3 * 64


def _recipe(*, shard_count: int, memory_bytes: int) -> DenseCacheRecipe:
    return DenseCacheRecipe(
        prefix_granularity=8,
        memory_bytes=memory_bytes,
        num_layers=2,
        row_fields=key_value_fields(2, 16),
        dtype="float32",
        shard_count=shard_count,
    )

"""The mapping point against a slow, obvious model: one token, one dictionary look-up at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_runtime.contract import CacheGroupContract, CacheRuntimeContract
from cache_runtime.errors import BatchContractError, CacheConfigError, UnknownGroupError
from cache_runtime.mapping.batch_metadata import CacheBatchMetadata
from cache_runtime.mapping.group_tables import CacheGroupGeometry
from cache_runtime.mapping.page_table import resolve_token_locations
from cache_runtime.mapping.router import CacheGroupRouter
from cache_runtime.mapping.write_locations import fail_closed_write_locations, span_tokens, span_write_locations
from cache_runtime.recipes.spec import CacheFamily, CacheGroupSpec, CacheRetention

Int32Array = npt.NDArray[np.int32]
NUM_BLOCKS = 50


@dataclass(frozen=True)
class FakePlan:
    num_rows: int
    begins: Int32Array
    input_lengths: Int32Array
    block_tables: Sequence[Int32Array]
    checkpoint_tokens: Int32Array
    state_input_slots: Sequence[Int32Array]
    state_output_slots: Sequence[Int32Array]


def group(
    group_id: str,
    block_granularity: int,
    *,
    shard_count: int = 1,
    interleave: int = 1,
    entry_stride_tokens: int = 1,
    window_tokens: int | None = None,
    replayable: bool = False,
) -> CacheGroupContract:
    """`interleave`: blocks of room from one block to the next."""
    spec = CacheGroupSpec(
        group_id=group_id,
        family=CacheFamily.HISTORY,
        retention=CacheRetention.FULL_HISTORY if window_tokens is None else CacheRetention.SLIDING_WINDOW,
        rows_per_page=block_granularity // entry_stride_tokens,
        entry_stride_tokens=entry_stride_tokens,
        sliding_window_tokens=window_tokens,
        replayable=replayable,
        shard_count=shard_count,
    )
    return CacheGroupContract(
        spec=spec,
        packing=1,
        virtual_packing=shard_count,
        num_blocks=NUM_BLOCKS,
        num_virtual_blocks=NUM_BLOCKS,
        block_stride_rows=interleave * block_granularity // entry_stride_tokens,
    )


def state(*, shard_count: int = 1) -> CacheGroupContract:
    spec = CacheGroupSpec(
        group_id="ssm",
        family=CacheFamily.STATE,
        retention=CacheRetention.FULL_HISTORY,
        checkpoint_granularity=8,
        shard_count=shard_count,
    )
    return CacheGroupContract(
        spec=spec,
        packing=1,
        virtual_packing=1,
        num_blocks=NUM_BLOCKS,
        num_virtual_blocks=NUM_BLOCKS,
        block_stride_rows=None,
    )


def geometry(block_granularity: int, *, interleave: int = 1) -> CacheGroupGeometry:
    return CacheGroupGeometry.of(group("full", block_granularity, interleave=interleave), 1)


def contract(*groups: CacheGroupContract) -> CacheRuntimeContract:
    return CacheRuntimeContract(prefix_granularity=64, num_lcm_blocks=NUM_BLOCKS - 1, groups=groups)


def array(values: Sequence[object]) -> Int32Array:
    return np.array(values, dtype=np.int32)


def plan(begins: Sequence[int], lengths: Sequence[int], *tables: Sequence[Sequence[int]]) -> FakePlan:
    return FakePlan(
        num_rows=len(begins),
        begins=array(begins),
        input_lengths=array(lengths),
        block_tables=[array(table) for table in tables],
        checkpoint_tokens=array([0] * len(begins)),
        state_input_slots=[array([]) for _ in tables],
        state_output_slots=[array([]) for _ in tables],
    )


def model_location(
    table: Sequence[Sequence[int]], row: int, position: int, granularity: int, interleave: int
) -> int | None:
    slots = dict(enumerate(table[row]))
    block = slots.get(position // granularity, 0)
    return None if block <= 0 else block * granularity * interleave + position % granularity


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, int, list[int], list[int], list[list[int]]]:
    """(block_granularity, kernel_page_size, begins, lengths, table) with holes and padding anywhere."""
    kernel_page_size = draw(st.sampled_from([1, 2, 4]))
    block_granularity = kernel_page_size * draw(st.integers(1, 4))
    num_rows = draw(st.integers(0, 5))
    num_slots = draw(st.integers(1, 6))
    rows = st.lists(st.integers(-1, NUM_BLOCKS - 1), min_size=num_slots, max_size=num_slots)
    table = draw(st.lists(rows, min_size=num_rows, max_size=num_rows))
    spans = st.lists(st.integers(0, num_slots * block_granularity + 3), min_size=num_rows, max_size=num_rows)
    return block_granularity, kernel_page_size, draw(spans), draw(spans), table


@given(batches(), st.integers(1, 5))
def test_write_locations_equal_the_model_and_fail_to_the_dummy_row_or_closed(
    batch: tuple[int, int, list[int], list[int], list[list[int]]], interleave: int
) -> None:
    granularity, _, begins, lengths, table = batch
    if not table:
        return
    expected = [
        model_location(table, row, begins[row] + step, granularity, interleave)
        for row in range(len(table))
        for step in range(lengths[row])
    ]
    arguments = (array(table), array(begins), array(lengths), geometry(granularity, interleave=interleave))
    assert span_write_locations(*arguments).tolist() == [0 if e is None else e for e in expected]
    assert fail_closed_write_locations(*arguments).tolist() == [-1 if e is None else e for e in expected]


def blocks_of(begin: int, length: int, granularity: int, num_slots: int) -> list[int]:
    end_slot = -(-(begin + length) // granularity)
    return [slot + 1 if slot < end_slot else -1 for slot in range(num_slots)]


@given(
    spans=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), max_size=5),
    kernel_page_size=st.sampled_from([1, 2, 4, 8]),
    interleave=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_both_views_of_a_routed_batch_name_the_same_rows(
    spans: list[tuple[int, int]], kernel_page_size: int, interleave: int, seed: int
) -> None:
    order = np.random.default_rng(seed).permutation(NUM_BLOCKS - 1) + 1
    begins, lengths = [begin for begin, _ in spans], [length for _, length in spans]
    table = np.full((len(spans), 13), -1, dtype=np.int32)
    for row, (begin, length) in enumerate(spans):
        num_slots = -(-(begin + length) // 8)
        table[row, :num_slots] = order[:num_slots]
    batch_contract = contract(group("full", 8, interleave=interleave))
    metadata = CacheBatchMetadata.from_plan(replace(plan(begins, lengths, []), block_tables=[table]), batch_contract)
    routed = CacheGroupRouter(batch_contract, {"full": kernel_page_size}).route(metadata)
    pages = routed.page_table("full").numpy()
    assert pages.shape == (len(spans), 13 * 8 // kernel_page_size)
    by_page = [
        int(pages[row, position // kernel_page_size]) * kernel_page_size + position % kernel_page_size
        for row, (begin, length) in enumerate(spans)
        for position in range(begin, begin + length)
    ]
    assert routed.write_locations("full").tolist() == by_page
    assert routed.kernel_page_size("full") == kernel_page_size
    assert metadata.num_tokens == len(by_page)


def route(batch: FakePlan, batch_contract: CacheRuntimeContract, **sizes: int) -> list[list[int]]:
    metadata = CacheBatchMetadata.from_plan(batch, batch_contract)
    routed = CacheGroupRouter(batch_contract, sizes).route(metadata)
    table: list[list[int]] = routed.page_table(next(iter(sizes))).tolist()
    return table


def test_a_block_becomes_its_consecutive_pages_and_holes_and_padding_the_dummy_page() -> None:
    pages = route(plan([10], [2], [[0, 3, -1]]), contract(group("sliding", 8, window_tokens=3)), sliding=2)
    assert pages == [[0, 0, 0, 0, 12, 13, 14, 15, 0, 0, 0, 0]]


def test_blocks_that_share_a_plane_with_other_fields_are_as_many_pages_apart_as_fields_lie_there() -> None:
    batch_contract = contract(group("sliding", 8, interleave=5, window_tokens=3))
    metadata = CacheBatchMetadata.from_plan(plan([10], [7], [[0, 3, 1]]), batch_contract)
    routed = CacheGroupRouter(batch_contract, {"sliding": 4}).route(metadata)
    assert routed.page_table("sliding").tolist() == [[0, 0, 30, 31, 10, 11]]
    assert routed.write_locations("sliding").tolist() == [*range(122, 128), 40]


def test_a_page_as_large_as_the_block_keeps_block_ids() -> None:
    batch_contract = contract(group("sliding", 8, window_tokens=1))
    assert route(plan([8], [1], [[0, 3, -1]]), batch_contract, sliding=8) == [[0, 3, 0]]


def test_routed_tensors_have_the_dtypes_kernels_read() -> None:
    batch_contract = contract(group("full", 8))
    metadata = CacheBatchMetadata.from_plan(plan([0], [3], [[5]]), batch_contract)
    routed = CacheGroupRouter(batch_contract, {"full": 4}).route(metadata)
    assert str(routed.page_table("full").dtype) == "torch.int32"
    assert str(routed.write_locations("full").dtype) == "torch.int64"
    assert routed.write_locations("full").tolist() == [40, 41, 42]


def test_groups_of_different_grain_are_routed_from_their_own_tables() -> None:
    batch_contract = contract(group("full", 8), group("fine", 4))
    batch = plan([6], [3], [[1, 2]], [[6, 7, 9]])
    metadata = CacheBatchMetadata.from_plan(batch, batch_contract)
    routed = CacheGroupRouter(batch_contract, {"full": 8, "fine": 2}).route(metadata)
    assert routed.write_locations("full").tolist() == [14, 15, 16]
    assert routed.write_locations("fine").tolist() == [30, 31, 36]
    assert routed.page_table("fine").tolist() == [[12, 13, 14, 15, 18, 19]]


def test_row_indices_beyond_32_bits_stay_exact() -> None:
    table = array([[2**31 - 1]])
    assert span_write_locations(table, array([5]), array([1]), geometry(64)).tolist() == [(2**31 - 1) * 64 + 5]


def test_positions_of_a_token_resolve_the_same_through_blocks_and_pages() -> None:
    rows, positions = span_tokens(array([3]), array([4]))
    blocks = resolve_token_locations(array([[4, 9]]), rows, positions, span=4, stride_rows=12)
    pages = resolve_token_locations(array([[24, 25, 54, 55]]), rows, positions, span=2, stride_rows=2)
    assert blocks.tolist() == pages.tolist() == [51, 108, 109, 110]


def test_a_table_without_slots_resolves_nothing() -> None:
    assert fail_closed_write_locations(np.empty((1, 0), np.int32), array([0]), array([2]), geometry(4)).tolist() == [
        -1,
        -1,
    ]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (plan([0], [1]), "0 block tables, the contract has 1 groups"),
        (plan([0], [1], [[1], [2]]), r'group "full": block table has shape \(2, 1\), expected 1 rows'),
        (plan([0], [1], [[NUM_BLOCKS]]), rf'group "full": block id {NUM_BLOCKS} is outside \[-1, {NUM_BLOCKS}\)'),
        (plan([0], [1], [[-2]]), r'group "full": block id -2 is outside \[-1,'),
        (plan([-1], [1], [[1]]), "begins must not be negative, row 0 has -1"),
        (plan([0], [-3], [[1]]), "input_lengths must not be negative, row 0 has -3"),
        (replace(plan([0], [1], [[1]]), begins=array([0, 0])), r"begins has shape \(2,\), expected \(1,\)"),
        (plan([0, 8], [1, 8], [[1, 2], [3, 0]]), r"row 1 writes positions \[8, 16\) .*slot of \[1, 2\)"),
        (plan([0, 8], [1, 1], [[1, -1], [3, -1]]), r"row 1 writes positions \[8, 9\)"),
        (plan([15], [2], [[1, 2]]), r"row 0 writes positions \[15, 17\) .*slot of \[1, 3\)"),
        (plan([100], [1], [[1, 2]]), r"row 0 writes positions \[100, 101\)"),
    ],
)
def test_a_plan_that_breaks_the_contract_is_refused_naming_the_culprit(batch: FakePlan, message: str) -> None:
    with pytest.raises(BatchContractError, match=message):
        CacheBatchMetadata.from_plan(batch, contract(group("full", 8)))


@pytest.mark.parametrize(
    ("window_tokens", "begin", "table", "message"),
    [
        (None, 17, [1, 0, 3], r"row 0 reads positions \[0, 17\) .* slot of \[0, 3\)"),
        (10, 17, [1, 0, 3], r"row 0 reads positions \[8, 17\) .* slot of \[1, 3\)"),
        (11, 17, [0, 2, 3], r"row 0 reads positions \[7, 17\) .* slot of \[0, 3\)"),
        (9, 16, [1, 0, 3], r"row 0 reads positions \[8, 16\) .* slot of \[1, 2\)"),
    ],
)
def test_a_hole_among_the_rows_that_a_forward_reads_is_refused(
    window_tokens: int | None, begin: int, table: list[int], message: str
) -> None:
    batch_contract = contract(group("g", 8, window_tokens=window_tokens))
    with pytest.raises(BatchContractError, match=f'group "g": {message}'):
        CacheBatchMetadata.from_plan(plan([begin], [1], [table]), batch_contract)


@pytest.mark.parametrize(("window_tokens", "table"), [(1, [0, 0, 3]), (2, [0, 0, 3]), (3, [0, 2, 3]), (10, [0, 2, 3])])
def test_holes_behind_the_window_are_what_a_sliding_table_looks_like(window_tokens: int, table: list[int]) -> None:
    batch_contract = contract(group("g", 8, window_tokens=window_tokens))
    metadata = CacheBatchMetadata.from_plan(plan([17], [1], [table]), batch_contract)
    assert metadata.block_tables["g"].tolist() == [table]


def test_a_replayable_group_may_begin_anywhere() -> None:
    batch_contract = contract(group("g", 8, window_tokens=16, replayable=True))
    CacheBatchMetadata.from_plan(plan([16], [1], [[0, 0, 3]]), batch_contract)


def test_rows_that_write_nothing_need_no_blocks() -> None:
    metadata = CacheBatchMetadata.from_plan(plan([8, 100], [0, 0], [[-1], [-1]]), contract(group("full", 8)))
    assert metadata.num_tokens == 0


def test_tables_are_passed_on_without_a_copy() -> None:
    batch = plan([0], [1], [[1]])
    metadata = CacheBatchMetadata.from_plan(batch, contract(group("full", 8)))
    assert metadata.block_tables["full"] is batch.block_tables[0]


@pytest.mark.parametrize(
    ("groups", "sizes", "error", "message"),
    [
        ((group("full", 8),), {"other": 8}, UnknownGroupError, '"other" was never published'),
        ((group("full", 8),), {"full": 3}, CacheConfigError, "kernel_page_size 3 must divide block_granularity 8"),
        ((group("full", 8),), {"full": 0}, CacheConfigError, "kernel_page_size 0"),
        ((group("full", 8, shard_count=2),), {"full": 8}, CacheConfigError, "shard_count 2 is neither 1 nor"),
        ((state(),), {"ssm": 8}, CacheConfigError, '"ssm": a state group has no pages'),
        ((group("full", 8, entry_stride_tokens=4),), {"full": 8}, CacheConfigError, "entry_stride_tokens 4 is not"),
    ],
)
def test_a_router_claims_only_groups_it_can_address(
    groups: tuple[CacheGroupContract, ...], sizes: dict[str, int], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        CacheGroupRouter(contract(*groups), sizes)


def test_unclaimed_groups_ride_through_and_cannot_be_read() -> None:
    batch_contract = contract(group("full", 8), group("side", 8))
    metadata = CacheBatchMetadata.from_plan(plan([0], [1], [[1]], [[2]]), batch_contract)
    routed = CacheGroupRouter(batch_contract, {"full": 8}).route(metadata)
    with pytest.raises(UnknownGroupError, match='"side" is not claimed'):
        routed.page_table("side")


def test_metadata_of_another_contract_is_refused() -> None:
    metadata = CacheBatchMetadata.from_plan(plan([0], [1], [[1]]), contract(group("full", 8)))
    with pytest.raises(BatchContractError, match="another runtime contract"):
        CacheGroupRouter(contract(group("full", 16)), {"full": 8}).route(metadata)


def test_a_block_distance_that_pages_do_not_divide_is_refused() -> None:
    with pytest.raises(CacheConfigError, match=r"block_stride_rows 12 .* kernel_page_size 8"):
        CacheGroupGeometry(group_id="g", block_granularity=8, kernel_page_size=8, block_stride_rows=12)
    with pytest.raises(CacheConfigError, match=r"block_stride_rows 4 must be at least block_granularity 8"):
        CacheGroupGeometry(group_id="g", block_granularity=8, kernel_page_size=4, block_stride_rows=4)

"""The planner against a slow, obvious copy of one block after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.cache_runtime.transfer.manifests import BLOCK_BYTES, FIELD_IDS, rank

from cache_runtime.transfer.planner import MAX_RUN_BYTES, PlanError, Run, coalesce, plan_block_runs
from cache_runtime.transfer.runs import RunTable
from cache_runtime.transfer.schema import FieldPlacement, GroupBlockCount, RankPlacement

SOURCE_BASE, TARGET_BASE = 1000, 500_000


def placement(base: int, num_blocks: int, fields: Sequence[FieldPlacement]) -> RankPlacement:
    return replace(
        rank(),
        arena_base=base,
        arena_bytes=max(item.end_bytes(num_blocks) for item in fields),
        fields=tuple(fields),
        block_counts=(GroupBlockCount(group_id="full", num_blocks=num_blocks),),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    source: RankPlacement
    target: RankPlacement
    field_ids: tuple[str, ...]
    source_blocks: tuple[int, ...]
    target_blocks: tuple[int, ...]
    max_run_bytes: int


@st.composite
def planes(draw: st.DrawFn, base: int, num_blocks: int, block_bytes: Sequence[int]) -> RankPlacement:
    """Planes in a random order, with random gaps between planes and between blocks."""
    fields, offset_bytes = [], 0
    for index in draw(st.permutations(range(len(block_bytes)))):
        offset_bytes += draw(st.integers(0, 3))
        item = FieldPlacement(
            field_id=f"f{index}",
            offset_bytes=offset_bytes,
            block_stride_bytes=block_bytes[index] + draw(st.sampled_from([0, 0, 1, 5])),
            block_bytes=block_bytes[index],
        )
        fields.append(item)
        offset_bytes = item.end_bytes(num_blocks)
    return placement(base, num_blocks, fields)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    block_bytes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    num_source, num_target = draw(st.integers(2, 12)), draw(st.integers(2, 12))
    target_blocks = draw(st.lists(st.integers(1, num_target - 1), unique=True, max_size=10))
    size = len(target_blocks)
    return Case(
        source=draw(planes(SOURCE_BASE, num_source, block_bytes)),
        target=draw(planes(TARGET_BASE, num_target, block_bytes)),
        field_ids=tuple(draw(st.lists(st.sampled_from([f"f{i}" for i in range(len(block_bytes))]), unique=True))),
        source_blocks=tuple(draw(st.lists(st.integers(1, num_source - 1), min_size=size, max_size=size))),
        target_blocks=tuple(target_blocks),
        max_run_bytes=draw(st.sampled_from([1, 2, 7, 1000])),
    )


def memories(case: Case) -> tuple[np.ndarray, np.ndarray]:
    noise = np.random.default_rng(1).integers(1, 256, case.source.arena_bytes, dtype=np.uint8)
    return noise, np.zeros(case.target.arena_bytes, dtype=np.uint8)


def copy_block_by_block(case: Case) -> np.ndarray:
    source, target = memories(case)
    for field_id in case.field_ids:
        ours, theirs = case.source.find_field(field_id), case.target.find_field(field_id)
        assert ours is not None
        assert theirs is not None
        for from_block, to_block in zip(case.source_blocks, case.target_blocks, strict=True):
            begin = ours.offset_bytes + from_block * ours.block_stride_bytes
            to_begin = theirs.offset_bytes + to_block * theirs.block_stride_bytes
            target[to_begin : to_begin + ours.block_bytes] = source[begin : begin + ours.block_bytes]
    return target


def copy_runs(case: Case, runs: Sequence[Run]) -> np.ndarray:
    source, target = memories(case)
    num_writes = np.zeros(target.size, dtype=np.int64)
    for run in runs:
        begin, to_begin = run.source_address - SOURCE_BASE, run.target_address - TARGET_BASE
        assert 0 <= begin <= begin + run.length_bytes <= source.size
        assert 0 <= to_begin <= to_begin + run.length_bytes <= target.size
        assert 0 < run.length_bytes <= case.max_run_bytes
        target[to_begin : to_begin + run.length_bytes] = source[begin : begin + run.length_bytes]
        num_writes[to_begin : to_begin + run.length_bytes] += 1
    assert num_writes.max(initial=0) <= 1
    return target


def plan(case: Case) -> RunTable:
    return plan_block_runs(
        case.source,
        case.target,
        case.field_ids,
        case.source_blocks,
        case.target_blocks,
        max_run_bytes=case.max_run_bytes,
    )


@given(case=cases())
@settings(max_examples=300)
def test_runs_move_the_same_bytes_as_a_copy_block_by_block(case: Case) -> None:
    assert np.array_equal(copy_runs(case, plan(case)), copy_block_by_block(case))


@given(case=cases())
@settings(max_examples=300)
def test_coalescing_runs_moves_the_same_bytes_in_no_more_runs(case: Case) -> None:
    runs = plan(case)
    merged = coalesce(runs, case.max_run_bytes)
    assert np.array_equal(copy_runs(case, merged), copy_block_by_block(case))
    assert len(merged) <= len(runs)


@given(case=cases())
@settings(max_examples=200)
def test_no_two_planned_runs_of_a_field_could_be_one(case: Case) -> None:
    for field_id in case.field_ids:
        runs = plan(replace(case, field_ids=(field_id,), max_run_bytes=1000))
        starts = {(run.source_address, run.target_address) for run in runs}
        ends = {(run.source_address + run.length_bytes, run.target_address + run.length_bytes) for run in runs}
        assert not starts & ends


def test_neighbouring_blocks_become_one_run_per_field() -> None:
    runs = plan_block_runs(rank(), rank(20, arena_base=1 << 30), FIELD_IDS, [2, 3, 4], [7, 8, 9])
    assert len(runs) == len(FIELD_IDS)
    assert runs[0] == Run((1 << 20) + 2 * BLOCK_BYTES, (1 << 30) + 7 * BLOCK_BYTES, 3 * BLOCK_BYTES)


def test_the_order_of_the_block_lists_does_not_hinder_coalescing() -> None:
    runs = plan_block_runs(rank(), rank(), FIELD_IDS[:1], [4, 2, 3], [9, 7, 8])
    assert [run.length_bytes for run in runs] == [3 * BLOCK_BYTES]


def test_blocks_that_are_neighbours_on_one_side_only_stay_apart() -> None:
    assert len(plan_block_runs(rank(), rank(), FIELD_IDS[:1], [2, 3, 4], [3, 5, 7])) == 3
    assert len(plan_block_runs(rank(), rank(), FIELD_IDS[:1], [2, 4, 6], [3, 4, 5])) == 3


def test_a_source_block_may_be_sent_to_two_places() -> None:
    assert len(plan_block_runs(rank(), rank(), FIELD_IDS[:1], [2, 2], [3, 4])) == 2


def test_long_runs_are_split_at_the_maximum() -> None:
    num_blocks = 3 * MAX_RUN_BYTES // BLOCK_BYTES
    big = rank(num_blocks + 1)
    ids = list(range(1, num_blocks + 1))
    runs = plan_block_runs(big, big, FIELD_IDS[:1], ids, ids)
    assert [run.length_bytes for run in runs] == [MAX_RUN_BYTES] * 3
    assert [run.source_address for run in runs] == [big.arena_base + BLOCK_BYTES + i * MAX_RUN_BYTES for i in range(3)]


def test_nothing_to_copy_is_no_runs() -> None:
    assert not plan_block_runs(rank(), rank(), FIELD_IDS, [], [])
    assert not plan_block_runs(rank(), rank(), [], [1], [1])
    assert not coalesce([])


@pytest.mark.parametrize("bad", [0, -1, 10, 1 << 31, 1 << 63, 1 << 70])
def test_a_block_outside_the_group_is_refused_on_either_side(bad: int) -> None:
    with pytest.raises(PlanError, match="source_blocks"):
        plan_block_runs(rank(), rank(), FIELD_IDS, [1, bad], [1, 2])
    with pytest.raises(PlanError, match="target_blocks"):
        plan_block_runs(rank(), rank(), FIELD_IDS, [1, 2], [1, bad])


def test_numpy_ids_are_taken_as_they_are() -> None:
    ids = np.array([1, 2], dtype=np.int32)
    assert plan_block_runs(rank(), rank(), FIELD_IDS, ids, ids) == plan_block_runs(
        rank(), rank(), FIELD_IDS, [1, 2], [1, 2]
    )


def test_a_target_block_named_twice_is_refused() -> None:
    with pytest.raises(PlanError, match="target_blocks names a block twice"):
        plan_block_runs(rank(), rank(), FIELD_IDS, [1, 2], [3, 3])


def test_lists_of_two_lengths_are_refused() -> None:
    with pytest.raises(PlanError, match="1 source_blocks for 2 target_blocks"):
        plan_block_runs(rank(), rank(), FIELD_IDS, [1], [1, 2])


def test_unknown_and_repeated_fields_are_refused() -> None:
    with pytest.raises(PlanError, match=r'"layers\.9\.k" is unknown to the source'):
        plan_block_runs(rank(), rank(), ["layers.9.k"], [1], [1])
    fewer = replace(rank(), fields=rank().fields[:1])
    with pytest.raises(PlanError, match=r'"layers\.1\.v" is unknown to the target'):
        plan_block_runs(rank(), fewer, ["layers.1.v"], [1], [1])
    with pytest.raises(PlanError, match="names a field twice"):
        plan_block_runs(rank(), rank(), ["layers.0.k", "layers.0.k"], [1], [1])


def test_blocks_of_two_sizes_are_refused() -> None:
    other = replace(rank(), fields=(replace(rank().fields[0], block_bytes=4), *rank().fields[1:]))
    with pytest.raises(PlanError, match=f"block_bytes source={BLOCK_BYTES}, target=4"):
        plan_block_runs(rank(), other, FIELD_IDS, [1], [1])


def test_the_group_is_needed_when_there_are_several() -> None:
    counts = (GroupBlockCount(group_id="full", num_blocks=10), GroupBlockCount(group_id="ssm", num_blocks=3))
    two = replace(rank(), block_counts=counts)
    with pytest.raises(PlanError, match="groups full, ssm"):
        plan_block_runs(two, two, FIELD_IDS, [1], [1])
    with pytest.raises(PlanError, match=r'outside \[1, 3\) of group "ssm"'):
        plan_block_runs(two, two, FIELD_IDS, [5], [1], group_id="ssm")
    assert len(plan_block_runs(two, two, FIELD_IDS, [5], [1], group_id="full")) == len(FIELD_IDS)
    with pytest.raises(PlanError, match='"swa" is unknown'):
        plan_block_runs(two, two, FIELD_IDS, [1], [1], group_id="swa")


def test_a_maximum_that_is_not_positive_is_refused() -> None:
    with pytest.raises(PlanError, match="max_run_bytes=0"):
        plan_block_runs(rank(), rank(), FIELD_IDS, [1], [1], max_run_bytes=0)

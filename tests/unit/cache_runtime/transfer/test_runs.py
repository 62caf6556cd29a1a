"""Runs as a table: a sequence like any other, and what is checked of one before it is posted."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_runtime.transfer.engine import MAX_ADDRESS, Region, Run
from cache_runtime.transfer.regions import RegionSet, rejection
from cache_runtime.transfer.runs import RunTable

EVERYTHING = RegionSet([Region(base_address=1, num_bytes=MAX_ADDRESS - 1)])
RUNS = (Run(10, 100, 3), Run(20, 200, 4), Run(30, 300, 5))


def test_a_table_is_a_sequence_of_its_runs() -> None:
    table = RunTable.of(RUNS)
    assert tuple(table) == RUNS
    assert (len(table), table[1], table[-1], tuple(table[1:])) == (3, RUNS[1], RUNS[2], RUNS[1:])
    assert table.num_bytes == 12
    assert RUNS[1] in table
    with pytest.raises(IndexError):
        table[3]


def test_a_table_is_taken_as_it_is_and_cannot_be_written_to() -> None:
    table = RunTable.of(RUNS)
    assert RunTable.of(table) is table
    with pytest.raises(ValueError, match="read-only"):
        table.rows[0, 0] = 1
    with pytest.raises(ValueError, match=r"shape \(3, 2\)"):
        RunTable(np.zeros((3, 2), dtype=np.int64))


def test_tables_are_joined_in_order() -> None:
    assert tuple(RunTable.joined([RunTable.of(RUNS[:1]), RunTable.of(()), RunTable.of(RUNS[1:])])) == RUNS
    assert not RunTable.joined([])


def test_a_number_that_is_no_address_is_rejected() -> None:
    for bad in (1 << 63, -(1 << 70)):
        assert rejection([Run(bad, 1, 1)], EVERYTHING, EVERYTHING) == "a run has an address or length above 2**63"


REGIONS = RegionSet(
    [Region(base_address=begin, num_bytes=num_bytes) for begin, num_bytes in ((10, 20), (30, 5), (50, 30))]
)
NUMBERS = st.integers(-2, 90)


@given(runs=st.lists(st.builds(Run, NUMBERS, NUMBERS, st.integers(-1, 12)), max_size=8))
def test_runs_are_rejected_exactly_when_a_rule_is_broken(runs: list[Run]) -> None:
    reason = rejection(runs, REGIONS, REGIONS)

    def lies_inside(address: int, length: int) -> bool:
        return any(region.base_address <= address and address + length <= region.end_address for region in REGIONS)

    malformed = [index for index, run in enumerate(runs) if min(run) <= 0]
    outside = [
        (side, index)
        for side in ("source", "target")
        for index, run in enumerate(runs)
        if not lies_inside(run[side == "target"], run.length_bytes)
    ]
    written_twice = {
        (i, j)
        for i, j in itertools.permutations(range(len(runs)), 2)
        if runs[i].target_address <= runs[j].target_address < runs[i].target_address + runs[i].length_bytes
    }
    if malformed:
        assert reason == f"run {malformed[0]} is malformed: {runs[malformed[0]]}"
    elif outside:
        side, index = outside[0]
        assert reason is not None
        assert reason.startswith(f"run {index}: {side} [")
    elif written_twice:
        assert reason in {f"runs {i} and {j} write the same target bytes" for i, j in written_twice}
    else:
        assert reason is None


@given(
    places=st.lists(st.integers(0, 1 << 20), min_size=2, max_size=60, unique=True),
    shift=st.integers(0, 30),
    extra=st.booleans(),
)
def test_scattered_targets_are_told_from_those_that_meet(places: list[int], shift: int, extra: bool) -> None:
    """However far targets lie apart: `extra` makes the lowest one reach into the next."""
    length = 1 << shift
    runs = [Run(1, 1 + (place << shift), length) for place in places]
    lowest = min(range(len(runs)), key=lambda index: runs[index].target_address)
    gap = sorted(places)[1] - min(places)
    if extra:
        runs[lowest] = runs[lowest]._replace(length_bytes=gap * length + 1)
    reason = rejection(runs, EVERYTHING, EVERYTHING)
    if extra:
        second = min((index for index in range(len(runs)) if index != lowest), key=lambda i: runs[i].target_address)
        assert reason == f"runs {lowest} and {second} write the same target bytes"
    else:
        assert reason is None

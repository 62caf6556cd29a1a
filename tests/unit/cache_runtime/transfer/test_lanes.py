"""Which ranks write to which: one way from each to its like, or all that have something for one another."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from unit.cache_runtime.transfer.manifests import logical, rank

from cache_runtime.transfer.lanes import LanePlanner
from cache_runtime.transfer.schema import LogicalManifest, RankPlacement


def ranks_of(size: int) -> tuple[RankPlacement, ...]:
    """Of three heads."""
    extent = max(1, 3 // size)
    fields = tuple(replace(item, block_bytes=item.block_bytes // 3 * extent) for item in rank().fields)
    return tuple(replace(rank(), tp_rank=index, tp_size=size, fields=fields) for index in range(size))


def pairs(num_sources: int, num_targets: int, *, cache: LogicalManifest | None = None) -> list[tuple[int, int]]:
    lanes = LanePlanner(cache or logical(), ranks_of(num_sources)).lanes_to(ranks_of(num_targets))
    return [(lane.source.tp_rank, lane.target.tp_rank) for lane in lanes]


@pytest.mark.parametrize("size", [1, 3, 6])
def test_ranks_of_equally_many_send_whole_blocks_to_their_likes(size: int) -> None:
    lanes = LanePlanner(logical(), ranks_of(size)).lanes_to(ranks_of(size))
    assert [(lane.source.tp_rank, lane.target.tp_rank) for lane in lanes] == [(index, index) for index in range(size)]
    assert all(lane.strips is None for lane in lanes)


def test_unlike_numbers_of_ranks_have_a_way_wherever_bytes_go() -> None:
    assert pairs(1, 3) == [(0, 0), (0, 1), (0, 2)]
    assert pairs(3, 1) == [(0, 0), (1, 0), (2, 0)]
    # Six ranks hold each of the three heads twice: one of the two writes.
    assert pairs(6, 3) == [(0, 0), (3, 1), (4, 2)]
    assert pairs(3, 6) == [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4), (2, 5)]


def test_what_every_rank_has_whole_comes_to_each_target_from_one_source() -> None:
    whole = replace(logical(), fields=tuple(replace(item, partition_axis=None) for item in logical().fields))
    assert pairs(3, 1, cache=whole) == [(0, 0)]
    assert pairs(2, 3, cache=whole) == [(0, 0), (0, 2), (1, 1)]


def test_the_strips_of_all_lanes_to_a_rank_cover_its_block_once() -> None:
    targets = ranks_of(1)
    covered = np.zeros(targets[0].fields[0].block_bytes, dtype=np.int64)
    for lane in LanePlanner(logical(), ranks_of(3)).lanes_to(targets):
        assert lane.strips is not None
        for _, begin, length in lane.strips["layers.0.k"].tolist():
            covered[begin : begin + length] += 1
    assert (covered == 1).all()

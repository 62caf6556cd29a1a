"""Groups whose blocks are spread over several owners: the id of a block says whose it is."""

from __future__ import annotations

import pytest

import scheduler_core as sc

from .builders import Runtime, full_group, scheduler_config, spec


def _runtime(num_lcm_blocks: int = 16) -> Runtime:
    group = full_group(cache_blocks_per_lcm_block=4, shard_count=2)
    return Runtime(sc.Scheduler(scheduler_config(num_lcm_blocks=num_lcm_blocks, cache_groups=[group])))


def _loads(table: list[int]) -> list[int]:
    return [sum((block_id - 1) % 2 == bucket for block_id in table) for bucket in (0, 1)]


@pytest.mark.behaviour("R3")
def test_a_table_is_balanced_over_its_owners_hits_and_reserve_included() -> None:
    runtime = _runtime()
    runtime.scheduler.submit([spec("a", 12, max_new_tokens=9)])
    runtime.step()
    assert runtime.scheduler.block_tables("a")[0].tolist() == [1, 2, 3, 4, 5, 6]
    runtime.run_until_idle()
    runtime.finish("a")
    runtime.scheduler.submit([spec("b", 9, max_new_tokens=4)])
    runtime.step()
    table = runtime.scheduler.block_tables("b")[0].tolist()
    assert runtime.admissions["b"] == 8
    assert table[:2] == [1, 2]
    assert _loads(table) == [2, 2]


@pytest.mark.behaviour("R2", "R5")
def test_balance_costs_no_parent_and_no_admission() -> None:
    runtime = _runtime(num_lcm_blocks=2)
    assert runtime.scheduler.max_request_tokens == 32
    runtime.scheduler.submit([spec("a", 10, max_new_tokens=2), spec("b", range(50, 62), max_new_tokens=8)])
    runtime.step()
    assert runtime.scheduler.block_tables("a")[0].tolist() == [1, 2, 3]
    assert runtime.scheduler.block_tables("b")[0].tolist() == [4, 5, 7, 6, 8]
    assert runtime.scheduler.capacity().empty_lcm_blocks == 0


@pytest.mark.behaviour("R2")
def test_tables_and_zero_lists_count_the_blocks_of_all_owners() -> None:
    runtime = _runtime(num_lcm_blocks=3)
    runtime.scheduler.submit([spec("a", 40, max_new_tokens=8)])
    plan = runtime.step()
    ids = list(range(1, 13))
    assert sorted(plan.block_tables[0][0].tolist()) == ids, "three parents of four, two for each owner"
    assert sorted(plan.zero_blocks[0].tolist()) == ids

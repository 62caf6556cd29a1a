"""What a plan carries: rows, tables, blocks to zero, inputs, admissions, and what reading it costs."""

from __future__ import annotations

import numpy as np
import pytest

import scheduler_core as sc

from .builders import Runtime, full_group, rows_of, scheduler_config, sliding_group, spec


def _runtime(role: sc.Role = sc.Role.FUSED, **changes: object) -> Runtime:
    return Runtime(sc.Scheduler(scheduler_config(role, **changes)))  # type: ignore[arg-type]


@pytest.mark.behaviour("I3")
def test_the_tables_of_a_group_are_one_rectangle_padded_behind_the_last_slot() -> None:
    runtime = _runtime(num_lcm_blocks=32, token_budget=100)
    runtime.scheduler.submit(
        [
            spec("nine blocks", 33, max_new_tokens=1),
            spec("three", range(100, 109), max_new_tokens=3),
            spec("seven blocks", range(200, 225), max_new_tokens=1),
            spec("one", [300], max_new_tokens=3),
        ]
    )
    runtime.step()
    plan = runtime.plan()
    assert plan.request_ids == ["three", "one"]
    assert plan.block_tables[0].tolist() == [[10, 11, 12], [20, -1, -1]]
    assert plan.block_tables[0].dtype == np.int32


@pytest.mark.behaviour("I3")
def test_holes_are_zero_and_stay_where_their_blocks_were() -> None:
    groups = [full_group(), sliding_group(window_tokens=4)]
    runtime = _runtime(num_lcm_blocks=32, token_budget=8, cache_groups=groups)
    runtime.scheduler.submit([spec("a", 16), spec("b", range(50, 54))])
    runtime.step()
    plan = runtime.plan()
    full, sliding = (table.tolist()[0] for table in plan.block_tables)
    assert 0 not in full
    assert sliding[0] == 0, "its tokens are out of the window of token 8"
    assert all(block_id > 0 for block_id in sliding[1:])


@pytest.mark.behaviour("I2")
def test_rows_are_prefills_then_decodes_each_in_the_order_they_came() -> None:
    runtime = _runtime(num_lcm_blocks=40)
    runtime.scheduler.submit([spec(name, [first]) for name, first in (("z", 1), ("a", 2))])
    runtime.step()
    runtime.scheduler.submit([spec(name, [first, first]) for name, first in (("y", 3), ("b", 4))])
    plan = runtime.plan()
    assert plan.request_ids == ["y", "b", "z", "a"]
    assert plan.num_prefill_rows == 2
    assert plan.prefill_lengths.tolist() == [2, 2, 0, 0]
    assert plan.input_lengths.tolist() == [2, 2, 1, 1]
    assert plan.begins.tolist() == [0, 0, 1, 1]
    assert plan.logits_wanted.tolist() == [1, 1, 1, 1]
    assert plan.replay_lengths.tolist() == [0, 0, 0, 0]
    assert sorted(plan.request_slots.tolist()) == [1, 2, 3, 4]


@pytest.mark.behaviour("I4", "T1")
def test_a_prompt_that_was_not_admitted_leaves_nothing_to_zero() -> None:
    runtime = _runtime(num_lcm_blocks=8)
    runtime.scheduler.submit([spec("running", 12, max_new_tokens=4)])
    runtime.step()
    runtime.scheduler.submit([spec("big", range(50, 70), max_new_tokens=4), spec("small", [90], max_new_tokens=9)])
    plan = runtime.plan()
    assert [admission.request_id for admission in plan.admissions] == ["small"]
    table = runtime.scheduler.block_tables("small")[0].tolist()
    assert len(table) == 3
    assert plan.zero_blocks[0].tolist() == table, "its reserve included, each block once"


@pytest.mark.behaviour("I5")
def test_the_rows_of_a_request_carry_its_tokens_one_after_another() -> None:
    runtime = _runtime(token_budget=5)
    prompt = list(range(70, 82))
    runtime.scheduler.submit([spec("a", prompt, max_new_tokens=4)])
    inputs, positions = [], []
    for _ in range(6):
        plan = runtime.step()
        inputs += plan.token_ids.tolist()
        positions += [begin + i for _, begin, length in rows_of(plan) for i in range(length)]
    assert inputs == [*prompt, 1012, 1013, 1014]
    assert positions == list(range(15))


@pytest.mark.behaviour("I7")
def test_nothing_to_do_is_an_empty_plan_and_a_place_in_the_batch_is_a_row() -> None:
    runtime = _runtime(max_batch_size=2)
    assert runtime.plan().is_empty
    runtime.scheduler.submit([spec(name, [ord(name)], max_new_tokens=2) for name in "abc"])
    assert runtime.step().request_ids == ["a", "b"]
    assert runtime.step().request_ids == ["a", "b"]
    assert runtime.plan().is_empty


@pytest.mark.behaviour("I8")
def test_an_admission_tells_where_its_prompt_was_found() -> None:
    runtime = _runtime()
    runtime.scheduler.submit([spec("a", 12, max_new_tokens=1)])
    (first,) = runtime.step().admissions
    assert (first.device_hit_tokens, first.host_hit_tokens, first.storage_hit_tokens) == (0, 0, 0)
    runtime.finish("a")
    runtime.scheduler.submit([spec("b", 12)])
    (second,) = runtime.step().admissions
    assert (second.request_id, second.device_hit_tokens) == ("b", 8)
    assert (second.host_hit_tokens, second.storage_hit_tokens) == (0, 0)
    assert runtime.step().admissions == [], "once in the life of a request"


@pytest.mark.behaviour("I9")
def test_reading_a_plan_again_gives_the_same_memory() -> None:
    runtime = _runtime()
    runtime.scheduler.submit([spec("a", 9)])
    plan = runtime.plan()
    for name in ("request_slots", "input_lengths", "begins", "prefill_lengths", "logits_wanted", "token_ids"):
        first, second = getattr(plan, name), getattr(plan, name)
        assert np.shares_memory(first, second), name
        assert not first.flags.owndata, name
    for lists in ("block_tables", "zero_blocks"):
        assert np.shares_memory(getattr(plan, lists)[0], getattr(plan, lists)[0]), lists

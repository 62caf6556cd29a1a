"""The fused role: chunked prefill, continuous batching, prefix reuse, ends."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import scheduler_core as sc

from .builders import Runtime, full_group, rows_of, scheduler_config, spec


def _runtime(**changes: object) -> Runtime:
    return Runtime(sc.Scheduler(scheduler_config(**changes)))  # type: ignore[arg-type]


@pytest.mark.behaviour("J5")
def test_an_incomplete_chunk_ends_the_line_and_a_complete_one_does_not() -> None:
    runtime = _runtime(num_lcm_blocks=4000, token_budget=6000)
    runtime.scheduler.submit([spec("a", 2000), spec("b", 1000), spec("c", 10000), spec("d", 10)])
    # The prompts share their beginnings, but nothing is published before the second plan.
    assert rows_of(runtime.step()) == [("a", 0, 2000), ("b", 0, 1000), ("c", 0, 3000)]
    assert rows_of(runtime.step()) == [("c", 3000, 5998), ("a", 2000, 1), ("b", 1000, 1)]
    assert runtime.step().request_ids == ["c", "d", "a", "b"]


@pytest.mark.behaviour("I2", "J4")
def test_decodes_run_beside_prefill_chunks_and_come_out_of_the_budget() -> None:
    runtime = _runtime(token_budget=8, num_lcm_blocks=32)
    runtime.scheduler.submit([spec("short", 3, max_new_tokens=8)])
    runtime.step()
    runtime.scheduler.submit([spec("long", range(100, 130))])
    plan = runtime.plan()
    assert rows_of(plan) == [("long", 0, 7), ("short", 3, 1)]
    assert plan.num_prefill_rows == 1
    assert plan.prefill_lengths.tolist() == [30, 0]
    assert plan.logits_wanted.tolist() == [0, 1]


@pytest.mark.behaviour("I2")
def test_rows_carry_their_inputs_and_their_absolute_tables() -> None:
    runtime = _runtime(token_budget=6)
    runtime.scheduler.submit([spec("a", [5, 6, 7, 8, 9], max_new_tokens=3)])
    first = runtime.step()
    assert first.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert first.block_tables[0].tolist() == [[1, 2]]
    assert first.zero_blocks[0].tolist() == [1, 2]
    second = runtime.step()
    assert second.token_ids.tolist() == [1005]
    assert second.begins.tolist() == [5]
    assert second.block_tables[0].tolist() == [[1, 2]]
    assert second.zero_blocks[0].tolist() == []


def test_rows_of_different_lengths_are_padded_with_minus_one() -> None:
    runtime = _runtime()
    runtime.scheduler.submit([spec("a", 9, max_new_tokens=3), spec("b", [50], max_new_tokens=1)])
    assert runtime.plan().block_tables[0].tolist() == [[1, 2, 3], [4, -1, -1]]


@pytest.mark.behaviour("E2", "H3")
def test_an_equal_prompt_hits_all_full_grains_before_its_last_token() -> None:
    runtime = _runtime(prefix_granularity=2, cache_groups=[full_group(block_granularity=2)])
    runtime.scheduler.submit([spec("a", 8)])
    runtime.run_until_idle()
    runtime.finish("a")
    runtime.scheduler.submit([spec("b", 8)])
    assert rows_of(runtime.step()) == [("b", 6, 2)]
    assert runtime.admissions["b"] == 6


def test_a_next_turn_hits_what_was_generated() -> None:
    runtime = _runtime(prefix_granularity=2, cache_groups=[full_group(block_granularity=2)])
    runtime.scheduler.submit([spec("a", 4, max_new_tokens=5)])
    runtime.run_until_idle()
    runtime.finish("a")
    generated = [1000 + position for position in range(4, 9)]
    runtime.scheduler.submit([spec("b", [0, 1, 2, 3, *generated, 7])])
    runtime.step()
    assert runtime.admissions["b"] == 8


@pytest.mark.behaviour("H8")
def test_an_aborted_request_publishes_nothing_new() -> None:
    runtime = _runtime()
    runtime.scheduler.submit([spec("a", 12)])
    runtime.step()
    runtime.scheduler.advance([sc.AbortEvent("a")])
    runtime.scheduler.submit([spec("b", 12)])
    runtime.step()
    assert runtime.admissions["b"] == 0


@pytest.mark.behaviour("D3")
def test_extra_keys_keep_equal_prompts_apart() -> None:
    runtime = _runtime()
    runtime.scheduler.submit([spec("a", 12)])
    runtime.run_until_idle()
    runtime.finish("a")
    salted = [
        sc.RequestSpec(request_id=name, tokens=list(range(12)), max_new_tokens=1, extra_keys=keys)
        for name, keys in (("salted", [b"salt"]), ("plain", []))
    ]
    runtime.scheduler.submit(salted)
    runtime.step()
    assert runtime.admissions == {"a": 0, "salted": 0, "plain": 8}


def test_with_the_prefix_cache_off_nothing_is_matched_or_kept() -> None:
    runtime = _runtime(enable_prefix_cache=False)
    for name in ("a", "b"):
        runtime.scheduler.submit([spec(name, 12)])
        runtime.run_until_idle()
        runtime.finish(name)
    assert runtime.admissions == {"a": 0, "b": 0}
    assert runtime.scheduler.capacity().empty_lcm_blocks == 16


@pytest.mark.behaviour("J15")
def test_two_equal_prompts_in_one_round_end_up_on_the_same_blocks() -> None:
    runtime = _runtime()
    runtime.scheduler.submit([spec("a", 8), spec("b", 8)])
    runtime.step()
    assert runtime.scheduler.block_tables("b")[0].tolist() == [4, 5, 6]
    runtime.step()
    assert runtime.scheduler.block_tables("b")[0].tolist() == [1, 2, 6]


def test_a_convergent_hit_over_two_groups_is_a_common_boundary() -> None:
    groups = [
        full_group("coarse", block_granularity=4),
        full_group("fine", block_granularity=2, cache_blocks_per_lcm_block=4),
    ]
    runtime = _runtime(prefix_granularity=4, cache_groups=groups, num_lcm_blocks=24)
    runtime.scheduler.submit([spec("a", 13)])
    runtime.run_until_idle()
    runtime.finish("a")
    runtime.scheduler.submit([spec("b", 13)])
    plan = runtime.step()
    assert runtime.admissions["b"] == 12
    assert [table.shape[1] for table in plan.block_tables] == [5, 9]


def test_the_oldest_prefixes_are_evicted_and_their_deepest_blocks_first() -> None:
    runtime = _runtime(num_lcm_blocks=8)
    for name, first in (("old", 0), ("new", 100)):
        runtime.scheduler.submit([spec(name, range(first, first + 13), max_new_tokens=1)])
        runtime.run_until_idle()
        runtime.finish(name)
    assert runtime.scheduler.capacity().cached_lcm_blocks == 6
    runtime.scheduler.submit([spec("fresh", range(200, 213), max_new_tokens=1)])  # four blocks, two are empty
    runtime.run_until_idle()
    runtime.finish("fresh")
    runtime.scheduler.submit([spec("old2", 13, max_new_tokens=1)])
    runtime.step()
    assert runtime.admissions["old2"] == 4


def test_a_blocked_prompt_does_not_stop_a_younger_one_that_fits() -> None:
    runtime = _runtime(num_lcm_blocks=8)
    runtime.scheduler.submit([spec("running", 12, max_new_tokens=4)])
    runtime.step()
    runtime.scheduler.submit([spec("big", range(50, 70), max_new_tokens=4), spec("small", [90], max_new_tokens=1)])
    assert "small" in runtime.step().request_ids
    assert "request big waiting" in runtime.scheduler.describe()
    assert runtime.finish("running", "small").request_ids == ["big"]


def test_a_blocked_prompt_is_passed_by_a_bounded_number_of_younger_ones() -> None:
    runtime = _runtime(num_lcm_blocks=6)
    runtime.scheduler.submit([spec("holder", 4, max_new_tokens=4)])
    runtime.step()
    runtime.scheduler.submit([spec("big", range(50, 70), max_new_tokens=4)])
    num_passed = 0
    for number in range(200):
        name = f"small{number}"
        runtime.scheduler.submit([spec(name, [200 + number], max_new_tokens=1)])
        if name not in runtime.step().request_ids:
            break
        num_passed += 1
        runtime.finish(name)
    assert num_passed == 64


def test_a_prompt_whose_hits_are_scattered_over_many_parents_starts_without_them() -> None:
    groups = [full_group("single"), full_group("packed", block_granularity=2, cache_blocks_per_lcm_block=8)]
    runtime = _runtime(num_lcm_blocks=10, cache_groups=groups)
    turns = list(range(31))
    for name, tokens, finished in (
        ("other", range(50, 58), []),
        ("turn1", turns[:12], ["turn1"]),
        ("third", range(70, 78), ["other", "third"]),
        ("turn2", turns[:16], ["turn2"]),
    ):
        runtime.scheduler.submit([spec(name, tokens, max_new_tokens=1)])
        runtime.step()
        runtime.finish(*finished)
    assert runtime.admissions["turn2"] == 8
    # The prompt is as long as the pool allows, and its hits lie in more parents than that leaves for them.
    assert runtime.scheduler.max_request_tokens == 32
    runtime.scheduler.submit([spec("turn3", turns, max_new_tokens=1)])
    assert rows_of(runtime.step()) == [("turn3", 0, 31)]
    assert runtime.admissions["turn3"] == 0


def test_a_finished_request_leaves_the_plan_after_it() -> None:
    runtime = _runtime()
    runtime.scheduler.submit([spec("a", 3, max_new_tokens=9)])
    runtime.step()
    runtime.scheduler.advance([sc.FinishEvent("a")])
    plan = runtime.plan()
    assert plan.finished == ["a"]
    assert plan.num_rows == 0
    assert not plan.is_empty
    assert runtime.plan().is_empty


def test_a_request_with_all_its_tokens_waits_for_its_finish() -> None:
    runtime = _runtime()
    runtime.scheduler.submit([spec("a", 3, max_new_tokens=2)])
    runtime.step()
    runtime.step()
    assert runtime.plan().is_empty
    assert "decoding tokens=3+2" in runtime.scheduler.describe()


def test_no_row_is_planned_while_its_result_is_owed() -> None:
    runtime = _runtime()
    runtime.scheduler.submit([spec("a", 3)])
    plan = runtime.plan()
    assert runtime.plan().is_empty
    runtime.land(plan)
    assert runtime.plan().num_rows == 1


@pytest.mark.behaviour("B5", "J11", "T2")
def test_a_batch_with_one_bad_event_applies_none() -> None:
    runtime = _runtime()
    runtime.scheduler.submit([spec("a", 3), spec("b", [7, 8])])
    runtime.plan()
    before = runtime.scheduler.describe()
    with pytest.raises(sc.ContractError, match=r"result.*\"b\".*awaiting_result.*1"):
        runtime.scheduler.advance([sc.ResultEvent("a", [5]), sc.ResultEvent("b", [])])
    with pytest.raises(sc.ContractError, match="no result is owed"):
        runtime.scheduler.advance([sc.ResultEvent("a", [5]), sc.ResultEvent("a", [5])])
    assert runtime.scheduler.describe() == before


def test_what_is_no_event_is_refused() -> None:
    with pytest.raises(TypeError):
        _runtime().scheduler.advance(["finish"])  # type: ignore[list-item]


@pytest.mark.behaviour("J11", "T3")
def test_late_and_unknown_events_change_nothing() -> None:
    runtime = _runtime()
    runtime.scheduler.submit([spec("a", 3)])
    runtime.plan()
    runtime.scheduler.advance([sc.AbortEvent("a")])
    before = runtime.scheduler.describe()
    runtime.scheduler.advance(
        [sc.ResultEvent("a", [3]), sc.FinishEvent("a"), sc.AbortEvent("a"), sc.ResultEvent("ghost", [1, 2])]
    )
    assert runtime.scheduler.describe() == before


def test_the_cache_clears_only_when_no_request_lives() -> None:
    runtime = _runtime()
    runtime.scheduler.submit([spec("a", 9)])
    runtime.run_until_idle()
    assert not runtime.scheduler.can_clear()
    assert not runtime.scheduler.clear_cache()
    runtime.finish("a")
    assert runtime.scheduler.capacity().cached_lcm_blocks > 0
    assert runtime.scheduler.can_clear()
    assert runtime.scheduler.clear_cache()
    assert runtime.scheduler.capacity().empty_lcm_blocks == 16


@pytest.mark.behaviour("I9")
def test_plan_arrays_are_read_only_views_that_outlive_the_scheduler() -> None:
    runtime = _runtime()
    runtime.scheduler.submit([spec("a", [5, 6, 7])])
    token_ids = runtime.plan().token_ids
    with pytest.raises(ValueError, match="read-only"):
        token_ids[0] = 1
    del runtime
    gc.collect()
    np.testing.assert_array_equal(token_ids, [5, 6, 7])


@pytest.mark.behaviour("B4")
def test_request_slots_are_unique_and_reused() -> None:
    runtime = _runtime(max_batch_size=2)
    runtime.scheduler.submit([spec(name, [ord(name)]) for name in "abc"])
    assert runtime.step().request_slots.tolist() == [1, 2]
    runtime.scheduler.advance([sc.AbortEvent("a")])
    plan = runtime.step()
    assert dict(zip(plan.request_ids, plan.request_slots.tolist(), strict=True)) == {"b": 2, "c": 1}


def test_a_large_limit_of_rows_costs_nothing() -> None:
    runtime = _runtime(max_batch_size=2**31 - 1, token_budget=2**31 - 1)
    runtime.scheduler.submit([spec("a", 3)])
    assert runtime.step().request_slots.tolist() == [1]


def test_objects_that_were_never_initialised_are_refused() -> None:
    runtime = _runtime()
    with pytest.raises(TypeError, match="initialised"):
        runtime.scheduler.advance([sc.AbortEvent.__new__(sc.AbortEvent)])
    with pytest.raises(TypeError, match="initialised"):
        _ = sc.Plan.__new__(sc.Plan).token_ids


def test_the_tables_of_an_unknown_request_cannot_be_asked() -> None:
    runtime = _runtime()
    with pytest.raises(sc.ContractError, match="ghost"):
        runtime.scheduler.block_tables("ghost")
    runtime.scheduler.submit([spec("a", 3)])
    assert [table.tolist() for table in runtime.scheduler.block_tables("a")] == [[]]

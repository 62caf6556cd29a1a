"""Decode rows that feed several tokens: what they cover, cost, bring and publish."""

from __future__ import annotations

import pytest

import scheduler_core as sc

from .builders import Runtime, full_group, rows_of, scheduler_config, sliding_group, spec, state_group


def one_block_per_token(**changes: int) -> Runtime:
    """Table slots are tokens, so that every number shows."""
    group = full_group(block_granularity=1)
    config = scheduler_config(
        prefix_granularity=1, num_lcm_blocks=300, token_budget=128, cache_groups=[group], verify_width=4, **changes
    )
    return Runtime(sc.Scheduler(config))


def lines_of(scheduler: sc.Scheduler, request_id: str) -> tuple[str, str]:
    """What a dump says of a request and of its first table."""
    lines = scheduler.describe().splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith(f"request {request_id} "))
    return lines[first], lines[first + 1]


def covered_tokens(scheduler: sc.Scheduler, request_id: str, block_granularity: int = 1) -> int:
    num_slots = len(scheduler.block_tables(request_id)[0])
    room = int(lines_of(scheduler, request_id)[1].rpartition("room ")[2])
    return num_slots * block_granularity - room


def computed_tokens(scheduler: sc.Scheduler, request_id: str) -> int:
    words = lines_of(scheduler, request_id)[0].split()
    return int(next(word for word in words if word.startswith("computed=")).partition("=")[2])


def num_entries(scheduler: sc.Scheduler) -> int:
    return int(scheduler.describe().partition("entries=")[2].split()[0])


@pytest.mark.behaviour("S2")
def test_a_row_is_covered_up_to_where_it_ends() -> None:
    runtime = one_block_per_token()
    runtime.scheduler.submit([spec("a", 100, max_new_tokens=None)])
    runtime.step()
    runtime.land(runtime.plan(), num_tokens=2)  # 103 tokens
    plan = runtime.plan()
    assert rows_of(plan) == [("a", 102, 4)]
    assert covered_tokens(runtime.scheduler, "a") == 106
    runtime.land(plan, num_tokens=2)
    runtime.plan()
    assert covered_tokens(runtime.scheduler, "a") == 108


@pytest.mark.behaviour("S2")
def test_a_row_planned_ahead_is_covered_wherever_the_results_out_move_it() -> None:
    runtime = one_block_per_token(overlap_depth=1)
    runtime.scheduler.submit([spec("a", 100, max_new_tokens=None)])
    last_chunk = runtime.plan()
    first = runtime.plan()
    assert covered_tokens(runtime.scheduler, "a") == 104
    runtime.land(last_chunk)
    second = runtime.plan()
    runtime.land(first, num_tokens=2)  # 103 tokens, one result out
    third = runtime.plan()
    assert covered_tokens(runtime.scheduler, "a") == 110
    assert [plan.begins.tolist() for plan in (first, second, third)] == [[100], [101], [103]]
    assert [plan.num_results_out.tolist() for plan in (last_chunk, first, second, third)] == [[0], [1], [1], [1]]
    assert third.token_ids.tolist() == [-1] * 4


@pytest.mark.behaviour("S3")
def test_grains_that_several_tokens_fill_are_published_at_the_next_admission() -> None:
    runtime = Runtime(sc.Scheduler(scheduler_config(verify_width=4)))
    runtime.scheduler.submit([spec("a", 9, max_new_tokens=20)])
    runtime.step()  # 10 tokens
    plan = runtime.plan()
    assert num_entries(runtime.scheduler) == 2
    runtime.land(plan, num_tokens=3)  # 13 tokens
    assert num_entries(runtime.scheduler) == 2
    runtime.plan()
    assert num_entries(runtime.scheduler) == 3


@pytest.mark.behaviour("H7")
def test_all_tokens_but_the_last_are_computed_whatever_the_width() -> None:
    runtime = one_block_per_token()
    runtime.scheduler.submit([spec("a", 100, max_new_tokens=None)])
    runtime.step()
    runtime.land(runtime.plan(), num_tokens=2)
    assert "tokens=100+3" in lines_of(runtime.scheduler, "a")[0]
    assert computed_tokens(runtime.scheduler, "a") == 102


@pytest.mark.behaviour("S1")
def test_a_row_feeds_no_more_than_may_still_be_generated() -> None:
    runtime = Runtime(sc.Scheduler(scheduler_config(verify_width=4)))
    runtime.scheduler.submit([spec("a", 4, max_new_tokens=7)])
    runtime.step()
    widths = []
    while (plan := runtime.plan()).num_rows:
        widths += plan.input_lengths.tolist()
        assert plan.token_ids.tolist()[1:] == [-1] * (plan.num_rows and int(plan.input_lengths[0]) - 1)
        runtime.land(plan, num_tokens=2)
    assert widths == [4, 4, 2]


@pytest.mark.behaviour("J11")
@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([], "tokens must hold 1 to 4, got 0"),
        ([1, 2, 3, 4, 5], "tokens must hold 1 to 4, got 5"),
        ([1, -2], "tokens[1] must not be negative, got -2"),
    ],
)
def test_a_result_that_its_row_cannot_bring_changes_nothing(tokens: list[int], words: str) -> None:
    runtime = Runtime(sc.Scheduler(scheduler_config(verify_width=4)))
    runtime.scheduler.submit([spec("a", 4, max_new_tokens=9)])
    runtime.step()
    runtime.plan()
    before = runtime.scheduler.describe()
    with pytest.raises(sc.ContractError) as refusal:
        runtime.scheduler.advance([sc.ResultEvent("a", tokens)])
    for word in ("result", '"a"', "decoding", words):
        assert word in str(refusal.value)
    assert runtime.scheduler.describe() == before


@pytest.mark.behaviour("J4")
def test_a_decode_row_costs_the_verify_width_however_little_it_feeds() -> None:
    runtime = Runtime(sc.Scheduler(scheduler_config(verify_width=4, token_budget=10)))
    runtime.scheduler.submit([spec("a", 3, max_new_tokens=2), spec("b", range(50, 53), max_new_tokens=9)])
    runtime.step()
    runtime.scheduler.submit([spec("c", range(70, 90), max_new_tokens=1)])
    assert rows_of(runtime.plan()) == [("c", 0, 2), ("a", 3, 1), ("b", 3, 4)]


@pytest.mark.behaviour("J4")
def test_decodes_are_free_on_the_decode_role() -> None:
    config = scheduler_config(sc.Role.DECODE, verify_width=4, token_budget=4)
    runtime = Runtime(sc.Scheduler(config))
    runtime.scheduler.submit([spec("a", 3, max_new_tokens=9), spec("b", range(50, 53), max_new_tokens=9)])
    runtime.scheduler.advance([sc.ReadyEvent("a"), sc.ReadyEvent("b")])
    runtime.plan()
    runtime.scheduler.advance([sc.DoneEvent("a", 7), sc.DoneEvent("b", 7)])
    assert rows_of(runtime.plan()) == [("a", 3, 4), ("b", 3, 4)]


def decoding_in_blocks_of_sixteen() -> Runtime:
    group = full_group(block_granularity=16)
    runtime = Runtime(sc.Scheduler(scheduler_config(prefix_granularity=16, cache_groups=[group])))
    runtime.scheduler.submit([spec("a", 8, max_new_tokens=None)])
    runtime.step()
    runtime.step()
    return runtime


@pytest.mark.behaviour("S4")
def test_a_reservation_replaces_the_growth_of_the_next_step_and_the_last_one_counts() -> None:
    runtime = decoding_in_blocks_of_sixteen()
    runtime.scheduler.advance([sc.ReserveEvent("a", 16)])
    runtime.plan()
    assert len(runtime.scheduler.block_tables("a")[0]) == 2
    runtime = decoding_in_blocks_of_sixteen()
    runtime.scheduler.advance([sc.ReserveEvent("a", 16), sc.ReserveEvent("a", 1)])
    runtime.plan()
    assert len(runtime.scheduler.block_tables("a")[0]) == 1


@pytest.mark.behaviour("S4")
def test_a_reservation_is_used_once_and_concerns_one_request() -> None:
    group = full_group(block_granularity=4)
    runtime = Runtime(sc.Scheduler(scheduler_config(num_lcm_blocks=40, cache_groups=[group])))
    runtime.scheduler.submit([spec("a", 4, max_new_tokens=None), spec("b", range(50, 54), max_new_tokens=None)])
    runtime.step()
    runtime.step()
    runtime.scheduler.advance([sc.ReserveEvent("a", 12)])
    num_slots = []
    for _ in range(16):
        runtime.step()
        num_slots.append([len(runtime.scheduler.block_tables(name)[0]) for name in ("a", "b")])
    assert num_slots[:3] == [[5, 2], [5, 2], [5, 2]]
    assert num_slots[-1] == [6, 6]


@pytest.mark.behaviour("J13")
def test_a_step_within_its_reserve_takes_nothing() -> None:
    runtime = decoding_in_blocks_of_sixteen()
    runtime.scheduler.advance([sc.ReserveEvent("a", 40)])
    runtime.step()
    gauges = runtime.scheduler.capacity()
    for _ in range(40):
        plan = runtime.step()
        assert [len(zeroed) for zeroed in plan.zero_blocks] == [0]
        num_empty = runtime.scheduler.capacity().empty_lcm_blocks
        assert num_empty == gauges.empty_lcm_blocks
    assert sum(len(zeroed) for _ in range(16) for zeroed in runtime.step().zero_blocks) == 1


@pytest.mark.behaviour("S4")
def test_a_reservation_beyond_the_longest_request_takes_what_that_one_would() -> None:
    runtime = decoding_in_blocks_of_sixteen()
    runtime.scheduler.advance([sc.ReserveEvent("a", 2**31 - 1)])
    runtime.plan()
    assert len(runtime.scheduler.block_tables("a")[0]) == 16


@pytest.mark.behaviour("S4")
def test_only_decoding_requests_reserve() -> None:
    runtime = Runtime(sc.Scheduler(scheduler_config()))
    runtime.scheduler.submit([spec("a", 4)])
    runtime.plan()
    with pytest.raises(sc.ContractError, match="only decoding requests reserve"):
        runtime.scheduler.advance([sc.ReserveEvent("a", 1)])
    runtime.scheduler.advance([sc.ResultEvent("a", [5])])
    runtime.plan()
    with pytest.raises(sc.ContractError, match="num_tokens must be at least 1, got 0"):
        runtime.scheduler.advance([sc.ReserveEvent("a", 0)])
    runtime.scheduler.advance([sc.AbortEvent("a"), sc.ReserveEvent("a", 1), sc.ReserveEvent("gone", 1)])


@pytest.mark.behaviour("S5")
def test_verification_takes_no_state_blocks() -> None:
    for verify_width in (1, 2, 4):
        config = scheduler_config(cache_groups=[full_group(), state_group()], verify_width=verify_width)
        runtime = Runtime(sc.Scheduler(config))
        runtime.scheduler.submit([spec("a", 4, max_new_tokens=20)])
        runtime.step()
        while (plan := runtime.plan()).num_rows:
            assert "promised=2" in runtime.scheduler.describe()
            assert sum(block_id > 0 for block_id in runtime.scheduler.block_tables("a")[1].tolist()) <= 2
            runtime.land(plan, num_tokens=verify_width)


@pytest.mark.behaviour("K12")
@pytest.mark.parametrize("role", [sc.Role.PREFILL, sc.Role.FUSED])
def test_the_completing_chunk_holds_the_verify_width_behind_the_prompt(role: sc.Role) -> None:
    config = scheduler_config(
        role, token_budget=8, cache_groups=[sliding_group(window_tokens=4)], verify_width=5, num_lcm_blocks=20
    )
    runtime = Runtime(sc.Scheduler(config))
    runtime.scheduler.submit([spec("a", 12, max_new_tokens=9)])
    runtime.step()
    assert len(runtime.scheduler.block_tables("a")[0]) == 2
    runtime.plan()
    assert len(runtime.scheduler.block_tables("a")[0]) == 5


def test_an_undeclared_completion_takes_blocks_as_it_grows_and_stops_at_the_bound() -> None:
    runtime = Runtime(sc.Scheduler(scheduler_config(num_lcm_blocks=4)))
    runtime.scheduler.submit([spec("a", 6, max_new_tokens=None)])
    runtime.step()
    assert len(runtime.scheduler.block_tables("a")[0]) == 2
    runtime.run_until_idle()
    assert "tokens=6+10" in lines_of(runtime.scheduler, "a")[0]
    assert len(runtime.scheduler.block_tables("a")[0]) == 4
    assert runtime.finish("a").finished == ["a"]


def test_an_undeclared_completion_gives_way_while_there_is_no_block_for_its_next_step() -> None:
    runtime = Runtime(sc.Scheduler(scheduler_config(num_lcm_blocks=4)))
    runtime.scheduler.submit([spec("a", 4, max_new_tokens=None), spec("b", range(50, 54), max_new_tokens=3)])
    runtime.run_until_idle()
    assert "retracted tokens=9+0" in lines_of(runtime.scheduler, "a")[0]
    assert runtime.plan().is_empty
    assert rows_of(runtime.finish("b")) == [("a", 8, 1)]


def test_an_undeclared_completion_is_held_against_the_bound_with_its_first_step() -> None:
    scheduler = sc.Scheduler(scheduler_config(num_lcm_blocks=4, verify_width=3))
    scheduler.submit([spec("fits", 13, max_new_tokens=None)])
    with pytest.raises(sc.SubmitError, match="max_new_tokens undeclared needs room for 17 tokens, the limit is 16"):
        scheduler.submit([spec("long", 14, max_new_tokens=None)])

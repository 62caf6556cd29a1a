"""What was retracted comes back, or ends; and what the runtime itself takes back."""

from __future__ import annotations

import pytest

import scheduler_core as sc

from .builders import full_group, rows_of, sliding_group, spec, state_group
from .full_pools import line_of, runtime_of, start, two_that_fill_the_pool

# How it comes back.


@pytest.mark.behaviour("M11")
@pytest.mark.behaviour("H8")
def test_what_was_computed_stays_cached_until_somebody_needs_the_blocks() -> None:
    runtime = two_that_fill_the_pool()
    runtime.step()
    plan = runtime.finish("b")
    assert runtime.admissions["a"] == 16  # five grains were published, and b needed one block
    assert rows_of(plan) == [("a", 16, 5)]


@pytest.mark.behaviour("M11")
def test_the_newest_state_of_an_incomplete_prefill_is_published() -> None:
    groups = [full_group(), state_group()]
    runtime = runtime_of(sc.Role.DECODE, num_lcm_blocks=21, token_budget=8, cache_groups=groups)
    start(runtime, spec("x", 8, max_new_tokens=None), spec("s", [1], max_new_tokens=11))
    for _ in range(4):
        runtime.step()
    runtime.scheduler.submit([spec("l", range(50, 77), max_new_tokens=None, local_prefill=True)])
    assert rows_of(runtime.step()) == [("l", 0, 8)]
    assert runtime.step().retracted == ["l"]
    runtime.scheduler.advance([sc.AbortEvent("x"), sc.AbortEvent("s")])
    assert rows_of(runtime.step()) == [("l", 8, 8)]
    assert runtime.admissions["l"] == 8


@pytest.mark.behaviour("C11")
def test_without_a_prefix_cache_everything_is_computed_again() -> None:
    runtime = runtime_of(num_lcm_blocks=6, enable_prefix_cache=False)
    runtime.scheduler.submit([spec("a", 8, max_new_tokens=None)])
    runtime.step()
    runtime.scheduler.submit([spec("n", range(50, 66), max_new_tokens=1)])
    assert runtime.step().retracted == ["a"]
    assert rows_of(runtime.finish("n")) == [("a", 0, 9)]
    assert runtime.admissions["a"] == 0


@pytest.mark.behaviour("M13")
def test_a_recovery_is_a_prefill_of_everything_and_gives_the_next_token() -> None:
    runtime = two_that_fill_the_pool()
    runtime.step()
    plan = runtime.finish("b")
    assert plan.prefill_lengths.tolist() == [21]
    assert plan.logits_wanted.tolist() == [1]
    assert plan.token_ids.tolist() == [116, 1017, 1018, 1019, 1020]
    runtime.land(plan)
    assert line_of(runtime, "a").startswith("request a prefill_done tokens=21+1 retractions=1")


@pytest.mark.behaviour("M16")
def test_a_recovery_is_cut_like_any_prompt_and_only_its_end_brings_a_token() -> None:
    runtime = runtime_of(token_budget=4, enable_prefix_cache=False)
    runtime.scheduler.submit([spec("a", 5, max_new_tokens=None)])
    for _ in range(5):
        runtime.step()
    runtime.scheduler.advance([sc.RetractEvent("a")])
    plans = [runtime.step() for _ in range(3)]
    assert [rows_of(plan) for plan in plans] == [[("a", 0, 4)], [("a", 4, 4)], [("a", 8, 1)]]
    assert [plan.prefill_lengths.tolist() for plan in plans] == [[9], [9], [9]]
    assert [plan.logits_wanted.tolist() for plan in plans] == [[0], [0], [1]]


@pytest.mark.behaviour("M14")
@pytest.mark.behaviour("M13")
@pytest.mark.behaviour("J2")
def test_readmissions_come_one_at_a_time_with_output_first_then_in_the_order_of_their_retraction() -> None:
    runtime = runtime_of(sc.Role.DECODE, num_lcm_blocks=32, token_budget=4)
    local = spec("local", range(50, 59), max_new_tokens=None, local_prefill=True)
    start(runtime, spec("a", [1, 2], max_new_tokens=None), spec("b", [3, 4], max_new_tokens=None))
    runtime.scheduler.submit([local])
    assert rows_of(runtime.step()) == [("local", 0, 4)]
    runtime.scheduler.advance([sc.RetractEvent("local"), sc.RetractEvent("b"), sc.RetractEvent("a")])
    runtime.scheduler.submit([spec("new", [5], max_new_tokens=1)])
    runtime.scheduler.advance([sc.ReadyEvent("new")])
    order: list[str] = []
    for _ in range(12):
        plan = runtime.step()
        if plan.num_prefill_rows:
            assert plan.num_rows == 1  # alone in its batch
            assert plan.remote_prefills == []
            order += plan.request_ids
        order += [grant.request_id for grant in plan.remote_prefills]
    assert order == ["b", "a", "local", "new", "local", "local"]


@pytest.mark.behaviour("M13")
def test_who_had_output_still_has_it_after_a_retraction_in_the_middle_of_its_recovery() -> None:
    runtime = runtime_of(sc.Role.DECODE, num_lcm_blocks=32, token_budget=4, enable_prefix_cache=False)
    start(runtime, spec("a", 6, max_new_tokens=None))
    runtime.scheduler.submit([spec("l", range(50, 59), max_new_tokens=None, local_prefill=True)])
    assert rows_of(runtime.step()) == [("l", 0, 4)]
    runtime.scheduler.advance([sc.RetractEvent("l"), sc.RetractEvent("a")])
    assert rows_of(runtime.step()) == [("a", 0, 4)]
    runtime.scheduler.advance([sc.RetractEvent("a")])  # after l, but with output
    while not (plan := runtime.step()).num_rows:
        pass
    assert rows_of(plan) == [("a", 0, 4)]


@pytest.mark.behaviour("L16")
def test_a_remote_request_recovers_here_alone_and_without_its_peer() -> None:
    runtime = two_that_fill_the_pool(sc.Role.DECODE)
    runtime.step()
    plan = runtime.finish("b")
    assert plan.remote_prefills == []
    assert rows_of(plan) == [("a", 16, 5)]
    runtime.land(plan)
    runtime.scheduler.advance([sc.DoneEvent("a", 5), sc.FailedEvent("a")])  # late words of the peer
    assert rows_of(runtime.step()) == [("a", 21, 1)]


@pytest.mark.behaviour("M14")
@pytest.mark.behaviour("J3")
def test_on_the_fused_role_a_retracted_request_stands_in_the_place_of_its_submission() -> None:
    runtime = runtime_of(num_lcm_blocks=6)
    runtime.scheduler.submit([spec("a", 8, max_new_tokens=None)])
    runtime.step()
    runtime.scheduler.submit([spec("n", range(50, 66), max_new_tokens=1)])
    assert runtime.step().retracted == ["a"]
    runtime.scheduler.submit([spec("m", [99], max_new_tokens=1)])
    runtime.scheduler.advance([sc.FinishEvent("n")])
    assert [name for name, _, _ in rows_of(runtime.step())] == ["a", "m"]


@pytest.mark.behaviour("J14")
@pytest.mark.parametrize("event", [sc.FinishEvent, sc.AbortEvent])
def test_a_retracted_request_ends_without_a_trace(event: type[sc.FinishEvent] | type[sc.AbortEvent]) -> None:
    for role in (sc.Role.FUSED, sc.Role.DECODE):
        runtime = two_that_fill_the_pool(role)
        runtime.step()
        runtime.scheduler.advance([event("a"), sc.FinishEvent("b")])
        assert runtime.plan().finished == ["b", "a"]
        assert runtime.scheduler.clear_cache()
        assert runtime.scheduler.capacity().empty_lcm_blocks == 10


@pytest.mark.behaviour("K16")
def test_after_a_retraction_or_an_abort_an_exact_fit_fits_again() -> None:
    runtime = runtime_of(num_lcm_blocks=6)
    exact = spec("n", range(50, 73), max_new_tokens=1)
    runtime.scheduler.submit([spec("a", 8, max_new_tokens=None)])
    runtime.step()
    runtime.scheduler.submit([exact])
    assert runtime.step().retracted == ["a"]
    runtime.scheduler.advance([sc.AbortEvent("n"), sc.AbortEvent("a")])
    runtime.plan()
    runtime.scheduler.submit([exact])
    assert rows_of(runtime.step()) == [("n", 0, 23)]


@pytest.mark.behaviour("M8")
@pytest.mark.behaviour("M4")
def test_a_prompt_that_finds_no_room_behind_its_end_gives_way_itself() -> None:
    runtime = runtime_of(num_lcm_blocks=4, token_budget=8)
    runtime.scheduler.submit([spec("s", [1, 2, 3], max_new_tokens=5), spec("x", range(50, 58), max_new_tokens=None)])
    assert rows_of(runtime.step()) == [("s", 0, 3), ("x", 0, 5)]
    runtime.scheduler.submit([spec("n", [9], max_new_tokens=1)])
    plan = runtime.step()
    assert plan.retracted == ["x"]
    assert rows_of(plan) == [("n", 0, 1), ("s", 3, 1)]


# The runtime's own retraction.


@pytest.mark.behaviour("M18")
def test_retract_publishes_nothing_and_starts_over_like_a_new_prompt() -> None:
    runtime = runtime_of(num_lcm_blocks=6)
    runtime.scheduler.submit([spec("a", 8, max_new_tokens=None)])
    out = runtime.plan()
    runtime.scheduler.advance([sc.RetractEvent("a")])
    assert runtime.scheduler.capacity().empty_lcm_blocks == 6
    assert line_of(runtime, "a") == "request a retracted tokens=8+0"
    runtime.scheduler.advance([sc.RetractEvent("a")])  # repeated
    runtime.land(out)  # late
    assert line_of(runtime, "a") == "request a retracted tokens=8+0"
    plan = runtime.step()
    assert plan.retracted == []  # the runtime knows
    assert rows_of(plan) == [("a", 0, 8)]
    assert runtime.admissions["a"] == 0


@pytest.mark.behaviour("B5")
def test_retract_of_what_holds_no_blocks_of_its_own_is_a_broken_contract() -> None:
    runtime = runtime_of(sc.Role.DECODE)
    runtime.scheduler.submit([spec("a", 8)])
    before = runtime.scheduler.describe()
    for state in ("awaiting_ready", "waiting", "remote_prefilling"):
        with pytest.raises(sc.ContractError, match=f'retract of request "a" in state {state}'):
            runtime.scheduler.advance([sc.RetractEvent("a")])
        assert runtime.scheduler.describe() == before
        runtime.scheduler.advance([sc.ReadyEvent("a")] if state == "awaiting_ready" else [])
        if state == "waiting":
            runtime.plan()
        before = runtime.scheduler.describe()


@pytest.mark.behaviour("L7")
def test_done_of_a_waiting_request_that_no_peer_prefills_is_a_broken_contract() -> None:
    runtime = runtime_of(sc.Role.DECODE)
    runtime.scheduler.submit([spec("a", 8, local_prefill=True)])
    with pytest.raises(sc.ContractError, match="no peer prefills"):
        runtime.scheduler.advance([sc.DoneEvent("a", 7)])


@pytest.mark.behaviour("C10")
def test_the_limit_counts_the_completion_where_it_is_generated() -> None:
    group = [full_group(block_granularity=2)]
    decode = runtime_of(sc.Role.DECODE, prefix_granularity=2, num_lcm_blocks=3, cache_groups=group).scheduler
    assert decode.max_request_tokens == 6
    with pytest.raises(sc.SubmitError, match="needs room for 8 tokens, the limit is 6"):
        decode.submit([spec("a", 4, max_new_tokens=4)])
    decode.submit([spec("a", 5, max_new_tokens=None)])
    prefill = runtime_of(sc.Role.PREFILL, prefix_granularity=2, num_lcm_blocks=3, cache_groups=group).scheduler
    prefill.submit([spec("a", 5, max_new_tokens=1000)])


@pytest.mark.behaviour("J10")
def test_a_window_runs_a_prompt_in_a_pool_far_smaller_than_its_history() -> None:
    groups = [sliding_group(window_tokens=5)]
    runtime = runtime_of(num_lcm_blocks=6, token_budget=8, cache_groups=groups)
    runtime.scheduler.submit([spec("a", 400, max_new_tokens=None)])
    for _ in range(50 + 40):
        assert runtime.step().retracted == []
    assert "tokens=400+41 " in line_of(runtime, "a")


# Stalls.


@pytest.mark.behaviour("M19")
def test_a_stall_is_told_after_1024_plans_and_at_each_doubling() -> None:
    runtime = runtime_of()
    runtime.scheduler.submit([spec("a", 3, max_new_tokens=1)])
    out = runtime.plan()
    assert [runtime.plan().num_stalled_plans for _ in range(1100)] == [0] * 1100  # a result is out
    runtime.land(out)
    told = [runtime.plan().num_stalled_plans for _ in range(5000)]
    assert {at + 1: count for at, count in enumerate(told) if count} == {1024: 1024, 2048: 2048, 4096: 4096}
    runtime.finish("a")
    assert [runtime.plan().num_stalled_plans for _ in range(4096)] == [0] * 4096

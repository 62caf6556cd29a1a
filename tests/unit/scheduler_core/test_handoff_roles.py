"""The prefill and decode roles: hand-overs, grants, quarantine, local prefill on a decode node."""

from __future__ import annotations

import gc

import pytest

import scheduler_core as sc

from .builders import Runtime, rows_of, scheduler_config, spec


def _prefill(**changes: object) -> Runtime:
    return Runtime(sc.Scheduler(scheduler_config(sc.Role.PREFILL, **changes)))  # type: ignore[arg-type]


def _decode(**changes: object) -> Runtime:
    return Runtime(sc.Scheduler(scheduler_config(sc.Role.DECODE, **changes)))  # type: ignore[arg-type]


def _granted(runtime: Runtime, *specs: sc.RequestSpec) -> list[sc.RemotePrefill]:
    runtime.scheduler.submit(list(specs))
    runtime.scheduler.advance([sc.ReadyEvent(request.request_id) for request in specs])
    return runtime.plan().remote_prefills


# Prefill role.


@pytest.mark.behaviour("L12")
def test_a_prompt_is_handed_over_once_after_its_first_token_landed() -> None:
    runtime = _prefill(token_budget=8)
    runtime.scheduler.submit([spec("a", 10)])
    assert runtime.step().handovers == []
    last_chunk = runtime.plan()
    assert runtime.plan().handovers == []
    runtime.land(last_chunk)
    handovers = runtime.plan().handovers
    assert [(h.request_id, h.token) for h in handovers] == [("a", 1010)]
    assert runtime.plan().handovers == []


@pytest.mark.behaviour("L11", "L12")
def test_blocks_stay_until_the_peer_has_everything_and_then_are_a_cached_prefix() -> None:
    runtime = _prefill()
    runtime.scheduler.submit([spec("a", 10)])
    runtime.step()
    runtime.plan()
    assert runtime.scheduler.capacity().active_lcm_blocks == 3
    runtime.scheduler.advance([sc.HandedOverEvent("a")])
    gauges = runtime.scheduler.capacity()
    assert (gauges.active_lcm_blocks, gauges.cached_lcm_blocks) == (0, 2)
    assert runtime.plan().finished == ["a"]


@pytest.mark.behaviour("L11")
@pytest.mark.parametrize("ending", [sc.AbortEvent("a"), sc.FailedEvent("a")])
@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_an_ended_prompt_keeps_its_blocks_until_the_transfer_is_quiet(ending: sc.Event, num_steps: int) -> None:
    runtime = _prefill(token_budget=6)
    runtime.scheduler.submit([spec("a", 10)])
    for _ in range(num_steps):
        runtime.step()
    table = runtime.scheduler.block_tables("a")[0].tolist()
    runtime.scheduler.advance([ending])
    assert runtime.plan().num_rows == 0
    assert runtime.scheduler.block_tables("a")[0].tolist() == table
    assert not runtime.scheduler.can_clear()
    runtime.scheduler.advance([sc.QuiescedEvent("a")])
    assert runtime.scheduler.capacity().active_lcm_blocks == 0
    assert runtime.plan().finished == ["a"]


@pytest.mark.parametrize("ending", ["handed over", "failed"])
def test_a_duplicate_block_stays_taken_while_the_transfer_may_read_it(ending: str) -> None:
    runtime = _prefill(token_budget=16)
    runtime.scheduler.submit([spec("a", 8), spec("b", [*range(8), 9, 9, 9, 9])])
    runtime.step()
    assert runtime.scheduler.block_tables("b")[0].tolist() == [4, 5, 6, 7]
    runtime.step()
    # The table shares the blocks of a from now on, but what was posted for b reads those it had.
    assert runtime.scheduler.block_tables("b")[0].tolist()[:2] == [1, 2]
    runtime.step()
    assert runtime.scheduler.capacity().active_lcm_blocks == 7
    if ending == "handed over":
        runtime.scheduler.advance([sc.HandedOverEvent("b")])
    else:
        runtime.scheduler.advance([sc.FailedEvent("b")])
        assert runtime.scheduler.capacity().active_lcm_blocks == 7
        runtime.scheduler.advance([sc.QuiescedEvent("b")])
    gauges = runtime.scheduler.capacity()
    assert gauges.active_lcm_blocks == 3
    assert gauges.empty_lcm_blocks + gauges.cached_lcm_blocks == 13


def test_a_waiting_prompt_holds_nothing_and_ends_at_once() -> None:
    runtime = _prefill()
    runtime.scheduler.submit([spec("a", 10)])
    runtime.scheduler.advance([sc.FailedEvent("a")])
    assert runtime.plan().finished == ["a"]


@pytest.mark.behaviour("L2")
def test_no_prompt_starts_beyond_the_limit_of_ungranted_ones() -> None:
    runtime = _prefill(max_ready_ungranted=2)
    runtime.scheduler.submit([spec(name, [ord(name)]) for name in "abcd"])
    assert runtime.step().request_ids == ["a", "b"]
    assert runtime.step().request_ids == []
    runtime.scheduler.advance([sc.GrantedEvent("a"), sc.GrantedEvent("a")])
    assert runtime.step().request_ids == ["c"]
    runtime.scheduler.advance([sc.AbortEvent("b")])
    assert runtime.step().request_ids == ["d"]


def test_prompts_in_transfer_take_no_batch_place() -> None:
    runtime = _prefill(max_batch_size=1)
    runtime.scheduler.submit([spec(name, [ord(name)]) for name in "abc"])
    assert [runtime.step().request_ids for _ in range(3)] == [["a"], ["b"], ["c"]]


@pytest.mark.behaviour("J14")
def test_a_prefill_role_request_cannot_finish() -> None:
    runtime = _prefill()
    runtime.scheduler.submit([spec("a", 3)])
    runtime.step()
    with pytest.raises(sc.ContractError, match="finish"):
        runtime.scheduler.advance([sc.FinishEvent("a")])


# Decode role.


@pytest.mark.behaviour("I7", "L1")
def test_nothing_is_held_before_ready() -> None:
    runtime = _decode()
    runtime.scheduler.submit([spec("a", 10)])
    assert runtime.plan().is_empty
    assert runtime.scheduler.capacity().empty_lcm_blocks == 16


@pytest.mark.behaviour("I4", "L6", "L7")
def test_a_grant_names_the_prompts_blocks_and_keeps_the_reserve_back() -> None:
    runtime = _decode()
    runtime.scheduler.submit([spec("a", 10, max_new_tokens=8)])
    runtime.scheduler.advance([sc.ReadyEvent("a"), sc.ReadyEvent("a")])
    plan = runtime.plan()
    (grant,) = plan.remote_prefills
    assert (grant.request_id, grant.from_token, grant.first_slots) == ("a", 0, [0])
    assert [ids.tolist() for ids in grant.block_ids] == [[1, 2, 3]]
    assert plan.zero_blocks[0].tolist() == [1, 2, 3, 4, 5]
    assert plan.num_rows == 0


@pytest.mark.behaviour("J1", "L8")
def test_several_requests_are_granted_in_one_plan_beside_decodes() -> None:
    runtime = _decode()
    _granted(runtime, spec("a", 5))
    runtime.scheduler.advance([sc.DoneEvent("a", 77)])
    runtime.scheduler.submit([spec("b", range(20, 25)), spec("c", range(30, 35))])
    runtime.scheduler.advance([sc.ReadyEvent("c"), sc.ReadyEvent("b")])
    plan = runtime.plan()
    assert [grant.request_id for grant in plan.remote_prefills] == ["b", "c"]
    assert rows_of(plan) == [("a", 5, 1)]
    assert plan.token_ids.tolist() == [77]


@pytest.mark.behaviour("H19", "L6", "L8")
def test_a_landed_prompt_is_published_and_a_second_grant_starts_behind_it() -> None:
    runtime = _decode()
    _granted(runtime, spec("a", 10))
    runtime.scheduler.advance([sc.DoneEvent("a", 77)])
    runtime.step()
    (grant,) = _granted(runtime, spec("b", 10))
    assert (grant.from_token, grant.first_slots) == (8, [2])
    assert len(grant.block_ids[0]) == 1
    assert runtime.admissions["b"] == 8


@pytest.mark.behaviour("L8")
def test_a_request_that_wanted_one_token_can_finish_when_it_lands() -> None:
    runtime = _decode()
    _granted(runtime, spec("a", 10, max_new_tokens=1))
    runtime.scheduler.advance([sc.DoneEvent("a", 77), sc.FinishEvent("a")])
    assert runtime.plan().finished == ["a"]
    assert runtime.scheduler.capacity().cached_lcm_blocks == 2


@pytest.mark.behaviour("L9", "T6")
@pytest.mark.parametrize("ending", [sc.AbortEvent("b"), sc.FailedEvent("b")])
def test_granted_blocks_are_quarantined_and_hits_return_at_once(ending: sc.Event) -> None:
    runtime = _decode()
    _granted(runtime, spec("a", 10))
    runtime.scheduler.advance([sc.DoneEvent("a", 77)])
    runtime.step()
    runtime.finish("a")
    _granted(runtime, spec("b", 10))
    runtime.scheduler.advance([ending])
    gauges = runtime.scheduler.capacity()
    assert (gauges.quarantined_lcm_blocks, gauges.cached_lcm_blocks, gauges.active_lcm_blocks) == (2, 2, 0)
    assert runtime.scheduler.block_tables("b")[0].tolist()[:2] == [0, 0]
    assert runtime.plan().finished == []
    runtime.scheduler.advance([sc.DoneEvent("b", 5)])  # late: changes nothing
    runtime.scheduler.advance([sc.QuiescedEvent("b")])
    assert runtime.scheduler.capacity().quarantined_lcm_blocks == 0
    assert runtime.plan().finished == ["b"]
    assert runtime.scheduler.capacity().cached_lcm_blocks == 2


def test_an_admission_waits_for_quarantined_blocks() -> None:
    runtime = _decode(num_lcm_blocks=4)
    _granted(runtime, spec("a", 12))
    runtime.scheduler.advance([sc.FailedEvent("a")])
    assert _granted(runtime, spec("b", 12)) == []
    runtime.scheduler.advance([sc.QuiescedEvent("a")])
    assert [grant.request_id for grant in runtime.plan().remote_prefills] == ["b"]


@pytest.mark.behaviour("L7")
def test_done_without_a_grant_is_a_broken_contract() -> None:
    runtime = _decode()
    runtime.scheduler.submit([spec("a", 10)])
    with pytest.raises(sc.ContractError, match=r"done.*\"a\".*awaiting_ready"):
        runtime.scheduler.advance([sc.DoneEvent("a", 3)])


def test_a_local_prefill_needs_no_ready_and_shares_no_batch_with_decodes() -> None:
    runtime = _decode(token_budget=4)
    _granted(runtime, spec("a", 5, max_new_tokens=9))
    runtime.scheduler.advance([sc.DoneEvent("a", 77)])
    runtime.scheduler.submit([spec("local", range(50, 60), local_prefill=True)])
    plans = [rows_of(runtime.step()) for _ in range(6)]
    # It takes turns with the decode, so that a long prompt cannot starve the stream.
    assert plans == [
        [("local", 0, 4)],
        [("a", 5, 1)],
        [("local", 4, 4)],
        [("a", 6, 1)],
        [("local", 8, 2)],
        [("a", 7, 1), ("local", 10, 1)],
    ]


def test_a_long_local_prefill_does_not_hold_up_grants() -> None:
    runtime = _decode(token_budget=4)
    runtime.scheduler.submit([spec("local", 16, local_prefill=True)])
    assert rows_of(runtime.step()) == [("local", 0, 4)]
    runtime.scheduler.submit([spec("remote", range(50, 55))])
    runtime.scheduler.advance([sc.ReadyEvent("remote")])
    plan = runtime.step()
    assert [grant.request_id for grant in plan.remote_prefills] == ["remote"]
    assert plan.num_rows == 0
    assert [rows_of(runtime.step()) for _ in range(2)] == [[("local", 4, 4)], [("local", 8, 4)]]


@pytest.mark.parametrize("big_is_local", [True, False])
def test_local_and_remote_prompts_overtake_one_another_a_bounded_number_of_times(big_is_local: bool) -> None:
    runtime = _decode(num_lcm_blocks=6)
    _granted(runtime, spec("holder", 4, max_new_tokens=4))
    big = spec("big", range(50, 70), max_new_tokens=4, local_prefill=big_is_local)
    runtime.scheduler.submit([big])
    if not big_is_local:
        runtime.scheduler.advance([sc.ReadyEvent("big")])
    runtime.step()
    num_passed = 0
    for number in range(200):
        name = f"small{number}"
        runtime.scheduler.submit([spec(name, [200 + number], max_new_tokens=1, local_prefill=not big_is_local)])
        if big_is_local:
            runtime.scheduler.advance([sc.ReadyEvent(name)])
        plan = runtime.step()
        if name not in runtime.admissions:
            break
        num_passed += 1
        if big_is_local:
            runtime.scheduler.advance([sc.DoneEvent(grant.request_id, 5) for grant in plan.remote_prefills])
        runtime.finish(name)
    assert num_passed == 64
    runtime.scheduler.advance([sc.AbortEvent("holder"), sc.QuiescedEvent("holder")])
    runtime.step()
    assert "big" in runtime.admissions


@pytest.mark.behaviour("L8")
def test_the_first_remote_token_counts_as_generated() -> None:
    runtime = _decode()
    _granted(runtime, spec("a", 5, max_new_tokens=3))
    runtime.scheduler.advance([sc.DoneEvent("a", 77)])
    assert [runtime.step().num_rows for _ in range(3)] == [1, 1, 0]


def test_parts_of_a_plan_outlive_it() -> None:
    runtime = _decode()
    grants = _granted(runtime, spec("a", 10))  # the plan itself is gone already
    del runtime
    gc.collect()
    block_ids = grants[0].block_ids[0]
    del grants
    gc.collect()
    assert block_ids.tolist() == [1, 2, 3]

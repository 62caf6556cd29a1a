"""Who gets a place in a round: budgets, slots, ends, events and gauges."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import scheduler_core as sc

from .builders import Runtime, full_group, rows_of, scheduler_config, spec, state_group


def _runtime(role: sc.Role = sc.Role.FUSED, **changes: object) -> Runtime:
    return Runtime(sc.Scheduler(scheduler_config(role, **changes)))  # type: ignore[arg-type]


def _landed(runtime: Runtime, *specs: sc.RequestSpec) -> None:
    """Remote prompts whose first token has landed."""
    runtime.scheduler.submit(list(specs))
    runtime.scheduler.advance([sc.ReadyEvent(request.request_id) for request in specs])
    runtime.plan()
    runtime.scheduler.advance([sc.DoneEvent(request.request_id, 7) for request in specs])


@pytest.mark.behaviour("J4")
def test_on_the_decode_role_decodes_and_grants_cost_no_budget_and_grants_no_place() -> None:
    runtime = _runtime(sc.Role.DECODE, token_budget=1, max_batch_size=3, num_lcm_blocks=40)
    _landed(runtime, *(spec(name, [ord(name)]) for name in "abc"))
    remote = [spec("d", range(50, 70)), spec("e", range(80, 100))]
    runtime.scheduler.submit(remote)
    runtime.scheduler.advance([sc.ReadyEvent("d"), sc.ReadyEvent("e")])
    plan = runtime.plan()
    assert plan.request_ids == ["a", "b", "c"]
    assert [grant.request_id for grant in plan.remote_prefills] == ["d", "e"]


@pytest.mark.behaviour("J7")
def test_a_prompt_with_too_little_budget_for_a_grain_waits_and_is_not_blocked() -> None:
    runtime = _runtime(token_budget=6, num_lcm_blocks=40, cache_groups=[full_group(), state_group()])
    runtime.scheduler.submit([spec("a", 4, max_new_tokens=1), spec("b", range(50, 62), max_new_tokens=1)])
    assert rows_of(runtime.step()) == [("a", 0, 4)], "two tokens are left, a grain has four"
    assert rows_of(runtime.step()) == [("b", 0, 4)]


@pytest.mark.behaviour("J5")
def test_an_incomplete_prompt_ends_the_line_also_with_budget_left() -> None:
    runtime = _runtime(token_budget=10, num_lcm_blocks=40, cache_groups=[full_group(), state_group()])
    runtime.scheduler.submit([spec("a", 20, max_new_tokens=1), spec("b", [90], max_new_tokens=1)])
    assert rows_of(runtime.step()) == [("a", 0, 8)], "two tokens are left, which b would fit in"
    assert rows_of(runtime.step()) == [("a", 8, 8)]
    assert rows_of(runtime.step()) == [("a", 16, 4), ("b", 0, 1)]


@pytest.mark.behaviour("B4")
def test_a_request_without_a_free_slot_waits_and_holds_nothing() -> None:
    runtime = _runtime(sc.Role.DECODE, max_batch_size=1)
    runtime.scheduler.submit([spec(name, [ord(name)]) for name in "abc"])
    runtime.scheduler.advance([sc.ReadyEvent(name) for name in "abc"])
    assert [grant.request_id for grant in runtime.plan().remote_prefills] == ["a", "b"]
    num_empty = runtime.scheduler.capacity().empty_lcm_blocks
    assert runtime.plan().is_empty
    assert runtime.scheduler.capacity().empty_lcm_blocks == num_empty
    assert [table.tolist() for table in runtime.scheduler.block_tables("c")] == [[]]
    runtime.scheduler.advance([sc.FailedEvent("a")])
    assert [grant.request_id for grant in runtime.plan().remote_prefills] == ["c"]


@pytest.mark.behaviour("K16")
def test_a_reserve_is_nobody_elses_and_an_exact_fit_fits_again_after_an_abort() -> None:
    runtime = _runtime(num_lcm_blocks=8)
    runtime.scheduler.submit([spec("a", 4, max_new_tokens=4)])
    runtime.step()
    runtime.scheduler.submit([spec("exact", range(50, 74), max_new_tokens=8)])
    assert runtime.scheduler.max_request_tokens == 32
    for _ in range(2):
        assert "exact" not in runtime.step().request_ids
    runtime.scheduler.advance([sc.AbortEvent("a")])
    assert runtime.step().request_ids == ["exact"]


@pytest.mark.behaviour("B4")
def test_a_request_keeps_its_slot_from_its_first_chunk_to_its_last_step() -> None:
    runtime = _runtime(token_budget=4)
    runtime.scheduler.submit([spec("other", [90], max_new_tokens=1), spec("a", 10, max_new_tokens=3)])
    slots = []
    for _ in range(6):
        plan = runtime.step()
        slots += [slot for name, slot in zip(plan.request_ids, plan.request_slots.tolist(), strict=True) if name == "a"]
    assert slots == [2] * 5


# Ends.


def _waiting(runtime: Runtime) -> None:
    runtime.scheduler.submit([spec("a", 10)])


def _prefilling(runtime: Runtime) -> None:
    _waiting(runtime)
    runtime.step()


def _prefilling_with_a_result_out(runtime: Runtime) -> None:
    _waiting(runtime)
    runtime.plan()


def _awaiting_result(runtime: Runtime) -> None:
    _prefilling(runtime)
    runtime.plan()


def _prefill_done(runtime: Runtime) -> None:
    _prefilling(runtime)
    runtime.step()


def _decoding_with_a_result_out(runtime: Runtime) -> None:
    _prefill_done(runtime)
    runtime.plan()


def _decoding(runtime: Runtime) -> None:
    _prefill_done(runtime)
    runtime.step()


Reach = Callable[[Runtime], None]


@pytest.mark.behaviour("J14")
@pytest.mark.parametrize(
    "reach",
    [
        _waiting,
        _prefilling,
        _prefilling_with_a_result_out,
        _awaiting_result,
        _prefill_done,
        _decoding_with_a_result_out,
        _decoding,
    ],
)
def test_an_abort_returns_the_blocks_at_once_in_every_state(reach: Reach) -> None:
    runtime = _runtime(token_budget=8)
    reach(runtime)
    runtime.scheduler.advance([sc.AbortEvent("a")])
    gauges = runtime.scheduler.capacity()
    assert (gauges.active_lcm_blocks, gauges.num_live_requests) == (0, 0)
    assert runtime.plan().finished == ["a"]
    assert runtime.plan().is_empty
    runtime.scheduler.advance([sc.ResultEvent("a", [5])])  # what was out comes late


@pytest.mark.behaviour("J14")
@pytest.mark.parametrize("reach", [_prefill_done, _decoding_with_a_result_out, _decoding])
def test_a_finish_returns_the_blocks_at_once_also_with_a_result_out(reach: Reach) -> None:
    runtime = _runtime(token_budget=8)
    reach(runtime)
    runtime.scheduler.advance([sc.FinishEvent("a")])
    gauges = runtime.scheduler.capacity()
    assert (gauges.active_lcm_blocks, gauges.cached_lcm_blocks) == (0, 2)
    assert runtime.plan().finished == ["a"]


@pytest.mark.behaviour("J14")
@pytest.mark.parametrize("reach", [_waiting, _prefilling, _awaiting_result])
def test_a_finish_before_the_first_token_is_a_broken_contract(reach: Reach) -> None:
    runtime = _runtime(token_budget=8)
    reach(runtime)
    before = runtime.scheduler.describe()
    with pytest.raises(sc.ContractError, match="finish"):
        runtime.scheduler.advance([sc.FinishEvent("a")])
    assert runtime.scheduler.describe() == before


@pytest.mark.behaviour("J14", "L7")
def test_a_finish_while_a_peer_fills_the_blocks_is_a_broken_contract() -> None:
    runtime = _runtime(sc.Role.DECODE)
    runtime.scheduler.submit([spec("a", 10)])
    runtime.scheduler.advance([sc.ReadyEvent("a")])
    assert len(runtime.plan().remote_prefills) == 1
    with pytest.raises(sc.ContractError, match=r"finish.*remote_prefilling"):
        runtime.scheduler.advance([sc.FinishEvent("a")])


# Events and gauges.


@pytest.mark.behaviour("J16")
def test_events_apply_in_the_order_they_are_given() -> None:
    for events, is_legal in (
        ([sc.DoneEvent("a", 7), sc.FinishEvent("a")], True),
        ([sc.FinishEvent("a"), sc.DoneEvent("a", 7)], False),
    ):
        runtime = _runtime(sc.Role.DECODE)
        runtime.scheduler.submit([spec("a", 10)])
        runtime.scheduler.advance([sc.ReadyEvent("a")])
        runtime.plan()
        if is_legal:
            runtime.scheduler.advance(events)
            assert runtime.plan().finished == ["a"]
        else:
            with pytest.raises(sc.ContractError):
                runtime.scheduler.advance(events)


@pytest.mark.behaviour("J16")
def test_gauges_count_a_request_as_running_from_its_first_chunk_to_its_end() -> None:
    runtime = _runtime(token_budget=8)
    counts = []
    for reach in (_waiting, _prefilling, _awaiting_result, _prefill_done, _decoding):
        runtime = _runtime(token_budget=8)
        reach(runtime)
        gauges = runtime.scheduler.capacity()
        counts.append((gauges.num_waiting, gauges.num_running, gauges.num_live_requests))
    assert counts == [(1, 0, 1), (0, 1, 1), (0, 1, 1), (0, 1, 1), (0, 1, 1)]


@pytest.mark.behaviour("T1")
def test_planning_for_a_prompt_that_does_not_fit_changes_nothing() -> None:
    runtime = _runtime(num_lcm_blocks=8)
    runtime.scheduler.submit([spec("cached", 9, max_new_tokens=1)])
    runtime.run_until_idle()
    runtime.finish("cached")
    runtime.scheduler.submit([spec("holder", range(50, 66), max_new_tokens=1)])
    runtime.plan()  # its result stays out, so it cannot give way
    before = runtime.scheduler.describe()
    runtime.scheduler.submit([spec("a", 16, max_new_tokens=1)])
    queued = runtime.scheduler.describe()
    for _ in range(3):
        plan = runtime.plan()
        assert plan.is_empty
        assert runtime.scheduler.describe() == queued
    runtime.scheduler.advance([sc.AbortEvent("a")])
    assert runtime.plan().finished == ["a"]
    assert runtime.scheduler.describe() == before

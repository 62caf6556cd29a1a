"""Plans that are made before the results of the last one have landed."""

from __future__ import annotations

import pytest

import scheduler_core as sc

from .builders import Runtime, full_group, rows_of, scheduler_config, sliding_group, spec, state_group


def ahead(role: sc.Role = sc.Role.FUSED, **changes: int) -> Runtime:
    return Runtime(sc.Scheduler(scheduler_config(role, overlap_depth=1, **{"token_budget": 8} | changes)))


def state_of(runtime: Runtime, request_id: str) -> str:
    lines = runtime.scheduler.describe().splitlines()
    return next(line.split()[2] for line in lines if line.startswith(f"request {request_id} "))


@pytest.mark.behaviour("J12")
@pytest.mark.parametrize("role", [sc.Role.FUSED, sc.Role.PREFILL])
def test_the_next_chunk_of_a_prompt_runs_while_one_result_is_out(role: sc.Role) -> None:
    runtime = ahead(role)
    runtime.scheduler.submit([spec("a", 20)])
    chunks = [runtime.plan(), runtime.plan()]
    assert runtime.plan().num_rows == 0  # never a third
    runtime.land(chunks[0])
    chunks.append(runtime.plan())
    assert [rows_of(plan) for plan in chunks] == [[("a", 0, 8)], [("a", 8, 8)], [("a", 16, 4)]]
    assert [plan.num_results_out.tolist() for plan in chunks] == [[0], [1], [1]]
    assert [plan.token_ids.tolist() for plan in chunks] == [[*range(8)], [*range(8, 16)], [*range(16, 20)]]


@pytest.mark.behaviour("J12")
def test_the_first_decode_row_runs_while_the_result_of_the_last_chunk_is_out() -> None:
    runtime = ahead()
    runtime.scheduler.submit([spec("a", 6, max_new_tokens=3)])
    chunk = runtime.plan()
    assert state_of(runtime, "a") == "awaiting_result"
    first = runtime.plan()
    assert state_of(runtime, "a") == "decoding"
    assert (rows_of(first), first.token_ids.tolist(), first.num_prefill_rows) == ([("a", 6, 1)], [-1], 0)
    assert runtime.plan().num_rows == 0
    runtime.land(chunk)
    second = runtime.plan()
    assert (rows_of(second), second.token_ids.tolist()) == ([("a", 7, 1)], [-1])
    runtime.land(first)
    assert runtime.plan().num_rows == 0  # three tokens are on their way: it wants no more
    runtime.land(second)
    assert "tokens=6+3" in runtime.scheduler.describe()


@pytest.mark.behaviour("J12")
def test_a_prompt_with_a_chunk_and_its_last_chunk_out_does_not_decode_yet() -> None:
    runtime = ahead()
    runtime.scheduler.submit([spec("a", 12)])
    first, last = runtime.plan(), runtime.plan()
    assert runtime.plan().num_rows == 0
    runtime.land(first)
    assert state_of(runtime, "a") == "awaiting_result"
    assert rows_of(runtime.plan()) == [("a", 12, 1)]
    runtime.land(last)


@pytest.mark.behaviour("J12")
def test_a_landed_prompt_decodes_ahead_on_the_decode_role() -> None:
    runtime = ahead(sc.Role.DECODE)
    runtime.scheduler.submit([spec("a", 6), spec("b", range(50, 56), local_prefill=True)])
    runtime.scheduler.advance([sc.ReadyEvent("a")])
    assert rows_of(runtime.plan()) == [("b", 0, 6)]
    beside = runtime.plan()
    assert [grant.request_id for grant in beside.remote_prefills] == ["a"]
    assert rows_of(beside) == [("b", 6, 1)]
    runtime.scheduler.advance([sc.DoneEvent("a", 7), sc.ResultEvent("b", [8])])
    plans = [runtime.plan(), runtime.plan(), runtime.plan()]
    assert [rows_of(plan) for plan in plans] == [[("a", 6, 1), ("b", 7, 1)], [("a", 7, 1)], []]
    assert [plan.token_ids.tolist() for plan in plans] == [[7, -1], [-1], []]


@pytest.mark.behaviour("J12")
def test_without_overlap_nothing_is_planned_before_a_result_has_landed() -> None:
    runtime = Runtime(sc.Scheduler(scheduler_config(token_budget=8)))
    runtime.scheduler.submit([spec("a", 10)])
    for _ in range(3):
        plan = runtime.plan()
        assert plan.num_rows == 1
        assert runtime.plan().num_rows == 0
        runtime.land(plan)


@pytest.mark.behaviour("I7")
def test_a_request_has_one_row_in_a_plan_also_when_decodes_get_what_a_prompt_leaves() -> None:
    config = scheduler_config(overlap_depth=1, token_budget=8, cache_groups=[full_group(), state_group()])
    runtime = Runtime(sc.Scheduler(config))
    runtime.scheduler.submit([spec("a", 3, max_new_tokens=9)])
    plans = [runtime.plan()]
    runtime.scheduler.submit([spec("b", range(50, 54), max_new_tokens=9)])
    for _ in range(6):
        plans.append(runtime.plan())
        runtime.land(plans[-2])
        assert len(set(plans[-1].request_ids)) == plans[-1].num_rows
    assert [sorted(plan.request_ids) for plan in plans[:3]] == [["a"], ["a", "b"], ["a", "b"]]


@pytest.mark.behaviour("J11")
def test_every_row_owes_one_result_and_they_land_in_order() -> None:
    runtime = ahead()
    runtime.scheduler.submit([spec("a", 10)])
    runtime.plan(), runtime.plan()
    with pytest.raises(sc.ContractError, match="tokens must hold 0, got 1"):
        runtime.scheduler.advance([sc.ResultEvent("a", [5])])
    runtime.scheduler.advance([sc.ResultEvent("a", [])])
    with pytest.raises(sc.ContractError, match="tokens must hold 1, got 0"):
        runtime.scheduler.advance([sc.ResultEvent("a", [])])
    runtime.scheduler.advance([sc.ResultEvent("a", [5])])
    with pytest.raises(sc.ContractError, match="no result is owed"):
        runtime.scheduler.advance([sc.ResultEvent("a", [5])])


@pytest.mark.behaviour("J11")
def test_a_row_planned_ahead_brings_nothing_when_the_one_before_it_brought_all() -> None:
    runtime = ahead(verify_width=4)
    runtime.scheduler.submit([spec("a", 4, max_new_tokens=5)])
    runtime.step()
    rows = [runtime.plan(), runtime.plan()]
    assert [rows_of(plan) for plan in rows] == [[("a", 4, 4)], [("a", 5, 3)]]
    runtime.land(rows[0], num_tokens=4)
    with pytest.raises(sc.ContractError, match="tokens must hold 0, got 1"):
        runtime.scheduler.advance([sc.ResultEvent("a", [5])])
    runtime.scheduler.advance([sc.ResultEvent("a", [])])
    assert "tokens=4+5" in runtime.scheduler.describe()
    assert runtime.plan().num_rows == 0


@pytest.mark.behaviour("J14")
@pytest.mark.parametrize("event", [sc.FinishEvent, sc.AbortEvent])
@pytest.mark.parametrize("num_landed", [0, 1, 2])
def test_a_request_ends_with_results_out_and_they_are_ignored(
    event: type[sc.FinishEvent] | type[sc.AbortEvent], num_landed: int
) -> None:
    runtime = ahead()
    runtime.scheduler.submit([spec("a", 8, max_new_tokens=9)])
    rows = [runtime.plan(), runtime.plan()]
    for plan in rows[:num_landed]:
        runtime.land(plan)
    runtime.scheduler.advance([event("a")])
    gauges = runtime.scheduler.capacity()
    assert gauges.active_lcm_blocks == 0
    for plan in rows[num_landed:]:
        runtime.land(plan)
    assert runtime.plan().finished == ["a"]
    runtime.land(rows[1])
    assert runtime.scheduler.clear_cache()
    assert runtime.scheduler.capacity().empty_lcm_blocks == 16


@pytest.mark.behaviour("H7")
def test_what_expires_is_judged_by_what_has_landed() -> None:
    config = scheduler_config(
        prefix_granularity=1,
        overlap_depth=1,
        verify_width=2,
        num_lcm_blocks=40,
        cache_groups=[sliding_group(window_tokens=3, block_granularity=1)],
    )
    runtime = Runtime(sc.Scheduler(config))
    runtime.scheduler.submit([spec("a", 6, max_new_tokens=20)])
    plans = [runtime.plan(), runtime.plan()]
    for num_computed in (6, 6, 8, 10, 12, 14):  # when the newest of the plans was made
        num_holes = [block_id > 0 for block_id in runtime.scheduler.block_tables("a")[0].tolist()].index(True)
        assert num_holes == num_computed - 3 + 1
        runtime.land(plans[-2], num_tokens=2)
        plans.append(runtime.plan())


@pytest.mark.behaviour("H19")
def test_the_first_decode_row_publishes_the_prompt_although_its_last_result_is_out() -> None:
    runtime = ahead()
    runtime.scheduler.submit([spec("a", 8, max_new_tokens=4)])
    runtime.plan()
    assert "entries=0" in runtime.scheduler.describe()
    runtime.plan()
    assert "entries=2" in runtime.scheduler.describe()


@pytest.mark.behaviour("L12")
def test_only_the_landed_first_token_hands_a_prompt_over() -> None:
    runtime = ahead(sc.Role.PREFILL)
    runtime.scheduler.submit([spec("a", 12)])
    chunks = [runtime.plan(), runtime.plan()]
    assert not runtime.plan().handovers
    runtime.land(chunks[0])
    assert not runtime.plan().handovers
    runtime.land(chunks[1])
    assert [handover.token for handover in runtime.plan().handovers] == [1012]


@pytest.mark.behaviour("K1")
def test_a_request_admitted_to_plan_ahead_holds_room_for_the_row_behind_its_end() -> None:
    for role, num_slots in ((sc.Role.FUSED, 6), (sc.Role.DECODE, 6), (sc.Role.PREFILL, 3)):
        runtime = ahead(role, verify_width=4, token_budget=16)
        runtime.scheduler.submit([spec("a", 8, max_new_tokens=12)])
        if role == sc.Role.DECODE:
            runtime.scheduler.advance([sc.ReadyEvent("a")])
        runtime.plan()
        assert len(runtime.scheduler.block_tables("a")[0]) == num_slots

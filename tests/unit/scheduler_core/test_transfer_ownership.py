"""Who owns the blocks that a peer reads or fills, and what a hand-over needs of them."""

from __future__ import annotations

import pytest

import scheduler_core as sc

from .builders import Runtime, rows_of, scheduler_config, spec


def _runtime(role: sc.Role, **changes: object) -> Runtime:
    return Runtime(sc.Scheduler(scheduler_config(role, **changes)))  # type: ignore[arg-type]


def _table(runtime: Runtime, request_id: str) -> list[int]:
    return runtime.scheduler.block_tables(request_id)[0].tolist()


def _granted(runtime: Runtime, *specs: sc.RequestSpec) -> list[sc.RemotePrefill]:
    runtime.scheduler.submit(list(specs))
    runtime.scheduler.advance([sc.ReadyEvent(request.request_id) for request in specs])
    return runtime.plan().remote_prefills


# Prefill role.


@pytest.mark.behaviour("L1")
@pytest.mark.parametrize("role", [sc.Role.PREFILL, sc.Role.FUSED])
def test_only_the_decode_role_waits_for_ready(role: sc.Role) -> None:
    runtime = _runtime(role)
    runtime.scheduler.submit([spec("a", 3)])
    assert rows_of(runtime.plan()) == [("a", 0, 3)]


@pytest.mark.behaviour("L13", "L14")
def test_chunks_that_were_computed_before_the_grant_lose_nothing() -> None:
    runtime = _runtime(sc.Role.PREFILL, token_budget=4)
    runtime.scheduler.submit([spec("a", 12)])
    tables = []
    for _ in range(3):
        runtime.step()
        tables.append(_table(runtime, "a"))
    assert tables == [[1, 2, 3, 4]] * 3, "a completed block is the same whenever its list is made"
    runtime.scheduler.advance([sc.GrantedEvent("a")])
    runtime.plan()
    assert _table(runtime, "a") == [1, 2, 3, 4]


@pytest.mark.behaviour("L14")
def test_what_was_hit_can_be_sent_like_what_was_computed() -> None:
    runtime = _runtime(sc.Role.PREFILL)
    runtime.scheduler.submit([spec("a", 10)])
    runtime.step()
    runtime.plan()
    runtime.scheduler.advance([sc.HandedOverEvent("a")])
    runtime.scheduler.submit([spec("b", 10)])
    runtime.step()
    assert runtime.admissions["b"] == 8
    assert 0 not in _table(runtime, "b"), "the peer may have less than was hit here"
    assert runtime.scheduler.capacity().cached_lcm_blocks == 0, "the hit blocks are in the transfer too"


@pytest.mark.behaviour("L15")
def test_a_prompt_shorter_than_a_block_ends_with_one_handover() -> None:
    runtime = _runtime(sc.Role.PREFILL)
    runtime.scheduler.submit([spec("a", [5])])
    runtime.step()
    assert [(h.request_id, h.token) for h in runtime.plan().handovers] == [("a", 1001)]
    assert len(_table(runtime, "a")) == 1
    runtime.scheduler.advance([sc.HandedOverEvent("a")])
    plan = runtime.plan()
    assert (plan.handovers, plan.finished) == ([], ["a"])


@pytest.mark.behaviour("L11")
def test_admissions_and_clearing_wait_for_the_end_of_a_transfer() -> None:
    runtime = _runtime(sc.Role.PREFILL, num_lcm_blocks=4)
    runtime.scheduler.submit([spec("a", 10)])
    runtime.step()
    runtime.plan()
    runtime.scheduler.submit([spec("b", range(50, 60))])
    assert runtime.plan().is_empty, "three of four blocks are read by the peer"
    assert not runtime.scheduler.clear_cache()
    runtime.scheduler.advance([sc.HandedOverEvent("a")])
    assert rows_of(runtime.plan()) == [("b", 0, 10)], "now they may be evicted"


@pytest.mark.behaviour("L12")
def test_nothing_is_handed_over_before_the_first_token_landed() -> None:
    runtime = _runtime(sc.Role.PREFILL)
    runtime.scheduler.submit([spec("a", 4), spec("b", [9])])
    plan = runtime.plan()
    runtime.scheduler.advance([sc.ResultEvent("b", [77])])
    assert [(h.request_id, h.token) for h in runtime.plan().handovers] == [("b", 77)]
    runtime.scheduler.advance([sc.ResultEvent("a", [78])])
    assert [(h.request_id, h.token) for h in runtime.plan().handovers] == [("a", 78)]
    assert plan.num_rows == 2


# Decode role.


@pytest.mark.behaviour("T6")
def test_what_a_peer_still_fills_is_not_hit() -> None:
    runtime = _runtime(sc.Role.DECODE)
    (first,) = _granted(runtime, spec("a", 10))
    (second,) = _granted(runtime, spec("b", 10))
    assert second.from_token == 0
    assert not set(first.block_ids[0].tolist()) & set(second.block_ids[0].tolist())


@pytest.mark.behaviour("T6")
def test_what_is_still_being_computed_is_not_hit() -> None:
    runtime = _runtime(sc.Role.FUSED, num_lcm_blocks=32)
    runtime.scheduler.submit([spec("a", 12)])
    plan = runtime.plan()
    runtime.scheduler.submit([spec("b", 12)])
    assert rows_of(runtime.plan()) == [("b", 0, 12)]
    assert plan.num_rows == 1


@pytest.mark.behaviour("L1", "L7", "T3")
def test_a_second_ready_or_done_changes_nothing() -> None:
    runtime = _runtime(sc.Role.DECODE)
    runtime.scheduler.advance([sc.ReadyEvent("nobody")])
    _granted(runtime, spec("a", 10))
    granted = runtime.scheduler.describe()
    runtime.scheduler.advance([sc.ReadyEvent("a")])
    assert runtime.scheduler.describe() == granted
    runtime.scheduler.advance([sc.DoneEvent("a", 7)])
    landed = runtime.scheduler.describe()
    runtime.scheduler.advance([sc.DoneEvent("a", 8), sc.ReadyEvent("a")])
    assert runtime.scheduler.describe() == landed
    assert runtime.plan().token_ids.tolist() == [7]


@pytest.mark.behaviour("L7")
def test_a_landing_keeps_its_reserve_and_a_negative_token_is_refused() -> None:
    runtime = _runtime(sc.Role.DECODE)
    _granted(runtime, spec("a", 10, max_new_tokens=8))
    table = _table(runtime, "a")
    with pytest.raises(sc.ContractError, match="negative"):
        runtime.scheduler.advance([sc.DoneEvent("a", -1)])
    runtime.scheduler.advance([sc.DoneEvent("a", 7)])
    assert "request a prefill_done tokens=10+1" in runtime.scheduler.describe()
    assert _table(runtime, "a") == table
    assert len(table) == 5

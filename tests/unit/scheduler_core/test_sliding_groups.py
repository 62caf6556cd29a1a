"""Groups that keep a window: retention, hits with holes, promises, grants of prompt tails."""

from __future__ import annotations

import pytest

import scheduler_core as sc

from .builders import Runtime, full_group, rows_of, scheduler_config, sliding_group, spec


def _runtime(role: sc.Role = sc.Role.FUSED, **changes: object) -> Runtime:
    return Runtime(sc.Scheduler(scheduler_config(role, **changes)))  # type: ignore[arg-type]


def _table(runtime: Runtime, request_id: str, group: int) -> list[int]:
    return runtime.scheduler.block_tables(request_id)[group].tolist()


def _num_leading_holes(table: list[int]) -> int:
    return next(slot for slot, block_id in enumerate(table) if block_id)


def _granted(runtime: Runtime, *specs: sc.RequestSpec) -> list[sc.RemotePrefill]:
    runtime.scheduler.submit(list(specs))
    runtime.scheduler.advance([sc.ReadyEvent(request.request_id) for request in specs])
    return runtime.plan().remote_prefills


@pytest.mark.behaviour("H1", "H6")
def test_blocks_that_slid_out_of_the_window_leave_holes_at_absolute_slots() -> None:
    groups = [sliding_group(window_tokens=4, block_granularity=2)]
    runtime = _runtime(prefix_granularity=2, token_budget=4, cache_groups=groups)
    runtime.scheduler.submit([spec("a", 12, max_new_tokens=8)])
    num_holes, num_live = [], []
    for _ in range(7):
        runtime.step()
        table = _table(runtime, "a", 0)
        num_holes.append(_num_leading_holes(table))
        num_live.append(len(table) - table.count(0))
    # Three chunks of four tokens, then the steps at 12, 13, 14 and 15 computed tokens.
    assert num_holes == [0, 0, 2, 4, 5, 5, 6]
    assert max(num_live) <= 5


@pytest.mark.behaviour("H6")
@pytest.mark.parametrize("window_tokens", [3, 5])
def test_steady_decode_keeps_one_or_two_blocks_of_a_short_window(window_tokens: int) -> None:
    runtime = _runtime(cache_groups=[sliding_group(window_tokens=window_tokens)])
    runtime.scheduler.submit([spec("a", 5, max_new_tokens=40)])
    runtime.step()
    for _ in range(39):
        runtime.step()
        table = _table(runtime, "a", 0)
        assert len(table) - table.count(0) in (1, 2)


@pytest.mark.behaviour("H4")
def test_one_token_per_block_and_grain_is_as_good_as_any_other() -> None:
    groups = [full_group(block_granularity=1), sliding_group(window_tokens=2, block_granularity=1)]
    runtime = _runtime(prefix_granularity=1, num_lcm_blocks=40, cache_groups=groups)
    runtime.scheduler.submit([spec("a", 6, max_new_tokens=3)])
    runtime.run_until_idle()
    assert _table(runtime, "a", 0).count(0) == 0
    # The last token has landed but its rows are written by nobody: eight are computed.
    assert _table(runtime, "a", 1)[:6] == [0] * 6
    runtime.finish("a")
    runtime.scheduler.submit([spec("b", 7)])
    assert rows_of(runtime.step()) == [("b", 6, 1)]


def test_a_prompt_runs_in_a_pool_far_smaller_than_its_history() -> None:
    runtime = _runtime(num_lcm_blocks=8, token_budget=8, cache_groups=[sliding_group(window_tokens=9)])
    runtime.scheduler.submit([spec("a", 400, max_new_tokens=100)])
    runtime.run_until_idle()
    assert "tokens=400+100" in runtime.scheduler.describe()


def test_a_hit_needs_the_window_before_it_and_leaves_holes_in_front() -> None:
    groups = [full_group(), sliding_group(window_tokens=8)]
    runtime = _runtime(num_lcm_blocks=40, cache_groups=groups)
    runtime.scheduler.submit([spec("a", 17)])
    runtime.run_until_idle()
    runtime.finish("a")
    runtime.scheduler.submit([spec("b", 17)])
    plan = runtime.step()
    assert runtime.admissions["b"] == 16
    assert rows_of(plan) == [("b", 16, 1)]
    full, sliding = _table(runtime, "b", 0), _table(runtime, "b", 1)
    assert 0 not in full
    assert sliding[:2] == [0, 0]
    assert 0 not in sliding[2:]


def test_a_window_of_one_never_limits_a_hit_and_holds_no_hit_block() -> None:
    runtime = _runtime(num_lcm_blocks=40, cache_groups=[full_group(), sliding_group(window_tokens=1)])
    runtime.scheduler.submit([spec("a", 17)])
    runtime.run_until_idle()
    runtime.finish("a")
    runtime.scheduler.submit([spec("b", 17)])
    runtime.step()
    assert runtime.admissions["b"] == 16
    assert _table(runtime, "b", 1)[:4] == [0] * 4


@pytest.mark.behaviour("H10")
def test_decode_publishes_the_window_as_grains_fill() -> None:
    groups = [full_group(block_granularity=2), sliding_group(window_tokens=4, block_granularity=2)]
    runtime = _runtime(prefix_granularity=2, num_lcm_blocks=40, cache_groups=groups)
    runtime.scheduler.submit([spec("a", 4, max_new_tokens=5)])
    runtime.run_until_idle()
    runtime.finish("a")
    generated = [1000 + position for position in range(4, 9)]
    runtime.scheduler.submit([spec("b", [0, 1, 2, 3, *generated, 7])])
    runtime.step()
    assert runtime.admissions["b"] == 8


def test_a_prompt_is_stopped_where_others_share_it_and_the_next_one_hits_there() -> None:
    groups = [full_group(block_granularity=2), sliding_group(window_tokens=3, block_granularity=2)]
    runtime = _runtime(prefix_granularity=2, num_lcm_blocks=60, cache_groups=groups)
    shared = list(range(8))
    for number, rows in ((1, [("p1", 0, 11)]), (2, [("p2", 0, 8)]), (3, [("p3", 8, 3)])):
        runtime.scheduler.submit([spec(f"p{number}", [*shared, 100 * number, 101 * number, 7], max_new_tokens=1)])
        assert rows_of(runtime.step()) == rows
        runtime.run_until_idle()
        runtime.finish(f"p{number}")
    assert runtime.admissions == {"p1": 0, "p2": 0, "p3": 8}


@pytest.mark.behaviour("E10")
def test_a_shared_boundary_does_not_stop_a_prompt_whose_budget_is_below_a_grain() -> None:
    groups = [full_group(), sliding_group(window_tokens=3)]
    runtime = _runtime(num_lcm_blocks=60, token_budget=3, cache_groups=groups)
    for name, last in (("first", 7), ("second", 9)):
        runtime.scheduler.submit([spec(name, [*range(8), last, last, last], max_new_tokens=1)])
        runtime.run_until_idle()
        runtime.finish(name)
    assert runtime.admissions == {"first": 0, "second": 8}


@pytest.mark.behaviour("K14")
def test_an_admitted_request_never_waits_for_a_block_whoever_shares_its_prefix() -> None:
    groups = [full_group(), sliding_group(window_tokens=9)]
    runtime = _runtime(num_lcm_blocks=48, token_budget=16, cache_groups=groups)
    runtime.scheduler.submit([spec("a", 17, max_new_tokens=20)])
    for _ in range(3):
        runtime.step()
    runtime.scheduler.submit([spec(name, 17, max_new_tokens=20) for name in "bcdefg"])
    for _ in range(60):
        runtime.step()
    lines = runtime.scheduler.describe().splitlines()
    decoded = [line for line in lines if "tokens=17+20" in line]
    assert len(decoded) >= 2
    assert not any(" prefilling " in line for line in lines)


def test_what_a_request_holds_falls_to_its_window_once_its_prompt_is_computed() -> None:
    runtime = _runtime(num_lcm_blocks=40, token_budget=64, cache_groups=[sliding_group(window_tokens=5)])
    runtime.scheduler.submit([spec("a", 60, max_new_tokens=60)])
    runtime.step()
    assert "promised=17 " in runtime.scheduler.describe()
    runtime.step()
    assert "promised=2 " in runtime.scheduler.describe()
    assert runtime.scheduler.capacity().active_lcm_blocks == 2


# Grants.


@pytest.mark.behaviour("L4", "L5", "L6")
def test_a_grant_of_a_sliding_group_is_the_tail_that_the_first_step_sees() -> None:
    groups = [sliding_group(window_tokens=4, block_granularity=2)]
    runtime = _runtime(sc.Role.DECODE, prefix_granularity=4, num_lcm_blocks=16, cache_groups=groups)
    (grant,) = _granted(runtime, spec("a", 8, max_new_tokens=1))
    assert (grant.from_token, grant.first_slots) == (0, [2])
    runtime.scheduler.advance([sc.DoneEvent("a", 77), sc.FinishEvent("a")])
    runtime.plan()
    runtime.scheduler.submit([spec("b", 16, max_new_tokens=1)])
    runtime.scheduler.advance([sc.ReadyEvent("b")])
    plan = runtime.plan()
    (grant,) = plan.remote_prefills
    table = _table(runtime, "b", 0)
    assert [block_id > 0 for block_id in table] == [False, False, True, True, False, False, True, True, True]
    assert runtime.admissions["b"] == 8
    assert plan.zero_blocks[0].tolist() == table[6:]
    assert (grant.from_token, grant.first_slots) == (8, [6])
    assert grant.block_ids[0].tolist() == table[6:8], "the reserve is not granted"


@pytest.mark.behaviour("L3")
def test_a_remote_prompt_is_not_stopped_where_others_share_it() -> None:
    groups = [full_group(block_granularity=64), sliding_group(window_tokens=513, block_granularity=32)]
    runtime = _runtime(sc.Role.DECODE, prefix_granularity=64, num_lcm_blocks=200, cache_groups=groups)
    prompt = list(range(639))

    def landed(name: str, tokens: list[int]) -> int:
        (grant,) = _granted(runtime, spec(name, tokens))
        runtime.scheduler.advance([sc.DoneEvent(name, 7), sc.FinishEvent(name)])
        runtime.plan()
        return grant.from_token

    assert landed("other", [*prompt[:576], *range(5000, 5800)]) == 0
    assert landed("without", prompt) == 0, "576 tokens of the full group are here, the window before them is not"
    assert landed("brings the window", prompt[:577]) == 0
    assert landed("with", prompt) == 576


@pytest.mark.behaviour("L9")
def test_a_failed_grant_keeps_its_tail_in_quarantine_and_nothing_else() -> None:
    groups = [full_group(), sliding_group(window_tokens=5)]
    runtime = _runtime(sc.Role.DECODE, num_lcm_blocks=24, cache_groups=groups)
    _granted(runtime, spec("a", 12, max_new_tokens=4))
    runtime.scheduler.advance([sc.FailedEvent("a")])
    assert "promised=2 kept=0" in runtime.scheduler.describe()
    assert runtime.scheduler.capacity().quarantined_lcm_blocks == 4 + 2
    runtime.scheduler.advance([sc.QuiescedEvent("a")])
    assert runtime.scheduler.capacity().empty_lcm_blocks == 24


# Prefill role.


@pytest.mark.behaviour("L11")
def test_a_duplicate_window_block_stays_in_its_slot_while_a_transfer_may_read_it() -> None:
    groups = [full_group(), sliding_group(window_tokens=5)]
    runtime = _runtime(sc.Role.PREFILL, num_lcm_blocks=40, token_budget=32, cache_groups=groups)
    runtime.scheduler.submit([spec("a", 8), spec("b", [*range(8), 9, 9, 9, 9])])
    runtime.step()
    before = _table(runtime, "b", 1)
    runtime.step()
    assert _table(runtime, "b", 1) == before
    assert _table(runtime, "b", 0)[:2] == _table(runtime, "a", 0)[:2], "full groups share the canonical block"

"""State groups: snapshots on grain boundaries, what is published of them, state slots of rows."""

from __future__ import annotations

import pytest

import scheduler_core as sc

from .builders import Runtime, full_group, rows_of, scheduler_config, spec, state_group


def _runtime(role: sc.Role = sc.Role.FUSED, **changes: object) -> Runtime:
    groups = {"cache_groups": [full_group(), state_group()], "num_lcm_blocks": 60} | changes
    return Runtime(sc.Scheduler(scheduler_config(role, **groups)))  # type: ignore[arg-type]


def _table(runtime: Runtime, request_id: str, group: int = 1) -> list[int]:
    return runtime.scheduler.block_tables(request_id)[group].tolist()


def _live(table: list[int]) -> list[int]:
    return [slot for slot, block_id in enumerate(table) if block_id]


def _chunks(runtime: Runtime, request_id: str) -> list[tuple[int, int]]:
    """(begin, end) of every prompt row of a request that is alone."""
    chunks = []
    while f"request {request_id} prefill_done" not in runtime.scheduler.describe():
        plan = runtime.step()
        chunks += [(begin, begin + length) for _, begin, length in rows_of(plan)]
    return chunks


def _hit(runtime: Runtime, name: str, tokens: list[int]) -> int:
    runtime.scheduler.submit([spec(name, tokens, max_new_tokens=1)])
    runtime.run_until_idle()
    runtime.finish(name)
    return runtime.admissions[name]


@pytest.mark.behaviour("J7")
def test_a_chunk_that_does_not_complete_its_prompt_ends_on_a_grain_boundary() -> None:
    runtime = _runtime(token_budget=6)
    runtime.scheduler.submit([spec("a", 12)])
    assert _chunks(runtime, "a") == [(0, 4), (4, 8), (8, 12)]
    without_state = _runtime(token_budget=12, cache_groups=[full_group()])
    without_state.scheduler.submit([spec("a", 30)])
    assert _chunks(without_state, "a") == [(0, 12), (12, 24), (24, 30)]


@pytest.mark.behaviour("H16", "H17", "H18")
def test_only_the_last_boundary_of_a_prompt_is_published() -> None:
    runtime = _runtime(token_budget=8)
    runtime.scheduler.submit([spec("a", 26, max_new_tokens=1)])
    assert _chunks(runtime, "a") == [(0, 8), (8, 16), (16, 24), (24, 26)]
    runtime.finish("a")
    assert "group state free_slots=0 entries=1" in runtime.scheduler.describe()
    assert _hit(runtime, "longer", list(range(27))) == 24
    assert _hit(runtime, "shorter", list(range(9))) == 0


@pytest.mark.behaviour("H11", "H18", "I2")
def test_the_last_chunk_leaves_a_snapshot_inside_it() -> None:
    runtime = _runtime(token_budget=8)
    runtime.scheduler.submit([spec("a", 30, max_new_tokens=1)])
    for _ in range(3):
        runtime.step()
    plan = runtime.step()
    assert rows_of(plan) == [("a", 24, 6)]
    assert plan.checkpoint_tokens.tolist() == [28]
    assert plan.state_input_slots[1].tolist() == [5]
    assert plan.state_output_slots[1].tolist() == [7]
    assert [slots.tolist() for slots in (plan.state_input_slots[0], plan.state_output_slots[0])] == [[], []]
    assert _live(plan.block_tables[1][0].tolist()) == [5, 6, 7, 8], "input, snapshot, end and reserve"
    runtime.finish("a")
    assert _hit(runtime, "b", list(range(40))) == 28


@pytest.mark.behaviour("H12", "H13")
def test_the_end_of_a_prompt_is_not_cut_into_body_and_tail() -> None:
    groups = [
        full_group(block_granularity=128),
        state_group(block_granularity=128),
        state_group("fine", block_granularity=32),
    ]
    runtime = _runtime(prefix_granularity=128, num_lcm_blocks=200, token_budget=2000, cache_groups=groups)
    assert _hit(runtime, "a", list(range(1290))) == 0
    prompt = [*range(1280), *range(9000, 9356)]
    runtime.scheduler.submit([spec("b", prompt, max_new_tokens=1)])
    plan = runtime.step()
    assert rows_of(plan) == [("b", 1280, 356)]
    assert plan.checkpoint_tokens.tolist() == [1536]
    assert _live(_table(runtime, "b", 1)) == [9, 11, 12, 13]
    assert _live(_table(runtime, "b", 2)) == [39, 47, 48, 49, 50, 51, 52]
    small = _runtime(
        prefix_granularity=128, num_lcm_blocks=200, token_budget=300, cache_groups=groups, enable_prefix_cache=False
    )
    small.scheduler.submit([spec("c", 356, max_new_tokens=1)])
    assert _chunks(small, "c") == [(0, 256), (256, 356)]


@pytest.mark.behaviour("H14")
def test_chunks_leave_their_final_state_alone_also_in_an_idle_pool() -> None:
    groups = [state_group(block_granularity=2)]
    runtime = _runtime(prefix_granularity=2, token_budget=8, cache_groups=groups)
    runtime.scheduler.submit([spec("a", 30)])
    live = []
    for _ in range(3):
        runtime.step()
        live.append(_live(_table(runtime, "a", 0)))
    assert live == [[3], [3, 7], [7, 11]]


@pytest.mark.behaviour("E10")
def test_a_prompt_is_stopped_where_others_share_it_and_the_next_one_hits_there() -> None:
    groups = [full_group(block_granularity=2), state_group(block_granularity=2)]
    runtime = _runtime(prefix_granularity=2, cache_groups=groups)
    shared = list(range(8))
    for number, rows in ((1, [("p1", 0, 11)]), (2, [("p2", 0, 8)]), (3, [("p3", 8, 3)])):
        runtime.scheduler.submit([spec(f"p{number}", [*shared, 100 * number, 101 * number, 7], max_new_tokens=1)])
        assert rows_of(runtime.step()) == rows
        if number == 2:
            assert rows_of(runtime.step()) == [("p2", 8, 3)]
        runtime.run_until_idle()
        runtime.finish(f"p{number}")
    assert runtime.admissions == {"p1": 0, "p2": 0, "p3": 8}


@pytest.mark.behaviour("E10", "J7")
@pytest.mark.parametrize(
    ("prompt", "token_budget", "expected"),
    [
        (60, 24, [(16, 32), (32, 56), (56, 60)]),
        (60, 12, [(16, 28), (28, 32), (32, 44), (44, 56), (56, 60)]),
        (40, 8, [(16, 24), (24, 32), (32, 40)]),
        (40, 10, [(16, 24), (24, 32), (32, 40)]),
    ],
)
def test_chunks_stop_at_the_shared_boundary(prompt: int, token_budget: int, expected: list[tuple[int, int]]) -> None:
    runtime = _runtime(num_lcm_blocks=200, token_budget=token_budget)
    assert _hit(runtime, "short", list(range(17))) == 0
    # Goes on elsewhere: leaves 32 common tokens of the full group, and a snapshot only where it ends.
    assert _hit(runtime, "longer", [*range(32), *range(500, 513)]) == 16
    runtime.scheduler.submit([spec("x", [*range(32), *range(700, 700 + prompt - 32)], max_new_tokens=1)])
    assert _chunks(runtime, "x") == expected


@pytest.mark.behaviour("H10", "I2")
def test_a_decode_step_names_the_state_it_continues_from_and_publishes_none() -> None:
    runtime = _runtime()
    runtime.scheduler.submit([spec("a", 7, max_new_tokens=12)])
    runtime.step()
    seen = []
    for _ in range(6):
        plan = runtime.step()
        seen.append((int(plan.state_input_slots[1][0]), int(plan.state_output_slots[1][0])))
        assert plan.checkpoint_tokens.tolist() == [0]
        assert 0 not in [plan.block_tables[1][0][slot] for slot in seen[-1]]
    assert seen == [(1, 1), (1, 2), (2, 2), (2, 2), (2, 2), (2, 3)]
    runtime.run_until_idle()
    runtime.finish("a")
    assert "group state free_slots=0 entries=1" in runtime.scheduler.describe()


@pytest.mark.behaviour("J9")
def test_a_decode_beside_a_state_group_leaves_a_grain_to_prefills() -> None:
    for token_budget, rows in ((4, [("b", 0, 4)]), (5, [("b", 0, 4), ("a", 3, 1)])):
        runtime = _runtime(token_budget=token_budget)
        runtime.scheduler.submit([spec("a", 3, max_new_tokens=8)])
        runtime.step()
        runtime.scheduler.submit([spec("b", range(50, 70), max_new_tokens=1)])
        assert rows_of(runtime.step()) == rows


def test_a_prompt_that_does_not_fit_leaves_the_budget_to_the_decodes() -> None:
    runtime = _runtime(token_budget=4, num_lcm_blocks=11)
    runtime.scheduler.submit([spec("a", 4, max_new_tokens=12)])
    runtime.step()
    runtime.scheduler.submit([spec("b", range(50, 70), max_new_tokens=1)])
    for _ in range(5):
        assert [name for name, *_ in rows_of(runtime.step())] == ["a"]


@pytest.mark.behaviour("H8", "H17")
def test_an_aborted_prompt_publishes_no_snapshot_and_a_finished_one_does() -> None:
    runtime = _runtime()
    runtime.scheduler.submit([spec("a", 9)])
    runtime.step()
    runtime.scheduler.advance([sc.AbortEvent("a")])
    assert "group state free_slots=0 entries=0" in runtime.scheduler.describe()
    runtime.scheduler.submit([spec("b", 9)])
    runtime.step()
    runtime.finish("b")
    assert "group state free_slots=0 entries=1" in runtime.scheduler.describe()


# Handoff roles.


def test_a_handed_over_prompt_leaves_its_snapshot_in_the_cache() -> None:
    runtime = _runtime(sc.Role.PREFILL)
    runtime.scheduler.submit([spec("a", 10)])
    plan = runtime.step()
    assert plan.checkpoint_tokens.tolist() == [8]
    assert _live(_table(runtime, "a")) == [1, 2], "no reserve: nothing is generated here"
    runtime.plan()
    runtime.scheduler.advance([sc.HandedOverEvent("a")])
    runtime.scheduler.submit([spec("b", 10)])
    assert rows_of(runtime.step()) == [("b", 8, 2)]


@pytest.mark.behaviour("C5", "E11", "L4", "L5")
def test_a_grant_asks_for_the_final_state_and_is_not_limited_by_cached_ones() -> None:
    groups = [full_group(), state_group(block_granularity=1)]
    runtime = _runtime(sc.Role.DECODE, cache_groups=groups)
    runtime.scheduler.submit([spec("a", 8, max_new_tokens=4)])
    runtime.scheduler.advance([sc.ReadyEvent("a")])
    (grant,) = runtime.plan().remote_prefills
    assert _live(_table(runtime, "a")) == [7, 8]
    assert grant.first_slots == [0, 7]
    assert [len(ids) for ids in grant.block_ids] == [2, 1]
    runtime.scheduler.advance([sc.DoneEvent("a", 77)])
    runtime.step()
    runtime.scheduler.submit([spec("b", 15)])
    runtime.scheduler.advance([sc.ReadyEvent("b")])
    (grant,) = runtime.plan().remote_prefills
    assert grant.from_token == 8
    assert grant.first_slots == [2, 14]


@pytest.mark.behaviour("H15", "L8")
@pytest.mark.parametrize(("prompt", "num_entries"), [(8, 1), (9, 0), (12, 1)])
def test_a_landed_state_is_published_only_on_a_grain_boundary(prompt: int, num_entries: int) -> None:
    runtime = _runtime(sc.Role.DECODE)
    runtime.scheduler.submit([spec("a", prompt, max_new_tokens=4)])
    runtime.scheduler.advance([sc.ReadyEvent("a")])
    runtime.plan()
    runtime.scheduler.advance([sc.DoneEvent("a", 77)])
    runtime.step()
    assert f"group state free_slots=0 entries={num_entries}" in runtime.scheduler.describe()

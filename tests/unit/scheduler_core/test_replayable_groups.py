"""Sliding groups that are regenerated: a hit feeds the window before it again."""

from __future__ import annotations

import pytest

import scheduler_core as sc

from .builders import Runtime, full_group, rows_of, scheduler_config, sliding_group, spec


def _runtime(role: sc.Role = sc.Role.FUSED, window_tokens: int = 8, **changes: object) -> Runtime:
    groups = [full_group(), sliding_group("private", window_tokens=window_tokens, replayable=True)]
    fields = {"cache_groups": groups, "num_lcm_blocks": 200, "token_budget": 64} | changes
    return Runtime(sc.Scheduler(scheduler_config(role, **fields)))  # type: ignore[arg-type]


def _cached(runtime: Runtime, num_tokens: int) -> None:
    """Leaves the first tokens of a prompt in the cache."""
    runtime.scheduler.submit([spec("cached", num_tokens, max_new_tokens=1)])
    while "cached prefill_done" not in runtime.scheduler.describe():
        runtime.step()
    runtime.finish("cached")


def _new_tokens(runtime: Runtime, tokens: list[int]) -> list[int]:
    """New tokens of every chunk of a prompt that is alone."""
    runtime.scheduler.submit([spec("x", tokens, max_new_tokens=1)])
    chunks = []
    while "x prefill_done" not in runtime.scheduler.describe():
        plan = runtime.step()
        chunks += (plan.input_lengths - plan.replay_lengths).tolist()
    return chunks


@pytest.mark.behaviour("J4", "Q2", "Q3")
def test_a_hit_feeds_the_window_before_it_again_in_the_first_chunk_only() -> None:
    runtime = _runtime(token_budget=40)
    _cached(runtime, 16)
    runtime.scheduler.submit([spec("x", 116, max_new_tokens=1)])
    plan = runtime.step()
    assert rows_of(plan) == [("x", 8, 40)]
    assert plan.replay_lengths.tolist() == [8]
    assert plan.token_ids.tolist() == list(range(8, 48))
    assert runtime.admissions["x"] == 16
    plan = runtime.step()
    assert rows_of(plan) == [("x", 48, 40)]
    assert plan.replay_lengths.tolist() == [0]


@pytest.mark.behaviour("Q2")
def test_no_more_is_fed_again_than_was_hit() -> None:
    runtime = _runtime()
    _cached(runtime, 4)
    runtime.scheduler.submit([spec("x", 20, max_new_tokens=1)])
    plan = runtime.step()
    assert rows_of(plan) == [("x", 0, 20)]
    assert plan.replay_lengths.tolist() == [4]


@pytest.mark.behaviour("Q5")
@pytest.mark.parametrize(
    ("hit_tokens", "prompt", "token_budget", "first_chunks"),
    [
        (16, 116, 40, [32, 40]),
        (4, 104, 40, [36, 40]),
        (0, 50, 45, [42, 8]),
        (0, 6, 16, [6]),
    ],
)
def test_the_last_chunk_computes_a_whole_window(
    hit_tokens: int, prompt: int, token_budget: int, first_chunks: list[int]
) -> None:
    runtime = _runtime(token_budget=token_budget)
    if hit_tokens:
        _cached(runtime, hit_tokens)
    assert _new_tokens(runtime, list(range(prompt)))[: len(first_chunks)] == first_chunks


@pytest.mark.behaviour("Q5")
@pytest.mark.parametrize(("num_own_tokens", "rows"), [(6, [("x", 0, 14)]), (12, [("x", 0, 8), ("x", 8, 12)])])
def test_a_shared_boundary_inside_the_last_window_is_passed_over(
    num_own_tokens: int, rows: list[tuple[str, int, int]]
) -> None:
    groups = [
        full_group(),
        sliding_group("cached", window_tokens=3),
        sliding_group("private", window_tokens=8, replayable=True),
    ]
    runtime = _runtime(cache_groups=groups)
    runtime.scheduler.submit([spec("first", [*range(8), *range(500, 506)], max_new_tokens=1)])
    runtime.run_until_idle()
    runtime.finish("first")
    runtime.scheduler.submit([spec("x", [*range(8), *range(700, 700 + num_own_tokens)], max_new_tokens=1)])
    assert [row for _ in rows for row in rows_of(runtime.step())] == rows


@pytest.mark.behaviour("Q5")
def test_a_prompt_waits_for_the_budget_of_its_window() -> None:
    runtime = _runtime(token_budget=16)
    runtime.scheduler.submit([spec("long", range(500, 512), max_new_tokens=1), spec("x", 6, max_new_tokens=1)])
    # The first prompt leaves four tokens, too few for a last chunk of six.
    assert rows_of(runtime.step()) == [("long", 0, 12)]
    assert rows_of(runtime.step()) == [("x", 0, 6)]


@pytest.mark.behaviour("E7", "Q1", "Q4", "Q8")
def test_the_group_takes_no_part_in_hits_and_is_never_cached() -> None:
    runtime = _runtime()
    _cached(runtime, 16)
    assert "group private free_slots=0 entries=0" in runtime.scheduler.describe()
    runtime.scheduler.submit([spec("x", 17, max_new_tokens=1)])
    runtime.step()
    assert runtime.admissions["x"] == 16
    full, private = (table.tolist() for table in runtime.scheduler.block_tables("x"))
    assert full[:4] != [0] * 4
    assert private[:2] == [0, 0]
    assert 0 not in private[2:]
    assert len(private) == 5


@pytest.mark.behaviour("J9")
def test_decodes_leave_a_prompt_the_budget_of_its_replay() -> None:
    runtime = _runtime(window_tokens=4, token_budget=8)
    runtime.scheduler.submit([spec("a", 4, max_new_tokens=20)])
    runtime.step()
    runtime.scheduler.submit([spec("b", range(50, 70), max_new_tokens=1)])
    assert rows_of(runtime.step()) == [("b", 0, 8)]


@pytest.mark.behaviour("Q7")
def test_a_landing_brings_the_window_whatever_was_hit() -> None:
    runtime = _runtime(sc.Role.DECODE, window_tokens=6)

    def granted(name: str) -> sc.RemotePrefill:
        runtime.scheduler.submit([spec(name, 9, max_new_tokens=2)])
        runtime.scheduler.advance([sc.ReadyEvent(name)])
        return runtime.plan().remote_prefills[0]

    granted("a")
    runtime.scheduler.advance([sc.DoneEvent("a", 7), sc.FinishEvent("a")])
    grant = granted("b")
    assert grant.from_token == 8
    assert grant.first_slots == [2, 1]
    assert [len(ids) for ids in grant.block_ids] == [1, 2]
    runtime.scheduler.advance([sc.FailedEvent("b")])
    assert runtime.scheduler.block_tables("b")[1].tolist()[1:3] == grant.block_ids[1].tolist(), "quarantined whole"

"""When what was computed becomes a cached prefix."""

from __future__ import annotations

import pytest

import scheduler_core as sc

from .builders import Runtime, full_group, rows_of, scheduler_config, sliding_group, spec, state_group


def _runtime(role: sc.Role = sc.Role.FUSED, **changes: object) -> Runtime:
    return Runtime(sc.Scheduler(scheduler_config(role, **changes)))  # type: ignore[arg-type]


def _num_entries(runtime: Runtime, group_id: str = "full") -> int:
    (line,) = [line for line in runtime.scheduler.describe().splitlines() if line.startswith(f"group {group_id} ")]
    return int(line.split("entries=")[1].split()[0])


@pytest.mark.behaviour("H8")
def test_a_chunk_is_published_in_the_next_admission_of_its_request() -> None:
    runtime = _runtime(token_budget=4)
    runtime.scheduler.submit([spec("a", 12)])
    plan = runtime.plan()
    assert _num_entries(runtime) == 0
    runtime.land(plan)
    assert _num_entries(runtime) == 0, "landing alone publishes nothing"
    plan = runtime.plan()
    assert rows_of(plan) == [("a", 4, 4)]
    assert _num_entries(runtime) == 1


@pytest.mark.behaviour("H8", "H19")
def test_a_grain_of_a_completion_is_published_once_its_last_token_is_computed() -> None:
    runtime = _runtime(prefix_granularity=2, cache_groups=[full_group(block_granularity=2)])
    runtime.scheduler.submit([spec("a", 4, max_new_tokens=6)])
    runtime.step()
    assert _num_entries(runtime) == 0
    plan = runtime.plan()  # the first step after the prompt
    assert _num_entries(runtime) == 2, "what prefill left pending"
    runtime.land(plan)
    runtime.step()
    assert _num_entries(runtime) == 2, "token 5 has landed, but nobody computed its row before this step"
    runtime.step()
    assert _num_entries(runtime) == 3


@pytest.mark.behaviour("H19", "L12")
def test_a_hand_over_publishes_what_was_pending_and_its_end_nothing_more() -> None:
    runtime = _runtime(sc.Role.PREFILL)
    runtime.scheduler.submit([spec("a", 10)])
    runtime.step()
    assert _num_entries(runtime) == 0
    assert [handover.request_id for handover in runtime.plan().handovers] == ["a"]
    assert _num_entries(runtime) == 2
    runtime.scheduler.advance([sc.HandedOverEvent("a")])
    runtime.plan()
    assert _num_entries(runtime) == 2


@pytest.mark.behaviour("H8")
def test_a_finish_publishes_the_rest_without_a_plan() -> None:
    runtime = _runtime()
    runtime.scheduler.submit([spec("a", 8)])
    runtime.step()
    runtime.scheduler.advance([sc.FinishEvent("a")])
    assert _num_entries(runtime) == 2


@pytest.mark.behaviour("H8")
def test_a_window_is_published_before_it_slides_on() -> None:
    groups = [full_group(), sliding_group(window_tokens=2)]
    runtime = _runtime(token_budget=14, num_lcm_blocks=32, cache_groups=groups)
    runtime.scheduler.submit([spec("a", 20, max_new_tokens=1)])
    runtime.step()
    assert runtime.scheduler.block_tables("a")[1].tolist()[2] > 0
    runtime.step()
    assert runtime.scheduler.block_tables("a")[1].tolist()[2] == 0, "token 14 does not see it"
    runtime.finish("a")
    runtime.scheduler.submit([spec("b", [*range(12), 90], max_new_tokens=1)])
    runtime.step()
    assert runtime.admissions["b"] == 12, "it backed the boundary at 12 when it went"


@pytest.mark.behaviour("H10")
@pytest.mark.parametrize("windows", [[], [4]])
def test_the_next_turn_hits_the_grains_that_were_generated(windows: list[int]) -> None:
    groups = [full_group(block_granularity=2)]
    groups += [sliding_group(window_tokens=window, block_granularity=2) for window in windows]
    runtime = _runtime(prefix_granularity=2, num_lcm_blocks=40, cache_groups=groups)
    prompt, generated = [1, 2, 3, 4], [101, 102, 103, 104, 105]
    runtime.scheduler.submit([spec("a", prompt, max_new_tokens=5)])
    for token in generated:
        runtime.plan()
        runtime.scheduler.advance([sc.ResultEvent("a", [token])])
    runtime.finish("a")
    runtime.scheduler.submit([spec("next", [*prompt, *generated, 7])])
    runtime.step()
    assert runtime.admissions["next"] == 8


@pytest.mark.behaviour("H3")
def test_what_a_request_published_is_hit_after_its_blocks_came_back() -> None:
    runtime = _runtime()
    runtime.scheduler.submit([spec("a", 12, max_new_tokens=2)])
    runtime.run_until_idle()
    runtime.finish("a")
    assert runtime.scheduler.capacity().active_lcm_blocks == 0
    for name in ("b", "c"):
        runtime.scheduler.submit([spec(name, 12, max_new_tokens=2)])
        runtime.run_until_idle()
        runtime.finish(name)
    assert (runtime.admissions["b"], runtime.admissions["c"]) == (8, 8)


# Snapshots of states.


@pytest.mark.behaviour("H17")
def test_a_published_snapshot_is_held_by_nobody() -> None:
    runtime = _runtime(num_lcm_blocks=16, token_budget=16, cache_groups=[full_group(), state_group()])
    runtime.scheduler.submit([spec("a", 9, max_new_tokens=1)])
    runtime.run_until_idle()
    runtime.finish("a")
    assert "group state free_slots=0 entries=1 evictable=1" in runtime.scheduler.describe()
    largest = runtime.scheduler.max_request_tokens - 1
    runtime.scheduler.submit([spec("large", range(100, 100 + largest), max_new_tokens=1)])
    runtime.run_until_idle()
    runtime.finish("large")
    runtime.scheduler.submit([spec("again", 9, max_new_tokens=1)])
    runtime.step()
    assert runtime.admissions["again"] == 0


@pytest.mark.behaviour("H12")
@pytest.mark.parametrize(
    ("role", "enable_prefix_cache", "hit_tokens"),
    [(sc.Role.FUSED, True, 1280), (sc.Role.FUSED, False, 0), (sc.Role.DECODE, True, 0)],
)
def test_only_the_budget_cuts_the_end_of_a_prompt(role: sc.Role, enable_prefix_cache: bool, hit_tokens: int) -> None:
    groups = [full_group(block_granularity=128), state_group(block_granularity=128)]
    runtime = _runtime(
        role,
        prefix_granularity=128,
        num_lcm_blocks=200,
        token_budget=300,
        cache_groups=groups,
        enable_prefix_cache=enable_prefix_cache,
    )
    is_local = role == sc.Role.DECODE
    if hit_tokens:
        runtime.scheduler.submit([spec("first", 1290, max_new_tokens=1)])
        runtime.run_until_idle()
        runtime.finish("first")
    runtime.scheduler.submit([spec("b", hit_tokens + 356, max_new_tokens=1, local_prefill=is_local)])
    assert rows_of(runtime.step()) == [("b", hit_tokens, 256)]
    plan = runtime.step()
    assert rows_of(plan) == [("b", hit_tokens + 256, 100)]
    assert plan.checkpoint_tokens.tolist() == [0], "the boundary at 1536 is the input"


@pytest.mark.behaviour("H11")
def test_a_chunk_takes_one_snapshot_inside_it_however_many_boundaries_it_crosses() -> None:
    runtime = _runtime(num_lcm_blocks=60, cache_groups=[full_group(), state_group()])
    runtime.scheduler.submit([spec("a", 30, max_new_tokens=1), spec("b", range(50, 66), max_new_tokens=1)])
    plan = runtime.step()
    assert rows_of(plan) == [("a", 0, 30), ("b", 0, 16)], "one forward pass each"
    assert plan.checkpoint_tokens.tolist() == [28, 0]
    assert plan.state_output_slots[1].tolist() == [7, 3]

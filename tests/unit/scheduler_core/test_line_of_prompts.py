"""Who waits behind whom. What the scheduler remembers of failed admissions saves work and decides nothing."""

from __future__ import annotations

import pytest

import scheduler_core as sc

from .builders import Runtime, full_group, rows_of, scheduler_config, spec, state_group

LONG = spec("long", range(200, 240))
SHORT = spec("short", range(300, 302), max_new_tokens=1)


@pytest.mark.behaviour("J6", "J7")
@pytest.mark.parametrize("was_tried_before", [False, True])
def test_a_prompt_that_does_not_fit_is_passed_however_little_budget_is_left(was_tried_before: bool) -> None:
    """Two tokens are left of the round, too few for a chunk of the long one."""
    config = scheduler_config(num_lcm_blocks=22, token_budget=8, cache_groups=[full_group(), state_group()])
    runtime = Runtime(sc.Scheduler(config))
    runtime.scheduler.submit([spec("holder", range(100, 104), max_new_tokens=20)])
    runtime.step()
    first = spec("first", range(400, 409), max_new_tokens=1)
    runtime.scheduler.submit([LONG, first] if was_tried_before else [first])
    assert rows_of(runtime.step()) == [("first", 0, 4), ("holder", 4, 1)]
    runtime.scheduler.submit([SHORT] if was_tried_before else [LONG, SHORT])
    assert rows_of(runtime.step()) == [("first", 4, 5), ("short", 0, 2), ("holder", 5, 1)]


@pytest.mark.behaviour("J9")
@pytest.mark.parametrize("was_tried_before", [False, True])
def test_decodes_leave_a_waiting_prompt_its_grain_whether_it_failed_before_or_not(was_tried_before: bool) -> None:
    """The first decode step gives back what only chunks need, and with that the waiting prompt fits at once."""
    config = scheduler_config(num_lcm_blocks=28, token_budget=8, cache_groups=[full_group(), state_group()])
    runtime = Runtime(sc.Scheduler(config))
    late = spec("late", range(100, 105), max_new_tokens=3)
    first = [spec(name, [ord(name)], max_new_tokens=8) for name in "abcd"]
    second = [spec("e", [500], max_new_tokens=2)]
    runtime.scheduler.submit([*first, late] if was_tried_before else first)
    plans = [runtime.plan()]
    runtime.scheduler.submit(second if was_tried_before else [*second, late])
    plans.append(runtime.plan())
    assert [rows_of(plan) for plan in plans] == [[(name, 0, 1) for name in names] for names in ("abcd", "e")]
    for plan in plans:
        runtime.land(plan)
    assert rows_of(runtime.step()) == [("late", 0, 4), *((name, 1, 1) for name in "abcd")]


@pytest.mark.behaviour("K12")
@pytest.mark.parametrize("was_tried_before", [False, True])
def test_a_prompt_that_does_not_fit_whole_starts_with_a_shorter_chunk(was_tried_before: bool) -> None:
    """Its last chunk needs room behind the prompt, which is not there; with less budget it is not the last."""
    config = scheduler_config(num_lcm_blocks=5, token_budget=8, cache_groups=[full_group()])
    runtime = Runtime(sc.Scheduler(config))
    undeclared = spec("undeclared", range(100, 108), max_new_tokens=None)
    runtime.scheduler.submit([spec("holder", range(4), max_new_tokens=8)])
    first = runtime.plan()
    runtime.scheduler.submit([undeclared] if was_tried_before else [])
    assert runtime.plan().is_empty
    runtime.land(first)
    runtime.scheduler.submit([] if was_tried_before else [undeclared])
    assert rows_of(runtime.step()) == [("undeclared", 0, 7), ("holder", 4, 1)]

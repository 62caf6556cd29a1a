"""What can be submitted, and that a refused batch leaves no trace."""

from __future__ import annotations

import numpy as np
import pytest

import scheduler_core as sc

from .builders import Runtime, full_group, scheduler_config, spec


def _scheduler(role: sc.Role = sc.Role.FUSED) -> sc.Scheduler:
    return sc.Scheduler(
        scheduler_config(role, prefix_granularity=2, num_lcm_blocks=3, cache_groups=[full_group(block_granularity=2)])
    )


@pytest.mark.behaviour("C9", "T2")
@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (spec("bad", []), ["bad", "tokens must not be empty"]),
        (spec("bad", [1, -2]), ["bad", "tokens[1]", "-2"]),
        (spec("bad", 2, max_new_tokens=-1), ["bad", "max_new_tokens", "-1"]),
        (spec("bad", 4, max_new_tokens=4), ["bad", "8", "limit is 6"]),
        (spec("", 2), ["request_id"]),
        (spec("live", 2), ["live", "already in use"]),
        (spec("good", 2), ["good", "twice"]),
    ],
)
def test_one_bad_request_refuses_its_whole_batch(bad: sc.RequestSpec, words: list[str]) -> None:
    scheduler = _scheduler()
    scheduler.submit([spec("live", 2, max_new_tokens=1)])
    before = scheduler.describe()
    with pytest.raises(sc.SubmitError) as refusal:
        scheduler.submit([spec("good", 2, max_new_tokens=1), bad])
    for word in words:
        assert word in str(refusal.value)
    assert scheduler.describe() == before


def test_the_prefill_role_bounds_the_prompt_only() -> None:
    scheduler = _scheduler(sc.Role.PREFILL)
    assert scheduler.max_request_tokens == 6
    scheduler.submit([spec("fits", 5, max_new_tokens=1000)])
    with pytest.raises(sc.SubmitError, match="limit is 6"):
        scheduler.submit([spec("long", 6)])


def test_a_request_of_exactly_the_bound_runs_to_its_end() -> None:
    runtime = Runtime(_scheduler())
    runtime.scheduler.submit([spec("exact", 2, max_new_tokens=4)])
    runtime.run_until_idle()
    assert "tokens=2+4" in runtime.scheduler.describe()


def test_tokens_may_be_an_int32_array_or_any_sequence_of_ints() -> None:
    for tokens in (np.array([3, 4], np.int32), [3, 4], (3, 4), np.array([3, 4], np.int64)):
        request = sc.RequestSpec(request_id="r", tokens=tokens, max_new_tokens=1)
        assert request.tokens.tolist() == [3, 4]


def test_arrays_of_every_layout_are_read_by_value() -> None:
    wide = np.arange(12, dtype=np.int32)
    for tokens in (wide[::3], wide[9::-3][::-1], wide.astype(">i4")[::3], wide.astype(np.uint32)[::3]):
        assert sc.RequestSpec(request_id="r", tokens=tokens, max_new_tokens=1).tokens.tolist() == [0, 3, 6, 9]
    kept = np.array([5, 6], np.int32)
    request = sc.RequestSpec(request_id="r", tokens=kept, max_new_tokens=1)
    kept[0] = 99
    assert request.tokens.tolist() == [5, 6]
    assert sc.RequestSpec(request_id="r", tokens=np.array([], np.int32), max_new_tokens=1).tokens.size == 0


def test_tokens_that_are_no_integers_are_refused() -> None:
    too_large = np.array([2**31], np.uint32)
    for tokens in ([0.5], np.array([0.5]), ["a"], [2**40], too_large, np.zeros((2, 2), np.int32), None):
        with pytest.raises(TypeError):
            sc.RequestSpec(request_id="r", tokens=tokens, max_new_tokens=1)  # type: ignore[arg-type]


def test_an_id_is_free_again_once_its_end_was_planned() -> None:
    scheduler = _scheduler()
    scheduler.submit([spec("r", 2)])
    scheduler.advance([sc.AbortEvent("r")])
    with pytest.raises(sc.SubmitError, match="already in use"):
        scheduler.submit([spec("r", 2)])
    assert scheduler.next_plan().finished == ["r"]
    scheduler.submit([spec("r", 2)])

"""How much of a prompt the cache holds, asked without being admitted."""

from __future__ import annotations

import numpy as np
import pytest

import scheduler_core as sc

from .builders import Runtime, full_group, scheduler_config, sliding_group, spec


def _served(prompt: list[int], **changes: object) -> sc.Scheduler:
    """A fused scheduler that has served this prompt; a grain is four tokens."""
    scheduler = sc.Scheduler(scheduler_config(**changes))  # type: ignore[arg-type]
    scheduler.submit([spec("a", prompt, max_new_tokens=1)])
    runtime = Runtime(scheduler)
    runtime.run_until_idle()
    runtime.finish("a")
    return scheduler


@pytest.mark.parametrize(
    ("prompt", "num_cached"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 8),
        ([1, 2, 3, 4, 5, 6, 7, 8], 4),  # the last token is computed in any case
        ([1, 2, 3, 4, 5, 6, 7, 9, 9], 4),
        ([1, 2, 3, 4], 0),
        ([9, 2, 3, 4, 5, 6, 7, 8, 9], 0),
        ([1], 0),
        ([], 0),
    ],
)
def test_it_is_what_an_admission_would_find(prompt: list[int], num_cached: int) -> None:
    scheduler = _served([1, 2, 3, 4, 5, 6, 7, 8, 9])
    before = scheduler.describe()
    assert scheduler.find_cached_tokens(prompt_array(prompt)) == num_cached
    assert scheduler.describe() == before
    if prompt:
        scheduler.submit([spec("b", prompt, max_new_tokens=1)])
        (admission,) = scheduler.next_plan().admissions
        assert admission.device_hit_tokens == num_cached


def test_extra_keys_keep_prompts_apart() -> None:
    scheduler = _served([1, 2, 3, 4, 5])
    assert scheduler.find_cached_tokens(prompt_array([1, 2, 3, 4, 5])) == 4
    assert scheduler.find_cached_tokens(prompt_array([1, 2, 3, 4, 5]), [b"salt"]) == 0


def test_without_a_cache_nothing_is_found() -> None:
    assert _served([1, 2, 3, 4, 5], enable_prefix_cache=False).find_cached_tokens(prompt_array([1, 2, 3, 4, 5])) == 0


def test_every_group_must_back_it() -> None:
    scheduler = _served(list(range(1, 18)), cache_groups=[full_group(), sliding_group(window_tokens=5)])
    # The window's blocks are there at the end of the prompt alone.
    assert scheduler.find_cached_tokens(prompt_array(list(range(1, 18)))) == 16
    assert scheduler.find_cached_tokens(prompt_array(list(range(1, 10)))) == 0


def prompt_array(prompt: list[int]) -> np.ndarray:
    return np.asarray(prompt, dtype=np.int32)

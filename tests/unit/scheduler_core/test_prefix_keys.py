"""Which prompts a scheduler says would hit its device cache, by keys that include everything a hit depends on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import scheduler_core as sc

from .builders import Runtime, full_group, scheduler_config, spec, state_group


def tracking(**changes: object) -> sc.Scheduler:
    scheduler = sc.Scheduler(scheduler_config(**changes))  # type: ignore[arg-type]
    scheduler.track_prefix_keys()
    return scheduler


def keys_of(tokens: int | Sequence[int], extra_keys: Sequence[bytes] = ()) -> list[int]:
    ids = range(tokens) if isinstance(tokens, int) else tokens
    return sc.prefix_keys(np.array(ids, dtype=np.int32), 4, list(extra_keys))


def serve(scheduler: sc.Scheduler, request: sc.RequestSpec) -> None:
    scheduler.submit([request])
    runtime = Runtime(scheduler)
    runtime.run_until_idle()
    runtime.finish(request.request_id)


def test_a_key_is_the_beginning_of_the_digest_of_its_grain() -> None:
    tokens = np.arange(9, dtype=np.int32)
    digests = sc.hash_grains(tokens, 4, [b"tenant"])
    assert keys_of(9, [b"tenant"]) == [int.from_bytes(digest[:8], "little") for digest in digests]
    assert keys_of(9, [b"tenant"]) != keys_of(9)


def test_what_becomes_cached_is_told_once_front_first() -> None:
    scheduler = tracking()
    serve(scheduler, spec("a", 9, max_new_tokens=1))
    changes = scheduler.drain_prefix_keys()
    assert (changes.is_cleared, changes.removed, changes.stored) == (False, [], keys_of(8))
    assert not scheduler.drain_prefix_keys()
    serve(scheduler, spec("b", 9, max_new_tokens=1))
    assert not scheduler.drain_prefix_keys()


def test_prompts_with_other_extra_keys_have_keys_of_their_own() -> None:
    scheduler = tracking()
    for name, salt in (("a", b"one"), ("b", b"two")):
        request = sc.RequestSpec(request_id=name, tokens=list(range(9)), max_new_tokens=1, extra_keys=[salt])
        serve(scheduler, request)
        assert scheduler.drain_prefix_keys().stored == keys_of(8, [salt])


def test_what_is_evicted_is_told_and_what_came_and_went_in_between_is_not() -> None:
    scheduler = tracking(num_lcm_blocks=7)
    serve(scheduler, spec("a", 12, max_new_tokens=1))
    assert scheduler.drain_prefix_keys().stored == keys_of(12)
    for number in range(1, 4):
        serve(scheduler, spec(f"b{number}", range(50 * number, 50 * number + 12), max_new_tokens=1))
    changes = scheduler.drain_prefix_keys()
    assert sorted(changes.removed) == sorted(keys_of(12))
    assert set(changes.stored) == {*keys_of(range(100, 112)), *keys_of(range(150, 162))}


def test_beside_a_state_group_only_boundaries_with_a_snapshot_count() -> None:
    scheduler = tracking(cache_groups=[full_group(), state_group()], num_lcm_blocks=32, token_budget=8)
    serve(scheduler, spec("a", 26, max_new_tokens=1))
    assert scheduler.drain_prefix_keys().stored == [keys_of(26)[5]]


def test_a_clear_supersedes_what_was_told() -> None:
    scheduler = tracking()
    serve(scheduler, spec("a", 9))
    assert scheduler.clear_cache()
    changes = scheduler.drain_prefix_keys()
    assert (changes.is_cleared, changes.removed, changes.stored) == (True, [], [])
    serve(scheduler, spec("b", 9, max_new_tokens=1))
    assert scheduler.drain_prefix_keys().stored == keys_of(8)


def test_keys_are_kept_track_of_from_the_beginning_or_not_at_all() -> None:
    scheduler = sc.Scheduler(scheduler_config())
    serve(scheduler, spec("a", 9))
    assert not scheduler.drain_prefix_keys()
    with pytest.raises(sc.ContractError, match="submitted before"):
        scheduler.track_prefix_keys()


def test_events_and_keys_are_told_side_by_side() -> None:
    scheduler = tracking(enable_prefix_events=True)
    scheduler.track_prefix_keys()
    serve(scheduler, spec("a", 9, max_new_tokens=1))
    assert len(scheduler.drain_prefix_events()) == 2
    assert scheduler.drain_prefix_keys().stored == keys_of(8)

"""Which prompts a scheduler says would hit its device cache, by keys that include everything a hit depends on."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

import scheduler_core as sc

from .builders import Runtime, full_group, scheduler_config, sliding_group, spec, state_group


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


def test_beside_a_window_only_boundaries_that_it_is_cached_before_count() -> None:
    """The window reaches two blocks back. A prompt leaves those before its end, so no hit can end one earlier."""
    scheduler = tracking(cache_groups=[full_group(), sliding_group(window_tokens=9)], num_lcm_blocks=32)
    serve(scheduler, spec("a", 26, max_new_tokens=1))
    assert scheduler.drain_prefix_keys().stored == [keys_of(26)[5]]
    # The next one hits there, and leaves the grain behind it as well.
    serve(scheduler, spec("b", 30, max_new_tokens=1))
    assert scheduler.drain_prefix_keys().stored == [keys_of(30)[6]]


@pytest.mark.parametrize("window_tokens", [2, 5, 6, 9, 14])
@pytest.mark.parametrize("block_granularity", [2, 4])
def test_what_was_told_is_what_a_prompt_would_hit(window_tokens: int, block_granularity: int) -> None:
    """Prompts that share beginnings, in a pool that holds few of them."""
    group = sliding_group(window_tokens=window_tokens, block_granularity=block_granularity)
    scheduler = tracking(
        cache_groups=[full_group(), group], num_lcm_blocks=36, token_budget=12, max_batch_size=4, role=sc.Role.FUSED
    )
    draw = random.Random(window_tokens * 10 + block_granularity)
    told, num_told, num_removed, num_hits = set[int](), 0, 0, 0
    prompts = [[0] * draw.randrange(5, 14) + [number] * draw.randrange(1, 20) for number in range(12)]
    prompts += [[*prompt[: draw.randrange(5, len(prompt))], 50 + number] for number, prompt in enumerate(prompts)]
    for turn in range(60):
        serve(scheduler, spec(f"{turn}", draw.choice(prompts), max_new_tokens=draw.randrange(1, 6)))
        changes = scheduler.drain_prefix_keys()
        assert not told & {*changes.stored}
        assert told >= {*changes.removed}
        told = told - {*changes.removed} | {*changes.stored}
        num_told += len(changes.stored)
        num_removed += len(changes.removed)
        for prompt in prompts:
            # The last token of a prompt is always computed.
            keys = keys_of(prompt[:-1])
            depth = max((depth for depth, key in enumerate(keys, start=1) if key in told), default=0)
            assert scheduler.find_cached_tokens(np.array(prompt, dtype=np.int32), []) == 4 * depth
            num_hits += depth > 0
    assert num_told > 40
    assert num_removed > 20
    assert num_hits > 100
    assert scheduler.clear_cache()
    assert scheduler.drain_prefix_keys().is_cleared


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

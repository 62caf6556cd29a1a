"""What a configuration must satisfy before anything is built from it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

import scheduler_core as sc

from .builders import full_group, scheduler_config


def _config(**changes: Any) -> sc.SchedulerConfig:
    fields: dict[str, Any] = {
        "role": sc.Role.FUSED,
        "prefix_granularity": 8,
        "num_lcm_blocks": 4,
        "max_batch_size": 2,
        "token_budget": 16,
        "cache_groups": [full_group()],
    }
    return sc.SchedulerConfig(**(fields | changes))


def _group(**changes: Any) -> sc.CacheGroupConfig:
    fields: dict[str, Any] = {
        "group_id": "full",
        "family": sc.Family.HISTORY,
        "retention": sc.Retention.FULL_HISTORY,
        "block_granularity": 4,
    }
    return sc.CacheGroupConfig(**(fields | changes))


def test_a_sound_configuration_passes() -> None:
    _config().validate()


@pytest.mark.behaviour("C1", "C2", "C3", "C4", "T2")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prefix_granularity": 0}, ["prefix_granularity", "1", "got 0"]),
        ({"num_lcm_blocks": 0}, ["num_lcm_blocks", "got 0"]),
        ({"max_batch_size": 0}, ["max_batch_size", "got 0"]),
        ({"token_budget": -3}, ["token_budget", "got -3"]),
        ({"max_ready_ungranted": 0}, ["max_ready_ungranted", "got 0"]),
        ({"verify_width": 0}, ["verify_width", "at least 1", "got 0"]),
        ({"verify_width": 17}, ["verify_width 17", "token_budget 16"]),
        ({"overlap_depth": 2}, ["overlap_depth", "0 or 1", "got 2"]),
        ({"overlap_depth": -1}, ["overlap_depth", "0 or 1", "got -1"]),
        (
            {"eviction_policy": sc.EvictionPolicy.AGED_FREQUENCY, "enable_prefix_cache": False},
            ["eviction_policy aged_frequency", "enable_prefix_cache"],
        ),
        (
            {"enable_prefix_events": True, "enable_prefix_cache": False},
            ["enable_prefix_events", "enable_prefix_cache"],
        ),
        ({"cache_groups": []}, ["cache_groups"]),
        ({"cache_groups": [_group(), _group()]}, ['"full"', "twice"]),
        ({"cache_groups": [_group(group_id="")]}, ["group_id"]),
        ({"cache_groups": [_group(block_granularity=0)]}, ['"full"', "block_granularity", "got 0"]),
        ({"cache_groups": [_group(block_granularity=3)]}, ['"full"', "block_granularity 3", "prefix_granularity 8"]),
        ({"cache_groups": [_group(cache_blocks_per_lcm_block=0)]}, ["cache_blocks_per_lcm_block", "got 0"]),
        ({"cache_groups": [_group(shard_count=0)]}, ['"full"', "shard_count", "got 0"]),
        ({"cache_groups": [_group(family=sc.Family.STATE, replayable=True)]}, ['"full"', "replayable"]),
        ({"num_lcm_blocks": 2**30, "cache_groups": [_group(cache_blocks_per_lcm_block=8)]}, ["int32"]),
        (
            {"cache_groups": [_group(cache_blocks_per_lcm_block=3, shard_count=2)]},
            ["shard_count 2", "cache_blocks_per_lcm_block 3"],
        ),
        (
            {"token_budget": 7, "cache_groups": [_group(group_id="ssm", family=sc.Family.STATE)]},
            ["token_budget 7", "prefix_granularity 8", '"ssm"'],
        ),
        (
            {"cache_groups": [_group(family=sc.Family.STATE, retention=sc.Retention.SLIDING_WINDOW)]},
            ["state group", "sliding_window"],
        ),
        (
            {"cache_groups": [_group(retention=sc.Retention.SLIDING_WINDOW, sliding_window_tokens=0)]},
            ["sliding_window_tokens", "got 0"],
        ),
        (
            {
                "token_budget": 19,
                "cache_groups": [
                    _group(retention=sc.Retention.SLIDING_WINDOW, sliding_window_tokens=10, replayable=True)
                ],
            },
            ["token_budget 19", "at least 20", "replayable window of 10"],
        ),
        (
            {
                "cache_groups": [
                    _group(retention=sc.Retention.SLIDING_WINDOW, sliding_window_tokens=4, replayable=True),
                    _group(group_id="ssm", family=sc.Family.STATE),
                ]
            },
            ['"ssm"', "beside a replayable group"],
        ),
        ({"cache_groups": [_group(retention=sc.Retention.SLIDING_WINDOW)]}, ["sliding_window_tokens"]),
        ({"cache_groups": [_group(sliding_window_tokens=4)]}, ["sliding_window_tokens"]),
        ({"cache_groups": [_group(replayable=True)]}, ["replayable"]),
    ],
)
def test_a_bad_configuration_is_refused_with_its_culprit(changes: dict[str, Any], words: list[str]) -> None:
    config = _config(**changes)
    with pytest.raises(sc.ConfigError) as refusal:
        config.validate()
    for word in words:
        assert word in str(refusal.value)
    with pytest.raises(sc.ConfigError):
        sc.Scheduler(config)


def test_lru_is_the_policy_nobody_has_to_name() -> None:
    assert _config().eviction_policy == sc.EvictionPolicy.LRU
    aged = _config(eviction_policy=sc.EvictionPolicy.AGED_FREQUENCY)
    aged.validate()
    assert aged.eviction_policy == sc.EvictionPolicy.AGED_FREQUENCY


@pytest.mark.behaviour("C1")
def test_there_is_no_default_configuration() -> None:
    with pytest.raises(TypeError):
        sc.SchedulerConfig()  # type: ignore[call-arg]


@pytest.mark.behaviour("C2")
def test_wide_rows_and_overlapped_plans_are_legal_in_every_role() -> None:
    for role in (sc.Role.FUSED, sc.Role.PREFILL, sc.Role.DECODE):
        _config(role=role, verify_width=16, overlap_depth=1).validate()


@pytest.mark.behaviour("K9")
def test_the_bound_of_a_request_is_what_the_pool_holds() -> None:
    two_groups = [full_group("a", block_granularity=2), full_group("b", block_granularity=2)]
    uneven = [full_group("a", block_granularity=2), full_group("b", block_granularity=1)]
    packed = [full_group("a", block_granularity=2, cache_blocks_per_lcm_block=3)]
    for groups, bound in ((two_groups, 8), (uneven, 5), (packed, 48)):
        config = scheduler_config(prefix_granularity=2, num_lcm_blocks=8, cache_groups=groups)
        assert sc.Scheduler(config).max_request_tokens == bound
    ahead = scheduler_config(prefix_granularity=2, num_lcm_blocks=8, cache_groups=two_groups, overlap_depth=1)
    assert sc.Scheduler(ahead).max_request_tokens == 7


@pytest.mark.behaviour("C2")
def test_every_group_states_the_span_of_its_blocks() -> None:
    with pytest.raises(TypeError):
        sc.CacheGroupConfig(  # type: ignore[call-arg]
            group_id="full", family=sc.Family.HISTORY, retention=sc.Retention.FULL_HISTORY
        )


@pytest.mark.behaviour("C3")
def test_exactly_three_kinds_of_groups_exist() -> None:
    legal = []
    for family in sc.Family:
        for retention in sc.Retention:
            for window in (None, 0, 5):
                group = _group(family=family, retention=retention, sliding_window_tokens=window)
                with suppress(sc.ConfigError):
                    _config(cache_groups=[group]).validate()
                    legal.append((family, retention, window))
    assert legal == [
        (sc.Family.HISTORY, sc.Retention.FULL_HISTORY, None),
        (sc.Family.HISTORY, sc.Retention.SLIDING_WINDOW, 5),
        (sc.Family.STATE, sc.Retention.FULL_HISTORY, None),
    ]


@pytest.mark.behaviour("C4")
@pytest.mark.parametrize(
    ("group", "least_budget"),
    [
        (_group(family=sc.Family.STATE), 8),
        (_group(retention=sc.Retention.SLIDING_WINDOW, sliding_window_tokens=10, replayable=True), 20),
        (_group(retention=sc.Retention.SLIDING_WINDOW, sliding_window_tokens=3, replayable=True), 11),
        (_group(retention=sc.Retention.SLIDING_WINDOW, sliding_window_tokens=10), 1),
    ],
)
def test_the_budget_holds_the_smallest_chunk_of_every_group(group: sc.CacheGroupConfig, least_budget: int) -> None:
    _config(cache_groups=[group], token_budget=least_budget).validate()
    with pytest.raises(sc.ConfigError, match="token_budget"):
        _config(cache_groups=[group], token_budget=least_budget - 1).validate()


@pytest.mark.behaviour("C5")
def test_what_a_peer_sends_follows_from_the_kind_of_a_group() -> None:
    groups = [_group(), _group(group_id="ssm", family=sc.Family.STATE)]
    for role in sc.Role:
        _config(role=role, cache_groups=groups).validate()
    with pytest.raises(TypeError):
        _group(transfer_policy="full_suffix")

"""Which node has which prefix, by what nodes tell and by what is on its way to them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from node_runtime.prefix_feed import PrefixChange, PrefixFeed
from router_node.prefix_index import PrefixIndex
from router_node.prompt_prefixes import PromptPrefixes
from scheduler_core import prefix_keys

KEYS = [11, 12, 13, 14]


def _snapshot(*keys: int, sequence: int = 1) -> PrefixChange:
    return PrefixChange(sequence=sequence, base_sequence=0, is_snapshot=True, removed=(), stored=keys)


def _delta(base: int, *, removed: tuple[int, ...] = (), stored: tuple[int, ...] = ()) -> PrefixChange:
    return PrefixChange(sequence=base + 1, base_sequence=base, is_snapshot=False, removed=removed, stored=stored)


def _index(max_keys_per_node: int = 100) -> PrefixIndex:
    return PrefixIndex(max_keys_per_node=max_keys_per_node)


def test_the_longest_prefix_counts_whether_or_not_those_before_it_are_there() -> None:
    index = _index()
    assert index.apply("a", 1, _snapshot(11, 12))
    assert index.apply("b", 1, _snapshot(13))
    assert index.apply("c", 1, _snapshot(99))
    assert index.find_depths(KEYS, ["a", "b", "c", "unknown"]) == {"a": 2, "b": 3}
    assert index.find_depths(KEYS, ["a"]) == {"a": 2}
    assert index.find_depths([], ["a"]) == {}


def test_changes_apply_in_order_and_a_gap_forgets_the_node() -> None:
    index = _index()
    assert index.apply("a", 1, _snapshot(11))
    assert index.apply("a", 1, _delta(1, stored=(12,)))
    assert index.apply("a", 1, _delta(2, removed=(12,), stored=(13,)))
    assert index.find_depths(KEYS, ["a"]) == {"a": 3}
    assert index.position("a") == (1, 3)
    assert not index.apply("a", 1, _delta(4, stored=(14,)))
    assert index.find_depths(KEYS, ["a"]) == {}
    assert index.position("a") == (1, 0)
    assert index.apply("a", 1, _snapshot(14, sequence=9))
    assert index.find_depths(KEYS, ["a"]) == {"a": 4}


def test_another_process_at_the_address_begins_anew() -> None:
    index = _index()
    assert index.apply("a", 1, _snapshot(11))
    assert not index.apply("a", 2, _delta(1, stored=(12,)))
    assert index.find_depths(KEYS, ["a"]) == {}
    assert index.apply("a", 2, _snapshot(12))
    assert index.find_depths(KEYS, ["a"]) == {"a": 2}


def test_no_node_can_make_the_index_grow_beyond_its_share(caplog: pytest.LogCaptureFixture) -> None:
    index = _index(max_keys_per_node=3)
    assert index.apply("a", 1, _snapshot(*range(1000)))
    assert index.apply("a", 1, _delta(1, stored=tuple(range(2000, 3000))))
    assert index.num_keys("a") == 3
    assert len(caplog.records) == 1
    # What it had first stays right, and makes room when it goes.
    assert index.apply("a", 1, _delta(2, removed=(1,), stored=(12,)))
    assert index.find_depths(KEYS, ["a"]) == {"a": 2}
    index.forget("a")
    assert index.find_depths([0], ["a"]) == {}


def test_a_prompt_on_its_way_counts_as_cached_while_it_is() -> None:
    index = _index()
    assert index.apply("a", 1, _snapshot(11))
    with index.expecting(KEYS, ["a", "b"]), index.expecting(KEYS[:2], ["a"]):
        assert index.find_depths(KEYS, ["a", "b"]) == {"a": 4, "b": 4}
        assert index.apply("a", 1, _delta(1, stored=(12, 13)))
        assert index.apply("a", 1, _delta(2, removed=(11,)))
        assert index.find_depths(KEYS[:1], ["a"]) == {"a": 1}
    assert index.find_depths(KEYS, ["a", "b"]) == {"a": 3}
    assert index.find_depths(KEYS[:1], ["a"]) == {}


def test_a_node_that_left_and_came_back_under_way_is_not_confused_with_another() -> None:
    index = _index()
    with index.expecting(KEYS, ["a"]):
        index.forget("a")
        assert index.apply("b", 1, _snapshot(11))
        assert index.apply("a", 2, _snapshot(12))
    assert index.find_depths(KEYS, ["a", "b"]) == {"a": 2, "b": 1}
    with index.expecting(KEYS, ["c"]):
        index.forget("c")
    assert index.apply("d", 1, _snapshot(14))
    assert index.find_depths(KEYS, ["a", "b", "c", "d"]) == {"a": 2, "b": 1, "d": 4}


def test_it_agrees_with_plain_sets_whatever_happens() -> None:
    rng = random.Random(3)
    index, names = _index(), ["a", "b", "c"]
    feeds = {name: PrefixFeed(max_remembered_keys=30) for name in names}
    sets: dict[str, set[int]] = {name: set() for name in names}
    for _ in range(500):
        name = rng.choice(names)
        removed = rng.sample(sorted(sets[name]), min(len(sets[name]), rng.randrange(4)))
        stored = [rng.randrange(60) for _ in range(rng.randrange(5))]
        sets[name] = (sets[name] - set(removed)) | set(stored)
        feeds[name].apply(is_cleared=False, removed=removed, stored=stored)
        if rng.random() < 0.3:
            _, sequence = index.position(name)
            assert all(index.apply(name, 1, change) for change in feeds[name].changes_since(sequence))
            keys = [rng.randrange(60) for _ in range(6)]
            deepest = max((d for d in range(1, 7) if keys[d - 1] in sets[name]), default=0)
            assert index.find_depths(keys, [name]).get(name, 0) == deepest


def test_the_keys_of_a_prompt_are_those_of_the_scheduler_without_the_last_token() -> None:
    prefixes = PromptPrefixes(range(9), [b"salt"])
    assert prefixes.keys(4) == prefix_keys(np.arange(8, dtype=np.int32), 4, [b"salt"])
    # A ninth token makes the second grain whole and yet not the last.
    assert len(PromptPrefixes(range(8), []).keys(4)) == 1
    assert prefixes.keys(8) == prefix_keys(np.arange(8, dtype=np.int32), 8, [b"salt"])
    assert prefixes.keys(4)[0] != PromptPrefixes(range(9), []).keys(4)[0]


def test_the_beginning_of_a_prompt_is_its_first_grain_or_all_of_it() -> None:
    long = PromptPrefixes(range(20), []).beginning(4)
    assert long == PromptPrefixes(range(9), []).beginning(4) != PromptPrefixes(range(9), [b"x"]).beginning(4)
    short = PromptPrefixes([1, 2], []).beginning(4)
    assert short == PromptPrefixes([1, 2], []).beginning(4)
    assert len({short, PromptPrefixes([1, 3], []).beginning(4), PromptPrefixes([1, 2], [b"x"]).beginning(4)}) == 3

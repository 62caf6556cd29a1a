"""What subscribers of the engine protocol hear of the cache, from the events of a real scheduler."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from unit.scheduler_core.builders import Runtime, full_group, scheduler_config, spec

from decode_node.engine_protocol.kv_feed import SEQUENCE_STEP, KvBatch, KvFeed
from scheduler_core import PrefixRemoved, PrefixStored, Scheduler


class Cache:
    """A scheduler whose events enter a feed."""

    def __init__(self, feed: KvFeed, **changes: object) -> None:
        self._feed = feed
        self._scheduler = Scheduler(scheduler_config(**changes))  # type: ignore[arg-type]
        self._scheduler.track_prefix_events(with_extra_keys=False)
        self._num_requests = 0

    def serve(self, tokens: Iterable[int]) -> None:
        self._num_requests += 1
        request = spec(f"request-{self._num_requests}", list(tokens), max_new_tokens=1)
        self._scheduler.submit([request])
        runtime = Runtime(self._scheduler)
        runtime.run_until_idle()
        runtime.finish(request.request_id)
        self.tell()

    def clear(self) -> None:
        assert self._scheduler.clear_cache()
        self.tell()

    def tell(self) -> None:
        self._feed.apply(self._scheduler.drain_prefix_events(), unix_s=1.0)


def known_to(batches: Iterable[KvBatch], known: dict[int, list[int]]) -> dict[int, list[int]]:
    """What a subscriber knows that knew this and was told those: tokens by hash."""
    for batch in batches:
        if batch.part is not None and batch.part.index == 0:
            known = {}
        for event in batch.events:
            if isinstance(event, PrefixStored):
                assert event.parent_hash is None or event.parent_hash in known, "a parent comes first"
                known[event.hash] = event.tokens.tolist()
            elif isinstance(event, PrefixRemoved):
                del known[event.hash]
            else:
                known.clear()
    return known


def test_a_subscriber_knows_the_same_whether_it_was_there_came_back_or_is_new() -> None:
    feed = KvFeed(first_sequence=SEQUENCE_STEP)
    cache = Cache(feed, num_lcm_blocks=12)
    sequence, there = 0, dict[int, list[int]]()
    for begin in range(0, 600, 50):
        cache.serve(range(begin, begin + 17))
        there = known_to(feed.batches_since(sequence), there)
        sequence = feed.sequence
        assert len(there) == feed.num_grains
        assert known_to(feed.batches_since(0), {}) == there
    assert known_to(feed.batches_since(sequence), dict(there)) == there
    # Twelve blocks hold three such prompts at most, so much was removed meanwhile.
    assert 4 <= len(there) <= 12
    cache.clear()
    assert known_to(feed.batches_since(sequence), there) == {}


def test_numbers_follow_one_another_and_a_state_ends_with_the_newest() -> None:
    feed = KvFeed(first_sequence=SEQUENCE_STEP)
    cache = Cache(feed)
    (empty,) = feed.batches_since(0)
    assert (empty.sequence, empty.events) == (SEQUENCE_STEP, ())
    for begin in (0, 100, 200):
        cache.serve(range(begin, begin + 9))
    numbers = [batch.sequence for batch in feed.batches_since(SEQUENCE_STEP)]
    assert numbers == list(range(SEQUENCE_STEP + 1, feed.sequence + 1))
    *_, last = feed.batches_since(0)
    assert last.sequence == feed.sequence


def test_one_that_is_too_far_behind_and_one_of_another_process_get_the_whole_state() -> None:
    feed = KvFeed(first_sequence=5 * SEQUENCE_STEP, max_remembered_tokens=40)
    cache = Cache(feed)
    for begin in range(0, 1000, 100):
        cache.serve(range(begin, begin + 9))
    for number in (
        5 * SEQUENCE_STEP,
        5 * SEQUENCE_STEP + 1,
        3 * SEQUENCE_STEP + 7,
        feed.sequence + 1,
        9 * SEQUENCE_STEP,
    ):
        first, *_ = feed.batches_since(number)
        assert first.part is not None
        assert first.part.num_grains == feed.num_grains
    (newest,) = feed.batches_since(feed.sequence - 1)
    assert newest.part is None


def test_a_large_state_comes_in_parts_that_each_fit_a_message() -> None:
    feed = KvFeed(first_sequence=SEQUENCE_STEP)
    grain = 4096
    group = full_group(block_granularity=grain)
    cache = Cache(feed, prefix_granularity=grain, num_lcm_blocks=64, token_budget=grain, cache_groups=[group])
    cache.serve(range(40 * grain + 1))
    parts = list(feed.batches_since(0))
    assert len(parts) > 1
    assert [part.sequence for part in parts] == list(range(feed.sequence - len(parts) + 1, feed.sequence + 1))
    assert [part.part.index for part in parts if part.part is not None] == list(range(len(parts)))
    assert all(sum(grain for _ in part.events) <= 16_384 for part in parts)
    assert len(known_to(parts, {})) == 40


def test_a_large_state_is_made_part_by_part_and_what_happens_meanwhile_comes_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feed = KvFeed(first_sequence=SEQUENCE_STEP)
    grain = 4096
    group = full_group(block_granularity=grain)
    cache = Cache(feed, prefix_granularity=grain, num_lcm_blocks=48, token_budget=grain, cache_groups=[group])
    cache.serve(range(40 * grain + 1))
    made: list[int] = []

    def note(**fields: object) -> KvBatch:
        batch = KvBatch(**fields)  # type: ignore[arg-type]
        made.append(batch.sequence)
        return batch

    monkeypatch.setattr("decode_node.engine_protocol.kv_feed.KvBatch", note)
    state, heard = feed.batches_since(0), dict[int, list[int]]()
    sequence = feed.sequence
    assert made == []
    for num_parts, part in enumerate(state, start=1):
        assert len(made) == num_parts
        assert part.part is not None
        assert part.part.num_grains == 40
        heard = known_to([part], heard)
        sequence = part.sequence
        # Of the grains of the state some go, and others come.
        monkeypatch.undo()
        for begin in range(4):
            cache.serve(range(num_parts * 100 + begin, num_parts * 100 + begin + 4 * grain + 1))
        monkeypatch.setattr("decode_node.engine_protocol.kv_feed.KvBatch", note)
    assert len(heard) == 40
    assert num_parts > 5
    monkeypatch.undo()
    whole = known_to(feed.batches_since(sequence), heard)
    assert whole == known_to(feed.batches_since(0), {})
    assert len(whole) == feed.num_grains


def test_who_lost_the_stream_in_the_middle_of_a_state_gets_it_whole() -> None:
    feed = KvFeed(first_sequence=SEQUENCE_STEP)
    grain = 4096
    group = full_group(block_granularity=grain)
    cache = Cache(feed, prefix_granularity=grain, num_lcm_blocks=64, token_budget=grain, cache_groups=[group])
    cache.serve(range(40 * grain + 1))
    # The batches that the parts of the state share their numbers with.
    for begin in range(1, 6):
        cache.serve(range(begin, begin + grain + 1))
    parts = list(feed.batches_since(0))
    assert len(parts) > 2
    cache.serve(range(7, grain + 8))
    whole = known_to(feed.batches_since(parts[-1].sequence), known_to(parts, {}))
    assert len(whole) == feed.num_grains
    # Who has heard all of a state is told what is new, likewise who has heard the batches of before it.
    for number in (parts[-1].sequence, parts[0].sequence - 1):
        first, *_ = feed.batches_resumed_from(number)
        assert first.part is None
    for num_heard in range(1, len(parts) + 1):
        heard = known_to(parts[:num_heard], {})
        assert known_to(feed.batches_resumed_from(parts[num_heard - 1].sequence), heard) == whole, num_heard


def test_numbers_of_parts_are_remembered_only_as_long_as_the_batches_of_the_same_numbers() -> None:
    feed = KvFeed(first_sequence=SEQUENCE_STEP, max_remembered_tokens=70_000)
    grain = 4096
    group = full_group(block_granularity=grain)
    cache = Cache(feed, prefix_granularity=grain, num_lcm_blocks=64, token_budget=grain, cache_groups=[group])
    for begin in range(8):
        cache.serve(range(begin, begin + 40 * grain + 1))
        assert len(list(feed.batches_since(0))) > 1
        assert len(feed._part_numbers) <= len(feed._log)


def test_a_number_that_leaves_no_room_below_is_refused() -> None:
    with pytest.raises(ValueError, match=f"first_sequence: 1 given, at least {SEQUENCE_STEP} required"):
        KvFeed(first_sequence=1)

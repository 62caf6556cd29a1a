"""The clocks of a node."""

from __future__ import annotations

import time

import pytest

from node_runtime.clock import ManualClock, SystemClock


def test_a_manual_clock_moves_only_when_told() -> None:
    clock = ManualClock(now_s=5.0, epoch_ns=1_000_000_000)
    assert clock.now_s() == 5.0
    clock.advance(0.25)
    assert clock.now_s() == 5.25
    assert (clock.unix_ns_at(5.0), clock.unix_ns_at(5.25)) == (6_000_000_000, 6_250_000_000)


def test_a_manual_clock_never_goes_back() -> None:
    with pytest.raises(ValueError, match="seconds must be >= 0, got -1"):
        ManualClock().advance(-1)


def test_the_system_clock_maps_a_moment_to_one_time_of_day_however_often_it_is_asked() -> None:
    clock = SystemClock()
    now_s = clock.now_s()
    moments = [now_s - 10 + step * 1e-5 for step in range(1000)]
    first = [clock.unix_ns_at(moment) for moment in moments]
    assert first == [clock.unix_ns_at(moment) for moment in moments]
    assert first == sorted(set(first))


def test_the_system_clock_agrees_with_the_time_of_day() -> None:
    clock = SystemClock()
    before_ns = time.time_ns()
    between_s = clock.now_s()
    after_ns = time.time_ns()
    slack_ns = 1_000_000_000
    assert before_ns - slack_ns <= clock.unix_ns_at(between_s) <= after_ns + slack_ns

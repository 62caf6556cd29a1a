"""The clocks of a node."""

from __future__ import annotations

import pytest

from node_runtime.clock import ManualClock, SystemClock


def test_a_manual_clock_moves_only_when_told() -> None:
    clock = ManualClock(now_s=5.0, epoch_ns=1_000_000_000)
    assert (clock.now_s(), clock.unix_ns()) == (5.0, 6_000_000_000)
    clock.advance(0.25)
    assert (clock.now_s(), clock.unix_ns()) == (5.25, 6_250_000_000)
    assert clock.unix_ns_at(5.0) == 6_000_000_000


def test_a_manual_clock_never_goes_back() -> None:
    with pytest.raises(ValueError, match="seconds must be >= 0, got -1"):
        ManualClock().advance(-1)


def test_the_system_clock_maps_monotonic_readings_to_the_time_of_day_in_order() -> None:
    clock = SystemClock()
    now_s = clock.now_s()
    assert clock.unix_ns_at(now_s - 10) < clock.unix_ns_at(now_s) <= clock.unix_ns()

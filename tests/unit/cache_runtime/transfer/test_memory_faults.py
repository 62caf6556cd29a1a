"""The faults the in-process plane can inject, which the tests of the nodes rely on."""

from __future__ import annotations

import numpy as np
import pytest

from cache_runtime.transfer.engine import (
    EngineClosed,
    PeerLink,
    PeerUnreachable,
    Region,
    Run,
    TransferFailed,
    TransferTimeout,
)
from cache_runtime.transfer.memory_engine import MemoryEngine, MemoryFabric


class Pair:
    """Two connected engines with 100 bytes each, and a link from one to the other."""

    def __init__(self) -> None:
        self.fabric = MemoryFabric()
        self.writer, self.receiver = MemoryEngine(self.fabric), MemoryEngine(self.fabric)
        self.source, self.target = np.arange(1, 101, dtype=np.uint8), np.zeros(100, dtype=np.uint8)
        self.writer.register(self.source.ctypes.data, 100)
        self.receiver.register(self.target.ctypes.data, 100)
        self.link = self.open()

    def open(self) -> PeerLink:
        return self.writer.open_peer(
            self.receiver.endpoint, [Region(base_address=self.target.ctypes.data, num_bytes=100)]
        )

    def runs(self, count: int) -> list[Run]:
        base, target = self.source.ctypes.data, self.target.ctypes.data
        return [Run(base + 10 * i, target + 10 * i, 10) for i in range(count)]


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_a_write_fails_after_the_injected_number_of_runs(pair: Pair) -> None:
    pair.fabric.fail_after(pair.receiver.endpoint, 3)
    with pytest.raises(TransferFailed, match="injected failure; 3 of 5 runs landed"):
        pair.link.write(pair.runs(5), timeout_s=9).result(9)
    assert np.count_nonzero(pair.target) == 30
    pair.fabric.fail_after(pair.receiver.endpoint, None)
    with pytest.raises(TransferFailed):
        pair.link.write(pair.runs(1), timeout_s=9).result(9)
    assert pair.open().write(pair.runs(5), timeout_s=9).result(9).num_bytes == 50


def test_a_held_write_lands_when_it_is_released(pair: Pair) -> None:
    pair.fabric.hold(pair.receiver.endpoint)
    future = pair.link.write(pair.runs(2), timeout_s=60)
    assert not future.done()
    assert not pair.target.any()
    pair.fabric.release(pair.receiver.endpoint)
    assert future.result(9).num_bytes == 20


def test_a_held_peer_does_not_hold_up_another(pair: Pair) -> None:
    other, target = MemoryEngine(pair.fabric), np.zeros(10, dtype=np.uint8)
    other.register(target.ctypes.data, 10)
    pair.fabric.hold(pair.receiver.endpoint)
    held = pair.link.write(pair.runs(1), timeout_s=60)
    link = pair.writer.open_peer(other.endpoint, [Region(base_address=target.ctypes.data, num_bytes=10)])
    link.write([Run(pair.source.ctypes.data, target.ctypes.data, 10)], timeout_s=9).result(9)
    assert not held.done()
    assert target.all()


def test_a_held_write_runs_out_of_time(pair: Pair) -> None:
    pair.fabric.hold(pair.receiver.endpoint)
    with pytest.raises(TransferTimeout):
        pair.link.write(pair.runs(2), timeout_s=0.05).result(9)
    assert not pair.target.any()


def test_closing_the_link_ends_a_held_write(pair: Pair) -> None:
    pair.fabric.hold(pair.receiver.endpoint)
    future = pair.link.write(pair.runs(2), timeout_s=60)
    pair.link.close()
    with pytest.raises(EngineClosed):
        future.result(9)


def test_an_unreachable_peer_cannot_be_opened_and_fails_writes_under_way(pair: Pair) -> None:
    pair.fabric.hold(pair.receiver.endpoint)
    future = pair.link.write(pair.runs(2), timeout_s=60)
    pair.fabric.set_unreachable(pair.receiver.endpoint)
    with pytest.raises(TransferFailed, match="the peer is gone"):
        future.result(9)
    with pytest.raises(PeerUnreachable):
        pair.open()
    pair.fabric.set_unreachable(pair.receiver.endpoint, False)
    pair.open()


def test_the_report_carries_the_injected_clock() -> None:
    fabric, ticks = MemoryFabric(), iter(range(1000))
    engine = MemoryEngine(fabric, clock=lambda: float(next(ticks)))
    memory = np.zeros(8, dtype=np.uint8)
    engine.register(memory.ctypes.data, 8)
    link = engine.open_peer(engine.endpoint, [Region(base_address=memory.ctypes.data, num_bytes=8)])
    report = link.write([], timeout_s=9).result(9)
    assert report.posted_at_s == int(report.posted_at_s) < report.landed_at_s

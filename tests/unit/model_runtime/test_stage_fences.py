"""A stage is told of only once the device has done its work, on a device whose work is done when the test says so."""

from __future__ import annotations

from cache_runtime.device import CpuDevice, CpuStream, Event, Stream
from model_runtime.stage_fences import StageFences


class ManualEvent:
    """Done when somebody says so, or waits for it. Notes whether anybody had to wait."""

    def __init__(self) -> None:
        self.done = False
        self.was_waited_for = False

    def is_done(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.was_waited_for |= not self.done
        self.done = True


class LateStream(CpuStream):
    def __init__(self, events: list[ManualEvent]) -> None:
        self._events = events

    def record_event(self) -> Event:
        self._events.append(ManualEvent())
        return self._events[-1]


class LateDevice(CpuDevice):
    """A device that has issued everything and done nothing."""

    def __init__(self) -> None:
        self.events: list[ManualEvent] = []

    def current_stream(self) -> Stream:
        return LateStream(self.events)


def test_on_the_cpu_a_stage_is_passed_on_at_once() -> None:
    seen: list[int] = []
    fences = StageFences(CpuDevice(), seen.append)
    for stage in range(3):
        fences.stored(stage)
        assert seen == list(range(stage + 1))


def test_a_stage_waits_for_its_own_work_and_for_no_other() -> None:
    device, seen = LateDevice(), list[int]()
    fences = StageFences(device, seen.append)
    fences.stored(0)
    fences.stored(1)
    assert seen == [], "nothing has been written yet"
    device.events[0].done = True
    fences.stored(2)
    assert seen == [0]
    assert not any(event.was_waited_for for event in device.events)


def test_stages_keep_their_order_whichever_work_is_done_first() -> None:
    device, seen = LateDevice(), list[int]()
    fences = StageFences(device, seen.append)
    fences.stored(0)
    fences.stored(1)
    device.events[1].done = True
    fences.stored(2)
    assert seen == []
    device.events[0].done = True
    fences.stored(3)
    assert seen == [0, 1]


def test_the_end_of_a_forward_waits_for_every_stage_that_is_left() -> None:
    device, seen = LateDevice(), list[int]()
    fences = StageFences(device, seen.append)
    for stage in range(3):
        fences.stored(stage)
    device.events[0].done = True
    fences.finish()
    assert seen == [0, 1, 2]
    assert [event.was_waited_for for event in device.events] == [False, True, True]
    fences.finish()
    assert seen == [0, 1, 2], "once each"

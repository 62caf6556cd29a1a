"""A scheduler that tells what goes into it and what comes out."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_core import Capacity, Event, Plan, RequestSpec, Scheduler, SchedulerConfig


class SchedulerWatch:
    """Hears what one scheduler is told and decides. Each method may be left as it is."""

    def on_submit(self, requests: Sequence[RequestSpec]) -> None:
        """It accepted these requests."""

    def on_plan(self, plan: Plan, capacity: Capacity) -> None:
        """It made a plan that is not empty, behind which these are its gauges."""

    def on_events(self, events: Sequence[Event]) -> None:
        """It took these events."""

    def on_clear(self, *, was_cleared: bool, before: Capacity, after: Capacity) -> None:
        """It was asked to clear its prefix cache."""


class WatchedScheduler(Scheduler):
    """Tells its watches in turn."""

    def __init__(self, config: SchedulerConfig, watches: Sequence[SchedulerWatch]) -> None:
        super().__init__(config)
        self._watches = tuple(watches)

    def submit(self, requests: Sequence[RequestSpec]) -> None:
        super().submit(requests)
        for watch in self._watches:
            watch.on_submit(requests)

    def next_plan(self) -> Plan:
        plan = super().next_plan()
        if not plan.is_empty:
            capacity = self.capacity()
            for watch in self._watches:
                watch.on_plan(plan, capacity)
        return plan

    def advance(self, events: Sequence[Event]) -> None:
        super().advance(events)
        for watch in self._watches:
            watch.on_events(events)

    def clear_cache(self) -> bool:
        before = self.capacity()
        was_cleared = super().clear_cache()
        after = self.capacity()
        for watch in self._watches:
            watch.on_clear(was_cleared=was_cleared, before=before, after=after)
        return was_cleared

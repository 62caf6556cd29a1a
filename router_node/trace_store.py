"""Spans of finished work, kept in memory by trace.

Does not know where the spans come from (see `collector`) nor how they are shown (see `waterfall`). The store belongs to
one event loop: adding and waiting happen there.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from dataclasses import dataclass, field

AttributeValue = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One finished operation. Ids are lower-case hexadecimal, times are nanoseconds since the epoch."""

    trace_id: str
    span_id: str
    parent_span_id: str
    """Empty on a root."""
    name: str
    node: str
    """Which process measured it."""
    start_ns: int
    end_ns: int
    attributes: dict[str, AttributeValue] = field(default_factory=dict)
    error: str = ""
    """Why it failed; empty when it did not."""

    def __post_init__(self) -> None:
        if not self.trace_id or not self.span_id:
            raise ValueError(f"span {self.name!r}: trace_id and span_id must not be empty")
        if self.end_ns < self.start_ns:
            raise ValueError(f"span {self.name!r}: end_ns {self.end_ns} lies before start_ns {self.start_ns}")

    @property
    def duration_ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


def is_complete(spans: Sequence[Span], required_names: Collection[str]) -> bool:
    """Whether a trace has a root, every parent that is referred to, and a span of each required name."""
    span_ids = {span.span_id for span in spans}
    has_root = any(not span.parent_span_id for span in spans)
    has_parents = all(span.parent_span_id in span_ids for span in spans if span.parent_span_id)
    return has_root and has_parents and set(required_names) <= {span.name for span in spans}


class TraceStore:
    """A ring of the newest `max_traces` traces; the oldest one leaves first. A span that arrives twice counts once."""

    def __init__(self, *, max_traces: int = 256, max_spans_per_trace: int = 1024) -> None:
        if max_traces < 1 or max_spans_per_trace < 1:
            raise ValueError(
                f"max_traces ({max_traces}) and max_spans_per_trace ({max_spans_per_trace}) must be at least 1"
            )
        self._max_traces = max_traces
        self._max_spans_per_trace = max_spans_per_trace
        self._traces: OrderedDict[str, dict[str, Span]] = OrderedDict()
        self._changed = asyncio.Condition()
        self.num_dropped_spans = 0

    async def add(self, spans: Iterable[Span]) -> None:
        """Files spans under their traces and wakes the waiters."""
        for span in spans:
            self._file(span)
        async with self._changed:
            self._changed.notify_all()

    def _file(self, span: Span) -> None:
        trace = self._traces.setdefault(span.trace_id, {})
        if span.span_id not in trace and len(trace) >= self._max_spans_per_trace:
            self.num_dropped_spans += 1
            return
        trace[span.span_id] = span
        while len(self._traces) > self._max_traces:
            _, dropped = self._traces.popitem(last=False)
            self.num_dropped_spans += len(dropped)

    def trace_ids(self) -> tuple[str, ...]:
        """Traces that are held, oldest first."""
        return tuple(self._traces)

    def spans(self, trace_id: str) -> tuple[Span, ...]:
        """What has arrived of one trace, by start time; empty when nothing has."""
        trace = self._traces.get(trace_id, {})
        return tuple(sorted(trace.values(), key=lambda span: (span.start_ns, span.end_ns, span.span_id)))

    async def finished_traces(self) -> AsyncIterator[str]:
        """Ids of traces, each once, as their roots arrive from now on. Other spans may still be on their way."""
        seen = {trace_id for trace_id in self._traces if self._has_root(trace_id)}
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: bool(self._new_roots(seen)))
            for trace_id in self._new_roots(seen):
                seen.add(trace_id)
                yield trace_id
            seen.intersection_update(self._traces)

    def _new_roots(self, seen: set[str]) -> list[str]:
        return [trace_id for trace_id in self._traces if trace_id not in seen and self._has_root(trace_id)]

    def _has_root(self, trace_id: str) -> bool:
        return any(not span.parent_span_id for span in self._traces[trace_id].values())

    async def wait_for_trace(
        self, trace_id: str, *, required_names: Collection[str] = (), timeout_s: float
    ) -> tuple[Span, ...]:
        """Waits until the trace `is_complete`, at most `timeout_s`; returns what is there by then."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: is_complete(self.spans(trace_id), required_names))
        except TimeoutError:
            pass
        return self.spans(trace_id)

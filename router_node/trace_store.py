"""Spans of finished work, kept in memory by trace.

Does not know where the spans come from (see `otlp_receiver`) nor what becomes of them (see `trace_service`). The store
belongs to one event loop: adding and waiting happen there.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from node_runtime.rpc import span_names

AttributeValue = str | int | float | bool
_REQUESTS: Final = (f"{span_names.OPERATION_CHAT} ", f"{span_names.OPERATION_TEXT_COMPLETION} ")


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

    @property
    def request_id(self) -> str:
        """Of the request that it belongs to; empty where it does not say."""
        return str(self.attributes.get(span_names.PDMESH_REQUEST_ID, ""))

    @property
    def is_request(self) -> bool:
        """Whether it is a whole request as a router saw it. It is no root where the client had opened the trace."""
        return self.name.startswith(_REQUESTS)


def is_complete(spans: Sequence[Span], required_names: Collection[str]) -> bool:
    """Whether a trace has a root, every parent that is referred to, and a span of each required name."""
    span_ids = {span.span_id for span in spans}
    has_root = any(not span.parent_span_id for span in spans)
    has_parents = all(span.parent_span_id in span_ids for span in spans if span.parent_span_id)
    return has_root and has_parents and set(required_names) <= {span.name for span in spans}


def requests_of(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The requests of a trace in the order given, or its roots when it has no request."""
    held = tuple(spans)
    return tuple(span for span in held if span.is_request) or tuple(span for span in held if not span.parent_span_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """A request, or another root, in the order of arrival. `sequence` counts from 1."""

    sequence: int
    span: Span


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
        self._trace_by_request: dict[str, str] = {}
        self._ended: deque[EndedRequest] = deque(maxlen=max_traces)
        self._num_ended = 0
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
        is_new = span.span_id not in trace
        if is_new and len(trace) >= self._max_spans_per_trace:
            self.num_dropped_spans += 1
            return
        replaced = trace.get(span.span_id)
        trace[span.span_id] = span
        if replaced is not None and all(held.request_id != replaced.request_id for held in trace.values()):
            self._forget_request(replaced)
        if is_new and (span.is_request or not span.parent_span_id):
            self._num_ended += 1
            self._ended.append(EndedRequest(sequence=self._num_ended, span=span))
        if span.request_id:
            self._trace_by_request[span.request_id] = span.trace_id
        while len(self._traces) > self._max_traces:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, dropped = self._traces.popitem(last=False)
        self.num_dropped_spans += len(dropped)
        for span in dropped.values():
            self._forget_request(span)

    def _forget_request(self, span: Span) -> None:
        """No span of its trace names the request any more; one of the same name may have run in another trace."""
        if self._trace_by_request.get(span.request_id) == span.trace_id:
            del self._trace_by_request[span.request_id]

    def trace_ids(self) -> tuple[str, ...]:
        """Traces that are held, oldest first."""
        return tuple(self._traces)

    def spans(self, trace_id: str) -> tuple[Span, ...]:
        """What has arrived of one trace, by start time; empty when nothing has."""
        trace = self._traces.get(trace_id, {})
        return tuple(sorted(trace.values(), key=lambda span: (span.start_ns, span.end_ns, span.span_id)))

    def find(self, name: str) -> tuple[str, ...]:
        """Ids of the traces that `name` may mean: the one with this id or this request, else all that begin with it."""
        if name in self._traces:
            return (name,)
        if name in self._trace_by_request:
            return (self._trace_by_request[name],)
        return tuple(trace_id for trace_id in self._traces if trace_id.startswith(name))

    def newest_requests(self, max_requests: int) -> tuple[Span, ...]:
        """Requests and other roots of the traces that are held, the newest trace first."""
        newest: list[Span] = []
        for trace_id in reversed(self._traces):
            newest += reversed(requests_of(self.spans(trace_id)))
            if len(newest) >= max_requests:
                break
        return tuple(newest[:max_requests])

    async def ended_requests(self, after: int | None = None) -> AsyncIterator[EndedRequest]:
        """Requests and other roots as they arrive: those behind sequence `after`, by default from now on. Their spans
        may still be on their way. Those that left the ring before they were asked for are skipped.
        """
        seen = self._num_ended if after is None or after > self._num_ended else after
        while True:
            async with self._changed:
                while self._num_ended <= seen:
                    await self._changed.wait()
            for ended in tuple(self._ended):
                if ended.sequence > seen:
                    seen = ended.sequence
                    yield ended

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

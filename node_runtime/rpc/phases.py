"""Phases of a request that were measured on other threads: each becomes a span of its trace and a value of a metric."""

from __future__ import annotations

from typing import Final

from node_runtime.clock import Clock
from node_runtime.rpc.telemetry import Attributes, Span, Telemetry

_BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)


class PhaseRecorder:
    """One per service."""

    def __init__(self, telemetry: Telemetry, clock: Clock) -> None:
        self._telemetry = telemetry
        self._clock = clock
        self._duration = telemetry.metrics.histogram(
            "pdmesh.phase.duration", "s", "what requests spend their time on, by the name of its span", _BOUNDS_S
        )

    def record(
        self, span: Span, name: str, begin_s: float | None, end_s: float | None, attributes: Attributes | None = None
    ) -> None:
        """The phase `name` of the request of `span`, on this node's clock; nothing where it did not begin or end."""
        if begin_s is None or end_s is None:
            return
        clock = self._clock
        self._telemetry.record_span(name, clock.unix_ns_at(begin_s), clock.unix_ns_at(end_s), span.context, attributes)
        self._duration.record(max(0.0, end_s - begin_s), {"phase": name})

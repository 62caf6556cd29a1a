"""What the trace of one request says about where it ran. Knows the choices and their outcomes, and makes none."""

from __future__ import annotations

from node_runtime.clock import Clock
from node_runtime.rpc import Span, Telemetry, span_names, status_of
from router_node.decode_call import DecodeCall
from router_node.failures import AttemptFailure
from router_node.placement import PlacementChoice


class RequestTrace:
    """Writes to the span of one request, and hangs others below it."""

    def __init__(self, telemetry: Telemetry, clock: Clock, span: Span) -> None:
        self._telemetry = telemetry
        self._clock = clock
        self._span = span

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits; empty when tracing is off."""
        return self._span.trace_id

    def tell_choice(self, choice: PlacementChoice) -> None:
        """Where the request runs from now on."""
        self._span.set_all(_nodes_of(choice))

    def record_failed(self, call: DecodeCall, failure: AttemptFailure, *, attempt: int, resumed_tokens: int) -> None:
        """A span of its own, because the node that died cannot tell its part of the story."""
        attributes: dict[str, str | int] = {
            span_names.PDMESH_ATTEMPT: attempt,
            span_names.PDMESH_RESUMED_TOKENS: resumed_tokens,
            span_names.ERROR_TYPE: status_of(failure.error).name,
        }
        self._record(span_names.SPAN_FAILED_ATTEMPT, call, attributes)

    def record_hedge(self, call: DecodeCall, *, attempt: int, outcome: str) -> None:
        """A second attempt beside the first one, up to the moment at which one of them gave a token."""
        self._record(
            span_names.SPAN_HEDGE,
            call,
            {span_names.PDMESH_ATTEMPT: attempt, span_names.PDMESH_HEDGE_OUTCOME: outcome},
        )

    def _record(self, name: str, call: DecodeCall, attributes: dict[str, str | int]) -> None:
        clock = self._clock
        self._telemetry.record_span(
            name,
            clock.unix_ns_at(call.began_at_s),
            clock.unix_ns_at(clock.now_s()),
            self._span.context,
            {**_nodes_of(call.choice), **attributes},
        )


def _nodes_of(choice: PlacementChoice) -> dict[str, str]:
    return {
        span_names.PDMESH_DECODE_NODE: choice.decode.node_id,
        span_names.PDMESH_PREFILL_NODE: "" if choice.prefill is None else choice.prefill.node_id,
    }

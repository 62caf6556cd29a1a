"""What the page shows of traces, as plain values for JSON: a line for each of the last ones, and one of them whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from router_node.trace_store import Span, TraceStore
from router_node.trace_summary import KIND_BY_NAME, summary_of
from router_node.ui.mesh_view import JsonObject

_MAX_LISTED: Final = 60


def list_traces(store: TraceStore) -> Sequence[JsonObject]:
    """The newest requests first, as far as their own spans have arrived."""
    return [_line(request, store.spans(request.trace_id)) for request in store.newest_requests(_MAX_LISTED)]


def _line(request: Span, spans: Sequence[Span]) -> JsonObject:
    summary = summary_of(request)
    phases: list[JsonObject] = [
        {"kind": KIND_BY_NAME[span.name], "name": span.name, "start_ms": _ms(span.start_ns), "end_ms": _ms(span.end_ns)}
        for span in spans
        if span.name in KIND_BY_NAME
    ]
    return {
        "trace_id": summary.trace_id,
        "name": summary.name,
        "start_ms": _ms(summary.start_ns),
        "end_ms": _ms(summary.end_ns),
        "error": summary.error,
        "request_id": summary.request_id,
        "prefill_node": summary.prefill_node,
        "decode_node": summary.decode_node,
        "input_tokens": summary.input_tokens,
        "output_tokens": summary.output_tokens,
        "phases": phases,
    }


def show_trace(store: TraceStore, trace_id: str) -> JsonObject | None:
    """Every span of a trace, depth first, siblings by start; None for a trace that is not held."""
    spans = store.spans(trace_id)
    if not spans:
        return None
    children: dict[str, list[Span]] = {}
    held = {span.span_id for span in spans}
    for span in spans:
        children.setdefault(span.parent_span_id if span.parent_span_id in held else "", []).append(span)
    rows: list[JsonObject] = []
    shown: set[str] = set()
    # Spans that enclose one another in a circle have no root among them: the first stands for one.
    for root in (*children.get("", ()), *spans):
        waiting = [(root, 0)]
        while waiting:
            span, depth = waiting.pop()
            if span.span_id not in shown:
                shown.add(span.span_id)
                rows.append(_row(span, depth))
                waiting += [(child, depth + 1) for child in reversed(children.get(span.span_id, ()))]
    return {"trace_id": trace_id, "spans": rows}


def _row(span: Span, depth: int) -> JsonObject:
    return {
        "name": span.name,
        "node": span.node,
        "depth": depth,
        "kind": KIND_BY_NAME.get(span.name, "envelope"),
        "start_ms": _ms(span.start_ns),
        "end_ms": _ms(span.end_ns),
        "error": span.error,
        "attributes": dict(span.attributes),
    }


def _ms(moment_ns: int) -> float:
    """Milliseconds since the epoch, to the microsecond."""
    return round(moment_ns / 1e6, 3)

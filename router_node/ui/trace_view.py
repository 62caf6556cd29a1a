"""What the page shows of traces, as plain values for JSON: a line for each of the last ones, and one of them whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from router_node.trace_store import Span, TraceStore
from router_node.ui.mesh_view import JsonObject

_MAX_LISTED: Final = 60
# What the time of a span was spent on; the rest enclose others.
KIND_BY_NAME: Mapping[str, str] = MappingProxyType(
    {
        "pdmesh.tokenize": "compute",
        "pdmesh.prefill.queue": "queue",
        "pdmesh.prefill.compute": "compute",
        "pdmesh.transfer": "transfer",
        "pdmesh.decode.queue": "queue",
        "pdmesh.decode.generate": "decode",
    }
)


def list_traces(store: TraceStore) -> Sequence[JsonObject]:
    """The newest requests first, as far as their roots have arrived."""
    listed: list[JsonObject] = []
    for trace_id in reversed(store.trace_ids()):
        spans = store.spans(trace_id)
        root = next((span for span in spans if not span.parent_span_id or span.name.startswith(_REQUESTS)), None)
        if root is not None:
            listed.append(_line(root, spans))
        if len(listed) == _MAX_LISTED:
            break
    return listed


# A caller may have opened the trace: then the root is its own, and not here.
_REQUESTS: Final = ("chat ", "text_completion ")


def _line(root: Span, spans: Sequence[Span]) -> JsonObject:
    phases: list[JsonObject] = [
        {"kind": KIND_BY_NAME[span.name], "name": span.name, "start_ms": _ms(span.start_ns), "end_ms": _ms(span.end_ns)}
        for span in spans
        if span.name in KIND_BY_NAME
    ]
    return {
        "trace_id": root.trace_id,
        "name": root.name,
        "start_ms": _ms(root.start_ns),
        "end_ms": _ms(root.end_ns),
        "error": root.error,
        "request_id": root.attributes.get("pdmesh.request_id", ""),
        "prefill_node": root.attributes.get("pdmesh.prefill_node", ""),
        "decode_node": root.attributes.get("pdmesh.decode_node", ""),
        "input_tokens": root.attributes.get("gen_ai.usage.input_tokens", 0),
        "output_tokens": root.attributes.get("gen_ai.usage.output_tokens", 0),
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
    waiting = [(span, 0) for span in reversed(children.get("", []))]
    while waiting:
        span, depth = waiting.pop()
        rows.append(_row(span, depth))
        waiting += [(child, depth + 1) for child in reversed(children.get(span.span_id, []))]
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

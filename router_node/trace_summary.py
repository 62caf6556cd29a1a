"""What the span of a request says about it in one line, and what the time of each span was spent on.

For everything that shows traces. Knows spans only, neither where they are kept nor how they are shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from node_runtime.rpc import span_names
from router_node.trace_store import Span

# The rest enclose others.
KIND_BY_NAME: Mapping[str, str] = MappingProxyType(
    {
        span_names.SPAN_TOKENIZE: "compute",
        span_names.SPAN_PREFILL_QUEUE: "queue",
        span_names.SPAN_PREFILL_COMPUTE: "compute",
        span_names.SPAN_TRANSFER: "transfer",
        span_names.SPAN_DECODE_QUEUE: "queue",
        span_names.SPAN_DECODE_GENERATE: "decode",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSummary:
    """One request that has ended. Nodes are empty where it was not placed."""

    trace_id: str
    request_id: str
    name: str
    start_ns: int
    end_ns: int
    status: str
    """"ok", "cancelled", or the name of the error."""
    error: str
    """Why it failed; empty when it did not."""
    prefill_node: str
    decode_node: str
    input_tokens: int
    output_tokens: int
    first_token_ms: float | None
    """From the request to its first token; None where none came, or the router did not say."""

    @property
    def duration_ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


def summary_of(request: Span) -> RequestSummary:
    """What the span of a whole request says."""
    first_token_ms = request.attributes.get(span_names.PDMESH_TIME_TO_FIRST_TOKEN_MS)
    return RequestSummary(
        trace_id=request.trace_id,
        request_id=request.request_id,
        name=request.name,
        start_ns=request.start_ns,
        end_ns=request.end_ns,
        status=_status_of(request),
        error=request.error,
        prefill_node=_text(request, span_names.PDMESH_PREFILL_NODE),
        decode_node=_text(request, span_names.PDMESH_DECODE_NODE),
        input_tokens=_count(request, span_names.GEN_AI_USAGE_INPUT_TOKENS),
        output_tokens=_count(request, span_names.GEN_AI_USAGE_OUTPUT_TOKENS),
        first_token_ms=float(first_token_ms) if isinstance(first_token_ms, int | float) else None,
    )


def _status_of(request: Span) -> str:
    if request.error:
        return _text(request, span_names.ERROR_TYPE) or "error"
    return "cancelled" if request.attributes.get(span_names.PDMESH_CANCELLED) else "ok"


def _text(span: Span, name: str) -> str:
    return str(span.attributes.get(name, ""))


def _count(span: Span, name: str) -> int:
    value = span.attributes.get(name)
    return value if isinstance(value, int) else 0

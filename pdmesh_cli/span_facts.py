"""What the attributes of spans say in words: the request, why it went where it went, and what its cache cost to move.

Knows names of attributes; how lines are laid out is `waterfall`'s business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from node_runtime.rpc import span_names
from pdmesh_cli.report import counted, format_bytes
from pdmesh_cli.terminal import format_ms
from router_node.trace_store import Span
from router_node.trace_summary import summary_of

_MS_PER_S = 1000.0
_ESTIMATES = (
    ("queue", span_names.PDMESH_PLACE_QUEUE_MS),
    ("compute", span_names.PDMESH_PLACE_COMPUTE_MS),
    ("transfer", span_names.PDMESH_PLACE_TRANSFER_MS),
    ("decode", span_names.PDMESH_PLACE_DECODE_MS),
)
_OF_GROUP = f"{span_names.PDMESH_TRANSFER_BLOCKS_OF_GROUP}."
_CACHED = (
    ("on the prefill node", span_names.PDMESH_CACHED_TOKENS_PREFILL_DEVICE),
    ("on the decode node", span_names.PDMESH_CACHED_TOKENS_DECODE_DEVICE),
    ("in host memory", span_names.PDMESH_CACHED_TOKENS_HOST),
    ("in the store", span_names.PDMESH_CACHED_TOKENS_STORAGE),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanFact:
    """One thing that is worth a line."""

    label: str
    text: str


def facts_of(spans: Sequence[Span]) -> tuple[SpanFact, ...]:
    """In the order of the spans; empty for spans that say nothing but their times."""
    facts: list[SpanFact] = []
    for span in spans:
        if span.is_request and span.request_id:
            facts.append(SpanFact(label="request", text=_request_text(span)))
        elif span.name == span_names.SPAN_PLACE and span_names.PDMESH_PLACE_POLICY in span.attributes:
            facts += (SpanFact(label=label, text=text) for label, text in _placement_facts(span))
        elif span.name == span_names.SPAN_FAILED_ATTEMPT:
            facts.append(SpanFact(label="attempt", text=_failed_attempt_text(span)))
        elif span.name == span_names.SPAN_TRANSFER and span_names.PDMESH_TRANSFER_BYTES in span.attributes:
            facts.append(SpanFact(label="transfer", text=_transfer_text(span)))
    return tuple(facts)


def _number(span: Span, name: str) -> float:
    value = span.attributes.get(name)
    return value if isinstance(value, int | float) else 0


def _count(span: Span, name: str) -> int:
    return int(_number(span, name))


def _text(span: Span, name: str) -> str:
    return str(span.attributes.get(name, ""))


def _nodes(span: Span) -> str:
    names = (_text(span, name) for name in (span_names.PDMESH_PREFILL_NODE, span_names.PDMESH_DECODE_NODE))
    return " > ".join(name for name in names if name) or "an unknown node"


def _request_text(span: Span) -> str:
    summary = summary_of(span)
    parts = [f"{summary.request_id} {summary.status}: {counted(summary.input_tokens, 'prompt token')}"]
    cached = [f"{_count(span, name):,} cached {place}" for place, name in _CACHED if _count(span, name)]
    if cached:
        parts[0] += f" ({', '.join(cached)})"
    parts.append(counted(summary.output_tokens, "completion token"))
    if summary.first_token_ms is not None:
        parts.append(f"the first after {format_ms(summary.first_token_ms)}")
    if adapter := _text(span, span_names.PDMESH_ADAPTER):
        parts.append(f"with adapter {adapter}")
    if tenant := _text(span, span_names.PDMESH_TENANT):
        parts.append(f"for {tenant}")
    return ", ".join(parts)


def _placement_facts(span: Span) -> Iterator[tuple[str, str]]:
    num_candidates = _count(span, span_names.PDMESH_PLACE_CANDIDATES)
    policy, reason = _text(span, span_names.PDMESH_PLACE_POLICY), _text(span, span_names.PDMESH_PLACE_REASON)
    yield "placed", f"{_nodes(span)} by {policy} of {counted(num_candidates, 'candidate')}: {reason}"
    cached = (
        (_count(span, span_names.PDMESH_PLACE_PREFILL_CACHED_TOKENS), "where the prompt is computed"),
        (_count(span, span_names.PDMESH_PLACE_DECODE_CACHED_TOKENS), "where it is decoded"),
    )
    known = [f"{num_tokens:,} tokens known to be cached {place}" for num_tokens, place in cached if num_tokens]
    expected = [f"{name} {format_ms(_number(span, attribute))}" for name, attribute in _ESTIMATES]
    yield "expected", ", ".join((*expected, *known))
    if others := _text(span, span_names.PDMESH_PLACE_RUNNERS_UP):
        yield "instead", others


def _failed_attempt_text(span: Span) -> str:
    cause = _text(span, span_names.ERROR_TYPE) or span.error or "no cause given"
    resumed_tokens = _count(span, span_names.PDMESH_RESUMED_TOKENS)
    behind = f", with {counted(resumed_tokens, 'token')} sent before" if resumed_tokens else ""
    return f"{_count(span, span_names.PDMESH_ATTEMPT)} on {_nodes(span)} failed: {cause}{behind}"


def _transfer_text(span: Span) -> str:
    num_bytes = _count(span, span_names.PDMESH_TRANSFER_BYTES)
    busy_ms = _number(span, span_names.PDMESH_TRANSFER_BUSY_MS)
    rate = _count(span, span_names.PDMESH_TRANSFER_BYTES_PER_S)
    # A node of an older release does not say it.
    rate = rate or (int(num_bytes / busy_ms * _MS_PER_S) if busy_ms else 0)
    groups = [
        f"{_count(span, name):,} of {name.removeprefix(_OF_GROUP)}"
        for name in span.attributes
        if name.startswith(_OF_GROUP)
    ]
    by_group = f" ({', '.join(groups)})" if len(groups) > 1 else ""
    return (
        f"{format_bytes(num_bytes)} at {format_bytes(rate)}/s from {span.node}, "
        f"{counted(_count(span, span_names.PDMESH_TRANSFER_BLOCKS), 'block')}{by_group} in "
        f"{counted(_count(span, span_names.PDMESH_TRANSFER_RUNS), 'run')}, busy for {format_ms(busy_ms)}"
    )

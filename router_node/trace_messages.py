"""Spans as the Traces service sends them, both ways."""

from __future__ import annotations

from pdmesh.v1 import traces_pb2

from router_node.trace_store import AttributeValue, Span


def message_of(span: Span) -> traces_pb2.TraceSpan:
    """A span for the wire."""
    return traces_pb2.TraceSpan(
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_span_id=span.parent_span_id,
        name=span.name,
        node=span.node,
        start_unix_ns=span.start_ns,
        end_unix_ns=span.end_ns,
        attributes={name: _attribute_of(value) for name, value in span.attributes.items()},
        error=span.error,
    )


def span_of(message: traces_pb2.TraceSpan) -> Span:
    """A span from the wire, its attributes by name. Raises ValueError for one without ids or of negative duration."""
    return Span(
        trace_id=message.trace_id,
        span_id=message.span_id,
        parent_span_id=message.parent_span_id,
        name=message.name,
        node=message.node,
        start_ns=message.start_unix_ns,
        end_ns=message.end_unix_ns,
        attributes={name: _value_of(attribute) for name, attribute in sorted(message.attributes.items())},
        error=message.error,
    )


def _attribute_of(value: AttributeValue) -> traces_pb2.SpanAttribute:
    match value:
        case bool():
            return traces_pb2.SpanAttribute(flag=value)
        case int():
            return traces_pb2.SpanAttribute(integer=value)
        case float():
            return traces_pb2.SpanAttribute(number=value)
        case str():
            return traces_pb2.SpanAttribute(text=value)


def _value_of(attribute: traces_pb2.SpanAttribute) -> AttributeValue:
    """Of a kind that a newer release may have added nothing is known."""
    match attribute.WhichOneof("value"):
        case "flag":
            return attribute.flag
        case "integer":
            return attribute.integer
        case "number":
            return attribute.number
        case "text":
            return attribute.text
        case _:
            return ""

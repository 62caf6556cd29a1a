"""Messages that are answered with OK, some of each kind: what hostile ones are made from."""

from __future__ import annotations

import json

from google.protobuf.message import Message
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue, KeyValueList
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span
from pdmesh.v1 import decode_pb2, inference_pb2, mesh_pb2, traces_pb2
from support.tiny_checkpoint import END_TOKEN

TOOL = json.dumps({"type": "function", "function": {"name": "look", "arguments": {"place": ["here"]}}})
SCHEMA = json.dumps(
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
)
TOKENS = list(b"tokens of a prompt")


def sampling(**fields: object) -> inference_pb2.SamplingParams:
    return inference_pb2.SamplingParams(
        **{
            "temperature": 0.8,
            "top_k": 40,
            "top_p": 0.9,
            "seed": 7,
            "logit_bias": {5: 1.5, 9: -100.0},
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.2,
            **fields,
        }
    )


FORMS = (
    inference_pb2.StructuredOutput(json_schema=SCHEMA),
    inference_pb2.StructuredOutput(regex="[a-z]{2,9}"),
)


def generate_requests() -> tuple[Message, ...]:
    """Of clients."""
    message = inference_pb2.ChatMessage
    chat = inference_pb2.ChatPrompt(
        messages=[
            message(role="system", content="Be brief.", name="us"),
            message(role="assistant", content="", tool_calls_json=[TOOL]),
            message(role="tool", content="there", tool_call_id="1"),
        ],
        tools_json=[TOOL],
    )
    request = inference_pb2.GenerateRequest
    return (
        request(text="a text", max_tokens=3, sampling=sampling(), stop=["zz"], stop_token_ids=[3], num_logprobs=2),
        request(chat=chat, max_tokens=3, cache_salt=b"salt", ignore_eos=True),
        request(tokens=inference_pb2.TokenPrompt(token_ids=TOKENS), max_tokens=4, num_samples=2, num_prompt_logprobs=1),
        *(request(text="form:", max_tokens=4, sampling=sampling(structured_output=form)) for form in FORMS),
    )


def decode_requests(prefill_address: str) -> tuple[Message, ...]:
    """Of routers, each for a prompt that is computed by the node at the address; empty: by whoever is asked."""
    request = decode_pb2.DecodeRequest
    common = {"prefill_address": prefill_address, "max_tokens": 3}
    return (
        request(request_id="a", token_ids=TOKENS, sampling=sampling(), num_logprobs=2, extra_keys=[b"x"], **common),
        request(request_id="b", token_ids=TOKENS, num_output_tokens=4, progress_interval_ms=50, **common),
        request(request_id="c", token_ids=TOKENS, num_prompt_logprobs=3, stop_token_ids=[END_TOKEN, 4], **common),
        *(
            request(request_id="d", token_ids=TOKENS, sampling=sampling(structured_output=form), **common)
            for form in FORMS
        ),
    )


def follow_requests() -> tuple[Message, ...]:
    request = mesh_pb2.FollowRequest
    return request(interval_ms=10, wants_prefixes=True), request(incarnation=3, prefix_sequence=1)


def trace_exports() -> tuple[Message, ...]:
    """Of nodes that report to a router."""
    values = (
        AnyValue(string_value="x"),
        AnyValue(int_value=-1),
        AnyValue(double_value=0.5),
        AnyValue(double_value=float("nan")),
        AnyValue(kvlist_value=KeyValueList(values=[KeyValue(key="k", value=AnyValue(bool_value=True))])),
    )
    common = {"trace_id": b"t" * 16, "start_time_unix_nano": 10**18, "end_time_unix_nano": 10**18 + 5}
    attributes = [KeyValue(key=f"key-{index}", value=value) for index, value in enumerate(values)]
    # What the page lists of a request.
    tokens = KeyValue(key="gen_ai.usage.output_tokens", value=AnyValue(double_value=3))
    request = Span(span_id=b"r" * 8, name="chat tiny", attributes=[*attributes, tokens], **common)
    part = Span(span_id=b"s" * 8, parent_span_id=b"r" * 8, name="pdmesh.transfer", attributes=attributes, **common)
    circular = Span(span_id=b"c" * 8, parent_span_id=b"c" * 8, name="a", **common)
    resource = Resource(attributes=[KeyValue(key="service.name", value=AnyValue(string_value="n"))])
    spans = ResourceSpans(resource=resource, scope_spans=[ScopeSpans(spans=[request, part, circular])])
    return (ExportTraceServiceRequest(resource_spans=[spans]),)


def metric_exports() -> tuple[Message, ...]:
    return (ExportMetricsServiceRequest(),)


# Of the one span in these exports.
TRACE_ID = (b"t" * 16).hex()


def list_requests() -> tuple[Message, ...]:
    return traces_pb2.ListRequestsRequest(), traces_pb2.ListRequestsRequest(max_requests=3)


def trace_requests() -> tuple[Message, ...]:
    return traces_pb2.GetTraceRequest(id=TRACE_ID), traces_pb2.GetTraceRequest(id=TRACE_ID[:4])


def follow_trace_requests() -> tuple[Message, ...]:
    return traces_pb2.FollowRequestsRequest(), traces_pb2.FollowRequestsRequest(sequence=1)

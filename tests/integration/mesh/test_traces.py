"""One request is one trace over three processes, with queueing, compute, transfer and decode told apart."""

from __future__ import annotations

import grpc
import pytest
from opentelemetry.proto.trace.v1 import trace_pb2
from support import prompts
from support.mesh import Mesh
from support.processes import wait_until
from support.span_sink import SpanSink

# With a salt of its own in every test, so that none finds it in a cache.
PROMPT = prompts.TEXTS["several chunks"]
# child: (parent, the service it runs in)
TREE = {
    "pdmesh.tokenize": ("text_completion", "router"),
    "pdmesh.place": ("text_completion", "router"),
    "pdmesh.decode.request": ("text_completion", "decode"),
    "pdmesh.handoff": ("pdmesh.decode.request", "decode"),
    "pdmesh.decode.queue": ("pdmesh.decode.request", "decode"),
    "pdmesh.decode.generate": ("pdmesh.decode.request", "decode"),
    "pdmesh.prefill.request": ("pdmesh.handoff", "prefill"),
    "pdmesh.prefill.queue": ("pdmesh.prefill.request", "prefill"),
    "pdmesh.prefill.compute": ("pdmesh.prefill.request", "prefill"),
    "pdmesh.transfer": ("pdmesh.prefill.request", "prefill"),
}


def test_one_request_is_one_tree_over_three_processes(mesh: Mesh, sink: SpanSink) -> None:
    answer = mesh.client.generate(text=PROMPT, cache_salt=b"tree", max_tokens=8, ignore_eos=True)
    assert answer.placement is not None
    trace_id = answer.placement.trace_id
    assert len(trace_id) == 32
    wait_until(lambda: len(sink.trace(trace_id)) >= len(TREE) + 1, 15.0, "all spans arrived")
    spans = sink.trace(trace_id)
    root = next(name for name in spans if name.startswith("text_completion "))
    assert not spans[root][1].parent_span_id
    for child, (parent, service) in TREE.items():
        parent_name = root if parent == "text_completion" else parent
        assert child in spans, sorted(spans)
        assert spans[child][1].parent_span_id == spans[parent_name][1].span_id, child
        assert service in spans[child][0], spans[child][0]


def test_the_phases_follow_one_another_and_lie_inside_the_request(mesh: Mesh, sink: SpanSink) -> None:
    answer = mesh.client.generate(text=PROMPT, cache_salt=b"phases", max_tokens=8, ignore_eos=True)
    trace_id = answer.placement.trace_id
    wait_until(lambda: len(sink.trace(trace_id)) >= len(TREE) + 1, 15.0, "all spans arrived")
    spans = {name: span for name, (_, span) in sink.trace(trace_id).items()}
    root = next(span for name, span in spans.items() if name.startswith("text_completion "))
    for name, span in spans.items():
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano, name
        assert span.end_time_unix_nano <= root.end_time_unix_nano, name
    queue, compute = spans["pdmesh.prefill.queue"], spans["pdmesh.prefill.compute"]
    transfer, generate = spans["pdmesh.transfer"], spans["pdmesh.decode.generate"]
    assert queue.end_time_unix_nano <= compute.start_time_unix_nano
    # Layer-wise push: the first write leaves before the last layer is computed.
    assert transfer.start_time_unix_nano < compute.end_time_unix_nano
    assert transfer.end_time_unix_nano <= generate.start_time_unix_nano
    attributes = {item.key: item.value for item in transfer.attributes}
    assert attributes["pdmesh.transfer.bytes"].int_value == answer.finish.timings.transferred_bytes
    assert attributes["pdmesh.transfer.bytes_per_s"].double_value > 0
    by_group = [value.int_value for name, value in attributes.items() if name.startswith("pdmesh.transfer.blocks_of.")]
    assert sum(by_group) == attributes["pdmesh.transfer.blocks"].int_value > 0
    usage = {item.key: item.value.int_value for item in root.attributes}
    assert usage["gen_ai.usage.input_tokens"] == answer.finish.usage.prompt_tokens
    assert usage["gen_ai.usage.output_tokens"] == 8


def test_a_request_that_ends_by_a_stop_string_is_a_trace_without_errors(mesh: Mesh, sink: SpanSink) -> None:
    fields = {"text": PROMPT, "cache_salt": b"stop", "ignore_eos": True}
    plain = mesh.client.generate(max_tokens=8, **fields).text
    answer = mesh.client.generate(max_tokens=400, stop=[plain[2:6]], **fields)
    assert answer.finish.matched_stop == plain[2:6]
    trace_id = answer.placement.trace_id
    wait_until(lambda: len(sink.trace(trace_id)) >= len(TREE) + 1, 15.0, "all spans arrived")
    spans = {name: span for name, (_, span) in sink.trace(trace_id).items()}
    assert {span.status.code for span in spans.values()} == {trace_pb2.Status.STATUS_CODE_UNSET}
    marks = {item.key: item.value.bool_value for item in spans["pdmesh.decode.request"].attributes}
    assert marks["pdmesh.cancelled"], "the router ended it"


def test_a_failed_request_is_a_trace_with_an_error(mesh: Mesh, sink: SpanSink) -> None:
    stream = mesh.client.start(2.0, text="Once upon a time", max_tokens=4000, ignore_eos=True)
    trace_id = next(stream).placement.trace_id
    with pytest.raises(grpc.RpcError):
        list(stream)
    wait_until(lambda: any(name.startswith("text_completion") for name in sink.trace(trace_id)), 15.0, "root arrived")
    root = next(span for name, (_, span) in sink.trace(trace_id).items() if name.startswith("text_completion"))
    assert root.status.code == trace_pb2.Status.STATUS_CODE_ERROR

"""The embedded collector, fed by the exporter that the nodes use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from node_runtime.rpc.telemetry import Telemetry, current_context
from pdmesh_cli.collector import Collector
from router_node.otlp_receiver import spans_of
from router_node.trace_store import AttributeValue, TraceStore


@pytest.fixture
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    running = Collector(TraceStore())
    endpoint = await running.start()
    yield running, endpoint
    await running.stop()


async def test_spans_of_two_nodes_become_one_trace_with_names_times_and_attributes(
    collector: tuple[Collector, str],
) -> None:
    running, endpoint = collector
    router = Telemetry.setup("pdmesh-router", "router", endpoint)
    decode = Telemetry.setup("pdmesh-decode", "decode-0", endpoint)
    attributes: dict[str, AttributeValue] = {"gen_ai.request.model": "smollm2", "n": 3, "x": 0.5, "on": True}
    with router.span("chat smollm2", attributes) as root, decode.span("pdmesh.decode.request"):
        decode.record_span("pdmesh.decode.generate", 1_000, 3_001_000, current_context())
    await asyncio.to_thread(decode.shutdown)
    await asyncio.to_thread(router.shutdown)
    spans = await running.store.wait_for_trace(root.trace_id, required_names={"chat smollm2"}, timeout_s=10)
    by_name = {span.name: span for span in spans}
    assert {name: span.node for name, span in by_name.items()} == {
        "chat smollm2": "router",
        "pdmesh.decode.request": "decode-0",
        "pdmesh.decode.generate": "decode-0",
    }
    assert by_name["chat smollm2"].parent_span_id == ""
    assert by_name["pdmesh.decode.request"].parent_span_id == by_name["chat smollm2"].span_id
    assert by_name["pdmesh.decode.generate"].parent_span_id == by_name["pdmesh.decode.request"].span_id
    assert by_name["pdmesh.decode.generate"].duration_ms == 3.0
    assert by_name["chat smollm2"].attributes == attributes


async def test_a_failed_span_carries_its_reason(collector: tuple[Collector, str]) -> None:
    running, endpoint = collector
    node = Telemetry.setup("pdmesh-prefill", "prefill-0", endpoint)
    with node.span("pdmesh.transfer") as span:
        span.fail("TransferBroken", "the peer is gone")
    await asyncio.to_thread(node.shutdown)
    (collected,) = await running.store.wait_for_trace(span.trace_id, timeout_s=10)
    assert collected.error == "the peer is gone"


def test_malformed_spans_are_left_out_and_the_others_kept() -> None:
    request = ExportTraceServiceRequest()
    spans = request.resource_spans.add().scope_spans.add().spans
    spans.add(trace_id=b"\x01" * 16, span_id=b"\x02" * 8, name="good", start_time_unix_nano=1, end_time_unix_nano=2)
    spans.add(span_id=b"\x02" * 8, name="no trace", start_time_unix_nano=1, end_time_unix_nano=2)
    spans.add(trace_id=b"\x01" * 16, name="no id", start_time_unix_nano=1, end_time_unix_nano=2)
    spans.add(trace_id=b"\x01" * 16, span_id=b"\x03" * 8, name="backwards", start_time_unix_nano=2)
    assert [(span.name, span.node) for span in spans_of(request)] == [("good", "unknown")]

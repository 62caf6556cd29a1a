"""Traces across servers, through a real OTLP receiver in this process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2
from pdmesh.v1 import decode_pb2

from node_runtime.config import NodeConfig
from node_runtime.errors import DeadlineExceeded, QueueFull, RemoteError
from node_runtime.log_context import LineFormatter
from node_runtime.rpc import (
    RpcContext,
    RpcServer,
    SpanKind,
    Telemetry,
    current_context,
    current_trace_id,
    rpc_metadata,
)
from tests.unit.node_runtime.probe_service import Probe, ScriptedDecode, serving


class OtlpReceiver:
    """Keeps every span it is sent, by name, with the name of the service that sent it."""

    def __init__(self) -> None:
        self.spans: dict[str, trace_pb2.Span] = {}
        self.service_by_span: dict[str, str] = {}

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: RpcContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource_spans in request.resource_spans:
            facts = {item.key: item.value.string_value for item in resource_spans.resource.attributes}
            for scope_spans in resource_spans.scope_spans:
                for span in scope_spans.spans:
                    self.spans[span.name] = span
                    self.service_by_span[span.name] = facts["service.name"]
        return trace_service_pb2.ExportTraceServiceResponse()


@asynccontextmanager
async def receiving() -> AsyncIterator[tuple[OtlpReceiver, str]]:
    receiver = OtlpReceiver()
    server = RpcServer(NodeConfig(node_id="collector"))
    server.add(trace_service_pb2_grpc.add_TraceServiceServicer_to_server, receiver)
    port = await server.start()
    try:
        yield receiver, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_one_request_through_two_servers_is_one_trace_with_right_parents() -> None:
    async with receiving() as (receiver, endpoint):
        front_telemetry = Telemetry.setup("pdmesh-router", "router-1", endpoint)
        back_telemetry = Telemetry.setup("pdmesh-decode", "decode-1", f"http://{endpoint}")

        async def inner(
            request: decode_pb2.DecodeRequest, context: RpcContext
        ) -> AsyncIterator[decode_pb2.DecodeResponse]:
            with back_telemetry.span("pdmesh.decode.request", {"pdmesh.request_id": "r1"}) as span:
                back_telemetry.record_span("pdmesh.decode.queue", 1_000, 2_000, span.context, {"n": 3})
                yield decode_pb2.DecodeResponse()

        async with serving(decode=ScriptedDecode(inner), telemetry=back_telemetry) as back:

            async def outer(
                request: decode_pb2.DecodeRequest, context: RpcContext
            ) -> AsyncIterator[decode_pb2.DecodeResponse]:
                with front_telemetry.span("chat m", kind=SpanKind.SERVER):
                    async for response in back.channel.server_stream(back.decode.Generate, request):
                        yield response

            async with serving(decode=ScriptedDecode(outer), telemetry=front_telemetry) as front:
                stream = front.channel.server_stream(front.decode.Generate, decode_pb2.DecodeRequest(), timeout_s=30)
                assert len([response async for response in stream]) == 1
        for telemetry in (front_telemetry, back_telemetry):
            assert await asyncio.to_thread(telemetry.flush, 10)
            await asyncio.to_thread(telemetry.shutdown)

    spans = receiver.spans
    assert set(spans) == {"chat m", "pdmesh.decode.request", "pdmesh.decode.queue"}
    assert len({span.trace_id for span in spans.values()}) == 1
    assert spans["chat m"].parent_span_id == b""
    assert spans["chat m"].kind == trace_pb2.Span.SPAN_KIND_SERVER
    assert spans["pdmesh.decode.request"].parent_span_id == spans["chat m"].span_id
    assert spans["pdmesh.decode.queue"].parent_span_id == spans["pdmesh.decode.request"].span_id
    queue = spans["pdmesh.decode.queue"]
    assert (queue.start_time_unix_nano, queue.end_time_unix_nano) == (1_000, 2_000)
    assert queue.attributes[0].value.int_value == 3
    assert receiver.service_by_span["chat m"] == "pdmesh-router"
    assert receiver.service_by_span["pdmesh.decode.request"] == "pdmesh-decode"


async def test_two_requests_on_one_connection_are_two_traces() -> None:
    seen: list[str] = []
    telemetry = Telemetry.setup("s", "n", "127.0.0.1:1")

    async def body(request: decode_pb2.DecodeRequest, context: RpcContext) -> AsyncIterator[decode_pb2.DecodeResponse]:
        with telemetry.span("work") as span:
            seen.append(span.trace_id)
            yield decode_pb2.DecodeResponse()

    async with serving(decode=ScriptedDecode(body), telemetry=telemetry) as probe:
        for _ in range(2):
            async for _ in probe.channel.server_stream(probe.decode.Generate, decode_pb2.DecodeRequest(), timeout_s=10):
                pass
    assert len(set(seen)) == 2
    assert all(len(trace_id) == 32 for trace_id in seen)


async def test_a_failed_block_marks_its_span_with_the_class_of_the_error() -> None:
    async with receiving() as (receiver, endpoint):
        telemetry = Telemetry.setup("s", "n", endpoint)
        with pytest.raises(QueueFull), telemetry.span("work"):
            raise QueueFull("no place")
        assert await asyncio.to_thread(telemetry.flush, 10)
    span = receiver.spans["work"]
    assert span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    assert span.status.message == "no place"
    assert {item.key: item.value.string_value for item in span.attributes}["error.type"] == "QueueFull"


async def _span_of_a_call_that_is_left(leave: Callable[[Probe], Awaitable[None]]) -> trace_pb2.Span:
    """The span of a handler that waits for ever, after one response, until `leave` has ended the call."""
    async with receiving() as (receiver, endpoint):
        telemetry = Telemetry.setup("s", "n", endpoint)

        async def body(
            request: decode_pb2.DecodeRequest, context: RpcContext
        ) -> AsyncIterator[decode_pb2.DecodeResponse]:
            with telemetry.span("work", kind=SpanKind.SERVER):
                yield decode_pb2.DecodeResponse()
                await asyncio.Event().wait()

        service = ScriptedDecode(body)
        async with serving(decode=service, telemetry=telemetry) as probe:
            await leave(probe)
            await service.ended.wait()
        assert await asyncio.to_thread(telemetry.flush, 10)
    return receiver.spans["work"]


async def test_work_that_its_caller_no_longer_wants_is_cancelled_and_no_error() -> None:
    async def leave_after_the_first_response(probe: Probe) -> None:
        call = probe.channel.server_stream(probe.decode.Generate, decode_pb2.DecodeRequest(), timeout_s=30)
        async with aclosing(call) as responses:
            await anext(responses)

    span = await _span_of_a_call_that_is_left(leave_after_the_first_response)
    assert span.status.code == trace_pb2.Status.STATUS_CODE_UNSET
    assert {item.key: item.value.bool_value for item in span.attributes} == {"pdmesh.cancelled": True}


async def test_work_that_outlives_its_deadline_is_an_error() -> None:
    async def wait_too_long(probe: Probe) -> None:
        with pytest.raises(DeadlineExceeded):
            async for _ in probe.channel.server_stream(
                probe.decode.Generate, decode_pb2.DecodeRequest(), timeout_s=0.3
            ):
                pass

    span = await _span_of_a_call_that_is_left(wait_too_long)
    assert span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    assert {item.key: item.value.string_value for item in span.attributes} == {"error.type": "DeadlineExceeded"}


async def test_with_telemetry_off_there_is_no_trace_and_no_header() -> None:
    telemetry = Telemetry.setup("s", "n", None)
    assert not telemetry.is_recording
    with telemetry.span("work") as span:
        span.set("key", 1)
        telemetry.record_span("inner", 1, 2, span.context)
        assert (span.trace_id, current_trace_id(), rpc_metadata()) == ("", "", ())
    assert telemetry.flush()
    telemetry.shutdown()


async def test_what_is_sampled_is_a_matter_of_the_environment_and_a_callers_choice_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    header = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-"
    async with receiving() as (receiver, endpoint):
        telemetry = Telemetry.setup("s", "n", endpoint)
        with telemetry.span("left out"), telemetry.span("left out as well"):
            # Whoever comes next in the trace leaves its part out, too.
            flags = dict(rpc_metadata())["traceparent"].rpartition("-")[2]
            assert int(flags, 16) & 1 == 0
        for flags, name in (("00", "not wanted by the caller"), ("01", "wanted by the caller")):
            with telemetry.continued((("traceparent", header + flags),)), telemetry.span(name):
                pass
        await asyncio.to_thread(telemetry.shutdown)
    assert set(receiver.spans) == {"wanted by the caller"}


async def test_a_node_with_telemetry_off_still_hands_the_callers_trace_on() -> None:
    telemetry = Telemetry.off()
    header = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with telemetry.continued([("traceparent", header)]), telemetry.span("work"):
        assert current_trace_id() == "0af7651916cd43dd8448eb211c80319c"
        assert dict(rpc_metadata())["traceparent"] == header


@pytest.mark.parametrize("header", ["", "garbage", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
async def test_a_malformed_trace_header_means_no_trace(header: str) -> None:
    with Telemetry.off().continued([("traceparent", header)]):
        assert current_trace_id() == ""


async def test_a_context_kept_for_later_is_a_parent_after_the_span_has_ended() -> None:
    async with receiving() as (receiver, endpoint):
        telemetry = Telemetry.setup("s", "n", endpoint)
        with telemetry.span("early"):
            kept = current_context()
        with telemetry.span("late", parent=kept):
            pass
        assert await asyncio.to_thread(telemetry.flush, 10)
    assert receiver.spans["late"].parent_span_id == receiver.spans["early"].span_id


async def test_shutdown_returns_although_the_collector_is_gone() -> None:
    telemetry = Telemetry.setup("s", "n", "127.0.0.1:1")
    with telemetry.span("lost"):
        pass
    await asyncio.wait_for(asyncio.to_thread(telemetry.shutdown, 0.5), timeout=30)


def test_log_records_inside_a_span_carry_its_trace_id() -> None:
    telemetry = Telemetry.setup("s", "n", "127.0.0.1:1")
    record = logging.LogRecord("pdmesh.x", logging.INFO, __file__, 1, "hello", None, None)
    formatter = LineFormatter("node-1")
    with telemetry.span("work") as span:
        assert f"[- {span.trace_id}]" in formatter.format(record)
    assert "[- -]" in formatter.format(record)
    telemetry.shutdown(0.1)


async def test_a_stream_that_another_task_closes_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    telemetry = Telemetry.setup("s", "n", "127.0.0.1:1")

    async def numbers() -> AsyncGenerator[int, None]:
        with telemetry.continued([("traceparent", "00-" + "a1" * 16 + "-" + "b2" * 8 + "-01")]), telemetry.span("work"):
            yield 1

    generator = numbers()
    assert await asyncio.create_task(anext(generator)) == 1
    await asyncio.create_task(generator.aclose())
    assert caplog.text == ""
    telemetry.shutdown(0.1)


async def test_a_refused_call_is_logged_with_the_callers_trace_id() -> None:
    caller = Telemetry.setup("s", "n", "127.0.0.1:1")
    lines: list[str] = []
    formatter = LineFormatter("probe")

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(formatter.format(record))

    async def refuse(
        request: decode_pb2.DecodeRequest, context: RpcContext
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        raise QueueFull("no place")
        yield

    logger = logging.getLogger("pdmesh.rpc")
    handler = Collect()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        async with serving(decode=ScriptedDecode(refuse)) as probe:
            with pytest.raises(RemoteError), caller.span("call") as span:
                await anext(
                    probe.channel.server_stream(probe.decode.Generate, decode_pb2.DecodeRequest(), timeout_s=10)
                )
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
        await asyncio.to_thread(caller.shutdown, 0.1)
    assert any(span.trace_id in line and "RESOURCE_EXHAUSTED: no place" in line for line in lines)

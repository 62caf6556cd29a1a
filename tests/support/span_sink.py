"""A collector of traces that keeps what it is sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2


class SpanSink(trace_service_pb2_grpc.TraceServiceServicer):
    """Every span that it received, with the name of the service that sent it."""

    def __init__(self) -> None:
        self.address = ""
        self._lock = threading.Lock()
        self._spans: list[tuple[str, trace_pb2.Span]] = []

    def Export(self, request, context):
        with self._lock:
            for resource in request.resource_spans:
                names = {item.key: item.value.string_value for item in resource.resource.attributes}
                for scope in resource.scope_spans:
                    self._spans += [(names["service.name"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, trace_id: str) -> dict[str, tuple[str, trace_pb2.Span]]:
        """By name of the span."""
        with self._lock:
            return {span.name: (service, span) for service, span in self._spans if span.trace_id.hex() == trace_id}


@contextmanager
def listening_sink() -> Iterator[SpanSink]:
    """Served at its `address` inside the block."""
    sink, server = SpanSink(), grpc.server(futures.ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(sink, server)
    sink.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield sink
    server.stop(None)

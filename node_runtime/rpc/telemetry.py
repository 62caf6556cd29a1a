"""Tracing: with `metrics`, the only modules that know OpenTelemetry.

With no endpoint nothing is recorded and a span costs next to nothing, but a trace context that came in still goes out
again. The W3C `traceparent` travels in gRPC metadata. Nothing here touches OpenTelemetry's process-wide provider.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import Token
from dataclasses import dataclass
from enum import Enum

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from node_runtime.config import NodeConfig
from node_runtime.errors import DeadlineExceeded
from node_runtime.log_context import bound_trace_id
from node_runtime.rpc.deadlines import remaining_s
from node_runtime.rpc.metrics import Metrics
from node_runtime.rpc.otlp import EXPORT_TIMEOUT_S, channel_options, endpoint_url, is_secure
from node_runtime.rpc.span_names import ERROR_TYPE, PDMESH_CANCELLED, PDMESH_NODE_ID

AttributeValue = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, AttributeValue]

# Short, so that somebody who watches a demo sees a trace at once.
_EXPORT_INTERVAL_MS = 200
# The caller's deadline and ours are the same, but its clock is not: its cancellation may arrive before our timer fires.
_DEADLINE_TOLERANCE_S = 0.05
_PROPAGATED_KEYS = ("traceparent", "tracestate")
_log = logging.getLogger("pdmesh.telemetry")
_propagator = TraceContextTextMapPropagator()


class SpanKind(Enum):
    """Role of a span in a remote call."""

    INTERNAL = trace.SpanKind.INTERNAL
    SERVER = trace.SpanKind.SERVER
    CLIENT = trace.SpanKind.CLIENT


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A position in a trace that other threads may hold on to. Opaque."""

    _value: otel_context.Context


class Span:
    """One running span. Not recording when telemetry is off; all methods are then free of effect."""

    __slots__ = ("_span",)

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def set(self, name: str, value: AttributeValue) -> None:
        """Sets one attribute."""
        self._span.set_attribute(name, value)

    def set_all(self, attributes: Attributes) -> None:
        """Sets several attributes."""
        for name, value in attributes.items():
            self._span.set_attribute(name, value)

    def fail(self, error_type: str, message: str) -> None:
        """Marks the span as failed."""
        self._span.set_attribute(ERROR_TYPE, error_type)
        self._span.set_status(trace.StatusCode.ERROR, message)

    def cancel(self) -> None:
        """Marks the span as ended by its caller or, when the deadline of the call has passed, as failed by that.

        Source: OpenTelemetry semantic conventions for gRPC, by which CANCELLED is no error of a server span and
        DEADLINE_EXCEEDED is one.
        """
        left_s = remaining_s()
        if left_s is not None and left_s < _DEADLINE_TOLERANCE_S:
            self.fail(DeadlineExceeded.__name__, "the deadline of the call passed")
        else:
            self._span.set_attribute(PDMESH_CANCELLED, True)

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits; empty when there is no trace."""
        return _trace_id_of(self._span)

    @property
    def context(self) -> TraceContext:
        """The position inside this span, as a parent for spans that are recorded elsewhere."""
        return TraceContext(trace.set_span_in_context(self._span, otel_context.Context()))


class Telemetry:
    """The tracer and the metrics of one node. Safe from every thread."""

    def __init__(self, provider: TracerProvider | None, metrics: Metrics | None = None) -> None:
        """`provider` None: no span is recorded; `metrics` None: they are off. Use `setup` or `off`."""
        self.metrics = metrics or Metrics.off()
        self._provider = provider
        source: trace.TracerProvider = provider or trace.NoOpTracerProvider()
        self._tracer = source.get_tracer("pdmesh")

    @classmethod
    def for_node(cls, config: NodeConfig) -> Telemetry:
        """As the configuration of a node asks for."""
        return cls.setup(
            f"pdmesh-{config.role_name}",
            config.node_id,
            config.otlp_endpoint,
            metrics_are_scraped=config.metrics_port is not None,
        )

    @classmethod
    def setup(
        cls, service_name: str, node_id: str, otlp_endpoint: str | None, *, metrics_are_scraped: bool = False
    ) -> Telemetry:
        """Sends spans and metrics to `otlp_endpoint` (host:port, http:// or https://); None: records no spans.

        `metrics_are_scraped`: `metrics.serve` will be called.
        """
        metrics = Metrics.setup(service_name, node_id, otlp_endpoint=otlp_endpoint, is_scraped=metrics_are_scraped)
        if not otlp_endpoint:
            return cls(None, metrics)
        resource = Resource.create(
            {"service.name": service_name, "service.instance.id": node_id, PDMESH_NODE_ID: node_id}
        )
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(
            BatchSpanProcessor(_exporter(otlp_endpoint), schedule_delay_millis=_EXPORT_INTERVAL_MS)
        )
        return cls(provider, metrics)

    def serve_metrics(self, config: NodeConfig) -> None:
        """Answers scrapes from now on, if the node is to. Raises PortInUse or BadConfig."""
        if config.metrics_port is not None:
            _log.info("metrics are at http://%s/metrics", self.metrics.serve(config.host, config.metrics_port))

    @classmethod
    def off(cls) -> Telemetry:
        """Telemetry that records nothing."""
        return cls(None)

    @property
    def is_recording(self) -> bool:
        """Whether spans go anywhere."""
        return self._provider is not None

    def span(
        self,
        name: str,
        attributes: Attributes | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        parent: TraceContext | None = None,
    ) -> AbstractContextManager[Span]:
        """A span around the block, child of `parent` or else of the current one; calls made inside carry it on.

        An exception that leaves the block marks the span as failed with the name of its class. A caller that no longer
        wants the work is no failure of the one that does it: such a span is marked as cancelled, unless the deadline
        has passed.
        """
        current = trace.get_current_span()
        if self._provider is None and parent is None and not current.is_recording():
            # Whatever trace there is goes on, and nobody records this part of it.
            return nullcontext(Span(current))
        return self._running(name, attributes, kind, parent)

    @contextmanager
    def _running(
        self, name: str, attributes: Attributes | None, kind: SpanKind, parent: TraceContext | None
    ) -> Iterator[Span]:
        started = self._tracer.start_span(
            name, context=parent._value if parent else None, kind=kind.value, attributes=attributes
        )
        span = Span(started)
        token = otel_context.attach(trace.set_span_in_context(started))
        try:
            with bound_trace_id(span.trace_id):
                yield span
        except (asyncio.CancelledError, GeneratorExit):
            span.cancel()
            raise
        except BaseException as error:
            span.fail(type(error).__name__, str(error))
            raise
        finally:
            _detach(token)
            started.end()

    def continued(self, metadata: Iterable[tuple[str, str | bytes]]) -> AbstractContextManager[None]:
        """Continues the caller's trace inside the block; malformed or absent headers mean no trace."""
        return _Continued(metadata)

    def record_span(
        self,
        name: str,
        start_ns: int,
        end_ns: int,
        parent_context: TraceContext,
        attributes: Attributes | None = None,
    ) -> None:
        """Records a span whose times were measured elsewhere: nanoseconds since the Unix epoch."""
        if self._provider is None:
            return
        span = self._tracer.start_span(name, context=parent_context._value, start_time=start_ns, attributes=attributes)
        span.end(max(start_ns, end_ns))

    def flush(self, timeout_s: float = EXPORT_TIMEOUT_S) -> bool:
        """Exports what was recorded. False when that did not work within `timeout_s`. Blocks."""
        return self._provider is None or self._provider.force_flush(round(timeout_s * 1000))

    def shutdown(self, timeout_s: float = EXPORT_TIMEOUT_S) -> None:
        """Exports what was recorded and stops, within twice `timeout_s` even if the collector is gone. Blocks.

        Idempotent.
        """
        self.metrics.shutdown(timeout_s)
        if self._provider is None:
            return
        # The exporter's own shutdown may wait for a collector that does not answer.
        worker = threading.Thread(target=self._provider.shutdown, name="telemetry-shutdown", daemon=True)
        worker.start()
        worker.join(timeout_s)


class _Continued:
    """A class and no generator, because every call that is served continues something."""

    __slots__ = ("_bound", "_metadata", "_token")

    def __init__(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        self._metadata = metadata

    def __enter__(self) -> None:
        carrier = {key: value for key, value in self._metadata if key in _PROPAGATED_KEYS and isinstance(value, str)}
        found = otel_context.Context()
        self._token = otel_context.attach(_propagator.extract(carrier, found) if carrier else found)
        self._bound = bound_trace_id(current_trace_id() if carrier else "")
        self._bound.__enter__()

    def __exit__(self, *exc_info: object) -> None:
        self._bound.__exit__(None, None, None)
        _detach(self._token)


def _detach(token: Token[otel_context.Context]) -> None:
    # An abandoned generator is closed by another task, whose context never saw the span. OpenTelemetry's own function
    # logs a traceback then.
    with suppress(ValueError):
        token.var.reset(token)


def _exporter(endpoint: str) -> OTLPSpanExporter:
    return OTLPSpanExporter(
        endpoint=endpoint_url(endpoint),
        insecure=not is_secure(endpoint),
        timeout=EXPORT_TIMEOUT_S,
        channel_options=channel_options(),
    )


def current_context() -> TraceContext:
    """Where the running code is in its trace."""
    return TraceContext(otel_context.get_current())


def current_trace_id() -> str:
    """The trace of the running code, 32 hexadecimal digits; empty outside of one."""
    return _trace_id_of(trace.get_current_span())


def _trace_id_of(span: trace.Span) -> str:
    context = span.get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else ""


def rpc_metadata() -> tuple[tuple[str, str], ...]:
    """The trace context of the running code as gRPC metadata for an outgoing call."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return tuple(carrier.items())

"""Metrics: with `telemetry`, the only modules that know OpenTelemetry; the only one that knows Prometheus.

An instrument is made once by who records with it, and read by whom the operator named: a Prometheus that scrapes
`metrics_port`, a collector that is sent them over OTLP, both, or nobody, when recording costs next to nothing.
Nothing here touches OpenTelemetry's process-wide provider. Safe from every thread.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from wsgiref.simple_server import WSGIServer

from opentelemetry import metrics as otel_metrics
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry, start_http_server

from node_runtime.address import format_address
from node_runtime.errors import BadConfig, PortInUse
from node_runtime.rpc.otlp import EXPORT_TIMEOUT_S, channel_options, endpoint_url, is_secure

Labels = Mapping[str, str]
Reading = Callable[[], Iterable[tuple[float, Labels]]]

_OTLP_INTERVAL_S = 15.0


class Histogram:
    """A distribution of what was recorded."""

    __slots__ = ("_instrument",)

    def __init__(self, instrument: otel_metrics.Histogram) -> None:
        self._instrument = instrument

    def record(self, value: float, labels: Labels) -> None:
        """Counts one value, in the unit of the instrument, with the span of the running code as its exemplar."""
        self._instrument.record(value, labels)


class Counter:
    """A sum that only grows."""

    __slots__ = ("_instrument",)

    def __init__(self, instrument: otel_metrics.Counter) -> None:
        self._instrument = instrument

    def add(self, amount: float, labels: Labels) -> None:
        """Adds `amount`, which is not negative."""
        self._instrument.add(amount, labels)


class Metrics:
    """The instruments of one node and who reads them."""

    def __init__(self, provider: MeterProvider | None, registry: CollectorRegistry | None = None) -> None:
        """Use `setup` or `off`. `registry` is what a scraper reads."""
        self._provider = provider
        self._registry = registry
        self._server: tuple[WSGIServer, threading.Thread] | None = None

    @classmethod
    def setup(cls, service_name: str, node_id: str, *, otlp_endpoint: str | None, is_scraped: bool) -> Metrics:
        """Read by `otlp_endpoint` (host:port, http:// or https://), by a scraper (see `serve`), by both or by none."""
        readers: list[MetricReader] = []
        registry = CollectorRegistry() if is_scraped else None
        if registry is not None:
            readers.append(PrometheusMetricReader(scope_info_enabled=False, registry=registry))
        if otlp_endpoint:
            exporter = OTLPMetricExporter(
                endpoint=endpoint_url(otlp_endpoint),
                insecure=not is_secure(otlp_endpoint),
                timeout=EXPORT_TIMEOUT_S,
                channel_options=channel_options(),
            )
            readers.append(PeriodicExportingMetricReader(exporter, export_interval_millis=_OTLP_INTERVAL_S * 1000))
        if not readers:
            return cls.off()
        resource = Resource.create({"service.name": service_name, "service.instance.id": node_id})
        return cls(MeterProvider(readers, resource=resource, shutdown_on_exit=False), registry)

    @classmethod
    def off(cls) -> Metrics:
        """Metrics that nobody reads."""
        return cls(None)

    @property
    def is_read(self) -> bool:
        """Whether anybody reads what is recorded."""
        return self._provider is not None

    def histogram(self, name: str, unit: str, description: str, bounds: Sequence[float]) -> Histogram:
        """An instrument with buckets up to each of `bounds`. `unit`: "s", "By" or a thing in braces, by UCUM."""
        made = self._meter().create_histogram(name, unit, description, explicit_bucket_boundaries_advisory=bounds)
        return Histogram(made)

    def counter(self, name: str, unit: str, description: str) -> Counter:
        """An instrument to add to."""
        return Counter(self._meter().create_counter(name, unit, description))

    def observe_counter(self, name: str, unit: str, description: str, read: Reading) -> None:
        """Asks `read` for the present sums, on a thread of the reader."""
        self._meter().create_observable_counter(name, [_callback(read)], unit, description)

    def observe_gauge(self, name: str, unit: str, description: str, read: Reading) -> None:
        """Asks `read` for the present values, on a thread of the reader."""
        self._meter().create_observable_gauge(name, [_callback(read)], unit, description)

    def serve(self, host: str, port: int) -> str:
        """Answers scrapes at the returned host:port, from a thread; `port` 0 takes a free one.

        Raises PortInUse, or BadConfig when `host` is not an address of this machine.
        """
        if self._registry is None:
            raise ValueError("these metrics are not made to be scraped")
        try:
            self._server = start_http_server(port, addr=host, registry=self._registry)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUse(host, port) from None
            where = format_address(host, port)
            raise BadConfig(f"host, metrics_port: cannot listen on {where}: {error.strerror or error}") from None
        return format_address(host, self._server[0].server_port)

    def shutdown(self, timeout_s: float = EXPORT_TIMEOUT_S) -> None:
        """Sends what was recorded and stops, within `timeout_s` even if the collector is gone. Blocks. Idempotent."""
        if self._server is not None:
            server, thread = self._server
            self._server = None
            server.shutdown()
            server.server_close()
            thread.join(timeout_s)
        if self._provider is not None:
            # The exporter's own shutdown may wait for a collector that does not answer.
            worker = threading.Thread(target=self._provider.shutdown, name="metrics-shutdown", daemon=True)
            worker.start()
            worker.join(timeout_s)

    def _meter(self) -> otel_metrics.Meter:
        source: otel_metrics.MeterProvider = self._provider or otel_metrics.NoOpMeterProvider()
        return source.get_meter("pdmesh")


def _callback(read: Reading) -> Callable[[otel_metrics.CallbackOptions], Iterable[otel_metrics.Observation]]:
    def observe(options: otel_metrics.CallbackOptions) -> Iterable[otel_metrics.Observation]:
        return [otel_metrics.Observation(value, labels) for value, labels in read()]

    return observe

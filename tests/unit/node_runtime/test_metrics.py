"""Metrics, read as their users read them: over HTTP by a scraper, over OTLP by a collector."""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.metrics.v1 import metrics_pb2
from pdmesh.v1 import mesh_pb2
from support.prometheus import samples_of, scrape

from node_runtime.clock import SystemClock
from node_runtime.config import NodeConfig
from node_runtime.errors import BadConfig, PortInUse
from node_runtime.rpc import Metrics, PhaseRecorder, RpcContext, RpcServer, StatusMetrics, Telemetry

BOUNDS_S = (0.1, 1.0)


@contextmanager
def scraped() -> Iterator[tuple[Metrics, str]]:
    metrics = Metrics.setup("pdmesh-test", "node-1", otlp_endpoint=None, is_scraped=True)
    try:
        yield metrics, metrics.serve("127.0.0.1", 0)
    finally:
        metrics.shutdown()


def test_a_scraper_reads_distributions_and_sums_by_label() -> None:
    with scraped() as (metrics, address):
        latency = metrics.histogram("pdmesh.latency", "s", "how long", BOUNDS_S)
        requests = metrics.counter("pdmesh.requests.done", "{request}", "how many")
        for value_s in (0.05, 0.5, 5.0):
            latency.record(value_s, {"kind": "chat"})
        requests.add(2, {"kind": "chat"})
        requests.add(3, {})
        samples = scrape(address)
    assert samples['pdmesh_latency_seconds_bucket{kind="chat",le="0.1"}'] == 1
    assert samples['pdmesh_latency_seconds_bucket{kind="chat",le="1.0"}'] == 2
    assert samples['pdmesh_latency_seconds_count{kind="chat"}'] == 3
    assert samples['pdmesh_latency_seconds_sum{kind="chat"}'] == pytest.approx(5.55)
    assert samples['pdmesh_requests_done_total{kind="chat"}'] == 2
    assert samples["pdmesh_requests_done_total"] == 3


def test_a_scrape_says_which_node_it_is() -> None:
    with scraped() as (metrics, address):
        metrics.counter("pdmesh.any", "", "any").add(1, {})
        target = next(name for name in scrape(address) if name.startswith("target_info"))
    assert 'service_instance_id="node-1"' in target
    assert 'service_name="pdmesh-test"' in target


def test_two_nodes_of_one_process_do_not_mix() -> None:
    with scraped() as (first, first_address), scraped() as (second, second_address):
        first.counter("pdmesh.any", "", "any").add(1, {})
        second.counter("pdmesh.any", "", "any").add(5, {})
        assert scrape(first_address)["pdmesh_any_total"] == 1
        assert scrape(second_address)["pdmesh_any_total"] == 5


def test_metrics_that_nobody_reads_record_nothing_and_listen_nowhere() -> None:
    metrics = Metrics.setup("pdmesh-test", "node-1", otlp_endpoint=None, is_scraped=False)
    metrics.histogram("pdmesh.latency", "s", "how long", BOUNDS_S).record(1.0, {})
    assert not metrics.is_read
    with pytest.raises(ValueError, match="not made to be scraped"):
        metrics.serve("127.0.0.1", 0)
    metrics.shutdown()


def test_a_port_in_use_and_a_strange_address_are_refused_by_name() -> None:
    with scraped() as (_, address):
        port = int(address.rpartition(":")[2])
        another = Metrics.setup("pdmesh-test", "node-2", otlp_endpoint=None, is_scraped=True)
        with pytest.raises(PortInUse, match=str(port)):
            another.serve("127.0.0.1", port)
        with pytest.raises(BadConfig, match=r"host, metrics_port: cannot listen on 192\.0\.2\.1"):
            another.serve("192.0.2.1", 0)
        another.shutdown()


def test_nothing_listens_after_the_end() -> None:
    with scraped() as (_, address):
        pass
    host, _, port = address.rpartition(":")
    with pytest.raises(ConnectionRefusedError), socket.create_connection((host, int(port)), timeout=5):
        pass


async def test_the_status_of_a_node_is_read_while_it_runs() -> None:
    status = mesh_pb2.NodeStatus(
        serving=True,
        num_running_requests=3,
        arena=mesh_pb2.ArenaStatus(total_lcm_blocks=10, empty_lcm_blocks=6, cached_lcm_blocks=4),
        peers=[mesh_pb2.PeerStatus(state=state) for state in ("ready", "ready", "draining")],
        num_steps=7,
    )

    async def read() -> mesh_pb2.NodeStatus:
        return status

    with scraped() as (metrics, address):
        node = StatusMetrics(metrics, read)
        assert not samples_of(scrape(address), "pdmesh_steps")
        node.start()
        await asyncio.sleep(0)
        samples = await asyncio.to_thread(scrape, address)
        await node.close()
    assert samples["pdmesh_serving"] == 1
    assert samples["pdmesh_requests_running"] == 3
    assert samples['pdmesh_arena_blocks{state="cached"}'] == 4
    assert samples['pdmesh_arena_blocks{state="quarantined"}'] == 0
    assert samples['pdmesh_peers{state="ready"}'] == 2
    assert samples['pdmesh_peers{state="suspect"}'] == 0
    assert samples['pdmesh_peers{state="draining"}'] == 1
    assert samples["pdmesh_steps_total"] == 7


async def test_a_status_that_cannot_be_read_is_logged_and_read_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    steps: list[int | Exception] = [7, RuntimeError("no"), *[9] * 500]
    read_all = asyncio.Event()

    async def read() -> mesh_pb2.NodeStatus:
        step = steps.pop(0)
        if isinstance(step, Exception):
            raise step
        if step == 9:
            read_all.set()
        return mesh_pb2.NodeStatus(num_steps=step)

    with scraped() as (metrics, address):
        node = StatusMetrics(metrics, read, interval_s=0.3)
        node.start()
        await asyncio.sleep(0)
        assert (await asyncio.to_thread(scrape, address))["pdmesh_steps_total"] == 7
        async with asyncio.timeout(20):
            await read_all.wait()
        await asyncio.sleep(0)
        assert (await asyncio.to_thread(scrape, address))["pdmesh_steps_total"] == 9
        await node.close()
    assert "the status of this node cannot be read" in caplog.text


async def test_a_node_without_an_arena_shows_none() -> None:
    async def read() -> mesh_pb2.NodeStatus:
        return mesh_pb2.NodeStatus(serving=True)

    with scraped() as (metrics, address):
        node = StatusMetrics(metrics, read)
        node.start()
        await asyncio.sleep(0)
        samples = await asyncio.to_thread(scrape, address)
        await node.close()
    assert samples["pdmesh_serving"] == 1
    assert not samples_of(samples, "pdmesh_arena_blocks")


class MetricsReceiver:
    """Keeps what it is sent, by name."""

    def __init__(self) -> None:
        self.metrics: dict[str, metrics_pb2.Metric] = {}

    async def Export(
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: RpcContext
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        for resource_metrics in request.resource_metrics:
            for scope_metrics in resource_metrics.scope_metrics:
                self.metrics.update({metric.name: metric for metric in scope_metrics.metrics})
        return metrics_service_pb2.ExportMetricsServiceResponse()


@asynccontextmanager
async def receiving() -> AsyncIterator[tuple[MetricsReceiver, str]]:
    receiver = MetricsReceiver()
    server = RpcServer(NodeConfig(node_id="collector"))
    server.add(metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server, receiver)
    port = await server.start()
    try:
        yield receiver, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_a_collector_gets_phases_with_the_trace_they_belong_to() -> None:
    async with receiving() as (receiver, endpoint):
        telemetry = Telemetry.setup("pdmesh-test", "node-1", endpoint)
        phases = PhaseRecorder(telemetry, SystemClock())
        with telemetry.span("request") as span:
            phases.record(span, "pdmesh.decode.queue", 1.0, 1.25)
            phases.record(span, "pdmesh.decode.generate", 1.25, None)
            trace_id = span.trace_id
        await asyncio.to_thread(telemetry.shutdown)
    (point,) = receiver.metrics["pdmesh.phase.duration"].histogram.data_points
    assert {item.key: item.value.string_value for item in point.attributes} == {"phase": "pdmesh.decode.queue"}
    assert point.sum == pytest.approx(0.25)
    assert [exemplar.trace_id.hex() for exemplar in point.exemplars] == [trace_id]


async def test_a_collector_gets_the_status_of_a_node() -> None:
    async def read() -> mesh_pb2.NodeStatus:
        return mesh_pb2.NodeStatus(serving=True, num_steps=7)

    async with receiving() as (receiver, endpoint):
        telemetry = Telemetry.setup("pdmesh-test", "node-1", endpoint)
        node = StatusMetrics(telemetry.metrics, read)
        node.start()
        await asyncio.sleep(0)
        await asyncio.to_thread(telemetry.shutdown)
        await node.close()
    (serving,) = receiver.metrics["pdmesh.serving"].gauge.data_points
    (steps,) = receiver.metrics["pdmesh.steps"].sum.data_points
    assert (serving.as_int, steps.as_int) == (1, 7)


def test_only_metrics_are_served() -> None:
    with scraped() as (_, address), urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")

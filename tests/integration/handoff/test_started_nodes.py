"""Nodes as `serve` starts them, whatever they compute with: everything that a configuration asks for is there."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pdmesh.v1 import mesh_pb2, mesh_pb2_grpc
from support.byte_tokenizer import make_tokenizer
from support.fake_compute import Gate, expected_tokens, fake_core
from support.fake_mesh import FakeMesh, until
from support.prometheus import scrape

import decode_node.server
import prefill_node.server
import router_node.server
from decode_node.config import DecodeNodeConfig, FusedNodeConfig
from node_runtime.lifecycle import READY_FILE_VARIABLE
from node_runtime.rpc.health import LIVENESS_SERVICE
from prefill_node.config import PrefillNodeConfig
from router_node.config import RouterConfig
from scheduler_core import Role

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
# On ports of its own choice, impatient with an engine that hangs.
ASKED = {"metrics_port": 0, "health_port": 0, "drain_grace_s": 5.0}
COMPUTING = {"model": "fake", "stall_timeout_s": 0.5, **ASKED}


@dataclass
class Started:
    """A node under `serve`, and where it says that it answers."""

    address: str
    metrics: str
    health: str
    serving: asyncio.Task[int]

    async def drain(self) -> int:
        """The status that its process would leave with."""
        async with grpc.aio.insecure_channel(self.address) as channel:
            await mesh_pb2_grpc.NodeStub(channel).Drain(mesh_pb2.DrainRequest(), timeout=10)
        return await asyncio.wait_for(self.serving, 20)

    async def until_told(self, service: str, status: int) -> None:
        """At the port for probes."""
        async with grpc.aio.insecure_channel(self.health) as channel:
            request = health_pb2.HealthCheckRequest(service=service)
            async for reply in health_pb2_grpc.HealthStub(channel).Watch(request, timeout=30):
                if reply.status == status:
                    return

    async def until_scraped(self, name: str) -> None:
        """The status of a node is looked at once a second."""
        async with asyncio.timeout(20):
            while name not in await asyncio.to_thread(scrape, self.metrics):
                await asyncio.sleep(0.02)


Start = Callable[[Coroutine[object, object, int]], Coroutine[object, object, Started]]


@pytest.fixture
async def start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[Start]:
    caplog.set_level(logging.INFO)
    ready = tmp_path / "ready"
    monkeypatch.setenv(READY_FILE_VARIABLE, str(ready))
    tasks: list[asyncio.Task[int]] = []

    async def begin(serve: Coroutine[object, object, int]) -> Started:
        serving = asyncio.create_task(serve)
        tasks.append(serving)
        await until(lambda: serving.done() or ready.exists(), "it says that it is ready")
        assert not serving.done(), caplog.text
        told = {
            name: re.findall(rf"{name} (?:is|are) at (?:http://)?([\d.:]+)", caplog.text)
            for name in ("metrics", "health")
        }
        (metrics,), (health,) = told["metrics"], told["health"]
        address = json.loads(ready.read_text())["address"]
        return Started(address=address, metrics=metrics, health=health, serving=serving)

    yield begin
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("role", ["prefill", "decode", "fused"])
async def test_a_compute_node_is_scraped_is_probed_and_drains(
    mesh: FakeMesh, start: Start, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabric = None if role == "fused" else mesh.fabric
    core = fake_core(Role[role.upper()], fabric=fabric)
    module = prefill_node.server if role == "prefill" else decode_node.server
    settings: dict[str, object] = {}
    monkeypatch.setattr(module, "load_core", lambda *_, **given: settings.update(given) or core)
    if role == "prefill":
        node = await start(module.serve(PrefillNodeConfig(max_ready_ungranted=7, **COMPUTING)))
        assert settings == {"max_ready_ungranted": 7}
        asked, fields = await mesh.decode(node.address), {"prefill_address": node.address}
    elif role == "decode":
        prefill = await mesh.prefill()
        node = await start(module.serve(DecodeNodeConfig(prefill=(prefill.address,), **COMPUTING)))
        asked, fields = node, {"prefill_address": prefill.address}
    else:
        node = await start(module.serve(FusedNodeConfig(**COMPUTING)))
        asked, fields = node, {}
    await node.until_told("", SERVING)
    await node.until_told(LIVENESS_SERVICE, SERVING)
    await node.until_scraped("pdmesh_serving")
    gate = Gate()
    core.executor.before_pass = gate.wait
    running = asyncio.ensure_future(mesh.generate(asked, PROMPT, max_tokens=5, **fields))
    await node.until_told(LIVENESS_SERVICE, NOT_SERVING)
    gate.open()
    assert (await running).token_ids == expected_tokens(PROMPT, 5)
    await node.until_told(LIVENESS_SERVICE, SERVING)
    computed = 'pdmesh_phase_duration_seconds_count{phase="pdmesh.prefill.compute"}'
    await node.until_scraped("pdmesh_handoffs_total" if role == "decode" else computed)
    assert await node.drain() == 0


async def test_a_router_is_scraped_is_probed_and_drains(
    mesh: FakeMesh, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = await mesh.fused()
    monkeypatch.setattr(router_node.server, "_load_tokenizer", lambda _: make_tokenizer())
    config = RouterConfig(model="fake.gguf", fused=(fused.address,), http="127.0.0.1:0", **ASKED)
    router = await start(router_node.server.serve(config))
    await router.until_told(LIVENESS_SERVICE, SERVING)
    await router.until_scraped('pdmesh_peers{state="ready"}')
    assert await router.drain() == 0

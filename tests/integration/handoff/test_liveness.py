"""Whether a node should be left to live: not when its engine has stood still for long, whatever its peers do."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.fake_compute import Gate, expected_tokens
from support.fake_mesh import FakeMesh, FakeNode, until

from node_runtime.rpc.health import LIVENESS_SERVICE

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
_IMPATIENT = {"stall_timeout_s": 0.5}


async def _wait_until_alive(node: FakeNode, is_alive: bool) -> None:
    """Watches, as nobody may have changed his mind between two questions."""
    wanted = health_pb2.HealthCheckResponse.SERVING if is_alive else health_pb2.HealthCheckResponse.NOT_SERVING
    async with grpc.aio.insecure_channel(node.address) as channel:
        request = health_pb2.HealthCheckRequest(service=LIVENESS_SERVICE)
        async for reply in health_pb2_grpc.HealthStub(channel).Watch(request, timeout=30):
            if reply.status == wanted:
                return


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_node_whose_engine_hangs_is_not_alive_until_it_goes_on(mesh: FakeMesh, role: str) -> None:
    prefill = await mesh.prefill(config=_IMPATIENT)
    decode = await mesh.decode(prefill, config=_IMPATIENT)
    node = {"prefill": prefill, "decode": decode}[role]
    watching = asyncio.create_task(node.node.watch_liveness())
    await _wait_until_alive(node, True)
    gate = Gate()
    node.executor.before_pass = gate.wait
    running = asyncio.ensure_future(mesh.generate(decode, PROMPT, max_tokens=5, prefill_address=prefill.address))
    await _wait_until_alive(node, False)
    gate.open()
    await _wait_until_alive(node, True)
    assert (await running).token_ids == expected_tokens(PROMPT, 5)
    watching.cancel()


async def test_a_decode_node_without_its_prefill_node_is_alive(mesh: FakeMesh) -> None:
    decode = await mesh.decode("127.0.0.1:1", config=_IMPATIENT)
    watching = asyncio.create_task(decode.node.watch_liveness())
    await _wait_until_alive(decode, True)
    assert not (await mesh.status(decode)).serving
    # It has nothing to do and moves when it is asked to; more often than one that hangs would have been given.
    await until(lambda: decode.node.engine.num_pulses > 15, "the engine was looked at often enough")
    await _wait_until_alive(decode, True)
    watching.cancel()

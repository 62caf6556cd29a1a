"""A node that drains finishes what it promised and refuses the rest, in words that a program can act on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from pdmesh.v1 import decode_pb2, mesh_pb2, mesh_pb2_grpc
from support.fake_compute import Gate, expected_tokens
from support.fake_mesh import FakeMesh, FakeNode, until
from support.fake_router import FakeRouter, RoutedAnswer

from decode_node import peers
from node_runtime.rpc.status_details import read_details

PROMPT = list(range(40, 77))
OTHER = list(range(300, 331))


@asynccontextmanager
async def node_stub(node: FakeNode) -> AsyncIterator[mesh_pb2_grpc.NodeAsyncStub]:
    async with grpc.aio.insecure_channel(node.address) as channel:
        yield mesh_pb2_grpc.NodeStub(channel)


async def drain(node: FakeNode) -> mesh_pb2.DrainResponse:
    async with node_stub(node) as stub:
        return await stub.Drain(mesh_pb2.DrainRequest(), timeout=10)


async def refusal(mesh: FakeMesh, node: FakeNode, **fields: object) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.generate(node, OTHER, **fields)
    return caught.value


async def tokens_of(call) -> list[int]:
    responses: list[decode_pb2.DecodeResponse] = [response async for response in call]
    return [token.token_id for response in responses for token in response.tokens.tokens]


async def test_a_draining_decode_node_finishes_its_generations_and_refuses_new_ones(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    gate = Gate()
    decode.executor.before_pass = gate.wait
    call = mesh.call(decode, token_ids=PROMPT, max_tokens=12, prefill_address=prefill.address)
    running = asyncio.ensure_future(tokens_of(call))
    await until(gate.reached.is_set, "the generation is in the middle of a pass")
    answer = await drain(decode)
    assert (answer.node_id, answer.num_running_calls) == (decode.node._config.node_id, 1)
    error = await refusal(mesh, decode, prefill_address=prefill.address)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert dict(error.trailing_metadata())["pdmesh-draining"] == answer.node_id
    status = await mesh.status(decode)
    assert (status.serving, status.draining) == (False, True)
    stopping = asyncio.ensure_future(decode.node.stop())
    gate.open()
    assert await running == expected_tokens(PROMPT, 12)
    await stopping
    assert len(mesh.drains) == 1
    await prefill.assert_all_blocks_return()


async def test_a_draining_prefill_node_finishes_the_handoffs_that_it_accepted(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    gate = Gate()
    prefill.executor.before_pass = gate.wait
    # One is being computed, the other waits in the queue: both are promised.
    calls = [
        mesh.call(decode, token_ids=prompt, max_tokens=5, prefill_address=prefill.address) for prompt in (PROMPT, OTHER)
    ]
    running = [asyncio.ensure_future(tokens_of(call)) for call in calls]
    await until(lambda: gate.reached.is_set() and prefill.num_handoffs == 2, "both prompts are on the prefill node")
    await drain(prefill)
    stopping = asyncio.ensure_future(prefill.node.stop())
    gate.open()
    assert await asyncio.gather(*running) == [expected_tokens(prompt, 5) for prompt in (PROMPT, OTHER)]
    await stopping
    await decode.assert_all_blocks_return()


async def test_a_prompt_that_a_draining_prefill_node_refuses_names_it_and_leaves_nothing_behind(
    mesh: FakeMesh,
) -> None:
    prefill, other = await mesh.prefill(), await mesh.prefill()
    decode = await mesh.decode(prefill, other)
    for node in (prefill, other):
        await mesh.generate(decode, [1, 2], max_tokens=1, prefill_address=node.address)
    answer = await drain(prefill)
    # The first refusal comes over the connection that is there, the next ones from an attempt to make a new one.
    for _ in range(3):
        error = await refusal(mesh, decode, prefill_address=prefill.address)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert read_details(error.trailing_metadata()).prefill_address == prefill.address
        assert f"node {answer.node_id} is draining" in (error.details() or "")
        assert dict(error.trailing_metadata())["pdmesh-draining"] == answer.node_id
    taken = await mesh.generate(decode, OTHER, prefill_address=other.address)
    assert taken.token_ids == expected_tokens(OTHER, 4)
    for node in (prefill, other, decode):
        await node.assert_all_blocks_return()


async def test_a_decode_node_hears_at_once_that_a_prefill_node_drains(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    await until(lambda: decode.node.is_ready, "the decode node has its peer")
    # No request tells of it, and the next look whether the peer is alive is far away: it would find it well anyhow.
    await drain(prefill)
    await until(lambda: not decode.node.is_ready, "the decode node knows", timeout_s=peers.WATCH_INTERVAL_S - 1)
    status = await mesh.status(decode)
    assert not status.serving
    assert [peer.state for peer in status.peers] == ["draining"]
    assert "is draining" in status.peers[0].detail
    port = int(prefill.address.rpartition(":")[2])
    await prefill.node.stop()
    await mesh.prefill(port=port)
    await until(lambda: decode.node.is_ready, "it takes the successor")


async def test_nodes_that_drain_cost_no_retries_and_are_said_to_drain(mesh: FakeMesh) -> None:
    prefill = [await mesh.prefill(), await mesh.prefill()]
    decode = [await mesh.decode(*prefill), await mesh.decode(*prefill)]
    await until(lambda: all(node.node.is_ready for node in decode), "the decode nodes have their peers")
    async with FakeRouter(prefill=prefill, decode=decode, retry_burst=0, retry_ratio=0, max_attempts=1) as router:
        # The router hears of neither in advance.
        for task in router.router._background:
            task.cancel()
        for node in (prefill[0], decode[0]):
            await drain(node)
        answers = await asyncio.gather(*(router.generate([*PROMPT, index], max_tokens=5) for index in range(6)))
        for index, answer in enumerate(answers):
            assert answer.token_ids == expected_tokens([*PROMPT, index], 5)
        assert sum(answer.finish.num_replacements for answer in answers) >= 2
        status = await router.status()
    assert status.num_retries == 0
    states = {peer.address: peer.state for peer in status.peers}
    assert states == {
        prefill[0].address: "draining",
        decode[0].address: "draining",
        prefill[1].address: "ready",
        decode[1].address: "ready",
    }
    for node in (*prefill, *decode):
        await node.assert_all_blocks_return()


async def test_a_node_that_was_told_to_drain_is_told_again_without_harm(mesh: FakeMesh) -> None:
    fused = await mesh.fused()
    answers = [await drain(fused) for _ in range(3)]
    assert [answer.was_draining for answer in answers] == [False, True, True]
    assert [answer.num_running_calls for answer in answers] == [0, 0, 0]
    await asyncio.wait_for(fused.node.stop(), 20)


async def test_a_stream_that_outlives_the_grace_of_its_decode_node_goes_on_at_another_one(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    decode = [await mesh.decode(prefill), await mesh.decode(prefill)]
    await until(lambda: all(node.node.is_ready for node in decode), "the decode nodes have their peer")
    async with FakeRouter(prefill=[prefill], decode=decode) as router:
        gate = Gate()
        engines = [node.node.engine for node in decode]
        for node in decode:
            node.executor.before_pass = lambda plan: (
                gate.wait() if max(engine.snapshot.num_steps for engine in engines) >= 10 else None
            )
        stream, answer = aiter(router.call(PROMPT, max_tokens=30)), RoutedAnswer()
        while len(answer.token_ids) < 7:
            answer.take(await anext(stream))
        await until(gate.reached.is_set, "the decode node stands still")
        leaving, staying = sorted(decode, key=lambda node: -node.node.engine.snapshot.num_running)
        staying.executor.before_pass = lambda plan: None
        leaving.node._config = leaving.node._config.model_copy(update={"drain_grace_s": 0.1})
        stopping = asyncio.ensure_future(leaving.node.stop())
        async for response in stream:
            answer.take(response)
        gate.open()
        await stopping
    assert answer.token_ids == expected_tokens(PROMPT, 30)
    assert answer.finish is not None
    assert answer.finish.num_replacements == 1
    for node in (prefill, staying):
        await node.assert_all_blocks_return()


async def test_a_draining_router_finishes_its_streams_and_refuses_new_ones(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    await until(lambda: decode.node.is_ready, "the decode node has its peer")
    async with FakeRouter(prefill=[prefill], decode=[decode], drain_grace_s=20) as router:
        gate = Gate()
        decode.executor.before_pass = gate.wait
        running = asyncio.ensure_future(router.generate(PROMPT, max_tokens=12))
        await until(gate.reached.is_set, "the generation is in the middle of a pass")
        stopping = asyncio.ensure_future(router.router.stop())
        with pytest.raises(grpc.aio.AioRpcError, match="is draining") as caught:
            await router.generate([1, 2], max_tokens=1)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        gate.open()
        assert (await running).token_ids == expected_tokens(PROMPT, 12)
        await stopping
    for node in (prefill, decode):
        await node.assert_all_blocks_return()

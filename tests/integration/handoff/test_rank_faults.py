"""Nodes of two tensor ranks when something is wrong: a rank that dies, a peer that cannot be linked, damaged bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import cast

import grpc
import pytest
from support.fake_mesh import FakeMesh, FakeNode, until
from support.model_core import model_core
from support.rank_threads import RankThreads
from unit.model_runtime import tiny_llama

from cache_runtime.transfer.schema import PlacementManifest
from model_runtime.checkpoint import Checkpoint, open_checkpoint
from node_runtime.wire.manifest import manifest_to_proto

PROMPT = tiny_llama.random_prompt(37, seed=1)
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(tiny_llama.save(tiny_llama.make_reference(), tmp_path_factory.mktemp("model")))


@pytest.fixture
async def mesh(checkpoint: Checkpoint) -> AsyncIterator[FakeMesh]:
    mesh = FakeMesh(partial(model_core, checkpoint=checkpoint))
    yield mesh
    await mesh.close()


def kill_a_rank(node: FakeNode) -> None:
    cast(RankThreads, node.core.ranks).kill(1)


async def test_a_dead_rank_of_the_prefill_node_ends_its_requests_as_unavailable_and_costs_its_peer_nothing(
    mesh: FakeMesh,
) -> None:
    broken, sound = await mesh.prefill(num_ranks=2), await mesh.prefill(num_ranks=2)
    decode = await mesh.decode(broken, sound, num_ranks=2)
    expected = (await mesh.generate(decode, PROMPT, prefill_address=sound.address)).token_ids
    kill_a_rank(broken)
    await until(lambda: bool(broken.fatal), "the node hears that its rank is gone")
    assert "tensor rank 1 ended" in str(broken.fatal[0])
    code, message = await mesh.error(decode, [*PROMPT, 1], prefill_address=broken.address)
    assert (code, "tensor rank 1 is gone" in message) == (UNAVAILABLE, True), message
    await mesh.kill(broken)
    answer = await mesh.generate(decode, PROMPT, prefill_address=sound.address)
    assert answer.token_ids == expected
    for node in (sound, decode):
        await node.assert_all_blocks_return()


async def test_a_rank_that_dies_while_bytes_are_on_their_way_leaves_nothing_behind(mesh: FakeMesh) -> None:
    """A prompt that is computed by then may still arrive."""
    prefill = await mesh.prefill(num_ranks=2)
    decode = await mesh.decode(prefill)
    await mesh.generate(decode, PROMPT, prefill_address=prefill.address)
    mesh.fabric.hold(decode.endpoint)
    asking = asyncio.create_task(mesh.generate(decode, [*PROMPT[:36], 1], prefill_address=prefill.address))
    await until(lambda: mesh.fabric.num_unfinished_writes(decode.endpoint) > 0, "bytes are on their way")
    kill_a_rank(prefill)
    await until(lambda: bool(prefill.fatal), "the node hears that its rank is gone")
    mesh.fabric.release(decode.endpoint)
    (outcome,) = await asyncio.gather(asking, return_exceptions=True)
    assert not isinstance(outcome, grpc.aio.AioRpcError) or outcome.code() == UNAVAILABLE, outcome
    await decode.assert_all_blocks_return()
    await until(lambda: prefill.num_handoffs == 0, "the prefill node holds no handoff")


async def test_a_dead_rank_of_the_decode_node_ends_its_streams_as_unavailable_and_frees_the_prefill_node(
    mesh: FakeMesh,
) -> None:
    prefill = await mesh.prefill(num_ranks=2)
    decode = await mesh.decode(prefill, num_ranks=2)
    call = mesh.call(decode, token_ids=PROMPT, prefill_address=prefill.address, max_tokens=150)
    num_tokens = 0
    async for response in call:
        num_tokens += len(response.tokens.tokens)
        if num_tokens >= 3:
            break
    kill_a_rank(decode)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        num_tokens += sum([len(response.tokens.tokens) async for response in call])
    assert error.value.code() == UNAVAILABLE, error.value.details()
    assert num_tokens < 150
    await until(lambda: bool(decode.fatal), "the node hears that its rank is gone")
    await prefill.assert_all_blocks_return()
    await mesh.kill(decode)
    other = await mesh.decode(prefill)
    assert len((await mesh.generate(other, PROMPT, prefill_address=prefill.address)).token_ids) == 4


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 2), (2, 1), (2, 2)])
async def test_bytes_that_are_damaged_on_the_way_to_a_rank_are_found_before_they_are_used(
    mesh: FakeMesh, num_prefill: int, num_decode: int
) -> None:
    prefill = await mesh.prefill(num_ranks=num_prefill)
    decode = await mesh.decode(prefill, num_ranks=num_decode, config={"verify_transfers": "all"})
    await mesh.generate(decode, [1, 2], max_tokens=1, prefill_address=prefill.address)
    num_steps = decode.node.engine.snapshot.num_steps
    # The second way is proved anew first, which takes a run.
    for num_runs in (0, 3):
        mesh.fabric.flip_bit(decode.endpoint, num_runs)
        code, message = await mesh.error(decode, PROMPT, prefill_address=prefill.address)
        assert code == grpc.StatusCode.DATA_LOSS
        assert "the cache differs from what was sent in layers." in message
    assert decode.node.engine.snapshot.num_steps == num_steps
    for prompt in (PROMPT, [*PROMPT[:20], 5, 6, 7]):
        assert len((await mesh.generate(decode, prompt, prefill_address=prefill.address)).token_ids) == 4
    status = await mesh.status(decode)
    assert (status.num_verified_handoffs, status.num_damaged_handoffs) == (5, 2)
    for node in (prefill, decode):
        await node.assert_all_blocks_return()


def with_ranks_apart(manifest: PlacementManifest) -> PlacementManifest:
    """As of a node whose ranks have data planes of their own."""
    first, second = manifest.ranks
    return replace(manifest, ranks=(first, replace(second, endpoint="memory:elsewhere")))


async def test_a_peer_whose_ranks_cannot_be_linked_is_refused_at_bootstrap_with_the_reason(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(num_ranks=2)
    bootstrap = decode.node._receiving.peers._bootstrap
    bootstrap._told_manifest = manifest_to_proto(with_ranks_apart(bootstrap._manifest))
    code, message = await mesh.error(decode, PROMPT, prefill_address=prefill.address)
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert "target ranks 0 and 1: reached at memory" in message
    assert "memory:elsewhere, one link must lead to all of them" in message
    for node in (prefill, decode):
        await node.assert_all_blocks_return()


async def test_ranks_whose_memory_is_not_exposed_are_refused_at_bootstrap(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(num_ranks=2)
    bootstrap = decode.node._receiving.peers._bootstrap
    first, second = bootstrap._manifest.ranks
    elsewhere = replace(second, arena_base=second.arena_base + (1 << 40))
    bootstrap._told_manifest = manifest_to_proto(replace(bootstrap._manifest, ranks=(first, elsewhere)))
    code, message = await mesh.error(decode, PROMPT, prefill_address=prefill.address)
    assert (code, "does not expose" in message) == (grpc.StatusCode.INVALID_ARGUMENT, True), message

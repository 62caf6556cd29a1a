"""Handoffs over the planes whose receiver places the bytes: the choice, the proof, the fence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import grpc
import pytest
from support.fake_compute import Gate, expected_tokens
from support.fake_mesh import FakeMesh, FakeNode, until

import prefill_node.checksums
from cache_runtime.transfer.engine import Permit, PlaneKind, Run, Spans, TransferEngine, TransferRefused
from cache_runtime.transfer.memory_engine import MemoryEngine
from cache_runtime.transfer.plane_set import PlaneSet
from cache_runtime.transfer.shm_engine import host_id, open_shm_engine
from cache_runtime.transfer.stream_engine import open_stream_engine
from node_runtime.engine.core import DataPlane
from node_runtime.handoff.messages import FieldChecksums
from node_runtime.wire.manifest import manifest_to_proto
from prefill_node.checksums import ShippedBlocks

PROMPT = list(range(40, 77))


def shm(mesh: FakeMesh) -> TransferEngine:
    return open_shm_engine()


def stream(mesh: FakeMesh) -> TransferEngine:
    return open_stream_engine("127.0.0.1", bind_host="127.0.0.1")


def memory(mesh: FakeMesh) -> TransferEngine:
    return MemoryEngine(mesh.fabric)


def fenced_memory(mesh: FakeMesh) -> TransferEngine:
    return MemoryEngine(mesh.fabric, kind=PlaneKind.TWO_SIDED)


Make = Callable[[FakeMesh], TransferEngine]


async def pair(
    mesh: FakeMesh, prefill: list[Make], decode: list[Make], config: dict[str, object] | None = None
) -> tuple[FakeNode, FakeNode]:
    """A prefill and a decode node, the latter of this configuration, that offer these planes."""
    first, second = (PlaneSet([make(mesh) for make in makes], host_id=host_id()) for makes in (prefill, decode))
    node = await mesh.prefill(planes=first)
    return node, await mesh.decode(planes=second, config=config)


async def used_planes(mesh: FakeMesh, *nodes: FakeNode) -> list[str]:
    return [peer.data_plane for node in nodes for peer in (await mesh.status(node)).peers]


@pytest.mark.parametrize(
    ("prefill", "decode", "used"),
    [
        ([shm, stream], [stream, shm], "shm"),
        ([shm, stream], [stream], "stream"),
        ([stream, memory], [memory, shm], "memory"),
        ([fenced_memory], [fenced_memory], "memory"),
    ],
)
async def test_a_prompt_goes_over_the_best_plane_in_common_and_both_sides_say_which(
    mesh: FakeMesh, prefill: list[Make], decode: list[Make], used: str
) -> None:
    one, other = await pair(mesh, prefill, decode, {"verify_transfers": "all"})
    for prompt in (PROMPT, PROMPT[:5], [9, 8, 7], [*PROMPT, 1, 2, 3]):
        answer = await mesh.generate(other, prompt, prefill_address=one.address)
        assert answer.token_ids == expected_tokens(prompt, 4)
    assert await used_planes(mesh, one, other) == [used, used]
    status = await mesh.status(other)
    assert (status.num_verified_handoffs, status.num_damaged_handoffs) == (4, 0)
    for node in (one, other):
        assert node.core.require_data_plane().planes.num_refused_runs == 0
        await node.assert_all_blocks_return()


@pytest.mark.parametrize("make", [shm, stream])
@pytest.mark.parametrize("place", [0, -1])
async def test_what_a_plane_hashed_on_arrival_is_compared_with_what_was_hashed_on_sending(
    mesh: FakeMesh, make: Make, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = await pair(mesh, [make], [make], {"verify_transfers": "all"})
    landed = prefill_node.checksums._split

    def told_wrongly(shipped: Sequence[ShippedBlocks], num_ranks: int, digests: bytes) -> list[FieldChecksums]:
        changed = bytearray(digests)
        changed[place] ^= 4
        return landed(shipped, num_ranks, bytes(changed))

    with monkeypatch.context() as patched:
        patched.setattr(prefill_node.checksums, "_split", told_wrongly)
        code, message = await mesh.error(other, PROMPT, prefill_address=one.address)
    assert code == grpc.StatusCode.DATA_LOSS
    assert "the cache differs from what was sent in layers." in message
    answer = await mesh.generate(other, PROMPT, prefill_address=one.address)
    assert answer.token_ids == expected_tokens(PROMPT, 4)
    status = await mesh.status(other)
    assert (status.num_verified_handoffs, status.num_damaged_handoffs) == (2, 1)
    for node in (one, other):
        await node.assert_all_blocks_return()


async def test_shared_memory_that_cannot_be_reached_gives_way_to_the_stream(mesh: FakeMesh) -> None:
    one, other = await pair(mesh, [shm, stream], [shm, stream])
    # As from another network namespace of the host: what the manifest names is not there.
    bootstrap = other.node._receiving.peers._bootstrap
    rank = bootstrap._manifest.ranks[0]
    hidden = tuple(replace(offer, endpoint="nobody") if offer.name == "shm" else offer for offer in rank.planes)
    bootstrap._told_manifest = manifest_to_proto(replace(bootstrap._manifest, ranks=(replace(rank, planes=hidden),)))
    answer = await mesh.generate(other, PROMPT, prefill_address=one.address)
    assert answer.token_ids == expected_tokens(PROMPT, 4)
    assert await used_planes(mesh, one, other) == ["stream", "stream"]


@pytest.mark.parametrize("is_decode_older", [True, False])
async def test_a_node_of_a_release_that_knows_no_offers_is_reached_over_the_plane_that_it_names(
    mesh: FakeMesh, is_decode_older: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    makes = [memory, shm, stream]
    one, other = await pair(mesh, [memory] if not is_decode_older else makes, makes)
    if is_decode_older:
        asking = other.node._receiving.peers._bootstrap
        asking._manifest = replace(asking._manifest, ranks=(replace(asking._manifest.ranks[0], planes=()),))
        asking._told_manifest = manifest_to_proto(asking._manifest)
    else:
        # It neither reads the offers nor says which plane it chose.
        bootstrap = one.node._peers.bootstrap

        async def as_before(caller) -> str:
            rank = replace(caller.manifest.ranks[0], planes=())
            manifest = replace(caller.manifest, ranks=(rank,))
            await bootstrap(replace(caller, manifest=manifest))
            return ""

        monkeypatch.setattr(type(one.node._peers), "bootstrap", lambda self, caller: as_before(caller))
    answer = await mesh.generate(other, PROMPT, prefill_address=one.address)
    assert answer.token_ids == expected_tokens(PROMPT, 4)
    assert await used_planes(mesh, other) == ["memory"]


async def test_nodes_without_a_plane_in_common_refuse_one_another_and_say_what_they_have(mesh: FakeMesh) -> None:
    one, other = await pair(mesh, [shm], [stream])
    code, message = await mesh.error(other, PROMPT, prefill_address=one.address)
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert "data_plane source=shm(unix), target=stream(tcp)" in message


async def test_a_plane_that_was_not_offered_is_not_believed(mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = await pair(mesh, [shm], [shm])
    bootstrap = one.node._peers.bootstrap

    async def lie(self, caller) -> str:
        await bootstrap(caller)
        return "pigeon"

    monkeypatch.setattr(type(one.node._peers), "bootstrap", lie)
    code, message = await mesh.error(other, PROMPT, prefill_address=one.address)
    assert code == grpc.StatusCode.INTERNAL
    assert 'data plane "pigeon", which was not offered' in message


@pytest.mark.parametrize("make", [shm, stream, fenced_memory])
async def test_after_a_cancellation_the_fence_is_down_before_the_writer_knows(mesh: FakeMesh, make: Make) -> None:
    one, other = await pair(mesh, [make], [make])
    await mesh.generate(other, [1, 2], max_tokens=1, prefill_address=one.address)
    engine = other.core.require_data_plane().planes.engines[0]
    allow, granted = engine.allow, list[tuple[bytes, Spans]]()

    def noted(key: bytes, spans: Spans, *, hashed_as: str | None) -> Permit:
        granted.append((key, spans))
        return allow(key, spans, hashed_as=hashed_as)

    engine.allow = noted
    gate, steps = Gate(), one.node.engine
    # The first chunk was sent; the writer is held up and learns nothing until the gate opens.
    one.executor.before_stage = lambda stage: gate.wait() if steps.snapshot.num_steps >= 1 and stage == 1 else None
    call = mesh.call(other, token_ids=PROMPT, prefill_address=one.address)
    await until(lambda: gate.reached.is_set() and other.node.engine.snapshot.active_lcm_blocks > 0, "memory is granted")
    call.cancel()
    # Nothing is quarantined: the blocks are free while the writer still means to fill them.
    await until(other.is_quiet, "the blocks are free")
    assert not one.is_quiet()
    seen = other.executor.arena.memory.copy()
    # A writer that knows of nothing would go on like this.
    ((key, spans),) = granted
    (peer,) = one.node._peers._peers.values()
    late = Run(one.executor.arena.base_address, int(spans[0][0]), 16)
    with pytest.raises(TransferRefused):
        await asyncio.wrap_future(peer.link.write([late], key=key, timeout_s=10.0))
    gate.open()
    for node in (one, other):
        await until(node.is_quiet, "all is quiet")
    assert (other.executor.arena.memory == seen).all()
    answer = await mesh.generate(other, PROMPT, prefill_address=one.address)
    assert answer.token_ids == expected_tokens(PROMPT, 4)
    assert await used_planes(mesh, other) == [engine.name]
    for node in (one, other):
        await node.assert_all_blocks_return()


@pytest.mark.parametrize("make", [shm, stream, fenced_memory])
async def test_a_write_that_no_grant_holds_is_refused_and_makes_nobody_suspect(mesh: FakeMesh, make: Make) -> None:
    one, other = await pair(mesh, [make], [make])
    await mesh.generate(other, [1, 2], max_tokens=1, prefill_address=one.address)
    data_plane: DataPlane = other.core.require_data_plane()
    engine = data_plane.planes.engines[0]
    allow = engine.allow

    def allow_nothing(key: bytes, spans: Spans, *, hashed_as: str | None) -> Permit:
        permit = allow(key, spans, hashed_as=hashed_as)
        permit.revoke()
        return permit

    engine.allow = allow_nothing
    code, message = await mesh.error(other, PROMPT, prefill_address=one.address)
    assert code == grpc.StatusCode.UNAVAILABLE
    assert "not granted" in message
    assert (await mesh.status(other)).num_refused_runs == data_plane.planes.num_refused_runs > 0
    engine.allow = allow
    assert one.node._peers.statuses()[0].state == "ready"
    answer = await mesh.generate(other, PROMPT, prefill_address=one.address)
    assert answer.token_ids == expected_tokens(PROMPT, 4)
    for node in (one, other):
        await node.assert_all_blocks_return()

"""Leases between real nodes and peers made of bare messages: a writer that is not renewed fences itself, a silent peer
is given up, a restarted one is a stranger.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import numpy as np
import pytest
from pdmesh.v1 import handoff_pb2, prefill_pb2, prefill_pb2_grpc
from support.fake_compute import Gate, expected_tokens
from support.fake_mesh import FakeMesh, FakeNode, until

from node_runtime.clock import SystemClock
from node_runtime.handoff.lease import WriterLease, beat_interval_ms
from node_runtime.wire.manifest import manifest_to_proto

PROMPT = list(range(10))
LEASE_MS = 600


class BareDecodeNode:
    """Bootstraps in the place of a real decode node and speaks the protocol by hand."""

    def __init__(self, prefill: FakeNode, decode: FakeNode) -> None:
        self.memory = decode.executor.arena.memory
        self.memory[:] = 0x5A
        self._plane = decode.core.require_data_plane()
        self._nonce = np.zeros(32, dtype=np.uint8)
        self._plane.engine.register(self._nonce.ctypes.data, 32)
        self._channel = grpc.aio.insecure_channel(prefill.address)
        self._stub = prefill_pb2_grpc.PrefillStub(self._channel)
        self.incarnation = 4711
        self._prefill_incarnation = 0
        self.received: list[handoff_pb2.HandoffResponse] = []
        self._outgoing: asyncio.Queue[handoff_pb2.HandoffRequest] = asyncio.Queue()

    async def bootstrap(self, incarnation: int = 4711) -> None:
        self.incarnation = incarnation
        request = prefill_pb2.BootstrapRequest(
            node_id="bare",
            incarnation=incarnation,
            manifest=manifest_to_proto(self._plane.manifest),
            nonce=b"n" * 32,
            nonce_address=self._nonce.ctypes.data,
        )
        self._prefill_incarnation = (await self._stub.Bootstrap(request, timeout=10)).incarnation

    def open(self, handoff_id: bytes = b"h" * 16, *, lease_ms: int = LEASE_MS) -> asyncio.Task[grpc.StatusCode]:
        """Starts a handoff; what the peer says is collected until it ends the stream."""
        start = handoff_pb2.Start(
            handoff_id=handoff_id,
            request_id=f"bare-{handoff_id.hex()}",
            token_ids=PROMPT,
            decode_incarnation=self.incarnation,
            prefill_incarnation=self._prefill_incarnation,
            lease_ms=lease_ms,
        )
        return asyncio.ensure_future(self._talk(handoff_pb2.HandoffRequest(start=start)))

    async def _talk(self, start: handoff_pb2.HandoffRequest) -> grpc.StatusCode:
        async def requests() -> AsyncIterator[handoff_pb2.HandoffRequest]:
            yield start
            while True:
                yield await self._outgoing.get()

        call = self._stub.Handoff(requests(), timeout=20)
        try:
            async for response in call:
                self.received.append(response)
        except grpc.aio.AioRpcError:
            pass
        return await call.code()

    def say(self, **message: object) -> None:
        self._outgoing.put_nowait(handoff_pb2.HandoffRequest(**message))

    def grant(self, *, beat: int = 0, lease_ms: int = LEASE_MS, handoff_id: bytes = b"h" * 16) -> None:
        group = handoff_pb2.GroupGrant(group_id="full", first_slot=0, block_ids=[1, 2, 3])
        self.say(grant=handoff_pb2.Grant(handoff_id=handoff_id, groups=[group], beat=beat, lease_ms=lease_ms))

    def renew(self, beat: int) -> None:
        self.say(renewed=handoff_pb2.Renewed(handoff_id=b"h" * 16, beat=beat))

    @property
    def kinds(self) -> list[str | None]:
        return [response.WhichOneof("message") for response in self.received]

    async def until(self, kind: str, number: int = 1) -> None:
        await until(lambda: self.kinds.count(kind) >= number, f"{number} of {kind}")

    async def close(self) -> None:
        await self._channel.close()


@pytest.fixture
async def nodes(mesh: FakeMesh) -> tuple[FakeNode, FakeNode]:
    return await mesh.prefill(), await mesh.decode()


@asynccontextmanager
async def bare_decode_node(mesh: FakeMesh, prefill: FakeNode, decode: FakeNode) -> AsyncIterator[BareDecodeNode]:
    """Whatever it did: afterwards the prefill node still serves a sound peer and holds nothing."""
    bare = BareDecodeNode(prefill, decode)
    await bare.bootstrap()
    yield bare
    await bare.close()
    answer = await mesh.generate(decode, [1, 2, 3], prefill_address=prefill.address)
    assert answer.token_ids == expected_tokens([1, 2, 3], 4)
    await prefill.assert_all_blocks_return()


@pytest.fixture
async def bare(mesh: FakeMesh, nodes: tuple[FakeNode, FakeNode]) -> AsyncIterator[BareDecodeNode]:
    async with bare_decode_node(mesh, *nodes) as bare:
        yield bare


class HeldClock(SystemClock):
    """Stands still but for what it is moved by, until it is let go: then no answer of a busy machine is a late one."""

    def __init__(self) -> None:
        super().__init__()
        self._held_at_s: float | None = super().now_s()

    def now_s(self) -> float:
        return super().now_s() if self._held_at_s is None else self._held_at_s

    def advance(self, seconds: float) -> None:
        assert self._held_at_s is not None
        self._held_at_s += seconds

    def let_go(self) -> None:
        self._held_at_s = None


@pytest.fixture
def renewals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The beats from which a writer's lease was made to count, as they are taken."""
    taken: list[int] = []
    extend = WriterLease.extend

    def noted(lease: WriterLease, beat: int, now_s: float) -> bool:
        is_extended = extend(lease, beat, now_s)
        taken.extend([beat] if is_extended else [])
        return is_extended

    monkeypatch.setattr(WriterLease, "extend", noted)
    return taken


async def test_a_prompt_may_compute_for_many_leases_while_its_lease_is_renewed(
    mesh: FakeMesh, renewals: list[int]
) -> None:
    clock, gate = HeldClock(), Gate()
    prefill = await mesh.prefill(clock=clock)
    async with bare_decode_node(mesh, prefill, await mesh.decode()) as bare:
        prefill.executor.before_pass = gate.wait
        stream = bare.open()
        await bare.until("ready")
        bare.grant()
        for beat in range(1, 13):
            clock.advance(beat_interval_ms(LEASE_MS) / 1000)
            await bare.until("beat", beat)
            bare.renew(beat)
            await until(lambda beat=beat: renewals[-1:] == [beat], f"renewal {beat}")
        gate.open()
        assert await stream == grpc.StatusCode.OK
        assert bare.kinds[-1] == "done"
        assert [response.beat.number for response in bare.received if response.HasField("beat")] == list(range(1, 13))
        clock.let_go()


async def test_a_prefill_node_whose_lease_is_not_renewed_writes_nothing_more_and_says_so(
    nodes: tuple[FakeNode, FakeNode], bare: BareDecodeNode
) -> None:
    gate = Gate()
    nodes[0].executor.before_pass = gate.wait
    stream = bare.open()
    await bare.until("ready")
    bare.grant()
    await bare.until("failed")
    gate.open()
    assert await stream == grpc.StatusCode.OK
    (failed,) = [response.failed for response in bare.received if response.HasField("failed")]
    assert failed.code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert "did not renew the lease" in failed.message
    assert bare.kinds[-1] == "quiesced"
    assert (bare.memory == 0x5A).all()


async def test_a_grant_whose_lease_is_over_is_not_written_to(bare: BareDecodeNode) -> None:
    stream = bare.open()
    await bare.until("beat", 5)
    bare.grant(beat=0)
    assert await stream == grpc.StatusCode.OK
    assert bare.kinds[-2:] == ["failed", "quiesced"]
    assert (bare.memory == 0x5A).all()


async def test_a_decode_node_of_a_release_without_leases_gets_no_message_that_it_does_not_know(
    bare: BareDecodeNode,
) -> None:
    stream = bare.open(lease_ms=0)
    await bare.until("ready")
    await asyncio.sleep(0.3)
    bare.grant(lease_ms=0)
    assert await stream == grpc.StatusCode.OK
    assert bare.kinds == ["ready", "done"]


async def test_a_handoff_id_opens_one_handoff_and_never_another(bare: BareDecodeNode) -> None:
    stream = bare.open()
    await bare.until("ready")
    bare.grant()
    assert await stream == grpc.StatusCode.OK
    bare.received.clear()
    assert await bare.open() == grpc.StatusCode.INVALID_ARGUMENT
    assert bare.received == []


async def test_a_decode_node_that_comes_back_as_another_incarnation_ends_the_handoffs_of_the_old_one(
    nodes: tuple[FakeNode, FakeNode], bare: BareDecodeNode
) -> None:
    stream = bare.open()
    await bare.until("ready")
    assert nodes[0].num_handoffs == 1
    await bare.bootstrap(incarnation=4712)
    await stream
    assert nodes[0].num_handoffs == 0
    await nodes[0].assert_all_blocks_return()


class SilentPrefill(prefill_pb2_grpc.PrefillServicer):
    """Bootstraps like the real one it stands before, says Ready, takes the grant, and then says nothing any more."""

    def __init__(self, behind: FakeNode) -> None:
        self._behind = behind
        self.kinds: list[str | None] = []

    async def Bootstrap(self, request, context):
        async with grpc.aio.insecure_channel(self._behind.address) as channel:
            return await prefill_pb2_grpc.PrefillStub(channel).Bootstrap(request, timeout=10)

    async def Handoff(self, requests, context):
        async for message in requests:
            if message.HasField("start"):
                ready = handoff_pb2.Ready(handoff_id=message.start.handoff_id, beat_interval_ms=100)
                yield handoff_pb2.HandoffResponse(ready=ready)


async def test_a_prefill_node_that_falls_silent_is_given_up_and_the_blocks_return_after_the_lease(
    mesh: FakeMesh,
) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(config={"handoff_lease_s": 1.0})
    server = grpc.aio.server()
    prefill_pb2_grpc.add_PrefillServicer_to_server(SilentPrefill(prefill), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        code, message = await mesh.error(decode, PROMPT, prefill_address=f"127.0.0.1:{port}")
        assert code == grpc.StatusCode.UNAVAILABLE
        assert "no sign of life for 1 s" in message
        await decode.assert_all_blocks_return()
    finally:
        await server.stop(None)
    answer = await mesh.generate(decode, PROMPT, prefill_address=prefill.address)
    assert answer.token_ids == expected_tokens(PROMPT, 4)


async def test_granted_blocks_are_kept_for_as_long_as_their_plane_says_that_a_write_may_land(mesh: FakeMesh) -> None:
    """After the same silence as above, over a plane that drains slowly."""
    prefill = await mesh.prefill()
    decode = await mesh.decode(config={"handoff_lease_s": 1.0})
    decode.core.require_data_plane().engine.drain_bound_s = 600.0
    server = grpc.aio.server()
    prefill_pb2_grpc.add_PrefillServicer_to_server(SilentPrefill(prefill), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        await mesh.error(decode, PROMPT, prefill_address=f"127.0.0.1:{port}")
    finally:
        await server.stop(None)
    engine = decode.node.engine
    await until(lambda: engine.snapshot.quarantined_lcm_blocks > 0, "the blocks are in quarantine")
    # The peer is gone, the lease is over, the node has gone on: none of it is a proof.
    answer = await mesh.generate(decode, PROMPT, prefill_address=prefill.address)
    assert answer.token_ids == expected_tokens(PROMPT, 4)
    assert engine.snapshot.quarantined_lcm_blocks > 0
    assert decode.num_handoffs == 1


class RestartingPrefill(SilentPrefill):
    """Another incarnation each time it is asked."""

    async def Bootstrap(self, request, context):
        response = await super().Bootstrap(request, context)
        self.num_incarnations += 1
        response.incarnation = self.num_incarnations
        return response

    num_incarnations = 0


async def test_a_prefill_node_that_comes_back_as_another_incarnation_ends_the_handoffs_with_the_old_one(
    mesh: FakeMesh,
) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(config={"handoff_lease_s": 3.0})
    server = grpc.aio.server()
    prefill_pb2_grpc.add_PrefillServicer_to_server(RestartingPrefill(prefill), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    peers = decode.node._receiving.peers
    try:
        old = asyncio.ensure_future(mesh.error(decode, PROMPT, prefill_address=address))
        await until(lambda: decode.node.engine.snapshot.active_lcm_blocks > 0, "the old incarnation has its grant")
        peers.suspect(peers._entries[address].peer, "a reason to bootstrap again")
        new = asyncio.ensure_future(mesh.error(decode, PROMPT, prefill_address=address, timeout=1.0))
        code, message = await old
        assert code == grpc.StatusCode.UNAVAILABLE
        assert "was restarted" in message
        await new
    finally:
        await server.stop(None)
    await decode.assert_all_blocks_return()


class OlderPrefill(SilentPrefill):
    """Passes everything on to the real one it stands before, like a release that knows no leases and no checksums."""

    async def Handoff(self, requests, context):
        async def older() -> AsyncIterator[handoff_pb2.HandoffRequest]:
            async for message in requests:
                self.kinds.append(message.WhichOneof("message"))
                if message.HasField("start"):
                    message.start.ClearField("lease_ms")
                    message.start.ClearField("wants_checksums")
                assert not message.grant.lease_ms
                yield message

        async with grpc.aio.insecure_channel(self._behind.address) as channel:
            async for response in prefill_pb2_grpc.PrefillStub(channel).Handoff(older(), timeout=20):
                yield response


async def test_a_prefill_node_of_a_release_without_leases_gets_no_message_that_it_does_not_know(
    mesh: FakeMesh,
) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(config={"handoff_lease_s": 0.5, "verify_transfers": "all"})
    gate = Gate()
    prefill.executor.before_pass = gate.wait
    server = grpc.aio.server()
    older = OlderPrefill(prefill)
    prefill_pb2_grpc.add_PrefillServicer_to_server(older, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        answering = asyncio.ensure_future(mesh.generate(decode, PROMPT, prefill_address=f"127.0.0.1:{port}"))
        await until(lambda: older.kinds == ["start", "grant"], "the grant was sent")
        # Longer than the lease that it knows nothing of.
        await asyncio.sleep(0.8)
        gate.open()
        assert (await answering).token_ids == expected_tokens(PROMPT, 4)
    finally:
        await server.stop(None)
    assert older.kinds == ["start", "grant"]
    assert (await mesh.status(decode)).num_verified_handoffs == 0
    for node in (prefill, decode):
        await node.assert_all_blocks_return()

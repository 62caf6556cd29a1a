"""Peers are made once, shared by all who wait for them, and leave nothing behind when they cannot be made."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from pdmesh.v1 import mesh_pb2, prefill_pb2, prefill_pb2_grpc
from support.fake_compute import Gate, expected_tokens
from support.fake_mesh import FakeMesh, FakeNode, until

from cache_runtime.transfer.engine import PeerLink, TransferEngine
from node_runtime.errors import PeerUnavailable
from node_runtime.rpc import NodeService
from node_runtime.wire.manifest import manifest_to_proto

PROMPT = [1, 2, 3]


class GatedOpening:
    """Holds `open_peer` of a node's data plane, and knows which links it made are closed."""

    def __init__(self, node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = Gate()
        self.num_calls = 0
        self.num_closed = 0
        engine: TransferEngine = node.core.require_data_plane().engine
        self._open_peer = engine.open_peer
        monkeypatch.setattr(engine, "open_peer", self._open)

    def _open(self, endpoint: str, regions: object) -> PeerLink:
        self.num_calls += 1
        self.gate.wait()
        link = self._open_peer(endpoint, regions)
        close = link.close

        def counted_close() -> None:
            self.num_closed += 1
            close()

        link.close = counted_close
        return link


async def test_requests_that_wait_for_one_peer_share_its_bootstrap_and_one_that_leaves_does_not_end_it(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = await mesh.prefill(), await mesh.decode()
    opening = GatedOpening(prefill, monkeypatch)
    leaver = mesh.call(decode, token_ids=PROMPT, prefill_address=prefill.address)
    reading = asyncio.ensure_future(leaver.read())
    await until(opening.gate.reached.is_set, "the bootstrap is under way")
    others = [asyncio.ensure_future(mesh.generate(decode, PROMPT, prefill_address=prefill.address)) for _ in range(4)]
    await until(lambda: len(decode.node.service._live) == 5, "all of them wait")
    leaver.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    opening.gate.open()
    for answer in await asyncio.gather(*others):
        assert answer.token_ids == expected_tokens(PROMPT, 4)
    assert opening.num_calls == 1


async def test_a_bootstrap_whose_caller_leaves_closes_the_link_that_it_was_opening(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = await mesh.prefill(), await mesh.decode()
    opening = GatedOpening(prefill, monkeypatch)
    request = prefill_pb2.BootstrapRequest(
        node_id="leaver",
        incarnation=5,
        manifest=manifest_to_proto(decode.core.require_data_plane().manifest),
        nonce=b"n" * 32,
        nonce_address=decode.node._receiving.peers._bootstrap._probes.base_address,
    )
    async with grpc.aio.insecure_channel(prefill.address) as channel:
        call = prefill_pb2_grpc.PrefillStub(channel).Bootstrap(request, timeout=30)
        await until(opening.gate.reached.is_set, "the link is being opened")
        call.cancel()
        await until(lambda: not prefill.node._peers._turns, "the bootstrap was given up")
    assert opening.num_closed == 0
    opening.gate.open()
    await until(lambda: opening.num_closed == 1, "the link is closed")
    assert prefill.node._peers.statuses() == ()


async def test_one_incarnation_is_bootstrapped_by_one_call_at_a_time_also_after_one_failed(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = await mesh.prefill(), await mesh.decode()
    num_active, seen = 0, []

    async def fail(self: object, caller: object, offers: object, *, with_arenas: bool) -> None:
        nonlocal num_active
        num_active += 1
        seen.append(num_active)
        await asyncio.sleep(0.01)
        num_active -= 1
        raise PeerUnavailable("decode:1", "nobody there")

    monkeypatch.setattr("prefill_node.peers.DecodePeers._open", fail)
    request = prefill_pb2.BootstrapRequest(
        node_id="raw",
        incarnation=5,
        manifest=manifest_to_proto(decode.core.require_data_plane().manifest),
        nonce=b"n" * 32,
        nonce_address=4096,
    )
    async with grpc.aio.insecure_channel(prefill.address) as channel:
        stub = prefill_pb2_grpc.PrefillStub(channel)

        async def bootstrap() -> grpc.StatusCode:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stub.Bootstrap(request, timeout=10)
            return error.value.code()

        early = [asyncio.ensure_future(bootstrap()) for _ in range(3)]
        await early[0]
        codes = await asyncio.gather(*early, bootstrap())
    assert set(codes) == {grpc.StatusCode.UNAVAILABLE}
    assert seen == [1, 1, 1, 1]
    assert prefill.node._peers._turns == {}


async def test_a_prefill_node_that_is_gone_and_not_configured_is_forgotten(mesh: FakeMesh) -> None:
    prefill, decode = await mesh.prefill(), await mesh.decode()
    await mesh.generate(decode, PROMPT, prefill_address=prefill.address)
    assert [peer.state for peer in (await mesh.status(decode)).peers] == ["ready"]
    await mesh.kill(prefill)
    code, message = await mesh.error(decode, PROMPT, prefill_address=prefill.address)
    assert code == grpc.StatusCode.UNAVAILABLE
    assert prefill.address in message
    assert (await mesh.status(decode)).peers == []
    await decode.assert_all_blocks_return()


async def test_a_peer_that_is_replaced_while_it_is_asked_for_its_health_goes_on_being_watched(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, may_answer = asyncio.Event(), asyncio.Event()
    answer = NodeService.GetNodeInfo

    async def answer_late(self: NodeService, request: object, context: object) -> mesh_pb2.NodeInfo:
        asked.set()
        await may_answer.wait()
        return await answer(self, request, context)

    monkeypatch.setattr(NodeService, "GetNodeInfo", answer_late)
    monkeypatch.setattr("decode_node.peers.WATCH_INTERVAL_S", 0.01)
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    await asyncio.wait_for(asked.wait(), 20)
    peers = decode.node._receiving.peers
    (entry,) = peers._entries.values()
    old = entry.peer
    peers.suspect(old, "a test says so")
    await mesh.generate(decode, PROMPT, prefill_address=prefill.address)
    assert entry.peer is not old
    may_answer.set()
    await until(lambda: old.num_users == 0, "the question was answered")
    (watcher,) = peers._watchers.values()
    assert not watcher.done()


async def test_source_blocks_stay_untouched_while_a_write_may_still_read_them(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill(num_lcm_blocks=24)
    slow, fast = await mesh.decode(prefill), await mesh.decode(prefill)
    for decode in (slow, fast):
        await mesh.generate(decode, [9], max_tokens=1, prefill_address=prefill.address)
    mesh.fabric.hold(slow.endpoint)
    prompt = list(range(40, 77))
    held = asyncio.ensure_future(mesh.generate(slow, prompt, prefill_address=prefill.address))
    await until(lambda: slow.node.engine.snapshot.active_lcm_blocks > 0, "the way to the slow node is granted")
    # More prompts than fit beside the held one: the prefill node has to take blocks from somewhere.
    for index in range(12):
        other = [index, *range(30)]
        answer = await mesh.generate(fast, other, prefill_address=prefill.address)
        assert answer.token_ids == expected_tokens(other, 4)
    assert not held.done()
    mesh.fabric.release(slow.endpoint)
    assert (await held).token_ids == expected_tokens(prompt, 4)
    for node in (prefill, slow, fast):
        await node.assert_all_blocks_return()


async def test_a_decode_node_that_fails_before_the_grant_frees_the_prefill_node(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)

    def break_down(plan: object) -> None:
        raise RuntimeError("secret of the device")

    decode.executor.before_zeroing = break_down
    code, message = await mesh.error(decode, PROMPT, prefill_address=prefill.address)
    assert code == grpc.StatusCode.INTERNAL
    assert "secret" not in message
    for node in (prefill, decode):
        await until(node.is_quiet, "the node is quiet")
    decode.executor.before_zeroing = lambda plan: None
    assert (await mesh.generate(decode, PROMPT, prefill_address=prefill.address)).token_ids == expected_tokens(
        PROMPT, 4
    )


async def test_prefill_nodes_behind_a_name_become_peers_and_those_that_leave_it_are_let_go(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = await mesh.prefill()
    port = prefill.address.rpartition(":")[2]
    hosts = ["127.0.0.1"]

    async def resolve(host: str) -> list[str]:
        assert host == "prefill"
        return list(hosts)

    monkeypatch.setattr("node_runtime.dns_names.resolve_host", resolve)
    decode = await mesh.decode(f"dns:prefill:{port}", config={"resolve_interval_s": 0.01})
    await until(lambda: decode.node.is_ready, "the node behind the name is a peer")
    answer = await mesh.generate(decode, PROMPT, prefill_address=prefill.address)
    hosts.clear()
    await until(lambda: not decode.node.is_ready, "the peer is let go")
    assert decode.node._receiving.peers.statuses() == ()
    # Whoever names it gets it nevertheless.
    again = await mesh.generate(decode, PROMPT, prefill_address=prefill.address)
    assert again.token_ids == answer.token_ids
    hosts.append("127.0.0.1")
    await until(lambda: decode.node.is_ready, "it is a peer again")

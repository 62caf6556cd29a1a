"""Peers that die, restart, refuse or break: their requests end with a status that says so, all others go on."""

from __future__ import annotations

import asyncio
import socket

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pdmesh.v1 import inference_pb2
from support.fake_compute import Gate, expected_tokens
from support.fake_mesh import FakeMesh, FakeNode, until

from node_runtime.errors import DuplicateRequest, NotBootstrapped
from prefill_node.peers import DecodePeer, DecodePeers

PROMPT = list(range(40, 77))


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def port_of(node: FakeNode) -> int:
    return int(node.address.rsplit(":", 1)[1])


async def is_serving(node: FakeNode) -> bool:
    async with grpc.aio.insecure_channel(node.address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    return answer.status == health_pb2.HealthCheckResponse.SERVING


async def until_serving(node: FakeNode, expected: bool) -> None:
    for _ in range(5000):
        if await is_serving(node) is expected:
            return
        await asyncio.sleep(0.002)
    raise AssertionError(f"serving never became {expected}")


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        ({"dtype": "bfloat16"}, ("dtype prefill=bfloat16, decode=float32", "layers.0.k", "layers.2.v", "block_shape")),
        ({"fingerprint": "other"}, ("model_fingerprint prefill=other, decode=fake-model",)),
        ({"prefix_granularity": 8}, ("prefix_granularity prefill=8, decode=4", "block_granularity")),
    ],
)
async def test_a_peer_that_differs_is_refused_with_every_difference(
    mesh: FakeMesh, difference: dict[str, object], words: tuple[str, ...]
) -> None:
    other, decode = await mesh.prefill(**difference), await mesh.decode()
    code, message = await mesh.error(decode, PROMPT, prefill_address=other.address)
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    for word in words:
        assert word in message
    for node in (other, decode):
        await node.assert_all_blocks_return()


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
async def test_an_address_where_nobody_answers_is_unavailable_and_named(mesh: FakeMesh, host: str) -> None:
    decode = await mesh.decode()
    address = f"{host}:{unused_port()}"
    code, message = await mesh.error(decode, PROMPT, prefill_address=address)
    assert code == grpc.StatusCode.UNAVAILABLE
    assert address in message
    assert (await mesh.status(decode)).peers == []
    await decode.assert_all_blocks_return()


async def test_an_address_of_another_service_is_refused(mesh: FakeMesh) -> None:
    fused, decode = await mesh.fused(), await mesh.decode()
    code, _ = await mesh.error(decode, PROMPT, prefill_address=fused.address)
    assert code == grpc.StatusCode.UNIMPLEMENTED


async def test_a_data_plane_that_cannot_be_reached_is_refused_at_bootstrap(mesh: FakeMesh) -> None:
    prefill, decode = await mesh.prefill(), await mesh.decode()
    mesh.fabric.set_unreachable(decode.endpoint)
    code, message = await mesh.error(decode, PROMPT, prefill_address=prefill.address)
    assert code == grpc.StatusCode.UNAVAILABLE
    assert decode.endpoint in message
    mesh.fabric.set_unreachable(decode.endpoint, False)
    answer = await mesh.generate(decode, PROMPT, prefill_address=prefill.address)
    assert answer.token_ids == expected_tokens(PROMPT, 4)


async def test_a_nonce_that_does_not_arrive_is_not_believed(mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = await mesh.prefill(), await mesh.decode()

    async def write_nothing(self: object, caller: object, link: object) -> None:
        return

    monkeypatch.setattr("prefill_node.peers.DecodePeers._write_nonce", write_nothing)
    code, message = await mesh.error(decode, PROMPT, prefill_address=prefill.address)
    assert code == grpc.StatusCode.UNAVAILABLE
    assert "nonce" in message


async def test_a_transfer_whose_turn_on_the_link_does_not_come_is_refused_and_the_one_ahead_goes_on(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    await mesh.generate(decode, [1, 2], max_tokens=1, prefill_address=prefill.address)
    mesh.fabric.hold(decode.endpoint)
    ahead = asyncio.create_task(mesh.generate(decode, PROMPT, prefill_address=prefill.address))
    await until(lambda: mesh.fabric.num_unfinished_writes(decode.endpoint) > 0, "a write is under way")
    monkeypatch.setattr("prefill_node.handoff.LINK_WAIT_S", 0.2)
    code, message = await mesh.error(decode, [7, 8, 9], prefill_address=prefill.address)
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "is crowded: other writes were ahead for 0.2 s" in message
    assert (await mesh.status(decode)).peers[0].state == "ready"
    assert prefill.node._peers.statuses()[0].state == "ready"
    mesh.fabric.release(decode.endpoint)
    assert (await ahead).token_ids == expected_tokens(PROMPT, 4)
    for node in (prefill, decode):
        await node.assert_all_blocks_return()


@pytest.mark.parametrize("num_runs", [0, 1, 5])
async def test_a_failed_write_ends_its_request_and_the_next_one_bootstraps_again(mesh: FakeMesh, num_runs: int) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    await mesh.generate(decode, [1, 2], max_tokens=1, prefill_address=prefill.address)
    mesh.fabric.fail_after(decode.endpoint, num_runs)
    code, message = await mesh.error(decode, PROMPT, prefill_address=prefill.address)
    assert code == grpc.StatusCode.UNAVAILABLE
    assert decode.node._config.node_id in message
    mesh.fabric.fail_after(decode.endpoint, None)
    answer = await mesh.generate(decode, PROMPT, prefill_address=prefill.address)
    assert answer.token_ids == expected_tokens(PROMPT, 4)
    for node in (prefill, decode):
        await node.assert_all_blocks_return()


async def test_logits_that_say_nothing_end_their_request_as_internal_and_those_beside_it_go_on(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    prefill.executor.broken_logits.add((7, len(PROMPT)))
    decode.executor.broken_logits.add((8, len(PROMPT) + 2))
    beside = asyncio.create_task(mesh.generate(decode, PROMPT[3:], max_tokens=30, prefill_address=prefill.address))
    for seed, position in ((7, len(PROMPT)), (8, len(PROMPT) + 2)):
        code, message = await mesh.error(
            decode, PROMPT, sampling=inference_pb2.SamplingParams(seed=seed), prefill_address=prefill.address
        )
        assert code == grpc.StatusCode.INTERNAL
        assert f"the model knows no next token: broken at position {position}" in message
    assert (await beside).token_ids == expected_tokens(PROMPT[3:], 30)
    answer = await mesh.generate(decode, PROMPT, prefill_address=prefill.address)
    assert answer.token_ids == expected_tokens(PROMPT, 4)
    assert (await mesh.status(decode)).peers[0].state == "ready"
    for node in (prefill, decode):
        await node.assert_all_blocks_return()


async def test_a_broken_way_to_one_decode_node_harms_no_other(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    broken, sound = await mesh.decode(prefill), await mesh.decode(prefill)
    for decode in (broken, sound):
        await mesh.generate(decode, [1, 2], max_tokens=1, prefill_address=prefill.address)
    mesh.fabric.fail_after(broken.endpoint, 2)
    (code, _), answer = await asyncio.gather(
        mesh.error(broken, PROMPT, prefill_address=prefill.address),
        mesh.generate(sound, PROMPT, prefill_address=prefill.address),
    )
    assert code == grpc.StatusCode.UNAVAILABLE
    assert answer.token_ids == expected_tokens(PROMPT, 4)
    for node in (prefill, broken, sound):
        await node.assert_all_blocks_return()


async def test_a_prefill_node_that_dies_fails_only_its_own_requests(mesh: FakeMesh) -> None:
    dying, living = await mesh.prefill(), await mesh.prefill()
    decode = await mesh.decode(dying, living)
    gate = Gate()
    await mesh.generate(decode, [1, 2], max_tokens=1, prefill_address=dying.address)
    dying.executor.before_pass = gate.wait
    doomed = [
        asyncio.ensure_future(mesh.error(decode, [*PROMPT, index], prefill_address=dying.address)) for index in range(4)
    ]
    await until(lambda: gate.reached.is_set() and dying.num_handoffs == 4, "the prompts are being prefilled")
    other = asyncio.ensure_future(mesh.generate(decode, PROMPT, max_tokens=30, prefill_address=living.address))
    killing = asyncio.ensure_future(mesh.kill(dying))
    for code, message in await asyncio.gather(*doomed):
        assert code == grpc.StatusCode.UNAVAILABLE, message
        assert "prefill node" in message
        assert dying.address in message
    gate.open()
    await killing
    assert (await other).token_ids == expected_tokens(PROMPT, 30)
    assert await is_serving(decode)
    await decode.assert_all_blocks_return()


async def test_a_decode_node_that_dies_frees_the_prefill_node(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    await mesh.generate(decode, [1, 2], max_tokens=1, prefill_address=prefill.address)
    mesh.fabric.hold(decode.endpoint)
    call = asyncio.ensure_future(mesh.error(decode, PROMPT, prefill_address=prefill.address))
    await until(lambda: prefill.node.engine.snapshot.num_steps >= 3, "the prompt is being prefilled")
    await mesh.kill(decode)
    assert (await call)[0] in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    await prefill.assert_all_blocks_return()


async def test_a_restarted_prefill_node_at_the_same_address_is_a_new_peer(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    before = await mesh.generate(decode, PROMPT, prefill_address=prefill.address)
    (peer,) = (await mesh.status(decode)).peers
    await mesh.kill(prefill)
    again = await mesh.prefill(port=port_of(prefill))
    after = await mesh.generate(decode, PROMPT, prefill_address=again.address)
    assert after.token_ids == before.token_ids
    (peer_again,) = (await mesh.status(decode)).peers
    assert peer_again.address == peer.address
    assert peer_again.incarnation != peer.incarnation
    assert peer_again.state == "ready"
    for node in (again, decode):
        await node.assert_all_blocks_return()


async def test_a_prefill_node_that_forgot_its_peers_is_bootstrapped_again_without_the_client_noticing(
    mesh: FakeMesh,
) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    await mesh.generate(decode, [1, 2], max_tokens=1, prefill_address=prefill.address)
    prefill.node._peers.close()
    answer = await mesh.generate(decode, PROMPT, prefill_address=prefill.address)
    assert answer.token_ids == expected_tokens(PROMPT, 4)
    await decode.assert_all_blocks_return()


async def test_readiness_follows_the_configured_prefill_nodes(mesh: FakeMesh) -> None:
    port = unused_port()
    decode = await mesh.decode(f"127.0.0.1:{port}")
    assert not await is_serving(decode)
    status = await mesh.status(decode)
    assert not status.serving
    assert status.peers[0].state == "connecting"
    prefill = await mesh.prefill(port=port)
    await until_serving(decode, True)
    assert (await mesh.status(decode)).peers[0].state == "ready"
    await mesh.kill(prefill)
    code, _ = await mesh.error(decode, PROMPT, prefill_address=prefill.address)
    assert code == grpc.StatusCode.UNAVAILABLE
    await until_serving(decode, False)
    again = await mesh.prefill(port=port)
    await until_serving(decode, True)
    answer = await mesh.generate(decode, PROMPT, prefill_address=again.address)
    assert answer.token_ids == expected_tokens(PROMPT, 4)


async def test_a_fused_node_is_ready_at_once(mesh: FakeMesh) -> None:
    assert await is_serving(await mesh.fused())


@pytest.mark.parametrize("where", ["prefill", "decode"])
async def test_a_fault_of_the_executor_is_internal_and_the_node_goes_on(mesh: FakeMesh, where: str) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    node = {"prefill": prefill, "decode": decode}[where]

    def break_down(stage: int) -> None:
        if stage == 1:
            raise RuntimeError("secret of the kernel")

    node.executor.before_stage = break_down
    code, message = await mesh.error(decode, PROMPT, prefill_address=prefill.address)
    assert code == grpc.StatusCode.INTERNAL
    assert "secret" not in message
    node.executor.before_stage = lambda stage: None
    answer = await mesh.generate(decode, PROMPT, prefill_address=prefill.address)
    assert answer.token_ids == expected_tokens(PROMPT, 4)
    for each in (prefill, decode):
        await each.assert_all_blocks_return()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_draining_node_finishes_what_it_has(mesh: FakeMesh, role: str) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    gate = Gate()
    node = {"prefill": prefill, "decode": decode}[role]
    node.executor.before_pass = gate.wait
    running = asyncio.ensure_future(mesh.generate(decode, PROMPT, max_tokens=8, prefill_address=prefill.address))
    await until(gate.reached.is_set, "the request is running")
    stopping = asyncio.ensure_future(node.node.stop())
    code, _ = await mesh.error(decode, PROMPT, prefill_address=prefill.address)
    assert code == grpc.StatusCode.UNAVAILABLE
    gate.open()
    assert (await running).token_ids == expected_tokens(PROMPT, 8)
    await stopping


async def test_a_peer_that_is_lost_right_after_its_bootstrap_is_bootstrapped_again(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a write of another handoff fails in that moment: nothing is wrong with the pair."""
    prefill, decode = await mesh.prefill(), await mesh.decode()
    find, refusals = DecodePeers.find, list[int]()

    def find_later(peers: DecodePeers, incarnation: int) -> DecodePeer:
        if not refusals:
            refusals.append(incarnation)
            raise NotBootstrapped("the data plane to it failed")
        return find(peers, incarnation)

    monkeypatch.setattr(DecodePeers, "find", find_later)
    answer = await mesh.generate(decode, PROMPT, prefill_address=prefill.address, max_tokens=4)
    assert answer.token_ids == expected_tokens(PROMPT, 4)
    assert len(refusals) == 1
    for node in (prefill, decode):
        await node.assert_all_blocks_return()


async def test_a_first_attempt_that_its_peer_still_has_is_no_name_that_the_client_must_change(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection broke, and the second attempt came before the news of that."""
    prefill, decode = await mesh.prefill(), await mesh.decode()
    refusals = iter((NotBootstrapped("it was lost"), DuplicateRequest("r1")))

    def find(peers: DecodePeers, incarnation: int) -> DecodePeer:
        raise next(refusals)

    monkeypatch.setattr(DecodePeers, "find", find)
    code, message = await mesh.error(decode, PROMPT, prefill_address=prefill.address)
    assert code == grpc.StatusCode.UNAVAILABLE
    assert f"node at {prefill.address} is unavailable: it has not yet noticed" in message
    assert next(refusals, None) is None
    for node in (prefill, decode):
        await node.assert_all_blocks_return()

"""Transfers that are compared with their checksums: a flipped bit is found before anything is decoded or published."""

from __future__ import annotations

from collections.abc import Iterable

import grpc
import pytest
from support.fake_compute import expected_tokens
from support.fake_mesh import FakeMesh, FakeNode

from cache_runtime.transfer.checksums import RUNNABLE_DIGEST_KINDS, BlockHasher
from cache_runtime.transfer.engine import XXH3

PROMPT = list(range(40, 77))


async def pair(mesh: FakeMesh, verify: str, **settings: object) -> tuple[FakeNode, FakeNode]:
    prefill = await mesh.prefill()
    # Another number of blocks, hence other offsets and strides than the prefill node's.
    decode = await mesh.decode(prefill, num_lcm_blocks=50, config={"verify_transfers": verify, **settings})
    await mesh.generate(decode, [1, 2], max_tokens=1, prefill_address=prefill.address)
    return prefill, decode


@pytest.mark.parametrize("num_runs", [0, 2, 5])
async def test_a_bit_that_flips_in_flight_is_data_loss_and_nothing_of_it_is_used(mesh: FakeMesh, num_runs: int) -> None:
    prefill, decode = await pair(mesh, "all")
    steps = decode.node.engine.snapshot.num_steps
    mesh.fabric.flip_bit(decode.endpoint, num_runs)
    code, message = await mesh.error(decode, PROMPT, prefill_address=prefill.address)
    assert code == grpc.StatusCode.DATA_LOSS
    assert "the cache differs from what was sent in layers." in message
    assert decode.node.engine.snapshot.num_steps == steps
    status = await mesh.status(decode)
    assert (status.num_verified_handoffs, status.num_damaged_handoffs) == (2, 1)
    again = await mesh.generate(decode, PROMPT, prefill_address=prefill.address)
    assert again.token_ids == expected_tokens(PROMPT, 4)
    assert again.finish.usage.cached.decode_device == 0
    for node in (prefill, decode):
        await node.assert_all_blocks_return()


async def test_a_damaged_transfer_makes_its_peer_suspect(mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons: list[str] = []
    prefill, decode = await pair(mesh, "all")
    peers = decode.node._receiving.peers
    suspect = peers.suspect
    monkeypatch.setattr(peers, "suspect", lambda peer, reason: (reasons.append(reason), suspect(peer, reason)))
    mesh.fabric.flip_bit(decode.endpoint, 1)
    await mesh.error(decode, PROMPT, prefill_address=prefill.address)
    assert any("differs from what was sent" in reason for reason in reasons)


async def test_what_is_right_passes_whatever_of_it_was_cached_before(mesh: FakeMesh) -> None:
    prefill, decode = await pair(mesh, "all")
    for prompt in (PROMPT, [*PROMPT[:20], 5, 6, 7], [3], PROMPT):
        answer = await mesh.generate(decode, prompt, prefill_address=prefill.address)
        assert answer.token_ids == expected_tokens(prompt, 4)
    status = await mesh.status(decode)
    assert (status.num_verified_handoffs, status.num_damaged_handoffs) == (5, 0)


async def test_without_verification_the_same_fault_goes_unnoticed(mesh: FakeMesh) -> None:
    prefill, decode = await pair(mesh, "off")
    mesh.fabric.flip_bit(decode.endpoint, 0)
    answer = await mesh.generate(decode, PROMPT, prefill_address=prefill.address)
    assert answer.token_ids != expected_tokens(PROMPT, 4)
    assert (await mesh.status(decode)).num_verified_handoffs == 0


async def test_a_sample_verifies_some_handoffs_and_not_others(mesh: FakeMesh) -> None:
    prefill, decode = await pair(mesh, "sample", verify_sample=0.5)
    for index in range(40):
        await mesh.generate(decode, [1, 2, index], max_tokens=1, prefill_address=prefill.address)
    assert 0 < (await mesh.status(decode)).num_verified_handoffs < 41


@pytest.mark.parametrize(
    ("compared", "taken", "agreed"),
    [
        (RUNNABLE_DIGEST_KINDS, RUNNABLE_DIGEST_KINDS, RUNNABLE_DIGEST_KINDS[0]),
        # As between adjacent releases, or processors one of which lacks the instructions.
        (RUNNABLE_DIGEST_KINDS, (), XXH3),
        ((), RUNNABLE_DIGEST_KINDS, XXH3),
        (("of tomorrow", *RUNNABLE_DIGEST_KINDS), (*RUNNABLE_DIGEST_KINDS, "of yesterday"), RUNNABLE_DIGEST_KINDS[0]),
    ],
)
async def test_nodes_agree_on_a_digest_that_both_can_take_and_find_damage_with_it(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch, compared: tuple[str, ...], taken: tuple[str, ...], agreed: str
) -> None:
    monkeypatch.setattr("decode_node.verification.RUNNABLE_DIGEST_KINDS", compared)
    monkeypatch.setattr("prefill_node.server.RUNNABLE_DIGEST_KINDS", taken)
    kinds: set[str] = set()
    digests = BlockHasher.digests

    def noted(self: BlockHasher, field_id: str, blocks: Iterable[int], kind: str) -> bytes:
        kinds.add(kind)
        return digests(self, field_id, blocks, kind)

    monkeypatch.setattr(BlockHasher, "digests", noted)
    prefill, decode = await pair(mesh, "all")
    answer = await mesh.generate(decode, PROMPT, prefill_address=prefill.address)
    assert answer.token_ids == expected_tokens(PROMPT, 4)
    mesh.fabric.flip_bit(decode.endpoint, 3)
    code, _ = await mesh.error(decode, [9, *PROMPT], prefill_address=prefill.address)
    assert code == grpc.StatusCode.DATA_LOSS
    assert kinds == {agreed}
    status = await mesh.status(decode)
    assert (status.num_verified_handoffs, status.num_damaged_handoffs) == (3, 1)
    for node in (prefill, decode):
        await node.assert_all_blocks_return()


async def test_a_fault_while_hashing_ends_the_handoff_and_not_the_node(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = await pair(mesh, "all")

    def break_down(self: object, field_id: str, blocks: object, kind: str) -> bytes:
        raise RuntimeError("secret of the hasher")

    with monkeypatch.context() as patched:
        patched.setattr("cache_runtime.transfer.checksums.BlockHasher.digests", break_down)
        code, message = await mesh.error(decode, PROMPT, prefill_address=prefill.address)
    assert code == grpc.StatusCode.INTERNAL
    assert "secret" not in message
    answer = await mesh.generate(decode, PROMPT, prefill_address=prefill.address)
    assert answer.token_ids == expected_tokens(PROMPT, 4)
    for node in (prefill, decode):
        await node.assert_all_blocks_return()

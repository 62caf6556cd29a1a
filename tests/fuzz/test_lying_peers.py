"""Nodes whose peers answer nonsense: a decode node in front of a prefill node, a router in front of a decode node.

Whom they serve gets a status or an answer, and afterwards they serve others as before.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import pytest
from fuzz.effort import looks
from fuzz.fuzzed_mesh import SILENCE_S, FuzzedMesh
from fuzz.lying_node import LyingNode, next_or_silence
from fuzz.messages import any_message, encoded, hostile, raw_bytes, spoilt
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from pdmesh.v1 import decode_pb2, handoff_pb2, inference_pb2, mesh_pb2, prefill_pb2
from support.fake_mesh import FakeNode
from support.fake_router import FakeRouter
from support.tiny_checkpoint import VOCAB_SIZE

from node_runtime.handoff.checks import GrantedGroup
from node_runtime.wire.manifest import manifest_to_proto

Draw = Callable[[st.SearchStrategy[Any]], Any]

HANDOFF, BOOTSTRAP = "/pdmesh.v1.Prefill/Handoff", "/pdmesh.v1.Prefill/Bootstrap"
GENERATE, FOLLOW = "/pdmesh.v1.Decode/Generate", "/pdmesh.v1.Node/Follow"
INFO, STATUS = "/pdmesh.v1.Node/GetNodeInfo", "/pdmesh.v1.Node/GetNodeStatus"
# Stands in messages for the id that the decode node draws.
ID = b"handoff-id-here."
NUM_PROMPT_TOKENS = 20
# None: whatever the other side says next is waited for.
Script = list[bytes | None]

_serials = itertools.count(1)


def fresh_prompt() -> list[int]:
    """One of which nothing is cached: what a liar has sent would be found by the next who asks for the same."""
    serial = next(_serials)
    return [*serial.to_bytes(4, "big"), *range(NUM_PROMPT_TOKENS - 4)]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedMesh]:
    with FuzzedMesh(tmp_path_factory.mktemp("fuzzed")) as mesh:
        yield mesh


@st.composite
def scripts(draw: Draw, sound: tuple[Message | None, ...]) -> Script:
    """A sound conversation to which a few things were done."""
    steps: list[Message | bytes | None] = list(sound)
    messages = tuple(step for step in sound if isinstance(step, Message))
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(steps) - 1)) if steps else 0
        match draw(st.integers(0, 5)):
            case 0:
                del steps[place:]
            case 1:
                steps[place:place] = steps[place : place + 1] * draw(st.sampled_from((1, 20)))
            case 2:
                steps.insert(place, draw(st.sampled_from(range(len(messages))).map(messages.__getitem__)))
            case 3:
                steps.insert(place, draw(raw_bytes(messages)))
            case 4:
                steps.insert(place, draw(any_message(messages[0].DESCRIPTOR)))
            case _:
                chosen = steps[place] if steps else None
                if isinstance(chosen, Message):
                    steps[place] = draw(spoilt(chosen))
    return [step.SerializeToString() if isinstance(step, Message) else step for step in steps]


def sound_handoff(decode: FakeNode) -> tuple[Message | None, ...]:
    """What a prefill node says that computes nothing and sends nothing."""
    manifest = decode.core.require_data_plane().manifest
    slots = [
        GrantedGroup.of(group, manifest.ranks[0].find_num_blocks(group.group_id) or 0).slots(0, NUM_PROMPT_TOKENS)
        for group in manifest.logical.groups
    ]
    response = handoff_pb2.HandoffResponse
    checksum = handoff_pb2.FieldChecksums(field_id=manifest.logical.fields[0].field_id, digests=b"d" * 8)
    return (
        response(ready=handoff_pb2.Ready(handoff_id=ID, beat_interval_ms=400)),
        None,
        response(beat=handoff_pb2.Beat(handoff_id=ID, number=1)),
        response(checksums=handoff_pb2.Checksums(handoff_id=ID, fields=[checksum])),
        response(
            done=handoff_pb2.Done(
                handoff_id=ID,
                first_token=inference_pb2.SampledToken(token_id=3),
                transferred_blocks=sum(end - first for first, end in slots),
            )
        ),
    )


def test_a_decode_node_survives_whatever_a_prefill_node_answers(mesh: FuzzedMesh) -> None:
    verifying = mesh.run(mesh.add_verifying_node())
    told: Script = []
    outcomes = Counter[str]()

    async def lie(requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        start = handoff_pb2.HandoffRequest.FromString(await anext(requests)).start
        for step in told:
            if step is None:
                await next_or_silence(requests, SILENCE_S)
            else:
                yield step.replace(ID, start.handoff_id)

    async def ask(node: FakeNode, address: str) -> None:
        try:
            answer = await mesh.mesh.generate(node, fresh_prompt(), prefill_address=address, timeout=10.0)
            outcomes["OK" if answer.finish is not None else "no end"] += 1
        except grpc.aio.AioRpcError as error:
            outcomes[error.code().name] += 1

    async def ask_all(script: Script) -> None:
        told[:] = script
        async with LyingNode(mesh.addresses["prefill"], {HANDOFF: lie}) as liar:
            for node in (mesh.nodes["decode"], verifying):
                await ask(node, liar.address)
        await mesh.assert_quiet(may_complain=True)

    @looks(25, shrinks=False)
    @given(scripts(sound_handoff(mesh.nodes["decode"])))
    def conversations(script: Script) -> None:
        mesh.run(ask_all(script))

    conversations()
    mesh.run(mesh.assert_unharmed(may_complain=True))
    assert outcomes["OK"], outcomes
    assert outcomes["DATA_LOSS"] + outcomes["INTERNAL"] + outcomes["UNAVAILABLE"], outcomes
    assert not outcomes["no end"], outcomes


def test_a_decode_node_survives_whatever_an_introduction_is_answered_with(mesh: FuzzedMesh) -> None:
    """Its prefill node writes the nonce, so that what it says of itself is looked at."""
    prefill = prefill_pb2.BootstrapResponse(node_id="liar", incarnation=5, data_plane="memory")
    manifest = mesh.nodes["decode"].core.require_data_plane().manifest
    prefill.manifest.CopyFrom(manifest_to_proto(manifest))
    told: list[bytes] = []
    outcomes = Counter[str]()

    async def lie(requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        request = await anext(requests)
        channel = mesh.channel("prefill")
        await channel.unary_unary(BOOTSTRAP)(request, timeout=10)
        yield told[0]

    async def ask() -> None:
        async with LyingNode(mesh.addresses["prefill"], {BOOTSTRAP: lie}) as liar:
            try:
                await mesh.mesh.generate(mesh.nodes["decode"], fresh_prompt(), prefill_address=liar.address)
                # The port was that of an earlier one, which the node still trusts.
                outcomes["OK"] += 1
            except grpc.aio.AioRpcError as error:
                outcomes[error.code().name] += 1
        await mesh.assert_quiet()

    @looks(25, shrinks=False)
    @given(hostile(prefill.DESCRIPTOR, (prefill,)).map(encoded) | raw_bytes((prefill,)))
    def introductions(data: bytes) -> None:
        told[:] = [data]
        mesh.run(ask())

    introductions()
    mesh.run(mesh.assert_unharmed())
    assert outcomes["INTERNAL"], outcomes
    assert outcomes["FAILED_PRECONDITION"], outcomes


def sound_generation() -> tuple[Message | None, ...]:
    token = decode_pb2.DecodeTokens(tokens=[inference_pb2.SampledToken(token_id=65, logprob=-1.0)])
    usage = inference_pb2.Usage(prompt_tokens=NUM_PROMPT_TOKENS, completion_tokens=4)
    response = decode_pb2.DecodeResponse
    return (
        response(admitted=decode_pb2.DecodeAdmitted(cached=inference_pb2.CachedTokens(decode_device=3))),
        response(progress=decode_pb2.DecodeProgress()),
        *(response(tokens=token) for _ in range(4)),
        response(finish=decode_pb2.DecodeFinish(reason=inference_pb2.FINISH_REASON_LENGTH, usage=usage)),
    )


def sound_updates() -> tuple[Message | None, ...]:
    update, status = mesh_pb2.NodeUpdate, mesh_pb2.NodeStatus(serving=True, prefill_tokens_per_s=100, decode_step_ms=2)
    return (
        update(incarnation=7, status=status, prefixes=mesh_pb2.PrefixChanges(sequence=1, is_snapshot=True, stored=[5])),
        update(incarnation=7, prefixes=mesh_pb2.PrefixChanges(sequence=2, base_sequence=1, stored=[6], removed=[5])),
    )


def test_a_router_survives_whatever_a_decode_node_answers(mesh: FuzzedMesh) -> None:
    generated: Script = []
    followed: Script = []
    outcomes = Counter[str]()

    def teller(script: Script) -> Callable[[AsyncIterator[bytes]], AsyncIterator[bytes]]:
        async def lie(requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
            for step in script:
                if step is not None:
                    yield step

        return lie

    async def ask(info: bytes | None) -> None:
        lies = {GENERATE: teller(generated), FOLLOW: teller(followed)}
        if info is not None:
            lies[INFO] = teller([info])
        async with (
            LyingNode(mesh.addresses["fused"], lies) as liar,
            FakeRouter(
                prefill=[],
                decode=[],
                vocab_size=VOCAB_SIZE,
                fused=[liar.address],
                placement_policy="cache_aware",
                http="127.0.0.1:0",
                max_attempts=2,
            ) as router,
        ):
            for fields in ({}, {"num_samples": 2}, {"num_prompt_logprobs": 1}):
                try:
                    answer = await router.generate(fresh_prompt(), timeout=5.0, **fields)
                    outcomes["OK" if answer.finish is not None else "no end"] += 1
                except grpc.aio.AioRpcError as error:
                    outcomes[error.code().name] += 1
            await router.status()
        await mesh.assert_quiet(may_complain=True)

    facts = mesh_pb2.NodeInfo(
        node_id="liar",
        incarnation=7,
        role=mesh_pb2.NODE_ROLE_FUSED,
        vocab_size=VOCAB_SIZE,
        context_tokens=256,
        max_request_tokens=256,
        prefix_granularity=8,
        capacity_tokens=1000,
    )
    infos = st.none() | hostile(facts.DESCRIPTOR, (facts,)).map(encoded) | raw_bytes((facts,))

    @looks(25, shrinks=False)
    @given(scripts(sound_generation()), scripts(sound_updates()), infos)
    def conversations(generation: Script, updates: Script, info: bytes | None) -> None:
        generated[:], followed[:] = generation, updates
        mesh.run(ask(info))

    conversations()
    mesh.run(mesh.assert_unharmed(may_complain=True))
    assert outcomes["OK"], outcomes
    assert outcomes["UNAVAILABLE"] + outcomes["INTERNAL"], outcomes
    assert not outcomes["UNKNOWN"] + outcomes["no end"], outcomes

"""Requests and peers that break the rules get a status that names field and limit, and harm nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc
import numpy as np
import pytest
from pdmesh.v1 import decode_pb2, decode_pb2_grpc, handoff_pb2, inference_pb2, prefill_pb2, prefill_pb2_grpc
from support.fake_compute import VOCAB_SIZE, Gate, expected_tokens
from support.fake_mesh import Answer, FakeMesh, FakeNode, until

from node_runtime.wire.manifest import manifest_to_proto

INVALID = grpc.StatusCode.INVALID_ARGUMENT
CONTEXT = 256

BAD_REQUESTS = {
    "no tokens": ({"token_ids": []}, INVALID, ("token_ids",)),
    "token over the vocabulary": ({"token_ids": [VOCAB_SIZE]}, INVALID, ("token_ids", str(VOCAB_SIZE))),
    "prompt over the context": ({"token_ids": [1] * CONTEXT}, INVALID, ("prompt", str(CONTEXT))),
    "no tokens wanted": ({"max_tokens": 0}, INVALID, ("max_tokens", "1")),
    "more than the context": ({"max_tokens": CONTEXT}, INVALID, ("max_tokens", str(CONTEXT))),
    "no name": ({"request_id": ""}, INVALID, ("request_id",)),
    "a long name": ({"request_id": "x" * 129}, INVALID, ("request_id", "128")),
    "negative temperature": ({"sampling": {"temperature": -1.0}}, INVALID, ("temperature",)),
    "too many stop tokens": ({"stop_token_ids": [1] * 81}, INVALID, ("stop_token_ids", "80")),
    "an address that is none": ({"prefill_address": "http://x"}, INVALID, ("prefill_address",)),
    "progress too often": ({"progress_interval_ms": 49}, INVALID, ("progress_interval_ms", "50")),
    "no address": ({"prefill_address": ""}, grpc.StatusCode.FAILED_PRECONDITION, ("prefill_address",)),
    "more than the arena": (
        {"token_ids": [1] * 200, "max_tokens": 50},
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        ("max_request_tokens=", "200 + 50"),
    ),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
async def test_a_bad_request_is_refused_by_field_and_limit_before_anything_starts(mesh: FakeMesh, name: str) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill, num_lcm_blocks=40)
    fields, expected, words = BAD_REQUESTS[name]
    sampling = inference_pb2.SamplingParams(**fields.get("sampling", {}))
    code, message = await mesh.error(
        decode,
        **{"prompt": fields.get("token_ids", [1, 2]), "prefill_address": prefill.address}
        | {key: value for key, value in fields.items() if key != "token_ids"}
        | {"sampling": sampling},
    )
    assert code == expected, message
    for word in words:
        assert word in message
    assert prefill.node.engine.snapshot.num_steps == decode.node.engine.snapshot.num_steps == 0


async def test_a_prompt_that_only_the_prefill_node_cannot_hold_is_refused_by_it(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill(num_lcm_blocks=10)
    decode = await mesh.decode(prefill)
    code, message = await mesh.error(decode, [1] * 60, prefill_address=prefill.address)
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "max_request_tokens=" in message
    for node in (prefill, decode):
        await node.assert_all_blocks_return()


async def test_a_second_request_of_the_same_name_is_refused_and_the_first_unharmed(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    gate = Gate()
    prefill.executor.before_pass = gate.wait
    fields = {"request_id": "twin", "prefill_address": prefill.address}
    first = asyncio.ensure_future(mesh.generate(decode, [1, 2, 3], **fields))
    await until(gate.reached.is_set, "the first is being computed")
    code, message = await mesh.error(decode, [4, 5], **fields)
    assert code == grpc.StatusCode.ALREADY_EXISTS
    assert "twin" in message
    gate.open()
    assert (await first).token_ids == expected_tokens([1, 2, 3], 4)
    again = await mesh.generate(decode, [4, 5], **fields)
    assert again.token_ids == expected_tokens([4, 5], 4)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_full_queue_refuses_and_recovers(mesh: FakeMesh, role: str) -> None:
    prefill = await mesh.prefill(config={"max_waiting_requests": 2} if role == "prefill" else None)
    decode = await mesh.decode(prefill, config={"max_waiting_requests": 2} if role == "decode" else None)
    gate = Gate()
    prefill.executor.before_pass = gate.wait

    def ask(index: int) -> asyncio.Task[Answer]:
        return asyncio.ensure_future(mesh.generate(decode, [1, 2, index], prefill_address=prefill.address))

    calls = [ask(0)]
    await until(lambda: decode.node.engine.snapshot.active_lcm_blocks > 0 and gate.reached.is_set(), "one is computed")
    calls += [ask(1), ask(2)]
    await until(lambda: prefill.num_handoffs == 3, "two wait")
    code, message = await mesh.error(decode, [9, 9], prefill_address=prefill.address)
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "max_waiting_requests=" in message
    gate.open()
    for index, call in enumerate(calls):
        assert (await call).token_ids == expected_tokens([1, 2, index], 4)
    for node in (prefill, decode):
        await node.assert_all_blocks_return()


# A peer that speaks the protocol wrongly.


class RawPeer:
    """A decode node made of bare messages."""

    def __init__(self, mesh: FakeMesh, prefill: FakeNode, decode: FakeNode) -> None:
        self.mesh = mesh
        self.prefill = prefill
        self.decode = decode
        self.channel = grpc.aio.insecure_channel(prefill.address)
        self.stub = prefill_pb2_grpc.PrefillStub(self.channel)
        self.incarnation = 4711
        self.nonce_memory = np.zeros(32, dtype=np.uint8)
        decode.core.require_data_plane().engine.register(self.nonce_memory.ctypes.data, 32)

    def introduction(self, **changes: object) -> prefill_pb2.BootstrapRequest:
        manifest = self.decode.core.require_data_plane().manifest
        fields = {
            "node_id": "raw",
            "incarnation": self.incarnation,
            "manifest": manifest_to_proto(manifest),
            "nonce": b"n" * 32,
            "nonce_address": self.nonce_memory.ctypes.data,
        }
        return prefill_pb2.BootstrapRequest(**{**fields, **changes})

    async def bootstrap(self, **changes: object) -> int:
        response = await self.stub.Bootstrap(self.introduction(**changes), timeout=10)
        return response.incarnation

    async def handoff(self, *messages: handoff_pb2.HandoffRequest) -> tuple[list[str], grpc.StatusCode, str]:
        """What came back, and the status the stream ended with. Messages are sent when an answer to the last came."""

        async def requests() -> AsyncIterator[handoff_pb2.HandoffRequest]:
            for message in messages:
                yield message
                await asyncio.sleep(0)

        call = self.stub.Handoff(requests(), timeout=10)
        kinds = []
        try:
            async for response in call:
                kinds.append(response.WhichOneof("message"))
        except grpc.aio.AioRpcError:
            pass
        return kinds, await call.code(), await call.details()


@pytest.fixture
async def raw(mesh: FakeMesh) -> AsyncIterator[RawPeer]:
    prefill, decode = await mesh.prefill(), await mesh.decode()
    peer = RawPeer(mesh, prefill, decode)
    yield peer
    await peer.channel.close()
    # Whatever it did: the prefill node still serves a sound peer and holds nothing.
    answer = await mesh.generate(decode, [1, 2, 3], prefill_address=prefill.address)
    assert answer.token_ids == expected_tokens([1, 2, 3], 4)
    await prefill.assert_all_blocks_return()


def start(prefill_incarnation: int, **changes: object) -> handoff_pb2.HandoffRequest:
    fields = {
        "handoff_id": b"h" * 16,
        "request_id": "raw-request",
        "token_ids": list(range(10)),
        "decode_incarnation": 4711,
        "prefill_incarnation": prefill_incarnation,
    }
    return handoff_pb2.HandoffRequest(start=handoff_pb2.Start(**{**fields, **changes}))


def grant(block_ids: list[int], **changes: object) -> handoff_pb2.HandoffRequest:
    group = handoff_pb2.GroupGrant(group_id="full", first_slot=0, block_ids=block_ids)
    fields = {"handoff_id": b"h" * 16, "from_token": 0, "groups": [group]}
    return handoff_pb2.HandoffRequest(grant=handoff_pb2.Grant(**{**fields, **changes}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nonce": b"short"}, "nonce: 5 bytes given, 32 required"),
        ({"nonce_address": 0}, "nonce_address"),
        ({"nonce_address": 8}, "cannot be written to"),
        ({"node_id": ""}, "node_id"),
    ],
)
async def test_a_malformed_introduction_is_refused(raw: RawPeer, changes: dict[str, object], words: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await raw.bootstrap(**changes)
    assert error.value.code() == INVALID
    assert words in error.value.details()


async def test_a_manifest_whose_arena_is_not_exposed_is_refused(raw: RawPeer) -> None:
    request = raw.introduction()
    request.manifest.ranks[0].arena_base += 1 << 30
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await raw.stub.Bootstrap(request, timeout=10)
    assert error.value.code() == INVALID


async def test_bootstrapping_twice_proves_the_way_again_and_keeps_the_peer(raw: RawPeer) -> None:
    await raw.bootstrap()
    assert raw.nonce_memory.tobytes() == b"n" * 32
    await raw.bootstrap(nonce=b"m" * 32)
    assert raw.nonce_memory.tobytes() == b"m" * 32
    assert len(raw.prefill.node._peers.statuses()) == 1


async def test_a_handoff_without_a_bootstrap_is_refused(raw: RawPeer) -> None:
    incarnation = (await raw.bootstrap()) + 0
    for message in (start(incarnation, decode_incarnation=1), start(incarnation ^ 1)):
        kinds, code, details = await raw.handoff(message)
        assert (kinds, code) == ([], grpc.StatusCode.FAILED_PRECONDITION), details


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"handoff_id": b"h"}, INVALID, "handoff_id: 1 bytes"),
        ({"token_ids": []}, INVALID, "token_ids"),
        ({"token_ids": [VOCAB_SIZE]}, INVALID, str(VOCAB_SIZE)),
        ({"token_ids": [1] * CONTEXT}, INVALID, str(CONTEXT - 1)),
        ({"request_id": ""}, INVALID, "request_id"),
    ],
)
async def test_a_malformed_start_is_refused(
    raw: RawPeer, changes: dict[str, object], code: grpc.StatusCode, words: str
) -> None:
    incarnation = await raw.bootstrap()
    kinds, got, details = await raw.handoff(start(incarnation, **changes))
    assert (kinds, got) == ([], code)
    assert words in details


async def test_the_start_of_another_handoff_on_a_running_stream_ends_it_and_starts_nothing(raw: RawPeer) -> None:
    incarnation = await raw.bootstrap()
    gate = Gate()
    raw.prefill.executor.before_pass = gate.wait
    beside = asyncio.ensure_future(raw.mesh.generate(raw.decode, [1, 2, 3], prefill_address=raw.prefill.address))
    await until(gate.reached.is_set, "another peer's prompt is being computed")
    other = start(incarnation, handoff_id=b"i" * 16, request_id="another-request")
    kinds, code, details = await raw.handoff(start(incarnation), other)
    assert code == INVALID
    assert "second Start" in details
    assert kinds[-2:] == ["failed", "quiesced"]
    assert raw.prefill.num_handoffs == 1
    gate.open()
    raw.prefill.executor.before_pass = lambda plan: None
    assert (await beside).token_ids == expected_tokens([1, 2, 3], 4)


async def test_a_stream_that_does_not_begin_with_start_is_refused(raw: RawPeer) -> None:
    await raw.bootstrap()
    for messages in ((), (grant([1, 2, 3]),), (handoff_pb2.HandoffRequest(),)):
        kinds, code, _ = await raw.handoff(*messages)
        assert (kinds, code) == ([], INVALID)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (grant([1, 2, 65]), "block_ids: 65 is outside [1, 65)"),
        (grant([0, 1, 2]), "block_ids: 0"),
        (grant([1, 1, 2]), "twice"),
        (grant([1, 2]), "slots: [0, 2) given, [0, 3) required"),
        (grant([1, 2, 3], from_token=3), "from_token: 3"),
        (grant([1, 2, 3], groups=[]), "groups"),
    ],
)
async def test_a_grant_that_is_not_the_missing_part_ends_the_handoff_with_nothing_written(
    raw: RawPeer, message: handoff_pb2.HandoffRequest, words: str
) -> None:
    incarnation = await raw.bootstrap()
    memory = raw.decode.executor.arena.memory
    memory[:] = 0x5A

    async def requests() -> AsyncIterator[handoff_pb2.HandoffRequest]:
        yield start(incarnation)
        await ready.wait()
        yield message

    ready = asyncio.Event()
    call = raw.stub.Handoff(requests(), timeout=10)
    kinds, told = [], ""

    async def read() -> None:
        nonlocal told
        async for response in call:
            kinds.append(response.WhichOneof("message"))
            ready.set()
            told = response.failed.message or told

    with pytest.raises(grpc.aio.AioRpcError) as error:
        await read()
    assert words in told
    assert kinds == ["ready", "failed", "quiesced"]
    assert error.value.code() == INVALID
    assert (memory == 0x5A).all()


async def test_messages_of_another_handoff_and_repeats_change_nothing(raw: RawPeer) -> None:
    incarnation = await raw.bootstrap()
    good = grant([1, 2, 3])

    async def requests() -> AsyncIterator[handoff_pb2.HandoffRequest]:
        yield start(incarnation)
        yield start(incarnation)
        await ready.wait()
        yield grant([4, 5, 6], handoff_id=b"z" * 16)
        yield handoff_pb2.HandoffRequest(abort=handoff_pb2.Abort(handoff_id=b"z" * 16))
        yield good
        yield good

    ready = asyncio.Event()
    kinds = []
    async for response in raw.stub.Handoff(requests(), timeout=10):
        kinds.append(response.WhichOneof("message"))
        ready.set()
        if response.HasField("done"):
            assert response.done.first_token.token_id == expected_tokens(list(range(10)), 1)[0]
            assert response.done.transferred_blocks == 3
    assert kinds == ["ready", "done"]


async def test_a_name_that_is_live_on_the_prefill_node_is_refused_there_too(raw: RawPeer) -> None:
    incarnation = await raw.bootstrap()

    async def first_requests() -> AsyncIterator[handoff_pb2.HandoffRequest]:
        yield start(incarnation)
        await over.wait()

    over = asyncio.Event()
    first = raw.stub.Handoff(first_requests(), timeout=10)
    assert (await first.read()).HasField("ready")
    kinds, code, details = await raw.handoff(start(incarnation, handoff_id=b"i" * 16))
    assert (kinds, code) == ([], grpc.StatusCode.ALREADY_EXISTS)
    assert "raw-request" in details
    over.set()
    first.cancel()


async def test_a_name_that_another_decode_node_has_live_is_served(raw: RawPeer) -> None:
    """A router places a request anew before the prefill node can know that the first decode node is lost."""
    incarnation = await raw.bootstrap()
    await raw.bootstrap(node_id="raw-2", incarnation=4712)

    async def requests(decode_incarnation: int, handoff_id: bytes) -> AsyncIterator[handoff_pb2.HandoffRequest]:
        yield start(incarnation, handoff_id=handoff_id, decode_incarnation=decode_incarnation)
        await over.wait()

    over = asyncio.Event()
    calls = [
        raw.stub.Handoff(requests(4711, b"h" * 16), timeout=10),
        raw.stub.Handoff(requests(4712, b"i" * 16), timeout=10),
    ]
    for call in calls:
        assert (await call.read()).HasField("ready")
    over.set()
    for call in calls:
        call.cancel()


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (handoff_pb2.HandoffRequest(), "none of start, grant, renewed, abort is set"),
        (handoff_pb2.HandoffRequest(abort=handoff_pb2.Abort(handoff_id=b"short")), "abort.handoff_id: 5 bytes given"),
    ],
)
async def test_a_malformed_message_ends_its_handoff_in_invalid_argument(
    raw: RawPeer, message: handoff_pb2.HandoffRequest, words: str
) -> None:
    incarnation = await raw.bootstrap()
    kinds, code, details = await raw.handoff(start(incarnation), message)
    assert kinds[-2:] == ["failed", "quiesced"]
    assert code == INVALID
    assert words in details


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"node_id": ""}, "node_id: 0 bytes"), ({"node_id": "a\nb"}, "node_id"), ({"incarnation": 0}, "incarnation: 0")],
)
async def test_an_introduction_without_an_identity_is_refused(
    raw: RawPeer, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await raw.bootstrap(**changes)
    assert error.value.code() == INVALID
    assert words in error.value.details()


async def test_an_abort_is_answered_with_quiesced(raw: RawPeer) -> None:
    incarnation = await raw.bootstrap()
    abort = handoff_pb2.HandoffRequest(abort=handoff_pb2.Abort(handoff_id=b"h" * 16, reason="tired"))
    kinds, code, _ = await raw.handoff(start(incarnation), abort)
    assert kinds[-1] == "quiesced"
    assert code == grpc.StatusCode.OK


# A prefill node that speaks the protocol wrongly.


class LyingPrefill(prefill_pb2_grpc.PrefillServicer):
    """Bootstraps like the real one it stands before, then answers every handoff with the given messages."""

    def __init__(
        self, behind: FakeNode, answers: Sequence[handoff_pb2.HandoffResponse] = (), node_id: str | None = None
    ) -> None:
        self._behind = behind
        self._answers = answers
        self._node_id = node_id

    async def Bootstrap(self, request, context):
        async with grpc.aio.insecure_channel(self._behind.address) as channel:
            response = await prefill_pb2_grpc.PrefillStub(channel).Bootstrap(request, timeout=10)
        response.node_id = response.node_id if self._node_id is None else self._node_id
        return response

    async def Handoff(self, requests, context):
        async for message in requests:
            handoff_id = message.start.handoff_id
            break
        for answer in self._answers:
            kind = answer.WhichOneof("message")
            getattr(answer, kind).handoff_id = getattr(answer, kind).handoff_id or handoff_id
            yield answer


def done_message() -> handoff_pb2.HandoffResponse:
    return handoff_pb2.HandoffResponse(done=handoff_pb2.Done(first_token=inference_pb2.SampledToken(token_id=1)))


LIES = {
    "done before a grant": [handoff_pb2.HandoffResponse(ready=handoff_pb2.Ready()), done_message()],
    "done before ready": [done_message()],
    "quiet unasked": [handoff_pb2.HandoffResponse(quiesced=handoff_pb2.Quiesced())],
    "an empty message": [],
    "another handoff's done": [
        handoff_pb2.HandoffResponse(ready=handoff_pb2.Ready()),
        handoff_pb2.HandoffResponse(done=handoff_pb2.Done(handoff_id=b"z" * 16)),
    ],
}


@pytest.mark.parametrize("name", LIES)
async def test_a_prefill_node_that_lies_is_never_believed(mesh: FakeMesh, name: str) -> None:
    prefill, decode = await mesh.prefill(), await mesh.decode()
    lying = grpc.aio.server()
    prefill_pb2_grpc.add_PrefillServicer_to_server(LyingPrefill(prefill, LIES[name]), lying)
    port = lying.add_insecure_port("127.0.0.1:0")
    await lying.start()
    try:
        code, _ = await mesh.error(decode, list(range(12)), prefill_address=f"127.0.0.1:{port}")
    finally:
        await lying.stop(None)
    assert code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)
    assert decode.node.engine.snapshot.num_steps == 0
    await decode.assert_all_blocks_return()
    answer = await mesh.generate(decode, [1, 2, 3], prefill_address=prefill.address)
    assert answer.token_ids == expected_tokens([1, 2, 3], 4)


async def test_a_prefill_node_without_a_name_is_its_own_fault_and_not_the_clients(mesh: FakeMesh) -> None:
    prefill, decode = await mesh.prefill(), await mesh.decode()
    nameless = grpc.aio.server()
    prefill_pb2_grpc.add_PrefillServicer_to_server(LyingPrefill(prefill, node_id=""), nameless)
    port = nameless.add_insecure_port("127.0.0.1:0")
    await nameless.start()
    try:
        code, message = await mesh.error(decode, [1, 2, 3], prefill_address=f"127.0.0.1:{port}")
    finally:
        await nameless.stop(None)
    assert code == grpc.StatusCode.INTERNAL
    assert "node_id: 0 bytes" in message
    assert (await mesh.status(decode)).peers == []


class OtherPrefill(LyingPrefill):
    """Of another model than the one it stands before, which has found nothing to refuse."""

    async def Bootstrap(self, request, context):
        response = await super().Bootstrap(request, context)
        response.manifest.logical.model_fingerprint = "another-model"
        response.manifest.logical.weight_version = "another"
        return response


async def test_a_decode_node_looks_for_differences_itself(mesh: FakeMesh) -> None:
    prefill, decode = await mesh.prefill(), await mesh.decode()
    other = grpc.aio.server()
    prefill_pb2_grpc.add_PrefillServicer_to_server(OtherPrefill(prefill), other)
    port = other.add_insecure_port("127.0.0.1:0")
    await other.start()
    try:
        code, message = await mesh.error(decode, [1, 2, 3], prefill_address=f"127.0.0.1:{port}")
    finally:
        await other.stop(None)
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert "model_fingerprint decode=fake-model, prefill=another-model" in message
    assert "weight_version decode=" in message
    assert "prefill=another" in message
    assert (await mesh.status(decode)).peers == []
    await decode.assert_all_blocks_return()


async def test_an_unknown_message_kind_of_a_request_is_refused_not_ignored(mesh: FakeMesh) -> None:
    decode = await mesh.decode()
    async with grpc.aio.insecure_channel(decode.address) as channel:
        call = decode_pb2_grpc.DecodeStub(channel).Generate(decode_pb2.DecodeRequest(), timeout=5)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
    assert error.value.code() == INVALID

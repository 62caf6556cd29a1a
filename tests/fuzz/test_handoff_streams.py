"""A prefill node and a decode node that keeps no rule: introductions and handoffs spoilt, cut off and out of order.

Writes stay inside the blocks that were granted by a sound grant, whatever was said before and after it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from fuzz.effort import looks
from fuzz.fuzzed_mesh import FuzzedMesh, Outcome, all_methods, documented_statuses
from fuzz.messages import any_message, hostile, raw_bytes, spoilt
from fuzz.strange_peer import StrangePeer
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from pdmesh.v1 import handoff_pb2, prefill_pb2

Draw = Callable[[st.SearchStrategy[Any]], Any]

METHODS = {method.name: method for method in all_methods() if method.containing_service.name == "Prefill"}
MAX_BURST = 6
# Names a peer that is always introduced well; others are made by the examples.
SOUND = 4711
PROMPT = list(b"twenty tokens or so .")


@dataclass(frozen=True, slots=True)
class Script:
    """What is said on one stream, with None where an answer is waited for."""

    steps: tuple[bytes | None, ...]
    half_closes: bool


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedMesh]:
    with FuzzedMesh(tmp_path_factory.mktemp("fuzzed")) as mesh:
        yield mesh


@pytest.fixture
def peer(mesh: FuzzedMesh) -> Iterator[StrangePeer]:
    decode = mesh.nodes["decode"]
    peer = StrangePeer(mesh.mesh.fabric, decode.core.require_data_plane().manifest)
    yield peer
    peer.assert_margins_untouched()
    peer.close()


def bootstrap(mesh: FuzzedMesh, peer: StrangePeer, incarnation: int) -> int:
    """Introduces the peer soundly; the prefill node's own incarnation."""
    request = peer.introduction(incarnation).SerializeToString()
    outcome = mesh.run(mesh.call("prefill", METHODS["Bootstrap"], request, timeout_s=10))
    assert outcome.code is grpc.StatusCode.OK, outcome.details
    return prefill_pb2.BootstrapResponse.FromString(outcome.responses[0]).incarnation


@st.composite
def scripts(draw: Draw, peer: StrangePeer, incarnation: int, prefill_incarnation: int) -> Script:
    """A sound handoff with a few things done to it."""
    said = peer.conversation(PROMPT, incarnation, prefill_incarnation, wants_checksums=draw(st.booleans()))
    start, grant, renewed, abort = said
    steps: list[Message | bytes | None] = [start, None, grant, None]
    extras = (None, start, grant, renewed, abort, handoff_pb2.HandoffRequest())
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(steps) - 1)) if steps else 0
        match draw(st.integers(0, 6)):
            case 0:
                del steps[place:]
            case 1:
                del steps[place : place + 1]
            case 2:
                steps[place:place] = steps[place : place + 1] * draw(st.sampled_from((1, 2, 30)))
            case 3:
                steps.insert(place, extras[draw(st.integers(0, len(extras) - 1))])
            case 4:
                steps.insert(place, draw(raw_bytes((start, grant, abort))))
            case 5:
                steps.insert(place, draw(any_message(handoff_pb2.HandoffRequest.DESCRIPTOR)))
            case _:
                chosen = steps[place] if steps else None
                if isinstance(chosen, Message):
                    steps[place] = draw(spoilt(chosen))
    encoded = tuple(step.SerializeToString() if isinstance(step, Message) else step for step in steps)
    return Script(encoded, half_closes=draw(st.booleans()))


def check_responses(outcome: Outcome, kinds: Counter[str]) -> None:
    """What came is a sound stream of the prefill node, whose failures are documented ones as well."""
    assert outcome.code in documented_statuses(METHODS["Handoff"]), (outcome.code, outcome.details)
    for data in outcome.responses:
        response = handoff_pb2.HandoffResponse.FromString(data)
        kinds[str(response.WhichOneof("message"))] += 1
        if response.HasField("failed"):
            codes = {code.value[0] for code in documented_statuses(METHODS["Handoff"])}
            assert response.failed.code in codes, response.failed
    kinds[outcome.code.name] += 1


def test_a_handoff_in_any_order_and_shape_ends_by_the_rules(mesh: FuzzedMesh, peer: StrangePeer) -> None:
    prefill_incarnation = bootstrap(mesh, peer, SOUND)
    kinds = Counter[str]()

    @looks(20, shrinks=False)
    @given(st.lists(scripts(peer, SOUND, prefill_incarnation), min_size=1, max_size=MAX_BURST))
    def bursts(burst: list[Script]) -> None:
        async def talk_to_all() -> list[Outcome]:
            talks = (
                mesh.talk("prefill", METHODS["Handoff"], script.steps, half_closes=script.half_closes)
                for script in burst
            )
            outcomes = await asyncio.gather(*talks)
            await mesh.assert_quiet()
            return list(outcomes)

        for outcome in mesh.run(talk_to_all()):
            check_responses(outcome, kinds)

    bursts()
    mesh.run(mesh.assert_unharmed())
    peer.assert_null_blocks_untouched()
    # It got as far as the end of a handoff, and as the refusals of every stage.
    assert {"ready", "done", "failed", "quiesced", "checksums", "OK", "INVALID_ARGUMENT"} <= kinds.keys(), kinds


def test_whoever_introduces_himself_strangely_is_refused_or_served_within_what_he_said(
    mesh: FuzzedMesh, peer: StrangePeer
) -> None:
    """A spoilt manifest that is taken is used: a sound handoff follows, whose writes go where it says."""
    method, seen = METHODS["Bootstrap"], Counter[str]()
    good, elsewhere, unlike = (peer.introduction(SOUND) for _ in range(3))
    for rank in elsewhere.manifest.ranks:
        rank.endpoint = "memory:no"
    unlike.manifest.logical.weight_version = "another"
    wild = hostile(method.input_type, (good, good, elsewhere, unlike))

    @looks(60, shrinks=False)
    @given(st.lists(wild, min_size=1, max_size=3), st.lists(raw_bytes((good,)), max_size=2))
    def bursts(requests: list[Message], noise: list[bytes]) -> None:
        async def meet() -> list[Outcome]:
            data = [*(request.SerializeToString() for request in requests), *noise]
            outcomes = await asyncio.gather(*(mesh.call("prefill", method, item, timeout_s=5) for item in data))
            taken = [
                (request.incarnation, prefill_pb2.BootstrapResponse.FromString(outcome.responses[0]).incarnation)
                for request, outcome in zip(requests, outcomes[: len(requests)], strict=True)
                if outcome.code is grpc.StatusCode.OK
            ]
            for incarnation, prefill_incarnation in taken:
                said = peer.conversation(PROMPT, incarnation, prefill_incarnation, wants_checksums=True)
                steps = (said[0].SerializeToString(), None, said[1].SerializeToString(), None)
                check_responses(await mesh.talk("prefill", METHODS["Handoff"], steps, half_closes=True), seen)
            await mesh.assert_quiet()
            return list(outcomes)

        for outcome in mesh.run(meet()):
            assert outcome.code in documented_statuses(method), (outcome.code, outcome.details)
            seen[f"bootstrap {outcome.code.name}"] += 1

    bursts()
    mesh.run(mesh.assert_unharmed())
    for code in ("OK", "INVALID_ARGUMENT", "FAILED_PRECONDITION", "UNAVAILABLE"):
        assert seen[f"bootstrap {code}"], seen
    assert seen["done"], seen

"""Whatever is sent to whichever RPC: the answer is a documented status, nothing is logged, and nobody else suffers.

Each example is a burst of calls at once. A new RPC needs a line in CASES.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
import pytest
from fuzz.effort import looks
from fuzz.fuzzed_mesh import FRAME_STATUSES, FuzzedMesh, Outcome, all_methods, documented_statuses
from fuzz.good_messages import decode_requests, follow_requests, generate_requests, metric_exports, trace_exports
from fuzz.messages import encoded, hostile, message_of, raw_bytes
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

MAX_BURST = 8
ROLES = ("router", "prefill", "decode", "fused")
OVERSIZE_BYTES = (4 << 20) + 1


def nothing(mesh: FuzzedMesh) -> tuple[Message, ...]:
    return ()


def routed(mesh: FuzzedMesh) -> tuple[Message, ...]:
    return generate_requests()


def handed_over(mesh: FuzzedMesh) -> tuple[Message, ...]:
    return decode_requests(mesh.addresses["prefill"])


def computed_here(mesh: FuzzedMesh) -> tuple[Message, ...]:
    return decode_requests("")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Who is asked, what good requests look like, and how long a call may last. `num_bursts` of each who is asked."""

    nodes: tuple[str, ...]
    good: Callable[[FuzzedMesh], tuple[Message, ...]] = nothing
    timeout_s: float = 1.0
    num_bursts: int = 3


CASES: dict[str, tuple[Case, ...]] = {
    "pdmesh.v1.Decode.Generate": (
        Case(nodes=("decode",), good=handed_over, num_bursts=20),
        Case(nodes=("fused",), good=computed_here, num_bursts=15),
    ),
    "pdmesh.v1.Inference.Generate": (Case(nodes=("router",), good=routed, num_bursts=25),),
    "pdmesh.v1.Inference.ListModels": (Case(nodes=("router",)),),
    "pdmesh.v1.Node.GetNodeInfo": (Case(nodes=ROLES),),
    "pdmesh.v1.Node.GetNodeStatus": (Case(nodes=ROLES),),
    "pdmesh.v1.Node.ClearCache": (Case(nodes=ROLES),),
    "pdmesh.v1.Node.Drain": (Case(nodes=("leaving",)),),
    "pdmesh.v1.Node.Follow": (Case(nodes=ROLES, good=lambda mesh: follow_requests(), timeout_s=0.1, num_bursts=5),),
}
# They take more than one message, or need a peer with memory of its own: test_handoff_streams.py.
ELSEWHERE = {"pdmesh.v1.Prefill.Bootstrap", "pdmesh.v1.Prefill.Handoff"}
METHODS = {method.full_name: method for method in all_methods()}
ATTACKS = [(name, case, node) for name, cases in CASES.items() for case in cases for node in case.nodes]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedMesh]:
    with FuzzedMesh(tmp_path_factory.mktemp("fuzzed")) as mesh:
        yield mesh


def test_every_rpc_has_its_case() -> None:
    assert METHODS.keys() == CASES.keys() | ELSEWHERE


def attack(mesh: FuzzedMesh, method: MethodDescriptor, case: Case, node: str) -> set[grpc.StatusCode]:
    """Bursts of hostile messages; the statuses that came of them."""
    good = case.good(mesh) or (message_of(method.input_type),)
    messages = hostile(method.input_type, good).map(encoded) | raw_bytes(good)
    allowed, seen = _allowed(method), set[grpc.StatusCode]()

    @looks(case.num_bursts, shrinks=False)
    @given(st.lists(messages, min_size=1, max_size=MAX_BURST))
    def bursts(burst: list[bytes]) -> None:
        async def fire() -> list[Outcome]:
            calls = (mesh.call(node, method, data, timeout_s=case.timeout_s) for data in burst)
            outcomes = await asyncio.gather(*calls)
            await mesh.assert_quiet()
            return list(outcomes)

        for outcome in mesh.run(fire()):
            assert outcome.code in allowed, (outcome.code, outcome.details)
            seen.add(outcome.code)

    bursts()
    mesh.run(mesh.assert_unharmed())
    return seen


def _allowed(method: MethodDescriptor) -> frozenset[grpc.StatusCode]:
    is_ours = method.full_name in METHODS
    allowed = documented_statuses(method) if is_ours else FRAME_STATUSES
    assert not allowed & {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
    return allowed


@pytest.mark.parametrize(("name", "case", "node"), ATTACKS, ids=[f"{name}-{node}" for name, _, node in ATTACKS])
def test_whatever_comes_is_answered_by_the_rules_and_harms_nobody(
    mesh: FuzzedMesh, name: str, case: Case, node: str
) -> None:
    seen = attack(mesh, METHODS[name], case, node)
    # Bytes that are no message are among all of them, so a case that never sees them refused attacks nothing.
    assert grpc.StatusCode.INVALID_ARGUMENT in seen
    if name != "pdmesh.v1.Node.Follow":
        assert grpc.StatusCode.OK in seen


@pytest.mark.parametrize("name", CASES)
def test_a_message_above_the_limit_is_refused_unread(mesh: FuzzedMesh, name: str) -> None:
    method, case = METHODS[name], CASES[name][0]
    # A field of a later release, as long as it takes.
    data = b"\xfa\xff\x03" + _varint(OVERSIZE_BYTES) + bytes(OVERSIZE_BYTES)
    outcome = mesh.run(mesh.call(case.nodes[0], method, data, timeout_s=20))
    assert outcome.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    mesh.run(mesh.assert_quiet())


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*encoded, value))


@pytest.mark.parametrize(
    ("module", "good"), [(trace_service_pb2, trace_exports), (metrics_service_pb2, metric_exports)]
)
def test_whatever_nodes_report_is_taken_and_the_page_still_shows_what_can_be_shown(
    mesh: FuzzedMesh, module: object, good: Callable[[], tuple[Message, ...]]
) -> None:
    (service,) = module.DESCRIPTOR.services_by_name.values()
    attack(
        mesh, service.methods_by_name["Export"], Case(nodes=("router",), good=lambda _: good(), num_bursts=10), "router"
    )

    def look(path: str) -> object:
        with urllib.request.urlopen(f"http://{mesh.router.router.http_address}{path}", timeout=20) as answer:
            return json.loads(answer.read(), parse_constant=pytest.fail)

    async def look_at_all() -> None:
        state = await asyncio.to_thread(look, "/ui/state")
        for line in state["traces"]:
            assert (await asyncio.to_thread(look, f"/ui/traces/{line['trace_id']}"))["spans"]

    mesh.run(look_at_all())

"""Whatever is sent to whichever RPC: the answer is a documented status, nothing is logged, and nobody else suffers.

Each example is a burst of calls at once. A new RPC needs a line in CASES.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Callable, Iterator

import grpc
import pytest
from fuzz.attack import Case, attack
from fuzz.fuzzed_mesh import FRAME_STATUSES, FuzzedMesh, all_methods, documented_statuses
from fuzz.good_messages import (
    decode_requests,
    follow_requests,
    follow_trace_requests,
    generate_requests,
    list_requests,
    metric_exports,
    trace_exports,
    trace_requests,
)
from google.protobuf.message import Message
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

ROLES = ("router", "prefill", "decode", "fused")
OVERSIZE_BYTES = (4 << 20) + 1


def routed(mesh: FuzzedMesh) -> tuple[Message, ...]:
    return generate_requests()


def handed_over(mesh: FuzzedMesh) -> tuple[Message, ...]:
    return decode_requests(mesh.addresses["prefill"])


def computed_here(mesh: FuzzedMesh) -> tuple[Message, ...]:
    return decode_requests("")


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
    "pdmesh.v1.Traces.ListRequests": (Case(nodes=("router",), good=lambda mesh: list_requests()),),
    "pdmesh.v1.Traces.GetTrace": (Case(nodes=("router",), good=lambda mesh: trace_requests(), num_bursts=5),),
    "pdmesh.v1.Traces.FollowRequests": (
        Case(nodes=("router",), good=lambda mesh: follow_trace_requests(), timeout_s=0.1),
    ),
    "pdmesh.v1.Node.Follow": (Case(nodes=ROLES, good=lambda mesh: follow_requests(), timeout_s=0.1, num_bursts=5),),
}
# Their streams end with the caller's deadline.
ENDLESS = {"pdmesh.v1.Node.Follow", "pdmesh.v1.Traces.FollowRequests"}
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


@pytest.mark.parametrize(("name", "case", "node"), ATTACKS, ids=[f"{name}-{node}" for name, _, node in ATTACKS])
def test_whatever_comes_is_answered_by_the_rules_and_harms_nobody(
    mesh: FuzzedMesh, name: str, case: Case, node: str
) -> None:
    seen = attack(mesh, METHODS[name], case, node, documented_statuses(METHODS[name]))
    assert grpc.StatusCode.INVALID_ARGUMENT in seen
    if name not in ENDLESS:
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

    def look(path: str) -> object:
        with urllib.request.urlopen(f"http://{mesh.router.router.http_address}{path}", timeout=20) as answer:
            return json.loads(answer.read(), parse_constant=pytest.fail)

    async def look_at_all() -> None:
        state = await asyncio.to_thread(look, "/ui/state")
        for line in state["traces"]:
            assert (await asyncio.to_thread(look, f"/ui/traces/{line['trace_id']}"))["spans"]

    case = Case(nodes=("router",), good=lambda _: good(), num_bursts=20)
    attack(mesh, service.methods_by_name["Export"], case, "router", FRAME_STATUSES, look_at_all)

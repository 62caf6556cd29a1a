"""What every node serves beside its own service, and what it says when it starts."""

from __future__ import annotations

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from pdmesh.v1 import inference_pb2
from support.mesh import Mesh
from support.processes import NodeProcess

OWN_SERVICE = {"router": "pdmesh.v1.Inference", "prefill": "pdmesh.v1.Prefill", "decode": "pdmesh.v1.Decode"}


def node_of(mesh: Mesh, role: str) -> NodeProcess:
    return mesh.router if role == "router" else mesh.nodes[role]


@pytest.mark.parametrize("role", OWN_SERVICE)
def test_every_node_reports_health_and_reflects_its_services(mesh: Mesh, role: str) -> None:
    node = node_of(mesh, role)
    assert node.health() == health_pb2.HealthCheckResponse.SERVING
    stub = reflection_pb2_grpc.ServerReflectionStub(node.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (response,) = stub.ServerReflectionInfo(iter([request]), timeout=5)
    names = {service.name for service in response.list_services_response.service}
    assert {OWN_SERVICE[role], "pdmesh.v1.Node", "grpc.health.v1.Health"} <= names


def test_the_router_lists_the_model_and_its_limits(mesh: Mesh) -> None:
    (card,) = mesh.client.stub.ListModels(inference_pb2.ListModelsRequest(), timeout=5).models
    assert card.vocab_size == 49_152
    assert card.context_tokens == 8_192
    answer = mesh.client.generate(text="The capital of France is", model=card.name, max_tokens=1)
    assert answer.text == " Paris"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_compute_node_says_what_it_runs_and_where(mesh: Mesh, role: str) -> None:
    node = node_of(mesh, role)
    log = node.log_text()
    for word in (node.address, "SmolLM2", "MiB", "tokens", "shm", "stream", "mooncake"):
        assert word in log, log


def test_a_node_answers_for_itself_while_it_works(mesh: Mesh) -> None:
    stream = mesh.client.start(text="Once upon a time", max_tokens=300, ignore_eos=True)
    for response in stream:
        if response.WhichOneof("event") == "delta":
            break
    status = mesh.nodes["decode"].status()
    assert status.num_running_requests == 1
    assert status.arena.active_lcm_blocks >= 1
    assert (status.peers[0].state, status.peers[0].data_plane) == ("ready", "shm")
    stream.cancel()
    mesh.assert_all_blocks_return()


def test_an_unknown_method_is_unimplemented(mesh: Mesh) -> None:
    call = mesh.client.channel.unary_unary("/pdmesh.v1.Inference/NoSuchMethod")
    with pytest.raises(grpc.RpcError) as error:
        call(b"", timeout=5)
    assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED

"""A mesh of real processes in which every hop is encrypted and every client is known."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.certificates import DOMAIN, MeshAuthority
from support.mesh import COMPUTE, Mesh
from support.preloaded import origin
from support.processes import NodeProcess, wait_until

TOKEN = "a-token-that-only-the-team-knows"
OPERATOR_TOKEN = "a-token-of-those-on-call"
PROMPT = "The capital of France is"


@dataclass(frozen=True, slots=True)
class Secured:
    folder: Path
    authority: MeshAuthority
    nodes: dict[str, NodeProcess]

    def run(self, *arguments: str, token: str = "", role: str | None = None) -> subprocess.CompletedProcess[str]:
        """`pdmesh` as somebody with the token and, where `role` is given, with a certificate of that role."""
        tls = {"PDMESH_TLS_CA": str(self.authority.path)}
        if role is not None:
            certificate, key = self.authority.issue(role)
            tls |= {"PDMESH_TLS_CERT": str(certificate), "PDMESH_TLS_KEY": str(key), "PDMESH_TLS_SERVER_NAME": DOMAIN}
        return origin().run(arguments, environment={**os.environ, **tls, "PDMESH_TOKEN": token}, timeout_s=120.0)


@pytest.fixture(scope="module")
def secured(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    authority = MeshAuthority(folder)

    def options(role: str) -> list[str]:
        settings = authority.settings(role) | {"health_port": "0", "model": str(model_path), "port": "0"}
        return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", value)]

    tenants = folder / "tenants.yaml"
    known = [
        {"name": "team", "token_sha256": [hashlib.sha256(TOKEN.encode()).hexdigest()]},
        {"name": "on-call", "token_sha256": [hashlib.sha256(OPERATOR_TOKEN.encode()).hexdigest()], "is_operator": True},
    ]
    tenants.write_text(json.dumps({"tenants": known}))
    prefill = NodeProcess("prefill", [*options("prefill"), *COMPUTE], folder)
    decode = NodeProcess("decode", [*options("decode"), *COMPUTE, "--prefill", prefill.address], folder)
    nodes = ["--prefill", prefill.address, "--decode", decode.address, "--tenants", str(tenants)]
    router = NodeProcess("router", [*options("router"), *nodes], folder)
    mesh = Secured(folder, authority, {"prefill": prefill, "decode": decode, "router": router})
    wait_until(lambda: is_healthy(router), 60, "the router serves")
    yield mesh
    for node in (router, decode, prefill):
        assert node.stop() == 0, node.log_text()
        assert "Traceback" not in node.log_text(), node.log_text()


def is_healthy(node: NodeProcess) -> bool:
    """By the port for probes, which needs no certificate."""
    found = re.search(r"health is at (\S+)", node.log_text())
    assert found is not None, node.log_text()
    with grpc.insecure_channel(found[1]) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    return answer.status == health_pb2.HealthCheckResponse.SERVING


def test_a_client_with_a_token_gets_the_same_text_as_from_an_open_mesh(secured: Secured, mesh: Mesh) -> None:
    result = secured.run(
        "generate", PROMPT, "--router", secured.nodes["router"].address, "--max-tokens", "8", "--json", token=TOKEN
    )
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    expected = mesh.client.generate(text=PROMPT, max_tokens=8)
    assert [token["token_id"] for token in answer["tokens"]] == expected.token_ids
    assert answer["placement"]["prefill_node"].startswith("prefill-")


def test_a_client_without_one_is_told_so_in_one_line(secured: Secured) -> None:
    result = secured.run("generate", PROMPT, "--router", secured.nodes["router"].address)
    assert result.returncode == 1
    assert "UNAUTHENTICATED" in result.stderr
    assert "a token is required" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_client_that_does_not_trust_the_authority_does_not_connect(secured: Secured) -> None:
    other = secured.folder / "other"
    other.mkdir()
    address = secured.nodes["router"].address
    result = secured.run("generate", PROMPT, "--router", address, "--tls-ca", str(MeshAuthority(other).path))
    assert result.returncode == 1
    assert "cannot connect" in result.stderr


def test_operators_see_every_node_and_clients_none(secured: Secured) -> None:
    address = secured.nodes["router"].address
    seen = secured.run("status", "--router", address, role="operator", token=OPERATOR_TOKEN)
    assert seen.returncode == 0, seen.stderr
    assert all(role in seen.stdout for role in ("router", "prefill", "decode"))
    refused = secured.run("status", "--router", address, token=TOKEN)
    assert "PERMISSION_DENIED" in refused.stderr
    assert " refused" in refused.stdout


def test_the_data_plane_is_encrypted_without_being_asked_for(secured: Secured) -> None:
    for role in ("prefill", "decode"):
        log = secured.nodes[role].log_text()
        assert "stream (tls) at" in log
        assert "mooncake" not in log


def test_a_compute_node_cannot_be_drained_by_its_peers(secured: Secured) -> None:
    refused = secured.run("drain", secured.nodes["prefill"].address, role="decode")
    assert refused.returncode == 1
    assert "Drain is for operator" in refused.stderr

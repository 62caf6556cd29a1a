"""Waiting for a node that does not serve yet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from pdmesh.v1 import mesh_pb2, mesh_pb2_grpc
from rich.console import Console

from node_runtime.config import NodeConfig
from node_runtime.rpc import NodeService, RpcServer
from pdmesh_cli.client_types import PdmeshError
from pdmesh_cli.status import NodeReport, print_status, wait_until_serving


class Reporter:
    """A router that serves when it is told to."""

    is_serving = False

    def info(self) -> mesh_pb2.NodeInfo:
        return mesh_pb2.NodeInfo(node_id="router", role=mesh_pb2.NODE_ROLE_ROUTER)

    async def status(self) -> mesh_pb2.NodeStatus:
        peer = mesh_pb2.PeerStatus(node_id="decode-0", address="d:1", state="connecting", detail="it is not serving")
        return mesh_pb2.NodeStatus(serving=self.is_serving, peers=[peer])

    async def clear_cache(self) -> bool:
        return True


@pytest.fixture
async def node() -> AsyncIterator[tuple[Reporter, str]]:
    reporter = Reporter()
    server = RpcServer(NodeConfig(node_id="router"))
    server.add(mesh_pb2_grpc.add_NodeServicer_to_server, NodeService(reporter, server, [].append))
    yield reporter, f"127.0.0.1:{await server.start()}"
    await server.stop(grace_s=0)


async def test_the_wait_ends_when_the_node_serves(node: tuple[Reporter, str]) -> None:
    reporter, address = node
    waiting = asyncio.create_task(wait_until_serving(address, timeout_s=30))
    done, _ = await asyncio.wait((waiting,), timeout=0.2)
    assert not done
    reporter.is_serving = True
    await waiting


async def test_a_node_that_does_not_serve_in_time_is_quoted(node: tuple[Reporter, str]) -> None:
    _, address = node
    with pytest.raises(PdmeshError, match=r"does not serve after 0 s: decode-0 is connecting: it is not serving"):
        await wait_until_serving(address, timeout_s=0.1)


@pytest.mark.parametrize(
    ("width", "is_terminal", "has_model"), [(80, True, False), (120, True, True), (80, False, True)]
)
def test_no_cell_is_cut_off_whatever_the_width(
    capsys: pytest.CaptureFixture[str], width: int, is_terminal: bool, has_model: bool
) -> None:
    info = mesh_pb2.NodeInfo(node_id="prefill-0", role=mesh_pb2.NODE_ROLE_PREFILL, model="smollm2")
    arena = mesh_pb2.ArenaStatus(total_lcm_blocks=363, active_lcm_blocks=40)
    report = NodeReport(
        address="127.0.0.1:39133", info=info, status=mesh_pb2.NodeStatus(serving=True, num_steps=1234, arena=arena)
    )
    gone = NodeReport(address="127.0.0.1:39134", error="UNAVAILABLE: gone")
    print_status((report, gone), Console(width=width, force_terminal=is_terminal))
    shown = capsys.readouterr().out
    assert "…" not in shown
    for word in ("prefill-0", "127.0.0.1:39133", "serving", "363", "no answer"):
        assert word in shown
    assert ("smollm2" in shown) is has_model
    assert is_terminal is False or max(len(line) for line in shown.splitlines()) <= width

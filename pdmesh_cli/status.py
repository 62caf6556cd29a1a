"""`pdmesh status`: one look at a node through its Node service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pdmesh.v1 import mesh_pb2, mesh_pb2_grpc
from rich.table import Table

from pdmesh_cli.client import client_errors
from pdmesh_cli.client_types import PdmeshError
from pdmesh_cli.identity import ANONYMOUS, Identity

_ANSWER_TIMEOUT_S = 3.0
_SERVING_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What a node answered, or why it did not."""

    address: str
    info: mesh_pb2.NodeInfo | None = None
    status: mesh_pb2.NodeStatus | None = None
    error: str = ""
    """As the user reads it."""


async def ask_node(address: str, *, timeout_s: float, identity: Identity = ANONYMOUS) -> NodeReport:
    """Asks one node; a failure becomes part of the report."""
    try:
        with client_errors():
            channel = identity.connect(address)
            try:
                stub = channel.stub(mesh_pb2_grpc.NodeStub)
                info = await channel.unary(stub.GetNodeInfo, mesh_pb2.GetNodeInfoRequest(), timeout_s=timeout_s)
                status = await channel.unary(stub.GetNodeStatus, mesh_pb2.GetNodeStatusRequest(), timeout_s=timeout_s)
            finally:
                await channel.close()
    except PdmeshError as error:
        return NodeReport(address=address, error=str(error))
    return NodeReport(address=address, info=info, status=status)


async def ask_mesh(
    addresses: Sequence[str], *, timeout_s: float, identity: Identity = ANONYMOUS
) -> tuple[NodeReport, ...]:
    """Asks the named nodes, then the nodes of every router among them, each address once."""
    reports: dict[str, NodeReport] = {}
    wanted = list(dict.fromkeys(addresses))
    while wanted:
        asking = [ask_node(address, timeout_s=timeout_s, identity=identity) for address in wanted]
        for report in await asyncio.gather(*asking):
            reports[report.address] = report
        known = [address for report in reports.values() for address in _nodes_of_router(report)]
        wanted = [address for address in dict.fromkeys(known) if address not in reports]
    return tuple(reports.values())


async def wait_until_serving(address: str, *, timeout_s: float) -> None:
    """Returns when the node at `address` says that it serves.

    Raises PdmeshError, with what the node says about its peers, when that takes longer.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        report = await ask_node(address, timeout_s=_ANSWER_TIMEOUT_S)
        if report.status is not None and report.status.serving:
            return
        if time.monotonic() >= deadline_s:
            raise PdmeshError("UNAVAILABLE", f"{address} does not serve after {timeout_s:.0f} s: {_reason(report)}")
        await asyncio.sleep(_SERVING_POLL_S)


def _reason(report: NodeReport) -> str:
    peers = () if report.status is None else report.status.peers
    details = [f"{peer.node_id or peer.address} is {peer.state}: {peer.detail}" for peer in peers if peer.detail]
    return report.error or "; ".join(details) or "it does not say why"


def _nodes_of_router(report: NodeReport) -> tuple[str, ...]:
    """Only a router lists peers by the address of their services; others may list data-plane endpoints."""
    if report.info is None or report.status is None or report.info.role != mesh_pb2.NODE_ROLE_ROUTER:
        return ()
    return tuple(peer.address for peer in report.status.peers)


def status_table(reports: Sequence[NodeReport]) -> Table:
    """One line per node. Block counts are LCM blocks of the cache arena."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for heading in ("node", "role", "address", "state", "model"):
        table.add_column(heading, no_wrap=True)
    for heading in ("waiting", "running", "steps", "in use", "cached", "blocks"):
        table.add_column(heading, justify="right", no_wrap=True)
    for report in reports:
        table.add_row(*_cells(report))
    return table


def role_name(info: mesh_pb2.NodeInfo) -> str:
    """The role as its command is called."""
    return mesh_pb2.NodeRole.Name(info.role).removeprefix("NODE_ROLE_").lower()


def state_text(status: mesh_pb2.NodeStatus) -> str:
    """Whether the node serves, in the markup of the terminal."""
    if status.draining:
        return "[yellow]draining[/yellow]"
    return "[green]serving[/green]" if status.serving else "[yellow]not serving[/yellow]"


def _cells(report: NodeReport) -> tuple[str, ...]:
    info, status = report.info, report.status
    if info is None or status is None:
        return ("-", "-", report.address, "[red]no answer[/red]")
    arena = status.arena
    blocks: tuple[str, ...] = ("-", "-", "-")
    if arena.total_lcm_blocks:
        used = arena.active_lcm_blocks + arena.quarantined_lcm_blocks
        blocks = (f"{used:,}", f"{arena.cached_lcm_blocks:,}", f"{arena.total_lcm_blocks:,}")
    return (
        info.node_id,
        role_name(info),
        report.address,
        state_text(status),
        info.model or "-",
        f"{status.num_waiting_requests:,}",
        f"{status.num_running_requests:,}",
        f"{status.num_steps:,}",
        *blocks,
    )

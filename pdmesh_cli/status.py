"""`pdmesh status`: one look at a node through its Node service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pdmesh.v1 import mesh_pb2, mesh_pb2_grpc
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from pdmesh_cli.client import client_errors
from pdmesh_cli.client_types import PdmeshError
from pdmesh_cli.identity import ANONYMOUS, Identity

_ANSWER_TIMEOUT_S = 3.0
_SERVING_POLL_S = 0.05
_REFUSALS = frozenset({"UNAUTHENTICATED", "PERMISSION_DENIED"})
_WORDS = ("node", "role", "address", "state", "model")
_HEADINGS = (*_WORDS, "waiting", "running", "steps", "in use", "cached", "blocks")
_NOT_WHERE_NARROW = frozenset({"model", "steps"})
_ANY_WIDTH = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What a node answered, or why it did not."""

    address: str
    info: mesh_pb2.NodeInfo | None = None
    status: mesh_pb2.NodeStatus | None = None
    error: str = ""
    """As the user reads it."""
    is_refusal: bool = False
    """It answered that it does not answer this caller."""

    @property
    def absence(self) -> str:
        """In place of the state of a node that told none."""
        return "refused" if self.is_refusal else "no answer"


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
        return NodeReport(address=address, error=str(error), is_refusal=error.code in _REFUSALS)
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


def print_status(reports: Sequence[NodeReport], console: Console) -> None:
    """One line per node. A narrow terminal gets fewer columns; where not even these fit it breaks the lines, for what
    is cut off says less.
    """
    table = status_table(reports)
    if console.is_terminal and _width_of(table, console) > console.width:
        table = status_table(reports, is_narrow=True)
    Console(highlight=False, width=max(console.width, _width_of(table, console))).print(table)


def _width_of(table: Table, console: Console) -> int:
    """That it has where there is room."""
    return Measurement.get(console, console.options.update(width=_ANY_WIDTH), table).maximum


def status_table(reports: Sequence[NodeReport], *, is_narrow: bool = False) -> Table:
    """One line per node. Block counts are LCM blocks of the cache arena."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    left_out = _NOT_WHERE_NARROW if is_narrow else frozenset()
    for heading in _HEADINGS:
        if heading not in left_out:
            table.add_column(heading, justify="left" if heading in _WORDS else "right", no_wrap=True)
    for report in reports:
        # A node that does not answer has fewer of them.
        named = zip(_HEADINGS, _cells(report), strict=False)
        table.add_row(*(cell for heading, cell in named if heading not in left_out))
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
        return ("-", "-", report.address, f"[red]{report.absence}[/red]")
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

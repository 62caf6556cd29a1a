"""`pdmesh status --watch`: the nodes as they change, in place, until Ctrl-C."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdmesh.v1 import mesh_pb2
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdmesh_cli.identity import ANONYMOUS, Identity
from pdmesh_cli.status import NodeReport, ask_mesh, role_name, state_text

_INTERVAL_S = 1.0
_BAR_CELLS = 24
# What holds the blocks of an arena, as drawn from left to right.
_ARENA_STYLES: Mapping[str, str] = {
    "active": "green",
    "cached": "blue",
    "quarantined": "red",
    "empty": "bright_black",
}


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the mesh. `at_s` is on the monotonic clock."""

    reports: tuple[NodeReport, ...]
    at_s: float


async def run_watch(
    addresses: Sequence[str], console: Console, *, timeout_s: float, identity: Identity = ANONYMOUS
) -> None:
    """Until it is cancelled. Nodes that do not answer are shown as such."""
    before: Look | None = None
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            reports = await ask_mesh(addresses, timeout_s=timeout_s, identity=identity)
            look = Look(reports, time.monotonic())
            live.update(watch_table(look, before), refresh=True)
            before = look
            await asyncio.sleep(_INTERVAL_S)


def watch_table(look: Look, before: Look | None) -> Table:
    """One line per node; rates are those since `before`."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("node", "role", "state"):
        table.add_column(heading, no_wrap=True)
    for heading in ("waiting", "running", "handoffs", "steps/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column(_legend(), no_wrap=True)
    table.add_column("peers", no_wrap=True)
    earlier = {report.address: report for report in before.reports} if before is not None else {}
    elapsed_s = look.at_s - before.at_s if before is not None else 0.0
    for report in look.reports:
        table.add_row(*_cells(report, earlier.get(report.address), elapsed_s))
    return table


def _legend() -> Text:
    return Text.assemble("arena: ", *((f"{state} ", style) for state, style in _ARENA_STYLES.items()))


def _cells(report: NodeReport, before: NodeReport | None, elapsed_s: float) -> tuple[str | Text, ...]:
    info, status = report.info, report.status
    if info is None or status is None:
        return (report.address, "-", Text(report.error or "no answer", style="red"))
    return (
        info.node_id,
        role_name(info),
        state_text(status),
        f"{status.num_waiting_requests:,}",
        f"{status.num_running_requests:,}",
        f"{status.num_handoffs:,}",
        _steps_per_s(report, before, elapsed_s),
        arena_bar(status.arena),
        _peers(status),
    )


def _steps_per_s(report: NodeReport, before: NodeReport | None, elapsed_s: float) -> str:
    """Empty for a node that was not seen before, or was started anew since."""
    if before is None or before.info is None or before.status is None or report.info is None or elapsed_s <= 0:
        return ""
    if report.status is None or report.info.incarnation != before.info.incarnation:
        return ""
    return f"{(report.status.num_steps - before.status.num_steps) / elapsed_s:,.1f}"


def arena_bar(arena: mesh_pb2.ArenaStatus) -> Text:
    """The arena as a bar. What holds any block at all has a cell, as long as there is room."""
    total = arena.total_lcm_blocks
    if not total:
        return Text("-")
    held = {state: getattr(arena, f"{state}_lcm_blocks") for state in _ARENA_STYLES}
    cells = {state: max(1, round(_BAR_CELLS * count / total)) if count else 0 for state, count in held.items()}
    while sum(cells.values()) != _BAR_CELLS:
        # The widest part gives or takes: nobody sees one cell of it.
        widest = max(cells, key=lambda state: cells[state])
        cells[widest] += 1 if sum(cells.values()) < _BAR_CELLS else -1
    bar = Text.assemble(*(("█" * cells[state], style) for state, style in _ARENA_STYLES.items()))
    return bar + Text(f" {total - held['empty']:,}/{total:,}")


def _peers(status: mesh_pb2.NodeStatus) -> Text:
    """How many are ready, and what is wrong with the first that is not."""
    if not status.peers:
        return Text("-")
    wrong = [peer for peer in status.peers if peer.state != "ready"]
    shown = Text(f"{len(status.peers) - len(wrong)} of {len(status.peers)} ready")
    if wrong:
        first = wrong[0]
        shown.append(f"; {first.node_id or first.address} {first.state}", style="yellow")
    return shown

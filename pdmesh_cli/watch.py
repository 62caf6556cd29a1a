"""`pdmesh status --watch`: the nodes as they change, in place, until Ctrl-C."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pdmesh.v1 import mesh_pb2
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdmesh_cli.identity import ANONYMOUS, Identity
from pdmesh_cli.status import NodeReport, ask_mesh, role_name, state_text
from pdmesh_cli.terminal import printable

_INTERVAL_S = 1.0
_BAR_CELLS = 24
_GROUP_BAR_CELLS = 12
# Headings, legend, a gap and what is wrong with one node.
_OTHER_LINES = 6
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
            live.update(WatchView(look=look, before=before), refresh=True)
            before = look
            await asyncio.sleep(_INTERVAL_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchView:
    """A rich renderable: one line per node, with rates since `before`; then its cache groups and how fast it computes,
    where there is room. On a narrow console words are shorter.
    """

    look: Look
    before: Look | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        layout = _WIDE if options.max_width >= _WIDE.min_columns else _NARROW
        table = Table(box=None, pad_edge=False, padding=(0, layout.gap, 0, 0), header_style="bold")
        for heading in ("node", "role", "state"):
            table.add_column(heading, no_wrap=True)
        for heading in layout.counts:
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("arena", no_wrap=True)
        table.add_column("peers", no_wrap=True)
        look, before = self.look, self.before
        earlier = {report.address: report for report in before.reports} if before is not None else {}
        elapsed_s = look.at_s - before.at_s if before is not None else 0.0
        for report in look.reports:
            table.add_row(*_cells(report, earlier.get(report.address), elapsed_s, layout))
        yield table
        yield _legend()
        for report in look.reports:
            yield from _complaints(report)
        details = _details(look.reports, layout)
        # What would be cut off at the bottom is of less interest than what is above it.
        if details.row_count and (
            options.height is None or len(look.reports) + details.row_count + 6 <= options.height
        ):
            yield Text()
            yield details


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Widths are characters."""

    min_columns: int
    gap: int
    counts: tuple[str, str, str, str]
    bar_cells: int
    peers_ready: str


_WIDE = _Layout(
    min_columns=112,
    gap=2,
    counts=("waiting", "running", "handoffs", "steps/s"),
    bar_cells=_BAR_CELLS,
    peers_ready="{ready} of {all} ready",
)
_NARROW = _Layout(
    min_columns=0, gap=1, counts=("wait", "run", "hand", "steps/s"), bar_cells=10, peers_ready="{ready}/{all}"
)


def _legend() -> Text:
    return Text.assemble(*((f"█ {state}  ", style) for state, style in _ARENA_STYLES.items()))


def _cells(report: NodeReport, before: NodeReport | None, elapsed_s: float, layout: _Layout) -> tuple[str | Text, ...]:
    info, status = report.info, report.status
    if info is None or status is None:
        return (report.address, "-", Text(report.absence, style="red"))
    return (
        info.node_id,
        role_name(info),
        state_text(status),
        f"{status.num_waiting_requests:,}",
        f"{status.num_running_requests:,}",
        f"{status.num_handoffs:,}",
        _steps_per_s(report, before, elapsed_s),
        arena_bar(status.arena, layout.bar_cells),
        _peers(status, layout),
    )


def _steps_per_s(report: NodeReport, before: NodeReport | None, elapsed_s: float) -> str:
    """Empty for a node that was not seen before, or was started anew since."""
    if before is None or before.info is None or before.status is None or report.info is None or elapsed_s <= 0:
        return ""
    if report.status is None or report.info.incarnation != before.info.incarnation:
        return ""
    return f"{(report.status.num_steps - before.status.num_steps) / elapsed_s:,.1f}"


def arena_bar(arena: mesh_pb2.ArenaStatus, num_cells: int = _BAR_CELLS) -> Text:
    """The arena as a bar of so many cells. What holds any block at all has a cell, as long as there is room."""
    total = arena.total_lcm_blocks
    if not total:
        return Text("-")
    held = {state: getattr(arena, f"{state}_lcm_blocks") for state in _ARENA_STYLES}
    return _bar(held, num_cells) + Text(f" {total - held['empty']:,}/{total:,}")


def _bar(held: Mapping[str, int], num_cells: int) -> Text:
    """Of blocks by state, some of them not 0."""
    total = sum(held.values())
    cells = {state: max(1, round(num_cells * count / total)) if count else 0 for state, count in held.items()}
    while sum(cells.values()) != num_cells:
        # The widest part gives or takes: nobody sees one cell of it.
        widest = max(cells, key=lambda state: cells[state])
        cells[widest] += 1 if sum(cells.values()) < num_cells else -1
    return Text.assemble(*(("█" * cells[state], style) for state, style in _ARENA_STYLES.items() if state in cells))


def _details(reports: Sequence[NodeReport], layout: _Layout) -> Table:
    """A line per cache group of each node, the first one with what the node measured of its speed. LCM blocks, but for
    those that requests and the prefix cache have taken of a group.
    """
    table = Table(box=None, pad_edge=False, padding=(0, layout.gap, 0, 0), header_style="bold")
    for heading in ("node", "group", "of the arena"):
        table.add_column(heading, no_wrap=True)
    for heading in ("in use", "cached", "taken"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("speed", no_wrap=True)
    for report in reports:
        if report.info is None or report.status is None:
            continue
        for number, group in enumerate(report.status.arena.groups):
            first = (report.info.node_id, _speed(report.status)) if number == 0 else ("", "")
            active = group.lcm_blocks - group.cached_lcm_blocks
            others = report.status.arena.total_lcm_blocks - group.lcm_blocks
            bar = _bar({"active": active, "cached": group.cached_lcm_blocks, "empty": others}, _GROUP_BAR_CELLS)
            counts = (f"{active:,}", f"{group.cached_lcm_blocks:,}", f"{group.taken_blocks:,}")
            table.add_row(first[0], printable(group.group_id), bar, *counts, first[1])
    return table


def _speed(status: mesh_pb2.NodeStatus) -> str:
    """Of prompts, and of a step in which only completions grow. Empty where nothing was computed of late."""
    parts = []
    if status.prefill_tokens_per_s:
        parts.append(f"{status.prefill_tokens_per_s:,.0f} tok/s")
    if status.decode_step_ms:
        parts.append(f"{status.decode_step_ms:,.1f} ms/step")
    return ", ".join(parts)


def _peers(status: mesh_pb2.NodeStatus, layout: _Layout) -> Text:
    """How many are ready."""
    if not status.peers:
        return Text("-")
    num_ready = sum(peer.state == "ready" for peer in status.peers)
    shown = layout.peers_ready.format(ready=num_ready, all=len(status.peers))
    return Text(shown, style="" if num_ready == len(status.peers) else "yellow")


def _complaints(report: NodeReport) -> Iterator[Text]:
    """Why a node does not answer, or which is the first of its peers that is not ready."""
    if report.error:
        yield Text(f"{report.address}: {printable(report.error)}", style="red")
    wrong = [] if report.status is None else [peer for peer in report.status.peers if peer.state != "ready"]
    if wrong and report.info is not None:
        name = wrong[0].node_id or wrong[0].address
        yield Text(printable(f"{report.info.node_id}: peer {name} is {wrong[0].state}"), style="yellow")

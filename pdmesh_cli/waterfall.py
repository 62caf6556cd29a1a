"""Draws one trace as a waterfall: a tree of span names beside bars on a common time axis.

Knows spans only, not how they were collected; what their attributes say is `span_facts`' business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from pdmesh_cli.span_facts import SpanFact, facts_of
from pdmesh_cli.terminal import printable
from router_node.trace_store import Span
from router_node.trace_summary import KIND_BY_NAME

_OFFSET_WIDTH = 9
_DURATION_WIDTH = 12
_MIN_BAR_WIDTH = 12
_MAX_NODE_WIDTH = 14


class SpanKind(Enum):
    """What the time of a span was spent on; value: (style, bar glyph). The glyphs tell kinds apart without colour."""

    QUEUE = ("yellow", "░")
    COMPUTE = ("cyan", "█")
    TRANSFER = ("magenta", "▒")
    DECODE = ("green", "▆")
    ENVELOPE = ("bright_black", "─")

    @property
    def style(self) -> str:
        return self.value[0]

    @property
    def glyph(self) -> str:
        return self.value[1]


def kind_of(span: Span) -> SpanKind:
    """Spans that only enclose others, and unknown ones, are envelopes."""
    name = KIND_BY_NAME.get(span.name)
    return SpanKind.ENVELOPE if name is None else SpanKind[name.upper()]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRow:
    """One line of the waterfall."""

    span: Span
    branch: str
    """Tree drawing in front of the name."""


def tree_rows(spans: Sequence[Span]) -> tuple[TreeRow, ...]:
    """Depth first, siblings by start time. A span whose parent has not arrived stands as a root."""
    span_ids = {span.span_id for span in spans}
    children: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda each: (each.start_ns, -each.end_ns, each.span_id)):
        parent = span.parent_span_id if span.parent_span_id in span_ids else ""
        children.setdefault(parent, []).append(span)
    rows: list[TreeRow] = []
    _append_children(rows, children, parent="", indent="", is_root=True)
    return tuple(rows)


def _append_children(
    rows: list[TreeRow], children: dict[str, list[Span]], *, parent: str, indent: str, is_root: bool
) -> None:
    siblings = children.get(parent, [])
    for index, span in enumerate(siblings):
        is_last = index == len(siblings) - 1
        branch = "" if is_root else indent + ("└ " if is_last else "├ ")
        rows.append(TreeRow(span=span, branch=branch))
        below = "" if is_root else indent + ("  " if is_last else "│ ")
        _append_children(rows, children, parent=span.span_id, indent=below, is_root=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Column widths in cells and the time axis of one rendering."""

    name_width: int
    node_width: int
    bar_width: int
    origin_ns: int
    total_ns: int

    def bar_range(self, span: Span) -> tuple[int, int]:
        """Cells [begin, end) of a span's bar; never empty."""
        begin = (span.start_ns - self.origin_ns) * self.bar_width // self.total_ns
        end = -(-(span.end_ns - self.origin_ns) * self.bar_width // self.total_ns)
        begin = min(begin, self.bar_width - 1)
        return begin, min(max(end, begin + 1), self.bar_width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """A rich renderable of the spans of one trace; fits the width of the console."""

    spans: tuple[Span, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.spans:
            yield Text("no spans have arrived", style="bright_black")
            return
        rows = tree_rows(self.spans)
        layout = _layout_of(rows, options.max_width)
        yield _title(self.spans, layout)
        for row in rows:
            yield _line(row, layout)
        yield from _notes(self.spans)
        yield _legend()
        facts = facts_of(tuple(row.span for row in rows))
        if facts:
            yield Text()
            yield _facts_table(facts)


def _layout_of(rows: Sequence[TreeRow], width: int) -> _Layout:
    origin_ns = min(row.span.start_ns for row in rows)
    end_ns = max(row.span.end_ns for row in rows)
    node_width = min(max(len(row.span.node) for row in rows), _MAX_NODE_WIDTH)
    name_width = max(len(row.branch) + len(row.span.name) for row in rows)
    num_gaps = 3
    fixed_width = node_width + _OFFSET_WIDTH + _DURATION_WIDTH + num_gaps
    name_width = max(min(name_width, width - fixed_width - _MIN_BAR_WIDTH), 8)
    bar_width = max(width - fixed_width - name_width, _MIN_BAR_WIDTH)
    return _Layout(
        name_width=name_width,
        node_width=node_width,
        bar_width=bar_width,
        origin_ns=origin_ns,
        total_ns=max(end_ns - origin_ns, 1),
    )


def _title(spans: Sequence[Span], layout: _Layout) -> Text:
    counts = f"{_counted(len(spans), 'span')}, {_counted(len({span.node for span in spans}), 'node')}"
    facts = f"  {layout.total_ns / 1e6:,.1f} ms, {counts}"
    title = f"trace {printable(spans[0].trace_id)}"
    return Text.assemble((title, "bold"), (facts, "bright_black"), no_wrap=True, overflow="ellipsis")


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _line(row: TreeRow, layout: _Layout) -> Text:
    span, kind = row.span, kind_of(row.span)
    begin, end = layout.bar_range(span)
    name = Text.assemble((row.branch, "bright_black"), (printable(span.name), "red" if span.error else ""))
    name.truncate(layout.name_width, overflow="ellipsis", pad=True)
    node = Text(printable(span.node), style="bright_black")
    node.truncate(layout.node_width, overflow="ellipsis", pad=True)
    offset_ms = (span.start_ns - layout.origin_ns) / 1e6
    return Text.assemble(
        name,
        " ",
        node,
        " " * (begin + 1),
        (kind.glyph * (end - begin), "red" if span.error else kind.style),
        " " * (layout.bar_width - end + 1),
        (f"{offset_ms:>+{_OFFSET_WIDTH},.1f}", "bright_black"),
        f"{span.duration_ms:>{_DURATION_WIDTH - 3},.1f} ms",
        no_wrap=True,
        overflow="crop",
    )


def _notes(spans: Sequence[Span]) -> list[Text]:
    """Failures in full, and how much of the tree is missing."""
    failures = [f"{span.name} on {span.node} failed: {span.error}" for span in spans if span.error]
    notes = [Text(printable(failure), style="red") for failure in failures]
    span_ids = {span.span_id for span in spans}
    num_orphans = sum(1 for span in spans if span.parent_span_id and span.parent_span_id not in span_ids)
    if num_orphans:
        notes.append(Text(f"{_counted(num_orphans, 'span')} without the parent, which has not arrived", style="yellow"))
    return notes


def _facts_table(facts: Sequence[SpanFact]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for fact in facts:
        table.add_row(fact.label, Text(printable(fact.text)))
    return table


def _legend() -> Text:
    legend = Text(no_wrap=True, overflow="crop")
    for kind in SpanKind:
        label = "other" if kind is SpanKind.ENVELOPE else kind.name.lower()
        legend.append(f"{kind.glyph * 2} ", style=kind.style)
        legend.append(f"{label}   ", style="bright_black")
    legend.rstrip()
    return legend

"""How a trace is drawn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pdmesh_cli.waterfall import SpanKind, Waterfall, kind_of, tree_rows
from router_node.trace_store import Span

_EPOCH_NS = 1_700_000_000_000_000_000


def _span(span_id: int, parent: int, name: str, node: str, begin_ms: float, end_ms: float, error: str = "") -> Span:
    return Span(
        trace_id="4bf92f3577b34da6a3ce929d0e0e4736",
        span_id=f"{span_id:016x}",
        parent_span_id=f"{parent:016x}" if parent else "",
        name=name,
        node=node,
        start_ns=_EPOCH_NS + round(begin_ms * 1e6),
        end_ns=_EPOCH_NS + round(end_ms * 1e6),
        error=error,
    )


_REQUEST = (
    _span(11, 4, "pdmesh.decode.generate", "decode-0", 612, 1810.5),
    _span(1, 0, "chat smollm2", "router", 0, 1812.4),
    _span(2, 1, "pdmesh.tokenize", "router", 0.1, 1.3),
    _span(3, 1, "pdmesh.place", "router", 1.3, 1.4),
    _span(4, 1, "pdmesh.decode.request", "decode-0", 3, 1811),
    _span(5, 4, "pdmesh.handoff", "decode-0", 3.2, 612),
    _span(6, 5, "pdmesh.prefill.request", "prefill-0", 4, 611),
    _span(7, 6, "pdmesh.prefill.queue", "prefill-0", 4, 99),
    _span(8, 6, "pdmesh.prefill.compute", "prefill-0", 99, 498),
    _span(9, 6, "pdmesh.transfer", "prefill-0", 240, 610),
    _span(10, 4, "pdmesh.decode.queue", "decode-0", 112, 114),
)

_FAILED = (
    _span(4, 99, "pdmesh.decode.request", "decode-0", 0, 50, error="UNAVAILABLE: node at 10.0.0.7:9000 is gone"),
    _span(5, 4, "pdmesh.handoff", "decode-0", 1, 49),
)


def _drawn(spans: tuple[Span, ...], width: int) -> str:
    console = Console(width=width, force_terminal=False, color_system=None, record=True, quiet=False, file=None)
    with console.capture() as capture:
        console.print(Waterfall(spans=spans))
    return capture.get()


@pytest.mark.parametrize(
    ("golden", "spans", "width"),
    [("request_100.txt", _REQUEST, 100), ("request_72.txt", _REQUEST, 72), ("failed_100.txt", _FAILED, 100)],
)
def test_the_waterfall_looks_as_recorded(golden: str, spans: tuple[Span, ...], width: int) -> None:
    drawn = _drawn(spans, width)
    assert drawn == (Path(__file__).parent / "golden" / golden).read_text(encoding="utf-8")
    assert max(len(line) for line in drawn.splitlines()) <= width


def test_the_tree_follows_parents_and_start_times_not_arrival() -> None:
    rows = [row.branch + row.span.name.removeprefix("pdmesh.") for row in tree_rows(_REQUEST)]
    assert rows == [
        "chat smollm2",
        "├ tokenize",
        "├ place",
        "└ decode.request",
        "  ├ handoff",
        "  │ └ prefill.request",
        "  │   ├ prefill.queue",
        "  │   ├ prefill.compute",
        "  │   └ transfer",
        "  ├ decode.queue",
        "  └ decode.generate",
    ]


def test_a_span_without_its_parent_stands_as_a_root() -> None:
    assert [(row.branch, row.span.name) for row in tree_rows(_FAILED)] == [
        ("", "pdmesh.decode.request"),
        ("└ ", "pdmesh.handoff"),
    ]


def test_queueing_compute_transfer_and_decode_are_told_apart() -> None:
    kinds = {span.name: kind_of(span) for span in _REQUEST}
    assert kinds["pdmesh.prefill.queue"] is kinds["pdmesh.decode.queue"] is SpanKind.QUEUE
    assert kinds["pdmesh.prefill.compute"] is SpanKind.COMPUTE
    assert kinds["pdmesh.transfer"] is SpanKind.TRANSFER
    assert kinds["pdmesh.decode.generate"] is SpanKind.DECODE
    assert kinds["chat smollm2"] is SpanKind.ENVELOPE
    assert len({kind.glyph for kind in SpanKind}) == len({kind.style for kind in SpanKind}) == len(SpanKind)


def test_a_span_of_no_duration_is_still_visible_inside_the_axis() -> None:
    spans = (_span(1, 0, "chat m", "router", 0, 10), _span(2, 1, "pdmesh.transfer", "prefill-0", 10, 10))
    assert sum(line.count(SpanKind.TRANSFER.glyph) for line in _drawn(spans, 80).splitlines()[:-1]) == 1


def test_no_spans_are_said_to_be_missing() -> None:
    assert _drawn((), 80) == "no spans have arrived\n"


def test_no_id_that_a_router_sends_moves_the_cursor() -> None:
    drawn = _drawn((replace(_REQUEST[1], trace_id="4b\x1b[2J"),), 100)
    assert "\x1b" not in drawn
    assert "trace 4b" in drawn

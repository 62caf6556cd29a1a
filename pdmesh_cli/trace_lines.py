"""Requests that have ended, one a line, and as JSON. Widths are characters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

from rich.text import Text

from pdmesh_cli.terminal import format_ms, printable
from router_node.trace_store import Span
from router_node.trace_summary import RequestSummary, summary_of

_STARTED_WIDTH = 11
_TRACE_WIDTH = 12
_STATUS_WIDTH = 16
_TOKENS_WIDTH = 7
_DURATION_WIDTH = 10
_MIN_REQUEST_WIDTH = 8
_MAX_REQUEST_WIDTH = 32
# Narrower than this there is no room for two ids.
_WIDTH_FOR_TRACE_IDS = 96
WIDTH_OF_A_FILE = 112
"""Of lines that no terminal cuts: enough for whole ids."""
_STATUS_STYLES: Mapping[str, str] = {"ok": "green", "cancelled": "yellow"}


@dataclass(frozen=True, slots=True)
class RequestLines:
    """Lines of one width, at least 80, under one heading."""

    width: int

    def heading(self) -> Text:
        """Above the lines."""
        trace = (_fitted("trace", _TRACE_WIDTH),) if self._has_trace_ids else ()
        numbers = (
            f"{'prompt':>{_TOKENS_WIDTH}}",
            f"{'answer':>{_TOKENS_WIDTH}}",
            f"{'1st token':>{_DURATION_WIDTH}}",
            f"{'total':>{_DURATION_WIDTH}}",
        )
        started, request = _fitted("started", _STARTED_WIDTH), _fitted("request", self._request_width)
        return Text(" ".join((started, request, *trace, _fitted("status", _STATUS_WIDTH), *numbers)), style="bold")

    def line(self, summary: RequestSummary) -> Text:
        """One request."""
        status = _fitted(summary.status, _STATUS_WIDTH)
        first_token = "-" if summary.first_token_ms is None else format_ms(summary.first_token_ms)
        trace = (f"{_fitted(summary.trace_id, _TRACE_WIDTH, cut='')} ",) if self._has_trace_ids else ()
        return Text.assemble(
            (f"{_local_time(summary.start_ns)} ", "bright_black"),
            f"{_fitted(summary.request_id or '-', self._request_width)} ",
            *trace,
            (f"{status} ", _STATUS_STYLES.get(summary.status, "red")),
            f"{summary.input_tokens:>{_TOKENS_WIDTH},} {summary.output_tokens:>{_TOKENS_WIDTH},} ",
            f"{first_token:>{_DURATION_WIDTH}} {format_ms(summary.duration_ms):>{_DURATION_WIDTH}}",
        )

    @property
    def _has_trace_ids(self) -> bool:
        return self.width >= _WIDTH_FOR_TRACE_IDS

    @property
    def _request_width(self) -> int:
        widths = [_STARTED_WIDTH, _STATUS_WIDTH, *[_TOKENS_WIDTH] * 2, *[_DURATION_WIDTH] * 2]
        if self._has_trace_ids:
            widths.append(_TRACE_WIDTH)
        left = self.width - sum(widths) - len(widths)
        return max(_MIN_REQUEST_WIDTH, min(left, _MAX_REQUEST_WIDTH))


def _fitted(text: str, width: int, *, cut: str = "…") -> str:
    """Padded, or cut off with a sign of it."""
    shown = printable(text)
    if len(shown) > width:
        shown = shown[: width - len(cut)] + cut
    return f"{shown:<{width}}"


def _local_time(unix_ns: int) -> str:
    """The time of a request of today, date and time of another one."""
    began = datetime.fromtimestamp(unix_ns / 1e9)
    layout = "%H:%M:%S" if began.date() == datetime.now().date() else "%m-%d %H:%M"
    return f"{began.strftime(layout):<{_STARTED_WIDTH}}"


def request_object(request: Span) -> dict[str, object]:
    """A request for machines: one line."""
    summary = summary_of(request)
    return {**asdict(summary), "duration_ms": summary.duration_ms}


def trace_object(spans: Sequence[Span]) -> dict[str, object]:
    """A whole trace for machines."""
    return {
        "trace_id": spans[0].trace_id if spans else "",
        "spans": [{**asdict(span), "duration_ms": span.duration_ms} for span in spans],
    }

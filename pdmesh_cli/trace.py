"""`pdmesh trace`: the requests that a router has seen end, or what happened to one of them."""

from __future__ import annotations

import json
from contextlib import aclosing
from dataclasses import dataclass

from rich.console import Console

from pdmesh_cli.identity import Identity
from pdmesh_cli.terminal import document_console
from pdmesh_cli.trace_lines import WIDTH_OF_A_FILE, RequestLines, request_object, trace_object
from pdmesh_cli.trace_reader import TraceReader
from pdmesh_cli.waterfall import Waterfall
from router_node.trace_store import Span
from router_node.trace_summary import summary_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """What is to be shown. `name` is the id of a request or a trace; empty: requests."""

    name: str
    num_requests: int
    follows: bool
    as_json: bool


async def run_trace(router: str, options: TraceOptions, *, timeout_s: float, identity: Identity) -> None:
    """Carries out the command. Raises PdmeshError."""
    channel = identity.connect(router)
    try:
        reader = TraceReader(channel, timeout_s=timeout_s)
        if options.name:
            _show_trace(await reader.trace(options.name), as_json=options.as_json)
            return
        output = _RequestOutput(as_json=options.as_json)
        if not options.follows:
            output.show(await reader.newest_requests(options.num_requests))
            return
        # Where none are kept that is said before anything else.
        await reader.newest_requests(1)
        output.begin()
        async with aclosing(reader.ended_requests()) as ended:
            async for request in ended:
                output.add(request)
    finally:
        await channel.close()


def _show_trace(spans: tuple[Span, ...], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(trace_object(spans)), flush=True)
    else:
        document_console().print(Waterfall(spans=spans))


class _RequestOutput:
    """Lines on standard output, each as soon as it is known."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._console = Console(highlight=False, soft_wrap=True)
        self._lines = RequestLines(self._console.width if self._console.is_terminal else WIDTH_OF_A_FILE)

    def show(self, requests: tuple[Span, ...]) -> None:
        """A list of which nothing follows."""
        if not requests and not self._as_json:
            self._console.print("no trace has come yet; the router and its nodes send theirs when a request has ended")
            return
        self.begin()
        for request in requests:
            self.add(request)

    def begin(self) -> None:
        if not self._as_json:
            self._console.print(self._lines.heading())

    def add(self, request: Span) -> None:
        if self._as_json:
            print(json.dumps(request_object(request)), flush=True)
        else:
            self._console.print(self._lines.line(summary_of(request)))
            self._console.file.flush()

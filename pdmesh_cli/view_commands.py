"""The commands that look at a mesh: `status` and `trace`."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import typer
from rich.console import Console

from node_runtime.errors import BadConfig
from pdmesh_cli.defaults import DEFAULT_ROUTER
from pdmesh_cli.failures import EXIT_FAILURE, reported_failures, with_advice
from pdmesh_cli.options import Router, TlsCa, TlsCert, TlsKey, TlsServerName, TokenFile
from pdmesh_cli.terminal import document_console


def status(
    router: Annotated[
        str, typer.Option(envvar="PDMESH_ROUTER", metavar="<host:port>", help="A router; its nodes are asked as well.")
    ] = DEFAULT_ROUTER,
    node: Annotated[
        list[str] | None,
        typer.Option(metavar="<host:port>", help="Ask this node instead. May be repeated."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again every second until Ctrl-C.")] = False,
    timeout_s: Annotated[
        float, typer.Option(min=0.001, metavar="<float>", help="How long to wait for each node. Seconds.")
    ] = 5,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_server_name: TlsServerName = None,
) -> None:
    """Show role, state, load and cache of the nodes, once or as they change."""
    from pdmesh_cli.identity import identity_of
    from pdmesh_cli.status import ask_mesh, print_status
    from pdmesh_cli.watch import run_watch

    with reported_failures():
        identity = identity_of(
            token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, tls_server_name=tls_server_name
        )
        if watch:
            asyncio.run(run_watch(node or [router], Console(), timeout_s=timeout_s, identity=identity))
        reports = asyncio.run(ask_mesh(node or [router], timeout_s=timeout_s, identity=identity))
    print_status(reports, document_console())
    errors = [
        with_advice(report.error) if report.address == router and not node else report.error
        for report in reports
        if report.error
    ]
    err = Console(stderr=True, highlight=False, soft_wrap=True)
    for error in errors:
        err.print(f"pdmesh: {error}", style="red", markup=False)
    if errors:
        sys.exit(EXIT_FAILURE)


def trace(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="<id>", show_default=False, help="Of a request or a trace, or the first digits of a trace's."
        ),
    ] = None,
    router: Router = DEFAULT_ROUTER,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show requests as they end, until Ctrl-C.")] = False,
    num_requests: Annotated[
        int, typer.Option("--num-requests", "-n", min=1, max=1000, metavar="<int>", help="Most requests to list.")
    ] = 20,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each request, or one for the trace.")
    ] = False,
    timeout_s: Annotated[
        float, typer.Option(min=0.001, metavar="<float>", help="How long to wait for an answer. Seconds.")
    ] = 5,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_server_name: TlsServerName = None,
) -> None:
    """Show the last requests, or what happened to one of them.

    A router keeps traces if it is told to (--keep-traces) and the nodes send them to it
    (--otlp-endpoint). Those of `pdmesh up` do both.
    """
    from pdmesh_cli.identity import identity_of
    from pdmesh_cli.trace import TraceOptions, run_trace

    with reported_failures():
        if name and follow:
            raise BadConfig("--follow: shows all requests, and goes without an id")
        identity = identity_of(
            token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, tls_server_name=tls_server_name
        )
        options = TraceOptions(name=name or "", num_requests=num_requests, follows=follow, as_json=as_json)
        asyncio.run(run_trace(router, options, timeout_s=timeout_s, identity=identity))

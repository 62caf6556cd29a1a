"""Options that several commands of clients share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from pdmesh_cli.defaults import TOKEN_VARIABLE

_TRUST: Final = "Secured meshes"

Router = Annotated[str, typer.Option(envvar="PDMESH_ROUTER", metavar="<host:port>", help="Address of the router.")]
Adapter = Annotated[
    str, typer.Option(metavar="<name>", help="LoRA adapter to change the model by. Default: none.", show_default=False)
]
Timeout = Annotated[float, typer.Option(min=0.001, metavar="<float>", help="Deadline of each answer. Seconds.")]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="<file>",
        rich_help_panel=_TRUST,
        help=f"File with the token to show. Default: the variable {TOKEN_VARIABLE}.",
    ),
]
TlsCa = Annotated[
    Path | None,
    typer.Option(
        envvar="PDMESH_TLS_CA", metavar="<file>", rich_help_panel=_TRUST, help="Encrypt, and trust this authority."
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(envvar="PDMESH_TLS_CERT", metavar="<file>", rich_help_panel=_TRUST, help="Certificate chain to show."),
]
TlsKey = Annotated[
    Path | None,
    typer.Option(envvar="PDMESH_TLS_KEY", metavar="<file>", rich_help_panel=_TRUST, help="Key of that certificate."),
]
TlsServerName = Annotated[
    str | None,
    typer.Option(
        envvar="PDMESH_TLS_SERVER_NAME",
        metavar="<name>",
        rich_help_panel=_TRUST,
        help="Name that the server's certificate must have. Default: the host that is dialled.",
    ),
]

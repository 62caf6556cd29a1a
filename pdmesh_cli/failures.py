"""How a command that failed ends: one line for the user, and a status."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final, NoReturn

from rich.console import Console

from node_runtime.errors import BadConfig, NodeError
from pdmesh_cli.child import ChildError
from pdmesh_cli.client_types import PdmeshError
from pdmesh_cli.defaults import DEFAULT_ROUTER_PORT
from pdmesh_cli.model_fetch import ModelFetchError
from pdmesh_cli.ports import PortTaken

EXIT_FAILURE: Final = 1
EXIT_BAD_USAGE: Final = 2

_ADVICE_BY_CAUSE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "no gRPC server": f"the other port of a router is meant, {DEFAULT_ROUTER_PORT} by default",
        "the TLS handshake failed": "--tls-ca is for routers with certificates, and names who has signed them",
        "Socket closed": "a router with certificates is called with --tls-ca",
    }
)


@contextmanager
def reported_failures(*, quote_logs: bool = False, asks_router: bool = True) -> Iterator[None]:
    """Ends the command with one clear line for what can go wrong in the open; defects keep their traceback.

    `quote_logs` shows the last lines of a child that failed, for commands that do not show them anyway. `asks_router`
    is False of commands that are given the address of any node: how a router is named is no advice to them.
    """
    err = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        yield
    except BadConfig as error:
        _fail(err, error, EXIT_BAD_USAGE)
    except ChildError as error:
        for line in error.last_lines if quote_logs else ():
            err.print(f"  {line}", style="bright_black", markup=False)
        _fail(err, error, EXIT_FAILURE)
    except PortTaken as error:
        _fail(err, f"{error}; choose another with {error.option}, or 0 for a free one", EXIT_FAILURE)
    except (ModelFetchError, PdmeshError, NodeError) as error:
        _fail(err, with_advice(str(error)) if asks_router else error, EXIT_FAILURE)
    except (KeyboardInterrupt, asyncio.CancelledError):
        err.print("interrupted")
        sys.exit(128 + signal.SIGINT)


def with_advice(failure: str) -> str:
    """What a router that was asked could not do, as the user reads it, and what to do next where that is known."""
    if not failure.startswith("UNAVAILABLE: cannot connect to "):
        return failure
    for cause, advice in _ADVICE_BY_CAUSE.items():
        if failure.endswith(cause):
            return f"{failure}; {advice}"
    return f"{failure}; start a mesh with `pdmesh up`, or name its router with --router or PDMESH_ROUTER"


def _fail(err: Console, error: Exception | str, exit_code: int) -> NoReturn:
    err.print(f"pdmesh: {error}", style="red", markup=False)
    sys.exit(exit_code)

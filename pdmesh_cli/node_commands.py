"""The commands that run one node, and those that prepare one or make it leave.

Read options and call the module that does the work; a role is imported only by the command that runs it.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from decode_node.config import DecodeNodeConfig, FusedNodeConfig
from node_runtime.config import ComputeNodeConfig, NodeConfig
from node_runtime.lifecycle import run_node, setup_logging
from pdmesh_cli.failures import reported_failures
from pdmesh_cli.flags import CONFIG_FILE_PARAMETER, FlagValue, config_parameters, load_merged, take_parameters
from pdmesh_cli.options import TlsCa, TlsCert, TlsKey, TlsServerName, TokenFile
from prefill_node.config import PrefillNodeConfig
from router_node.config import RouterConfig

ConfigT = TypeVar("ConfigT", PrefillNodeConfig, DecodeNodeConfig, FusedNodeConfig, RouterConfig)


def _panel_of(name: str) -> str:
    """Help panel of a configuration field: the widest group that has it."""
    if name in NodeConfig.model_fields:
        return "Every node"
    return "Model, cache and batching" if name in ComputeNodeConfig.model_fields else "This role"


def _role_command(
    config_type: type[ConfigT], serve: Callable[[ConfigT], Coroutine[object, object, int]]
) -> Callable[..., None]:
    """The command that runs one node in the foreground until SIGTERM or SIGINT."""

    def command(config_file: Path | None, **flags: FlagValue) -> None:
        from pdmesh_cli.up import alias_name, provide_model

        with reported_failures():
            config = load_merged(config_type, config_file, flags, os.environ, role=config_type.role_name).config
            alias = alias_name(config.model)
            if alias is not None:
                path = provide_model(alias, Console(stderr=True))
                config = config.model_copy(
                    update={"model": str(path), "served_model_name": config.served_model_name or alias}
                )
        setup_logging(config.node_id, config.log_level)
        run_node(serve(config))

    command.__doc__ = inspect.getdoc(serve)
    take_parameters(command, [CONFIG_FILE_PARAMETER, *config_parameters(config_type, panel_of=_panel_of)])
    return command


def _serve_router(config: RouterConfig) -> Coroutine[object, object, int]:
    """Run a router: the endpoint of clients. Text in, text out; needs no torch."""
    from router_node.server import serve

    return serve(config)


def _serve_prefill(config: PrefillNodeConfig) -> Coroutine[object, object, int]:
    """Run a prefill node: computes prompts and writes their cache into decode nodes."""
    from prefill_node.server import serve

    return serve(config)


def _serve_decode(config: DecodeNodeConfig) -> Coroutine[object, object, int]:
    """Run a decode node: takes prefilled prompts and generates tokens."""
    from decode_node.server import serve

    return serve(config)


def _serve_fused(config: FusedNodeConfig) -> Coroutine[object, object, int]:
    """Run a fused node: prefill and decode in one process."""
    from decode_node.server import serve

    return serve(config)


router = _role_command(RouterConfig, _serve_router)
prefill = _role_command(PrefillNodeConfig, _serve_prefill)
decode = _role_command(DecodeNodeConfig, _serve_decode)
fused = _role_command(FusedNodeConfig, _serve_fused)


def fetch(
    url: Annotated[str, typer.Argument(metavar="<url>", help="Where the model file is: http:// or https://.")],
    sha256: Annotated[str, typer.Option(metavar="<hex>", help="SHA-256 of the file; another file is not kept.")],
    to: Annotated[Path, typer.Option(metavar="<path>", help="Where to put it. Nothing is fetched if it is there.")],
) -> None:
    """Download a model file and check it, for nodes that are to find it on a volume."""
    from pdmesh_cli.model_download import fetch_to_file

    with reported_failures():
        fetch_to_file(url, sha256=sha256, target=to)


def drain(
    address: Annotated[str, typer.Argument(metavar="<host:port>", help="Address of the node.")],
    wait: Annotated[bool, typer.Option("--wait", help="Return when the node has left.")] = False,
    timeout_s: Annotated[
        float, typer.Option(min=0.001, metavar="<float>", help="How long to wait for an answer. Seconds.")
    ] = 5,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_server_name: TlsServerName = None,
) -> None:
    """Tell a node to take no new work, finish what it has and leave, as SIGTERM does."""
    from pdmesh_cli.drain import drain_line, drain_node, wait_until_left
    from pdmesh_cli.identity import identity_of

    with reported_failures(asks_router=False):
        identity = identity_of(
            token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, tls_server_name=tls_server_name
        )
        answer = asyncio.run(drain_node(address, timeout_s=timeout_s, identity=identity))
        typer.echo(drain_line(address, answer))
        if wait:
            left = wait_until_left(
                address, answer.node_id, grace_s=answer.grace_s, timeout_s=timeout_s, identity=identity
            )
            asyncio.run(left)
            typer.echo(f"{answer.node_id} has left")

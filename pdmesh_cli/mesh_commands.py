"""The commands `up`, `demo` and `plan`: a mesh on this machine, or what would fit into it."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console

from node_runtime.config import ComputeNodeConfig, NodeConfig
from node_runtime.errors import BadConfig
from pdmesh_cli.defaults import DEFAULT_HTTP_PORT, DEFAULT_ROUTER_PORT
from pdmesh_cli.failures import reported_failures
from pdmesh_cli.flags import FlagValue, config_parameters, load_merged, take_parameters
from pdmesh_cli.model_fetch import ALIASES
from pdmesh_cli.terminal import document_console

# What `pdmesh up` sets itself on every compute node.
_NOT_FOR_UP = frozenset({*NodeConfig.model_fields, "model", "served_model_name", "num_threads"})

_Model = Annotated[str, typer.Option(help=f"GGUF file, safetensors directory, or an alias: {', '.join(ALIASES)}.")]
_Fused = Annotated[bool, typer.Option("--fused", help="One fused node instead of prefill and decode.")]
_NumPrefill = Annotated[int, typer.Option(min=1, metavar="<int>", help="Prefill nodes to start.")]
_NumDecode = Annotated[int, typer.Option(min=1, metavar="<int>", help="Decode (or fused) nodes to start.")]
_NumThreads = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="<int>",
        help="Compute threads of each node. Default: the cores, shared out equally between the nodes.",
    ),
]
_LogLevel = Annotated[
    str,
    typer.Option(metavar="<name>", help="Least severe log records to print. One of debug, info, warning, error."),
]


def _run_up(
    *,
    compute_values: dict[str, FlagValue],
    model: _Model = "smollm2",
    served_model_name: Annotated[
        str | None, typer.Option(help="Name clients use for the model. Default: the alias or the name of the file.")
    ] = None,
    fused: _Fused = False,
    num_prefill: _NumPrefill = 1,
    num_decode: _NumDecode = 1,
    num_threads: _NumThreads = None,
    host: Annotated[str, typer.Option(help="Address the router listens on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="<int>", help="Port of the router; 0 takes a free one.")
    ] = DEFAULT_ROUTER_PORT,
    http_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            metavar="<int>",
            help=f"Port of the OpenAI-compatible HTTP API; 0 takes a free one. Default: {DEFAULT_HTTP_PORT}, or a free "
            "one with --port 0.",
        ),
    ] = None,
    log_level: _LogLevel = "info",
    otlp_endpoint: Annotated[
        str | None, typer.Option(help="Send traces there instead of to the embedded collector.")
    ] = None,
    waterfall: Annotated[
        bool, typer.Option("--waterfall", help="Print the waterfall of every request's trace.")
    ] = False,
) -> None:
    """Run a whole mesh on this machine: router, prefill and decode nodes, trace collector. Ctrl-C stops it."""
    from pdmesh_cli.up import UpOptions, provide_model, run_up

    options = UpOptions(
        model=model,
        served_model_name=served_model_name,
        fused=fused,
        num_prefill=num_prefill,
        num_decode=num_decode,
        num_threads=num_threads,
        host=host,
        port=port,
        http_port=http_port,
        log_level=log_level,
        otlp_endpoint=otlp_endpoint,
        show_waterfalls=waterfall,
        compute_values=compute_values,
    )
    console = document_console()
    # Before there is an event loop, which would only take note of a Ctrl-C while this waits.
    model_path = provide_model(model, console)
    asyncio.run(run_up(options, model_path, console))


def _up_command() -> Callable[..., None]:
    """Its own options, then those of the compute nodes that it passes on."""

    def command(**values: FlagValue) -> None:
        own = {name: value for name, value in values.items() if name in own_names}
        compute_values = {name: value for name, value in values.items() if name not in own_names}
        node_values = {name: value for name, value in own.items() if name in ComputeNodeConfig.model_fields}
        with reported_failures():
            # Refused here, by name, instead of by a child.
            load_merged(ComputeNodeConfig, None, {**node_values, **compute_values}, os.environ)
            # Each value has the type that the signature of `_run_up` gave typer.
            _run_up(**own, compute_values=compute_values)  # type: ignore[arg-type]

    own_parameters = [
        parameter
        for parameter in inspect.signature(_run_up, eval_str=True).parameters.values()
        if parameter.name != "compute_values"
    ]
    own_names = {parameter.name for parameter in own_parameters}
    passed_on = config_parameters(ComputeNodeConfig, exclude=_NOT_FOR_UP, panel_of=lambda _: "Passed on to the nodes")
    command.__doc__ = inspect.getdoc(_run_up)
    take_parameters(command, [*own_parameters, *passed_on])
    return command


up = _up_command()


def demo(
    model: _Model = "smollm2",
    fused: _Fused = False,
    num_threads: _NumThreads = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the log lines of the nodes.")] = False,
) -> None:
    """Start router, prefill and decode as three processes, answer four prompts and show what happened to each."""
    from pdmesh_cli.demo import run_demo
    from pdmesh_cli.up import UpOptions, provide_model

    options = UpOptions(model=model, fused=fused, num_threads=num_threads, port=0)
    console = document_console()
    with reported_failures(quote_logs=not verbose):
        model_path = provide_model(model, console)
        asyncio.run(run_demo(options, model_path, console, verbose=verbose))


# What decides how the cache of a node is laid out.
_OF_A_PLAN = frozenset(
    {"memory", "prefix_granularity", "dtype", "max_batch_size", "token_budget", "max_model_len", "enable_prefix_cache"}
)


_PLAN_ROLES_HELP = "Whose cache. One of fused, prefill, decode. Default: fused."


def _plan_command() -> Callable[..., None]:
    """Its own parameters, then those fields of a compute node that size its cache."""

    def command(model: str, role: str, **flags: FlagValue) -> None:
        from pdmesh_cli.up import provide_model

        with reported_failures():
            try:
                from pdmesh_cli.plan import ROLES, plan_report
            except ModuleNotFoundError as error:
                if error.name != "torch":
                    raise
                advice = "install it with: pip install 'pdmesh[compute]'"
                raise BadConfig(f"torch is not installed, and a plan is made with it; {advice}") from error
            if role not in ROLES:
                raise BadConfig(f"role: expected one of {', '.join(ROLES)}, got {role!r}")
            path = provide_model(model, Console(stderr=True))
            config = load_merged(ComputeNodeConfig, None, {**flags, "model": str(path)}, os.environ).config
            report = plan_report(config, ROLES[role])
        document_console().print(report)

    own_parameters = inspect.signature(_plan_parameters, eval_str=True).parameters.values()
    sizing = config_parameters(
        ComputeNodeConfig,
        exclude=ComputeNodeConfig.model_fields.keys() - _OF_A_PLAN,
        panel_of=lambda _: "As a node would be given them",
    )
    command.__doc__ = inspect.getdoc(_plan_parameters)
    take_parameters(command, [*own_parameters, *sizing])
    return command


def _plan_parameters(
    *,
    model: Annotated[str, typer.Argument(help=f"GGUF file, safetensors directory, or an alias: {', '.join(ALIASES)}.")],
    role: Annotated[str, typer.Option(metavar="<name>", help=_PLAN_ROLES_HELP, show_default=False)] = "fused",
) -> None:
    """Show how the cache of a model would be laid out in a given memory, and how much it would hold."""


plan = _plan_command()

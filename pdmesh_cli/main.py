"""The `pdmesh` command: reads options, calls the module that does the work, turns every failure into one line.

Exit status: 0 done, 1 failed, 2 wrong usage or configuration. Roles are imported only by the command that runs them.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import inspect
import os
import sys
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Annotated, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.measure import Measurement

from decode_node.config import DecodeNodeConfig, FusedNodeConfig
from node_runtime.config import ComputeNodeConfig, NodeConfig
from node_runtime.errors import BadConfig
from node_runtime.lifecycle import run_node, setup_logging
from pdmesh_cli.client_commands import bench, chat
from pdmesh_cli.client_types import GenerateOptions
from pdmesh_cli.config_commands import TAKES_ROLE_OPTIONS, check_files, print_schema, show_values
from pdmesh_cli.failures import EXIT_FAILURE, reported_failures
from pdmesh_cli.flags import CONFIG_FILE_PARAMETER, FlagValue, config_parameters, load_merged
from pdmesh_cli.identity import identity_of
from pdmesh_cli.model_download import fetch_to_file
from pdmesh_cli.model_fetch import ALIASES
from pdmesh_cli.options import DEFAULT_ROUTER, Router, TlsCa, TlsCert, TlsKey, TlsServerName, TokenFile
from pdmesh_cli.parent_death import die_with_parent
from pdmesh_cli.sim import simulate_mesh
from pdmesh_cli.up import DEFAULT_HTTP_PORT, DEFAULT_ROUTER_PORT, UpOptions, alias_name, provide_model, run_up
from prefill_node.config import PrefillNodeConfig
from router_node.config import RouterConfig

# What `pdmesh up` sets itself on every compute node.
_NOT_FOR_UP = frozenset({*NodeConfig.model_fields, "model", "served_model_name", "num_threads"})

ConfigT = TypeVar("ConfigT", PrefillNodeConfig, DecodeNodeConfig, FusedNodeConfig, RouterConfig)
Parameters = ParamSpec("Parameters")

app = typer.Typer(
    name="pdmesh",
    help="Serve an LLM with prefill and decode as separate services.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_NODES = "Nodes"
_THIS_MACHINE = "A mesh on this machine"
_CLIENTS = "Using a mesh"
_DEVELOPERS = "Testing a mesh"


def _panel_of(name: str) -> str:
    """Help panel of a configuration field: the widest group that has it."""
    if name in NodeConfig.model_fields:
        return "Every node"
    return "Model, cache and batching" if name in ComputeNodeConfig.model_fields else "This role"


def _take_parameters(command: Callable[..., None], parameters: Iterable[inspect.Parameter]) -> None:
    """Gives `command`, which takes whatever it is called with, the parameters that typer is to offer."""
    # No function is declared to have a signature, yet `inspect` documents the attribute for this.
    command.__signature__ = inspect.Signature([*parameters])  # type: ignore[attr-defined]
    command.__annotations__ = {}


def _add_role(
    name: str, config_type: type[ConfigT], serve: Callable[[ConfigT], Coroutine[object, object, int]]
) -> None:
    """Adds the command that runs one node in the foreground until SIGTERM or SIGINT."""

    def command(config_file: Path | None, **flags: FlagValue) -> None:
        with reported_failures():
            config = load_merged(config_type, config_file, flags, os.environ, role=name).config
            alias = alias_name(config.model)
            if alias is not None:
                path = provide_model(alias, Console(stderr=True))
                config = config.model_copy(
                    update={"model": str(path), "served_model_name": config.served_model_name or alias}
                )
        setup_logging(config.node_id, config.log_level)
        run_node(serve(config))

    parameters = [CONFIG_FILE_PARAMETER, *config_parameters(config_type, panel_of=_panel_of)]
    _take_parameters(command, parameters)
    app.command(name, help=serve.__doc__, rich_help_panel=_NODES)(command)


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


_add_role("router", RouterConfig, _serve_router)
_add_role("prefill", PrefillNodeConfig, _serve_prefill)
_add_role("decode", DecodeNodeConfig, _serve_decode)
_add_role("fused", FusedNodeConfig, _serve_fused)

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


def _add_up() -> None:
    """Adds `up`: its own options, then those of the compute nodes that it passes on."""

    def command(**values: FlagValue) -> None:
        own = {name: value for name, value in values.items() if name in own_names}
        compute_values = {name: value for name, value in values.items() if name not in own_names}
        node_values = {name: value for name, value in own.items() if name in ComputeNodeConfig.model_fields}
        with reported_failures():
            # Refused here, by name, instead of by a child.
            load_merged(ComputeNodeConfig, None, {**node_values, **compute_values}, os.environ)
            # Each value has the type that the signature of `_up_options` gave typer.
            options = _up_options(**own, compute_values=compute_values)  # type: ignore[arg-type]
            asyncio.run(run_up(options, _document_console()))

    own_parameters = [
        parameter
        for parameter in inspect.signature(_up_options, eval_str=True).parameters.values()
        if parameter.name != "compute_values"
    ]
    own_names = {parameter.name for parameter in own_parameters}
    passed_on = config_parameters(ComputeNodeConfig, exclude=_NOT_FOR_UP, panel_of=lambda _: "Passed on to the nodes")
    _take_parameters(command, [*own_parameters, *passed_on])
    app.command("up", help=_up_options.__doc__, rich_help_panel=_THIS_MACHINE)(command)


def _up_options(
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
) -> UpOptions:
    """Run a whole mesh on this machine: router, prefill and decode nodes, trace collector. Ctrl-C stops it."""
    return UpOptions(
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


_add_up()


@app.command("demo", rich_help_panel=_THIS_MACHINE)
def _demo(
    model: _Model = "smollm2",
    fused: _Fused = False,
    num_threads: _NumThreads = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the log lines of the nodes.")] = False,
) -> None:
    """Start router, prefill and decode as three processes, answer four prompts and show what happened to each."""
    from pdmesh_cli.demo import run_demo

    options = UpOptions(model=model, fused=fused, num_threads=num_threads, port=0)
    with reported_failures(quote_logs=not verbose):
        asyncio.run(run_demo(options, _document_console(), verbose=verbose))


def _document_console() -> Console:
    """As wide as the terminal, at most 100 columns; 100 where there is no terminal."""
    console = Console(highlight=False)
    width = min(console.width, 100) if console.is_terminal else 100
    return Console(highlight=False, width=width)


# What decides how the cache of a node is laid out.
_OF_A_PLAN = frozenset(
    {"memory", "prefix_granularity", "dtype", "max_batch_size", "token_budget", "max_model_len", "enable_prefix_cache"}
)


_PLAN_ROLES_HELP = "Whose cache. One of fused, prefill, decode. Default: fused."


def _add_plan() -> None:
    """Adds `plan`: its own parameters, then those fields of a compute node that size its cache."""

    def command(model: str, role: str, **flags: FlagValue) -> None:
        from pdmesh_cli.plan import ROLES, plan_report

        with reported_failures():
            if role not in ROLES:
                raise BadConfig(f"role: expected one of {', '.join(ROLES)}, got {role!r}")
            path = provide_model(model, Console(stderr=True))
            config = load_merged(ComputeNodeConfig, None, {**flags, "model": str(path)}, os.environ).config
            report = plan_report(config, ROLES[role])
        _document_console().print(report)

    own_parameters = inspect.signature(_plan_parameters, eval_str=True).parameters.values()
    sizing = config_parameters(
        ComputeNodeConfig,
        exclude=ComputeNodeConfig.model_fields.keys() - _OF_A_PLAN,
        panel_of=lambda _: "As a node would be given them",
    )
    _take_parameters(command, [*own_parameters, *sizing])
    app.command("plan", help=_plan_parameters.__doc__, rich_help_panel=_THIS_MACHINE)(command)


def _plan_parameters(
    *,
    model: Annotated[str, typer.Argument(help=f"GGUF file, safetensors directory, or an alias: {', '.join(ALIASES)}.")],
    role: Annotated[str, typer.Option(metavar="<name>", help=_PLAN_ROLES_HELP, show_default=False)] = "fused",
) -> None:
    """Show how the cache of a model would be laid out in a given memory, and how much it would hold."""


_add_plan()


@app.command("fetch", rich_help_panel=_NODES)
def _fetch(
    url: Annotated[str, typer.Argument(metavar="<url>", help="Where the model file is: http:// or https://.")],
    sha256: Annotated[str, typer.Option(metavar="<hex>", help="SHA-256 of the file; another file is not kept.")],
    to: Annotated[Path, typer.Option(metavar="<path>", help="Where to put it. Nothing is fetched if it is there.")],
) -> None:
    """Download a model file and check it, for nodes that are to find it on a volume."""
    with reported_failures():
        fetch_to_file(url, sha256=sha256, target=to)


@app.command("generate", rich_help_panel=_CLIENTS)
def _generate(
    prompt: Annotated[str, typer.Argument(help='The prompt, or "-" to read it from standard input.')],
    router: Router = DEFAULT_ROUTER,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a chat message.")] = False,
    system: Annotated[str | None, typer.Option(help="System message in front of the chat message.")] = None,
    model: Annotated[str, typer.Option(help="Name of the model. Default: the only one served.")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate. Default: 256.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. Default: 0.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep only the k most likely tokens. Default: all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the smallest set with this mass. Default: 1.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text. Default: drawn by the server.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="<str>", help="End before this text. May be repeated.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at the model's end tokens.")] = False,
    num_samples: Annotated[
        int | None, typer.Option(help="Answers, which differ in their seeds: seed, seed + 1, ... Default: 1.")
    ] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Against tokens of the answer. Default: 0.")] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="Against tokens of the answer, by their number. Default: 0.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Against tokens of prompt and answer; divides their logits. Default: 1.")
    ] = None,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(metavar="<token=bias>", help="Add this to the logit of a token. May be repeated."),
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="Print log-probabilities of each token and of this many alternatives.")
    ] = None,
    prompt_logprobs: Annotated[
        int | None, typer.Option(help="Likewise of each token of the prompt, which is then computed whole.")
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(metavar="<file>", help="Answer in JSON that the schema in this file allows.")
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="Answer in text that matches this regular expression as a whole.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole answer as one JSON object, each sample on a line.")
    ] = False,
    timeout_s: Annotated[
        float, typer.Option(min=0.001, metavar="<float>", help="Deadline of the answer. Seconds.")
    ] = 600,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_server_name: TlsServerName = None,
) -> None:
    """Generate text for one prompt: the answer goes to standard output, what it cost to standard error."""
    from pdmesh_cli.generate import biases_of, prompt_of, run_generate, schema_text

    text = sys.stdin.read() if prompt == "-" else prompt
    out, err = Console(), Console(stderr=True, highlight=False)
    with reported_failures():
        options = GenerateOptions(
            model=model,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=tuple(stop or ()),
            ignore_eos=ignore_eos,
            num_samples=num_samples,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            repetition_penalty=repetition_penalty,
            logit_bias=biases_of(logit_bias or ()),
            num_logprobs=logprobs,
            num_prompt_logprobs=prompt_logprobs,
            json_schema=schema_text(json_schema, regex),
            regex=regex,
        )
        identity = identity_of(
            token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, tls_server_name=tls_server_name
        )
        work = run_generate(
            router,
            prompt_of(text, chat=chat or system is not None, system=system),
            options,
            timeout_s=timeout_s,
            identity=identity,
            as_json=as_json,
            out=out,
            err=err,
        )
        asyncio.run(work)


@app.command("status", rich_help_panel=_CLIENTS)
def _status(
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
    from pdmesh_cli.status import ask_mesh, status_table
    from pdmesh_cli.watch import run_watch

    with reported_failures():
        identity = identity_of(
            token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, tls_server_name=tls_server_name
        )
        if watch:
            asyncio.run(run_watch(node or [router], Console(), timeout_s=timeout_s, identity=identity))
        reports = asyncio.run(ask_mesh(node or [router], timeout_s=timeout_s, identity=identity))
    table = status_table(reports)
    console = _document_console()
    # A table that is cut off says less than one whose lines the terminal breaks.
    width = max(console.width, Measurement.get(console, console.options, table).maximum)
    Console(highlight=False, width=width).print(table)
    errors = [report.error for report in reports if report.error]
    err = Console(stderr=True, highlight=False, soft_wrap=True)
    for error in errors:
        err.print(f"pdmesh: {error}", style="red", markup=False)
    if errors:
        sys.exit(EXIT_FAILURE)


@app.command("drain", rich_help_panel=_NODES)
def _drain(
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

    with reported_failures():
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


@app.command("version", rich_help_panel=_CLIENTS)
def _version() -> None:
    """Print the version."""
    typer.echo(f"pdmesh {importlib.metadata.version('pdmesh')}")


def _reporting(work: Callable[Parameters, None]) -> Callable[Parameters, None]:
    @functools.wraps(work)
    def command(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        with reported_failures():
            work(*args, **kwargs)

    return command


_config_app = typer.Typer(help="Check and show configurations without starting a node.", no_args_is_help=True)
_config_app.command("check")(_reporting(check_files))
_config_app.command("show", context_settings=TAKES_ROLE_OPTIONS)(_reporting(show_values))
_config_app.command("schema")(_reporting(print_schema))
app.add_typer(_config_app, name="config", rich_help_panel=_NODES)
app.command("chat", rich_help_panel=_CLIENTS)(chat)
app.command("bench", rich_help_panel=_CLIENTS)(bench)
app.command("sim", rich_help_panel=_DEVELOPERS)(simulate_mesh)


def main() -> None:
    """Entry point of the `pdmesh` command."""
    die_with_parent()
    app(prog_name="pdmesh")


if __name__ == "__main__":
    main()

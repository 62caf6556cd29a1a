"""`pdmesh demo`: a real mesh of three processes answers four prompts and shows what happened to each.

A guided tour over the public surface: nothing here is used by a node.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import platformdirs
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from model_runtime.text.errors import TokenizerError
from model_runtime.text.tokenizer import has_chat_template
from node_runtime.errors import BadConfig
from pdmesh_cli.child import LogSink
from pdmesh_cli.client import AsyncPdmeshClient
from pdmesh_cli.client_types import Delta, Finish
from pdmesh_cli.demo_requests import CHAT_REQUESTS, COMPLETION_REQUESTS, DemoRequest
from pdmesh_cli.generate import stream_answer
from pdmesh_cli.logs import ConsoleLogs, FileLogs
from pdmesh_cli.report import counted, num_cached_tokens, print_report, summary_table
from pdmesh_cli.text_output import WrappedText
from pdmesh_cli.up import RunningMesh, UpOptions, cancelled_by_signals, running_mesh
from pdmesh_cli.waterfall import Waterfall

_REQUEST_TIMEOUT_S = 180.0
_TRACE_WAIT_S = 3.0
_EXPECTED_SPANS = ("pdmesh.decode.request", "pdmesh.decode.generate", "pdmesh.prefill.request", "pdmesh.transfer")


def default_log_dir() -> Path:
    """Where the logs of the nodes of a demo are left."""
    return platformdirs.user_log_path("pdmesh") / "demo"


async def run_demo(options: UpOptions, model_path: Path, console: Console, *, verbose: bool) -> None:
    """Carries out the command. Raises BadConfig, ChildError, PdmeshError."""
    begun_s = time.monotonic()
    console.print(f"model      {model_path}", highlight=False, soft_wrap=True)
    requests = requests_for(model_path)
    with cancelled_by_signals(), _logs(console, verbose=verbose) as sink:
        async with running_mesh(options, model_path, sink, console) as running:
            console.print(f"started in {time.monotonic() - begun_s:.1f} s")
            finished = await running.mesh.run(_answer_all(requests, running, console))
            console.print()
            console.print(Rule("summary", align="left"))
            console.print(summary_table(finished))
            _print_cache_remark(finished, console)
            console.print("stopping all processes, the router first ...")
    console.print(f"all processes stopped; the demo took {time.monotonic() - begun_s:.1f} s")


@contextmanager
def _logs(console: Console, *, verbose: bool) -> Iterator[LogSink]:
    """On the console, or in files of which it is told. Raises BadConfig where there can be none."""
    if verbose:
        yield ConsoleLogs(console)
        return
    with FileLogs(default_log_dir()) as files:
        console.print(f"logs       {files.directory}", highlight=False, soft_wrap=True)
        yield files


def _print_cache_remark(finished: Sequence[tuple[str, Finish]], console: Console) -> None:
    num_cached = sum(num_cached_tokens(finish.usage.cached) for _, finish in finished)
    if num_cached:
        console.print(f"{counted(num_cached, 'prompt token')} came from a prefix cache and were not computed again")


def requests_for(model_path: Path) -> Sequence[DemoRequest]:
    """Questions for a model that takes chats, beginnings for another. Raises BadConfig for a file that is no model."""
    try:
        return CHAT_REQUESTS if has_chat_template(model_path) else COMPLETION_REQUESTS
    except TokenizerError as error:
        raise BadConfig(str(error)) from None


async def _answer_all(
    requests: Sequence[DemoRequest], running: RunningMesh, console: Console
) -> list[tuple[str, Finish]]:
    finished: list[tuple[str, Finish]] = []
    async with AsyncPdmeshClient(running.router.address) as client:
        for index, request in enumerate(requests):
            console.print()
            console.print(Rule(f"{index + 1}/{len(requests)}  {request.title}", align="left"))
            finish = await _answer(client, request, running, console)
            finished.append((request.title, finish))
    return finished


async def _answer(client: AsyncPdmeshClient, request: DemoRequest, running: RunningMesh, console: Console) -> Finish:
    console.print(Text.assemble(("> ", "bold"), (request.shown, "bold")))

    def write(text: str) -> None:
        console.file.write(text)
        console.file.flush()

    output = WrappedText(write, width=console.width, indent="  ")

    def show(delta: Delta) -> None:
        output.feed(delta.text)

    try:
        answer = await stream_answer(
            client, request.prompt, request.options, timeout_s=_REQUEST_TIMEOUT_S, on_delta=show
        )
    finally:
        # Also when it is interrupted: what is said next begins on a line of its own.
        output.finish()
    console.print()
    print_report(answer.placement, answer.finish, console)
    if trace_id := answer.placement.trace_id:
        required = _EXPECTED_SPANS if answer.placement.prefill_node else _EXPECTED_SPANS[:2]
        spans = await running.traces.wait_for_trace(trace_id, required_names=required, timeout_s=_TRACE_WAIT_S)
        console.print()
        console.print(Waterfall(spans=spans))
    return answer.finish

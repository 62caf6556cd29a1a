"""What `pdmesh up` makes of its options, and where the log lines of its nodes go."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shlex
import signal
from pathlib import Path

import pytest
from rich.console import Console

from node_runtime.errors import BadConfig
from pdmesh_cli.logs import ConsoleLogs, FileLogs
from pdmesh_cli.model_fetch import Progress
from pdmesh_cli.up import UpOptions, cancelled_by_signals, example_command, example_request, mesh_plan, provide_model

_PATH = Path("/models/tiny.gguf")


def _console() -> Console:
    return Console(file=io.StringIO(), width=40, color_system=None)


def _printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_options_reach_the_nodes_they_are_meant_for() -> None:
    options = UpOptions(
        model="smollm2",
        num_prefill=2,
        num_threads=3,
        port=7,
        log_level="debug",
        compute_values={"memory": "8MiB", "enable_prefix_cache": False, "dtype": None},
    )
    plan = mesh_plan(options, _PATH, "http://127.0.0.1:4317")
    assert plan.common_arguments == (
        f"--model={_PATH}",
        "--served-model-name=smollm2",
        "--log-level=debug",
        "--otlp-endpoint=http://127.0.0.1:4317",
    )
    assert plan.compute_arguments == ("--memory=8MiB", "--no-enable-prefix-cache")
    assert plan.router_arguments == ("--host=127.0.0.1", "--port=7", "--http=127.0.0.1:7780", "--keep-traces=256")
    assert (plan.num_prefill, plan.num_decode, plan.num_threads) == (2, 1, 3)


def test_a_path_leaves_the_served_name_to_the_nodes() -> None:
    plan = mesh_plan(UpOptions(model=str(_PATH)), _PATH, "c:1")
    assert not any(argument.startswith("--served-model-name") for argument in plan.common_arguments)


def test_the_served_name_can_be_chosen() -> None:
    plan = mesh_plan(UpOptions(model="smollm2", served_model_name="mine"), _PATH, "c:1")
    assert "--served-model-name=mine" in plan.common_arguments


@pytest.mark.parametrize(("port", "http_port", "address"), [(0, None, ":0"), (0, 8, ":8"), (7, 0, ":0"), (7, 8, ":8")])
def test_the_http_port_is_as_asked_or_free_where_the_routers_is(port: int, http_port: int | None, address: str) -> None:
    plan = mesh_plan(UpOptions(model="m", port=port, http_port=http_port), _PATH, "c:1")
    assert f"--http=127.0.0.1{address}" in plan.router_arguments


def test_the_example_request_can_be_pasted_into_a_shell() -> None:
    words = shlex.split(example_request("127.0.0.1:8"))
    assert words[:2] == ["curl", "http://127.0.0.1:8/v1/completions"]
    assert json.loads(words[-1])["prompt"]


def test_the_example_command_sends_no_chat_to_a_model_that_takes_none() -> None:
    assert shlex.split(example_command("h:1", takes_chats=True))[3:] == ["h:1", "--chat", "What is gravity?"]
    assert shlex.split(example_command("h:1", takes_chats=False))[3:] == ["h:1", "The capital of France is"]


@pytest.mark.parametrize(("fused", "num_nodes"), [(False, 3), (True, 1)])
def test_the_cores_are_shared_between_the_compute_nodes(
    monkeypatch: pytest.MonkeyPatch, fused: bool, num_nodes: int
) -> None:
    monkeypatch.setattr("pdmesh_cli.up.num_usable_cores", lambda: 12)
    plan = mesh_plan(UpOptions(model="m", fused=fused, num_prefill=2), _PATH, "c:1")
    assert plan.num_threads == 12 // num_nodes


def test_the_cores_are_shared_between_the_tensor_ranks_of_all_compute_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdmesh_cli.up.num_usable_cores", lambda: 12)
    plan = mesh_plan(UpOptions(model="m", compute_values={"tensor_parallel": 2}), _PATH, "c:1")
    assert plan.num_threads == 3
    assert "--tensor-parallel=2" in plan.compute_arguments


def test_adapters_are_passed_on_to_all_nodes() -> None:
    plan = mesh_plan(UpOptions(model="m", compute_values={"adapter": ["red=/a", "blue=/b"]}), _PATH, "c:1")
    assert plan.compute_arguments == ("--adapter=red=/a", "--adapter=blue=/b")


def test_a_mesh_without_decode_nodes_is_refused() -> None:
    with pytest.raises(BadConfig, match="num_decode must be at least 1, got 0"):
        mesh_plan(UpOptions(model="m", num_decode=0), _PATH, "c:1")


def test_a_model_that_is_there_is_provided_without_a_word(tmp_path: Path) -> None:
    console = _console()
    assert provide_model(str(tmp_path), console) == tmp_path
    assert _printed(console) == ""


def test_a_download_is_followed_by_lines_where_there_is_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(reference: str, progress: object) -> Path:
        assert callable(progress)
        for received in (1, 60, 70, 100):
            progress(received * 10**6, 100 * 10**6)
        return tmp_path

    monkeypatch.setattr("pdmesh_cli.up.resolve_model", resolve)
    console = _console()
    provide_model("tiny", console)
    assert _printed(console) == "downloading tiny: 50 % of 100 MB\ndownloading tiny: 100 % of 100 MB\n"


def test_the_terms_of_a_model_are_said_before_it_is_fetched_and_not_for_a_cached_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[str] = []
    for is_cached in (False, True):

        def resolve(reference: str, *, progress: Progress, is_cached: bool = is_cached) -> Path:
            for received in () if is_cached else (1, 2):
                progress(received, 2)
            return tmp_path

        monkeypatch.setattr("pdmesh_cli.up.resolve_model", resolve)
        console = Console(file=io.StringIO(), width=200, color_system=None)
        provide_model("gemma3", console)
        said.append(_printed(console))
    assert said[0].count("gemma3: the weights are used under the Gemma Terms of Use") == 1
    assert said[0].index("Gemma Terms of Use") < said[0].index("downloading gemma3")
    assert said[1] == ""


async def test_a_signal_cancels_the_work_once() -> None:
    async def work() -> None:
        with cancelled_by_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(work())


def test_console_lines_carry_the_name_and_are_not_wrapped_or_interpreted() -> None:
    console = _console()
    ConsoleLogs(console).write_line("decode-0", "[red]loaded[/red] " + "x" * 60)
    assert _printed(console) == "decode-0  | [red]loaded[/red] " + "x" * 60 + "\n"


def test_console_lines_on_a_terminal_leave_out_what_a_person_does_not_need() -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    logs = ConsoleLogs(console)
    logs.write_line("decode-0", "2026-01-02T03:04:05.678Z INFO decode-0 [- -] pdmesh.lifecycle: is ready: yes")
    logs.write_line("router", "2026-01-02T03:04:06.001Z WARNING router [0123456789abcdef ff] pdmesh.rpc: refused")
    failed = "lifecycle: the node failed: Traceback (most recent call last):\\n  File x\\nKeyError: 1"
    logs.write_line("router", f"2026-01-02T03:04:07.001Z ERROR router [- -] pdmesh.{failed}")
    assert _printed(console).splitlines() == [
        "decode-0  | 03:04:05 is ready: yes",
        "router    | 03:04:06 WARNING [01234567] refused",
        "router    | 03:04:07 ERROR the node failed: Traceback (most recent call last):",
        "    File x",
        "  KeyError: 1",
    ]


def test_file_logs_keep_one_file_per_node_and_start_anew(tmp_path: Path) -> None:
    for run in ("first", "second"):
        with FileLogs(tmp_path / "logs") as logs:
            logs.write_line("router", f"{run} one")
            logs.write_line("router", f"{run} two")
            logs.write_line("decode-0", run)
    assert (tmp_path / "logs" / "router.log").read_text() == "second one\nsecond two\n"
    assert (tmp_path / "logs" / "decode-0.log").read_text() == "second\n"


def test_a_log_file_that_cannot_be_written_disturbs_nobody(tmp_path: Path) -> None:
    (tmp_path / "router.log").symlink_to("/dev/full")
    with FileLogs(tmp_path) as logs:
        for line in ("one", "two"):
            logs.write_line("router", line)
            logs.write_line("decode-0", line)
    assert (tmp_path / "decode-0.log").read_text() == "one\ntwo\n"


def test_where_there_can_be_no_log_files_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(BadConfig, match=r"^logs: cannot write under .*: File exists; --verbose shows them here$"):
        FileLogs(tmp_path / "logs").__enter__()

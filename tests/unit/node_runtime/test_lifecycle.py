"""Start, announce, stop: with real signals to real processes."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from node_runtime.errors import PortInUse
from node_runtime.lifecycle import READY_FILE_VARIABLE, StopRequest, announce_ready, run_until_stopped

NODE = """
import asyncio, atexit, sys
from node_runtime.lifecycle import StopRequest, announce_ready, run_node, run_until_stopped, setup_logging

async def ignore_the_end():
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue

async def start():
    {start}
    announce_ready(role="decode", node_id="decode-1", address="127.0.0.1:5")
    print("started", flush=True)

async def stop():
    print("stopping", flush=True)
    {stop}
    print("stopped", flush=True)

async def main():
    global request
    request = StopRequest()
    return await run_until_stopped(start, stop, request)

atexit.register(lambda: print("interpreter exit", flush=True))
setup_logging("decode-1")
run_node(main())
"""


@contextmanager
def running_node(start: str = "pass", stop: str = "pass") -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", NODE.format(start=start, stop=stop)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line_from(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_stops_a_node_gracefully_and_without_interpreter_tear_down(number: signal.Signals) -> None:
    with running_node() as process:
        assert line_from(process) == "started"
        process.send_signal(number)
        out, err = process.communicate()
        assert out.split() == ["stopping", "stopped"]
        assert process.returncode == 0
        assert f"stopping: {number.name} received" in err


def test_a_task_that_ignores_its_end_keeps_no_process_alive_and_is_named() -> None:
    start = "global left; left = asyncio.create_task(ignore_the_end())"
    with running_node(start=start) as process:
        assert line_from(process) == "started"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
        assert out.split() == ["stopping", "stopped"]
        assert process.returncode == 0
        assert "ERROR decode-1 [- -] pdmesh.lifecycle: left behind, though it was cancelled: <Task" in err
        assert "ignore_the_end" in err


def test_a_second_signal_leaves_at_once() -> None:
    with running_node(stop="await asyncio.Event().wait()") as process:
        assert line_from(process) == "started"
        process.send_signal(signal.SIGTERM)
        assert line_from(process) == "stopping"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate()
        assert out == ""
        assert process.returncode == 128 + signal.SIGTERM
        assert "SIGTERM again: leaving at once" in err


def test_a_signal_to_a_node_that_stops_already_is_no_second_signal() -> None:
    stop = "await asyncio.to_thread(sys.stdin.readline)"
    with running_node(start="request.ask('told to drain')", stop=stop) as process:
        assert [line_from(process), line_from(process)] == ["started", "stopping"]
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        for line in process.stderr:
            if "SIGTERM received, and stopping already" in line:
                break
        out, _ = process.communicate("go on\n")
        assert out.split() == ["stopped"]
        assert process.returncode == 0


def test_a_signal_during_start_cancels_it_and_still_cleans_up() -> None:
    with running_node(start="print('loading', flush=True); await asyncio.Event().wait()") as process:
        assert line_from(process) == "loading"
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate()
        assert out.split() == ["stopping", "stopped"]
        assert process.returncode == 0


def test_a_start_that_is_refused_says_why_in_one_line_and_exits_with_1() -> None:
    start = "from node_runtime.errors import PortInUse; raise PortInUse('127.0.0.1', 5)"
    with running_node(start=start) as process:
        out, err = process.communicate()
        assert out.split() == ["stopping", "stopped"]
        assert process.returncode == 1
        assert "cannot start: cannot listen on 127.0.0.1:5: the port is already in use" in err
        assert "Traceback" not in err


def test_a_start_that_breaks_shows_its_traceback_and_exits_with_1() -> None:
    with running_node(start="raise KeyError('defect')") as process:
        out, err = process.communicate()
        assert out.split() == ["stopping", "stopped"]
        assert process.returncode == 1
        assert "KeyError: 'defect'" in err


async def test_the_node_can_be_asked_to_stop_from_another_thread() -> None:
    request = StopRequest()
    events: list[str] = []

    async def start() -> None:
        events.append("start")
        threading.Thread(target=request.ask, args=("engine failed", 3)).start()

    async def stop() -> None:
        events.append("stop")

    assert await run_until_stopped(start, stop, request) == 3
    assert request.reason == "engine failed"
    assert events == ["start", "stop"]


async def test_only_the_first_request_to_stop_counts() -> None:
    request = StopRequest()
    request.ask("first", 4)
    request.ask("second", 5)

    async def nothing() -> None:
        await asyncio.sleep(0)

    assert await run_until_stopped(nothing, nothing, request) == 4
    assert request.reason == "first"


async def test_stop_runs_after_a_failed_start() -> None:
    stopped = False

    async def start() -> None:
        raise PortInUse("127.0.0.1", 5)

    async def stop() -> None:
        nonlocal stopped
        stopped = True

    assert await run_until_stopped(start, stop) == 1
    assert stopped


def test_the_ready_file_says_who_listens_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "ready.json"
    monkeypatch.setenv(READY_FILE_VARIABLE, str(target))
    announce_ready(role="prefill", node_id="p1", address="127.0.0.1:7")
    facts = json.loads(target.read_text())
    assert facts.pop("pid") > 0
    assert facts == {"role": "prefill", "node_id": "p1", "address": "127.0.0.1:7"}
    assert list(tmp_path.iterdir()) == [target]
    announce_ready(role="router", node_id="r1", address="127.0.0.1:7", http_address="127.0.0.1:8")
    assert json.loads(target.read_text())["http_address"] == "127.0.0.1:8"


def test_without_the_variable_no_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(READY_FILE_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    announce_ready(role="prefill", node_id="p1", address="127.0.0.1:7")
    assert list(tmp_path.iterdir()) == []

"""Supervision of one process: announcement, log lines, end. The children here are small scripts."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest

from pdmesh_cli.child import Announcement, Child, ChildError, ChildSpec, describe_exit, parse_announcement

_ANNOUNCE = (
    "import json, os, signal, sys, time\n"
    "facts = {'role': 'prefill', 'node_id': 'prefill-0', 'address': '127.0.0.1:4242', 'pid': os.getpid()}\n"
    "with open(os.environ['PDMESH_READY_FILE'] + '.part', 'w') as file:\n"
    "    json.dump(facts, file)\n"
    "os.replace(file.name, os.environ['PDMESH_READY_FILE'])\n"
)


class Lines:
    """A sink that remembers and can be waited on."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.changed = asyncio.Condition()

    def write_line(self, name: str, line: str) -> None:
        self.lines.append((name, line))


async def _start(script: str, run_dir: Path, sink: Lines, **environment: str) -> Child:
    spec = ChildSpec(name="prefill-0", arguments=("-c", script), environment=environment)
    return await Child.start(spec, sink, run_dir)


async def test_a_child_is_ready_when_it_announces_itself_and_stops_when_asked(tmp_path: Path) -> None:
    child = await _start(_ANNOUNCE + "signal.pause()", tmp_path, Lines())
    announcement = await child.wait_ready(timeout_s=30)
    assert announcement == Announcement(role="prefill", node_id="prefill-0", address="127.0.0.1:4242", pid=child.pid)
    assert await child.stop(grace_s=30) == -signal.SIGTERM


async def test_log_lines_of_both_streams_arrive_with_the_name_of_the_child(tmp_path: Path) -> None:
    sink = Lines()
    script = "import sys; print('out'); print('err', file=sys.stderr); print('x' * 200_000); sys.stdout.write('no end')"
    child = await _start(script, tmp_path, sink)
    assert await child.wait() == 0
    assert [name for name, _ in sink.lines] == ["prefill-0"] * 4
    assert [line[:6] for _, line in sink.lines] == ["out", "err", "xxxxxx", "no end"]
    assert child.last_lines[-1] == "no end"


async def test_the_environment_of_the_child_is_added_to_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = Lines()
    monkeypatch.setenv("PDMESH_TEST_OUTER", "kept")
    script = "import os; print(os.environ['PDMESH_TEST_OUTER'], os.environ['OMP_NUM_THREADS'])"
    child = await _start(script, tmp_path, sink, OMP_NUM_THREADS="1")
    await child.wait()
    assert sink.lines == [("prefill-0", "kept 1")]


async def test_a_child_that_ends_before_it_is_ready_is_named_with_its_last_words(tmp_path: Path) -> None:
    child = await _start("print('no such model'); raise SystemExit(3)", tmp_path, Lines())
    with pytest.raises(ChildError, match="prefill-0 exited with code 3") as failure:
        await child.wait_ready(timeout_s=30)
    assert failure.value.last_lines == ("no such model",)


async def test_what_a_child_complained_of_last_is_said_with_its_end(tmp_path: Path) -> None:
    script = (
        "import logging\n"
        "from node_runtime.log_context import setup_logging\n"
        "setup_logging('prefill-0')\n"
        "logging.getLogger('a').error('an earlier one')\n"
        "try: open('/no/such/file')\n"
        "except OSError: logging.getLogger('b').exception('cannot start')\n"
        "logging.getLogger('c').info('stopped')\n"
        "raise SystemExit(1)"
    )
    child = await _start(script, tmp_path, Lines())
    with pytest.raises(ChildError) as failure:
        await child.wait_ready(timeout_s=30)
    assert str(failure.value) == (
        "prefill-0 exited with code 1: cannot start: FileNotFoundError: [Errno 2] No such file or directory: "
        "'/no/such/file'"
    )


async def test_a_child_that_never_announces_itself_is_given_up(tmp_path: Path) -> None:
    child = await _start("import signal; signal.pause()", tmp_path, Lines())
    with pytest.raises(ChildError, match="prefill-0 was not ready after 0 s"):
        await child.wait_ready(timeout_s=0.1)
    await child.stop(grace_s=30)


async def test_a_child_that_ignores_the_signal_is_killed(tmp_path: Path) -> None:
    sink = Lines()
    script = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + _ANNOUNCE + "signal.pause()"
    child = await _start(script, tmp_path, sink)
    await child.wait_ready(timeout_s=30)
    assert await child.stop(grace_s=0.1) == -signal.SIGKILL
    assert sink.lines == [("prefill-0", "did not stop within 0 s and is killed")]


async def test_stopping_a_child_that_has_ended_gives_its_exit_status(tmp_path: Path) -> None:
    child = await _start("raise SystemExit(4)", tmp_path, Lines())
    await child.wait()
    assert await child.stop(grace_s=1) == 4


async def test_a_child_that_asks_for_it_dies_with_its_supervisor(tmp_path: Path) -> None:
    """A supervisor in a process of its own is killed; the child's end closes the pipe that both held."""
    supervisor = (
        "import asyncio, os, sys\n"
        "from pathlib import Path\n"
        "from pdmesh_cli.child import Child, ChildSpec\n"
        "class Sink:\n"
        "    def write_line(self, name, line): pass\n"
        "CHILD = '''\n"
        "from pdmesh_cli.parent_death import die_with_parent\n"
        "die_with_parent()\n" + _ANNOUNCE + "signal.pause()\n'''\n"
        "async def run():\n"
        "    child = await Child.start(ChildSpec(name='c', arguments=('-c', CHILD)), Sink(), Path(sys.argv[1]))\n"
        "    await child.wait_ready(60)\n"
        "    print(child.pid, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(run())\n"
    )
    import sys

    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", supervisor, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    child_pid = int(await process.stdout.readline())
    process.kill()
    await process.wait()
    async with asyncio.timeout(30):
        while _is_running(child_pid):
            await asyncio.sleep(0.02)


def _is_running(pid: int) -> bool:
    """Neither gone nor a zombie that nobody has reaped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[1]", "expected a JSON object, found list"),
        (json.dumps({"role": "decode", "pid": 1}), "keys are missing: node_id, address"),
        ("{", "Expecting"),
    ],
)
def test_an_announcement_that_is_none_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_announcement(text)


def test_an_announcement_may_name_an_http_address() -> None:
    text = '{"role": "router", "node_id": "r", "address": "a:1", "pid": 1%s}'
    assert parse_announcement(text % "").http_address == ""
    assert parse_announcement(text % ', "http_address": "a:2"').http_address == "a:2"


def test_exit_statuses_have_words() -> None:
    assert [describe_exit(code) for code in (0, 2, -9, -200)] == [
        "exited with code 0",
        "exited with code 2",
        "was killed by SIGKILL",
        "was killed by signal 200",
    ]

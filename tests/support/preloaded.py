"""Python processes that begin with everything imported: forks of one that has done it once.

What a process does from its first line on is what `python -m MODULE` does; only the seconds in which it would import
the same libraries as the one before it are gone. The one they are forked from has a single thread and opens nothing,
so there is nothing that a fork could break. Linux only; what is about the imports themselves starts an interpreter of
its own.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

PRELOADED = (
    "torch",
    "pdmesh_cli.main",
    "prefill_node.server",
    "decode_node.server",
    "router_node.server",
    "node_runtime.engine.assembly",
)
_MAX_MESSAGE_BYTES = 1 << 18
_POLL_INTERVAL_S = 0.01


class PreloadedProcess:
    """What subprocess.Popen is to its caller, as far as tests use it."""

    def __init__(self, origin: Origin, pid: int, arguments: Sequence[str]) -> None:
        self._origin, self._arguments = origin, tuple(arguments)
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._origin.status_of(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired after `timeout` seconds."""
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise subprocess.TimeoutExpired(self._arguments, timeout or 0.0)
            time.sleep(_POLL_INTERVAL_S)
        return status

    def send_signal(self, number: int) -> None:
        # Nobody else gets the number before `poll` has seen the end.
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Origin:
    """The process that the others are forked from. May be used by several threads."""

    def __init__(self, prefix: Sequence[str] = ()) -> None:
        """`prefix`: words before the command that become this process, such as those that enter a namespace."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with theirs:
            passed = theirs.fileno()
            command = [*prefix, sys.executable, __file__, str(passed)]
            self._process = subprocess.Popen(command, pass_fds=[passed])

    @property
    def pid(self) -> int:
        """Of the parent of all that `start` starts."""
        return self._process.pid

    def start(
        self,
        arguments: Sequence[str],
        *,
        module: str = "pdmesh_cli.main",
        environment: Mapping[str, str],
        stdout: IO[bytes],
        stderr: IO[bytes],
        stdin: IO[bytes] | None = None,
        folder: Path | None = None,
    ) -> PreloadedProcess:
        """`python -m module arguments...`; by default in the folder of this process, and with nothing to read."""
        order = {
            "arguments": [*arguments],
            "module": module,
            "environment": dict(environment),
            "folder": str(folder or Path.cwd()),
        }
        with open(os.devnull, "rb") as nothing:
            files = (stdin or nothing, stdout, stderr)
            answer = self._ask(order, [file.fileno() for file in files])
        return PreloadedProcess(self, answer, arguments)

    def run(
        self, arguments: Sequence[str], *, environment: Mapping[str, str], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """`pdmesh arguments...` to its end. Raises subprocess.TimeoutExpired."""
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            process = self.start(arguments, environment=environment, stdout=stdout, stderr=stderr)
            try:
                status = process.wait(timeout_s)
            finally:
                process.kill()
            told = []
            for file in (stdout, stderr):
                file.seek(0)
                told.append(file.read().decode())
        return subprocess.CompletedProcess([*arguments], status, *told)

    def status_of(self, pid: int) -> int | None:
        """As subprocess has it: negative for a signal, None while the process runs."""
        return self._ask({"status_of": pid})

    def close(self) -> None:
        """Ends it, and with it whatever it started that asked to die with its parent."""
        self._control.close()
        self._process.wait()

    def _ask(self, order: Mapping[str, object], files: Sequence[int] = ()):
        with self._lock:
            socket.send_fds(self._control, [json.dumps(order).encode()], files)
            answer = self._control.recv(_MAX_MESSAGE_BYTES)
        if not answer:
            raise RuntimeError("the process with everything imported is gone")
        return json.loads(answer)


@functools.cache
def origin(*prefix: str) -> Origin:
    """The one of this process behind these words, started on first use."""
    started = Origin(prefix)
    atexit.register(started.close)
    return started


def _serve(control: socket.socket) -> Mapping[str, object] | None:
    """Returns in every fork, with its order, and in the process itself when nobody can ask for more."""
    while True:
        message, files, _, _ = socket.recv_fds(control, _MAX_MESSAGE_BYTES, 3)
        if not message:
            return None
        order = json.loads(message)
        if "status_of" in order:
            pid, status = os.waitpid(order["status_of"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                control.close()
                for number, file in enumerate(files):
                    os.dup2(file, number)
                    os.close(file)
                return order
            for file in files:
                os.close(file)
        control.send(json.dumps(answer).encode())


def _main() -> None:
    # What stands beside this file is no top-level module.
    sys.path[0] = os.getcwd()
    control = socket.socket(fileno=int(sys.argv[1]))
    for module in PRELOADED:
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has only the thread that asked for it"
    gc.freeze()
    order = _serve(control)
    if order is None:
        return
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    sys.path[0] = order["folder"]
    sys.argv[1:] = order["arguments"]
    # As the main module it is another one than that which others may have imported.
    sys.modules.pop(order["module"], None)
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()

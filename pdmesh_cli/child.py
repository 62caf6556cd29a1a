"""One supervised child process: starting it, hearing that it is ready, reading its log lines, stopping it.

A node announces itself in the file that PDMESH_READY_FILE names: JSON with role, node_id, address and pid, written
atomically once it can be dialled. Knows no order among children (see `mesh`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from node_runtime.lifecycle import READY_FILE_VARIABLE
from pdmesh_cli.logs import last_complaint
from pdmesh_cli.parent_death import PARENT_PID_VARIABLE

_POLL_INTERVAL_S = 0.05
_READ_BYTES = 65536
_NUM_KEPT_LINES = 60


class ChildError(Exception):
    """A child ended or stayed silent when it should not have; the message names it."""

    def __init__(self, name: str, reason: str, last_lines: tuple[str, ...]) -> None:
        super().__init__(f"{name} {reason}")
        self.name = name
        self.last_lines = last_lines


class LogSink(Protocol):
    """Where the log lines of children go."""

    def write_line(self, name: str, line: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What to start. `arguments` follow the interpreter; `environment` is added to this process's own."""

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What a node says about itself once it can be dialled."""

    role: str
    node_id: str
    address: str
    pid: int
    http_address: str = ""
    """host:port of its HTTP API; empty where it has none."""


def parse_announcement(text: str) -> Announcement:
    """Raises ValueError for text that is no announcement."""
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError(f"expected a JSON object, found {type(content).__name__}")
    missing = [key for key in ("role", "node_id", "address", "pid") if key not in content]
    if missing:
        raise ValueError(f"keys are missing: {', '.join(missing)}")
    return Announcement(
        role=str(content["role"]),
        node_id=str(content["node_id"]),
        address=str(content["address"]),
        pid=int(content["pid"]),
        http_address=str(content.get("http_address", "")),
    )


def describe_exit(exit_code: int) -> str:
    """Words for an exit status as asyncio reports it: negative for a signal."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


class Child:
    """A running child. Created by `start`; its output is read until it ends."""

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process, ready_file: Path, sink: LogSink) -> None:
        self.spec = spec
        self._process = process
        self._ready_file = ready_file
        self._sink = sink
        self._last_lines: deque[str] = deque(maxlen=_NUM_KEPT_LINES)
        self._reader = asyncio.create_task(self._pump_lines(), name=f"log lines of {spec.name}")

    @classmethod
    async def start(cls, spec: ChildSpec, sink: LogSink, run_dir: Path) -> Child:
        """Starts the process in a process group of its own, so that Ctrl-C reaches the supervisor alone."""
        ready_file = run_dir / f"{spec.name}.ready.json"
        environment = {
            **os.environ,
            **spec.environment,
            READY_FILE_VARIABLE: str(ready_file),
            PARENT_PID_VARIABLE: str(os.getpid()),
            "PYTHONUNBUFFERED": "1",
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *spec.arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            process_group=0,
        )
        return cls(spec, process, ready_file, sink)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The end of its log."""
        return tuple(self._last_lines)

    async def wait_ready(self, timeout_s: float) -> Announcement:
        """Waits for the announcement. Raises ChildError when the child ends first or takes longer."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._ready_file.exists():
                    if self._process.returncode is not None:
                        raise await self.failure()
                    await asyncio.sleep(_POLL_INTERVAL_S)
        except TimeoutError:
            raise ChildError(self.name, f"was not ready after {timeout_s:.0f} s", self.last_lines) from None
        try:
            return parse_announcement(self._ready_file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ChildError(self.name, f"announced itself in a way not understood: {error}", ()) from error

    async def wait(self) -> int:
        """Waits for the end; returns the exit status, negative for a signal."""
        exit_code = await self._process.wait()
        with contextlib.suppress(TimeoutError):
            # A grandchild may hold the pipe open for ever.
            async with asyncio.timeout(2.0):
                await asyncio.shield(self._reader)
        return exit_code

    async def failure(self) -> ChildError:
        """The error that says how this child ended, and of what it complained last."""
        reason = describe_exit(await self.wait())
        complaint = last_complaint(self.last_lines)
        return ChildError(self.name, f"{reason}: {complaint}" if complaint else reason, self.last_lines)

    async def stop(self, grace_s: float) -> int:
        """Asks it to stop, kills it after `grace_s`; returns the exit status."""
        self.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                return await self.wait()
        except TimeoutError:
            self._sink.write_line(self.name, f"did not stop within {grace_s:.0f} s and is killed")
            self.send(signal.SIGKILL)
            return await self.wait()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal; nothing happens when the child has ended."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _pump_lines(self) -> None:
        """Reads in chunks: a line may be longer than any stream buffer."""
        stream = self._process.stdout
        if stream is None:
            return
        pending = b""
        while chunk := await stream.read(_READ_BYTES):
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                self._take_line(line)
        if pending:
            self._take_line(pending)

    def _take_line(self, line: bytes) -> None:
        text = line.decode("utf-8", errors="replace").rstrip("\r")
        self._last_lines.append(text)
        self._sink.write_line(self.name, text)

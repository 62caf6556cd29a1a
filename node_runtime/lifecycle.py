"""Life cycle of a node process: start, announce, wait for a signal, drain, leave.

Knows no role: a role hands over a `start` and a `stop` coroutine function. The main thread of the process owns what is
here. Processes end by `os._exit`, because the native data-plane engines hold the interpreter for about a second each
when they are torn down at interpreter exit.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import NoReturn

from node_runtime.errors import NodeError
from node_runtime.log_context import setup_logging

__all__ = [
    "READY_FILE_VARIABLE",
    "StopRequest",
    "announce_ready",
    "exit_process",
    "run_node",
    "run_until_stopped",
    "setup_logging",
]

READY_FILE_VARIABLE = "PDMESH_READY_FILE"

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_BAD_CONFIG = 2
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# How long tasks that the node leaves behind may take to end.
_LAST_TASKS_S = 2.0

_log = logging.getLogger("pdmesh.lifecycle")


class StopRequest:
    """Lets any thread ask the node to stop. Create it inside the running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._asked = asyncio.Event()
        self._exit_code = EXIT_OK
        self._reason = ""
        self._was_signalled = False

    @property
    def exit_code(self) -> int:
        """Status the process will leave with: that of the first request."""
        return self._exit_code

    @property
    def reason(self) -> str:
        """Why the node stops; empty while nobody asked."""
        return self._reason

    def ask(self, reason: str, exit_code: int = EXIT_OK) -> None:
        """Asks for a graceful stop; only the first call counts. Thread-safe."""
        self._loop.call_soon_threadsafe(self._ask, reason, exit_code)

    def _ask(self, reason: str, exit_code: int) -> None:
        if not self._asked.is_set():
            self._reason, self._exit_code = reason, exit_code
            self._asked.set()

    def on_signal(self, number: signal.Signals) -> None:
        """A signal asks like anybody else; a second one leaves the process at once, whoever asked first."""
        if self._was_signalled:
            _log.warning("%s again: leaving at once", number.name)
            exit_process(128 + number)
        self._was_signalled = True
        if self._reason:
            _log.info("%s received, and stopping already; another one leaves at once", number.name)
        self._ask(f"{number.name} received", EXIT_OK)

    async def wait(self) -> None:
        """Returns when somebody has asked."""
        await self._asked.wait()


async def run_until_stopped(
    start: Callable[[], Awaitable[None]],
    stop: Callable[[], Awaitable[None]],
    stop_request: StopRequest | None = None,
) -> int:
    """Runs a node: `start`, wait for SIGTERM, SIGINT or `stop_request`, `stop`. Returns the exit status.

    A signal during `start` cancels it. `stop` runs in every case, also after a failed start, so it must cope with what
    was never started. A second signal leaves the process at once.
    """
    request = stop_request or StopRequest()
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, request.on_signal, number)
    try:
        exit_code = await _start_and_wait(start, request)
    finally:
        try:
            await stop()
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
    _log.info("stopped")
    return exit_code


async def _start_and_wait(start: Callable[[], Awaitable[None]], request: StopRequest) -> int:
    starting = asyncio.ensure_future(start())
    asked = asyncio.ensure_future(request.wait())
    try:
        await asyncio.wait((starting, asked), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
            await asked
    except NodeError as error:
        _log.error("cannot start: %s", error)
        return EXIT_FAILURE
    finally:
        starting.cancel()
        asked.cancel()
        await asyncio.gather(starting, asked, return_exceptions=True)
    _log.info("stopping: %s", request.reason)
    return request.exit_code


def announce_ready(*, role: str, node_id: str, address: str, http_address: str = "") -> None:
    """Logs that the node listens and, when PDMESH_READY_FILE is set, writes that as JSON into the file it names.

    `http_address` is empty for a node that serves no HTTP. The file appears whole or not at all. Raises OSError when it
    cannot be written.
    """
    _log.info("%s node %s is ready at %s", role, node_id, address)
    target = os.environ.get(READY_FILE_VARIABLE)
    if not target:
        return
    facts = {"role": role, "node_id": node_id, "address": address, "pid": os.getpid()}
    if http_address:
        facts["http_address"] = http_address
    directory = Path(target).absolute().parent
    with tempfile.NamedTemporaryFile("w", dir=directory, prefix=".ready-", delete=False) as file:
        json.dump(facts, file)
    os.replace(file.name, target)


def run_node(main: Coroutine[object, object, int]) -> NoReturn:
    """Runs the composition root of a node and leaves the process with the status it returns. What it leaves running is
    cancelled, and has little time to end.
    """
    exit_code = EXIT_FAILURE
    # It is not closed: that would wait for tasks which ignore that they were cancelled, and for threads.
    runner = asyncio.Runner()
    try:
        exit_code = runner.run(_with_all_ended(main))
    except NodeError as error:
        _log.error("cannot run: %s", error)
    except KeyboardInterrupt:
        exit_code = 128 + signal.SIGINT
    except BaseException:
        _log.exception("the node failed")
    exit_process(exit_code)


async def _with_all_ended(main: Coroutine[object, object, int]) -> int:
    """What `main` returns or raises, once the other tasks have ended or had their time."""
    try:
        return await main
    finally:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            for task in (await asyncio.wait(others, timeout=_LAST_TASKS_S))[1]:
                _log.error("left behind, though it was cancelled: %r", task)


def exit_process(exit_code: int) -> NoReturn:
    """Leaves without running interpreter tear-down; buffered output is written first."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            # The reader is gone; there is nobody left to tell.
            continue
    os._exit(exit_code)

"""The machines of a simulated mesh: each runs one process after another, at an address that stays.

A host starts, kills, stops and restarts its process, and lets it leave in good order as `serve` of every role does.
What is not simulated here is the node: its services, sessions, scheduler and engine loop are those of production, on a
simulated transport, data plane, clock and model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from functools import partial

from typing_extensions import override

from node_runtime.rpc import Telemetry
from node_runtime.rpc.loopback import LoopbackTransport
from router_node.server import Router
from simulation.dice import Dice
from simulation.findings import Journal
from simulation.kernel import Process, VirtualClock, World
from simulation.ledger import Ledger
from simulation.network import Network
from simulation.plane import DataNetwork
from simulation.settings import RouterSettings, router_config, simulated_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What all hosts of a world share."""

    world: World
    network: Network
    data: DataNetwork
    ledger: Ledger
    journal: Journal
    dice: Dice
    compute_factor: float
    # Nobody's process: what happens to processes is called from it.
    director: Process


_WAKE_S = 0.001


class Host(ABC):
    """One machine. `boot` starts a process on it; how is for the subclasses to say."""

    def __init__(self, name: str, address: str, surroundings: Surroundings) -> None:
        self.name = name
        self.address = address
        self.around = surroundings
        self.process: Process | None = None
        self.past: list[Process] = []
        self.slowness = 1.0
        self.num_boots = 0
        # How often a node here has dropped its prefix cache.
        self.num_clears = 0
        # Since when the process that runs now is leaving.
        self.leaves_since_s: float | None = None
        # Somebody will ask the process that runs now to leave; None: it is not started again by itself.
        self.is_asked_to_leave = False
        self._restart_after_s: float | None = None
        self._stop_node: Callable[[], Awaitable[None]] | None = None

    @property
    def is_leaving(self) -> bool:
        return self.leaves_since_s is not None

    def boot(self) -> None:
        """Starts a process. Without effect while one runs."""
        if self.process is None:
            process = self.process = Process(self.around.world, self.name, partial(self._on_error, self.name))
            self.num_boots += 1
            self.around.journal.note(self.name, lambda: "starts")
            # Nothing of whoever starts it, such as the deadline of a call, is inherited.
            process.call_soon(self._start, process, context=Context())

    def kill(self, *, silently: bool = False) -> None:
        """As kill -9, or `silently` as a power cut."""
        if self.process is not None:
            self.around.journal.note(self.name, lambda: "is killed" + (", and its machine with it" if silently else ""))
            self._end_process(silently=silently)

    def stop_running(self) -> None:
        if self.process is not None and not self.process.is_stopped:
            self.around.journal.note(self.name, lambda: "is stopped")
            self.process.stop_running()
            self.around.network.suspend(self.process)

    def resume(self) -> None:
        if self.process is not None and self.process.is_stopped:
            self.around.journal.note(self.name, lambda: "goes on")
            # Which of its threads is the first is the kernel's choice: here the engine's, which is the worse case.
            self.process.is_waking = True
            self.around.director.call_later(_WAKE_S, self.process.resume)

    def close(self) -> None:
        """Ends every coroutine of every process that ever ran here."""
        for process in (*self.past, *(() if self.process is None else (self.process,))):
            process.close_tasks()

    # Leaving in good order.

    def expect_to_leave(self, restart_after_s: float | None) -> None:
        """The process that runs now will be asked to leave; it is started again after it has, unless that is None."""
        if self.process is not None and not self.is_leaving:
            self.is_asked_to_leave = True
            self._restart_after_s = restart_after_s

    def leave(self, reason: str) -> None:
        """The first who asks is heard, as in `node_runtime.lifecycle`."""
        process, stop_node = self.process, self._stop_node
        if process is None or stop_node is None or self.is_leaving:
            return
        self.leaves_since_s = self.around.world.now_s
        self.around.journal.note(self.name, lambda: f"begins to leave: {reason}")

        async def stop() -> None:
            await stop_node()
            # Not from inside the coroutine that is to die with the process.
            self.around.director.call_soon(self._left, process)

        process.create_task(stop(), context=Context())

    def _left(self, process: Process) -> None:
        if self.process is not process:
            return
        self.around.journal.note(self.name, lambda: "has left")
        self.around.journal.count("left")
        restart_after_s = self._restart_after_s
        self._end_process()
        if restart_after_s is not None:
            self.around.director.call_later(restart_after_s, self.boot)

    def _end_process(self, *, silently: bool = False) -> None:
        process, self.process = self.process, None
        self._stop_node = None
        self.is_asked_to_leave, self.leaves_since_s = False, None
        if process is not None:
            process.kill()
            self.past.append(process)
            self.around.network.drop_process(process, silently=silently)
            self.around.data.drop_process(process)

    # For the nodes.

    def run_node(self, process: Process, start: Awaitable[None], stop: Callable[[], Awaitable[None]]) -> None:
        """Starts a node; `stop` is how it leaves in good order."""

        async def begin() -> None:
            await start

        self._stop_node = stop
        process.create_task(begin())

    @abstractmethod
    def _start(self, process: Process) -> None:
        """Makes the node of this machine and begins to run it; called inside the event loop of `process`."""

    def _on_error(self, name: str, message: str, error: BaseException | None) -> None:
        self.around.journal.find("exception", f"{name}: {message}: {error!r}")

    def on_fatal(self, error: BaseException) -> None:
        self.around.journal.find("fatal", f"{self.name}: {error!r}")

    def on_drain(self, reason: str) -> None:
        if self.is_asked_to_leave:
            self.leave(reason)
        else:
            self.around.journal.find("drain", f"{self.name} drains though nobody asked it to: {reason}")

    def transport(self, process: Process) -> LoopbackTransport:
        return LoopbackTransport(self.around.network.wire_of(process))

    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def hostname(self) -> str:
        return self.address.rpartition(":")[0]


class RouterHost(Host):
    """Runs a Router in front of the given nodes."""

    def __init__(
        self,
        name: str,
        address: str,
        surroundings: Surroundings,
        settings: RouterSettings,
        *,
        prefill: Sequence[str],
        decode: Sequence[str],
        fused: Sequence[str],
    ) -> None:
        super().__init__(name, address, surroundings)
        # Of the process that runs now.
        self.router: Router | None = None
        self._settings = settings
        self._prefill = tuple(prefill)
        self._decode = tuple(decode)
        self._fused = tuple(fused)

    def _start(self, process: Process) -> None:
        hostname, port, settings = self.hostname(), self.port(), self._settings
        router = self.router = Router(
            router_config(self.name, hostname, port, settings, self._prefill, self._decode, self._fused),
            simulated_tokenizer(),
            telemetry=Telemetry.off(),
            on_fatal=self.on_fatal,
            on_drain=self.on_drain,
            clock=VirtualClock(self.around.world),
            transport=self.transport(process),
            draw=self.around.dice.of("router").random,
        )
        self.run_node(process, router.start(), router.stop)

    @override
    def _end_process(self, *, silently: bool = False) -> None:
        super()._end_process(silently=silently)
        self.router = None

"""A whole mesh on this machine as child processes: who is started with what, in which order all of it stops.

Knows the roles by their command lines only. Compute nodes start side by side, on ports that are chosen here so that
decode nodes are told of the prefill nodes at once; the router starts when they are ready. The router stops first, then
decode, then prefill, so that nobody loses a peer that it still needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pdmesh_cli.child import Announcement, Child, ChildError, ChildSpec, LogSink
from pdmesh_cli.ports import reserved_ports

# How long after a failure of the work a dying child is taken for its cause.
_BLAME_WINDOW_S = 1.0
_ROUTER = "router"
# It, and a compute node.
_FEWEST_CHILDREN = 2
# The address compute nodes listen on: nobody but this machine needs them.
_COMPUTE_HOST = "127.0.0.1"

T = TypeVar("T")


def num_usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def shared_num_threads(num_cores: int, num_compute_nodes: int) -> int:
    """Compute threads of each node when nodes share a machine: an equal part of the cores, at least one."""
    return max(1, num_cores // max(1, num_compute_nodes))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """What to start. The argument tuples are command-line options that are passed on as they are."""

    num_prefill: int
    num_decode: int
    fused: bool
    """One fused node per `num_decode`; no prefill nodes then."""
    num_threads: int
    compute_arguments: tuple[str, ...]
    router_arguments: tuple[str, ...]
    common_arguments: tuple[str, ...] = ()
    program: tuple[str, ...] = ("-P", "-m", "pdmesh_cli.main")
    """Interpreter arguments in front of the role."""
    ready_timeout_s: float = 300.0
    stop_grace_s: float = 35.0

    def __post_init__(self) -> None:
        if self.num_decode < 1:
            raise ValueError(f"num_decode must be at least 1, got {self.num_decode}")
        if not self.fused and self.num_prefill < 1:
            raise ValueError(f"num_prefill must be at least 1 without fused, got {self.num_prefill}")
        if self.num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {self.num_threads}")

    @property
    def num_compute_nodes(self) -> int:
        return self.num_decode + (0 if self.fused else self.num_prefill)

    @property
    def compute_names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.compute_specs((0,) * self.num_compute_nodes))

    def compute_specs(self, ports: Sequence[int]) -> tuple[ChildSpec, ...]:
        """The compute nodes, prefill before decode, each listening on one of the ports."""
        if self.fused:
            return tuple(self._compute_spec("fused", index, port) for index, port in enumerate(ports))
        prefill_ports, decode_ports = ports[: self.num_prefill], ports[self.num_prefill :]
        peers = tuple(f"--prefill={_COMPUTE_HOST}:{port}" for port in prefill_ports)
        prefill = tuple(self._compute_spec("prefill", index, port) for index, port in enumerate(prefill_ports))
        return prefill + tuple(
            self._compute_spec("decode", index, port, *peers) for index, port in enumerate(decode_ports)
        )

    def router_spec(self, compute_nodes: Sequence[Announcement]) -> ChildSpec:
        """The router, told where the compute nodes are."""
        addresses = tuple(f"--{node.role}={node.address}" for node in compute_nodes)
        arguments = (*addresses, *self.router_arguments, *self.common_arguments)
        return self._spec(_ROUTER, _ROUTER, arguments, num_threads=1)

    def _compute_spec(self, role: str, index: int, port: int, *peers: str) -> ChildSpec:
        place = (f"--host={_COMPUTE_HOST}", f"--port={port}", *peers, f"--num-threads={self.num_threads}")
        arguments = (*place, *self.compute_arguments, *self.common_arguments)
        return self._spec(role, f"{role}-{index}", arguments, num_threads=self.num_threads)

    def _spec(self, role: str, name: str, arguments: tuple[str, ...], *, num_threads: int) -> ChildSpec:
        command = (*self.program, role, f"--node-id={name}", *arguments)
        # Nodes share the machine: a thread that waits must sleep instead of spinning.
        environment = {"OMP_NUM_THREADS": str(num_threads), "OMP_WAIT_POLICY": "PASSIVE"}
        return ChildSpec(name=name, arguments=command, environment=environment)


class Mesh:
    """The children of one plan. Whoever starts it stops it, also when starting failed: use `async with`."""

    def __init__(self, plan: MeshPlan, sink: LogSink, *, on_ready: Callable[[Announcement], None]) -> None:
        self._plan = plan
        self._sink = sink
        self._on_ready = on_ready
        self._children: list[Child] = []
        self._run_dir = tempfile.TemporaryDirectory(prefix="pdmesh-")

    async def __aenter__(self) -> Mesh:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def start(self) -> Announcement:
        """Starts everything and returns the router. Raises ChildError for the first child that fails."""
        with reserved_ports(_COMPUTE_HOST, self._plan.num_compute_nodes) as ports:
            compute = [await self._spawn(spec) for spec in self._plan.compute_specs(ports)]
            announcements = await self._all_ready(compute)
        router = await self._spawn(self._plan.router_spec(announcements))
        return (await self._all_ready([router]))[0]

    async def _spawn(self, spec: ChildSpec) -> Child:
        child = await Child.start(spec, self._sink, Path(self._run_dir.name))
        self._children.append(child)
        return child

    async def _all_ready(self, children: Sequence[Child]) -> list[Announcement]:
        async def wait_for_all() -> list[Announcement]:
            return await asyncio.gather(*(self._ready(child) for child in children))

        return await self.run(wait_for_all())

    async def _ready(self, child: Child) -> Announcement:
        announcement = await child.wait_ready(self._plan.ready_timeout_s)
        self._on_ready(announcement)
        return announcement

    async def wait_for_exit(self) -> ChildError:
        """Waits until any child ends, which none does by itself; says which one and how.

        A compute node that was told to leave, and did, is no loss as long as there is another one.
        """
        waits = {asyncio.create_task(child.wait()): child for child in self._children}
        try:
            while True:
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for child in [waits.pop(task) for task in done]:
                    self._children.remove(child)
                    if await child.wait() != 0 or child.name == _ROUTER or len(self._children) < _FEWEST_CHILDREN:
                        return await child.failure()
                    self._sink.write_line(child.name, "has left")
        finally:
            for task in waits:
                task.cancel()

    async def run(self, work: Coroutine[object, object, T]) -> T:
        """Runs `work` beside the children. When one of them ends, the work is cancelled and ChildError raised.

        An error of the work itself is raised as ChildError too when a child's end turns out to be its cause.
        """
        working = asyncio.create_task(work)
        watching = asyncio.create_task(self.wait_for_exit())
        try:
            await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
            if working.done() and working.exception() is not None:
                await asyncio.wait((watching,), timeout=_BLAME_WINDOW_S)
            if watching.done():
                raise watching.result()
            return working.result()
        finally:
            for task in (working, watching):
                task.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    async def stop(self) -> None:
        """Stops all children in order; returns when none is left. May be called again."""
        children, self._children = self._children, []
        for prefix in (_ROUTER, "decode", "fused", "prefill"):
            members = [child for child in children if child.name.startswith(prefix)]
            await asyncio.gather(*(child.stop(self._plan.stop_grace_s) for child in members))
        with contextlib.suppress(OSError):
            self._run_dir.cleanup()

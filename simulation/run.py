"""Carries out one scenario and judges it.

The order: nodes start, requests and faults come, everything heals, the mesh gets quiet, late requests show that it
still works, and at the end every block must be free.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import assert_never

from pdmesh.v1 import handoff_pb2

from node_runtime.rpc.loopback_wire import Data, Frame
from simulation.client import Answer, Clients
from simulation.compute_hosts import ComputeHost, DecodeHost, PrefillHost
from simulation.findings import Finding, Journal, JournalHandler
from simulation.hosts import Host, RouterHost, Surroundings
from simulation.judge import Judge
from simulation.kernel import Livelock, Process, World
from simulation.ledger import Ledger
from simulation.meddling import MeddlingPlan
from simulation.network import HANDOFF_METHOD, Network
from simulation.plane import DataNetwork
from simulation.scenario import (
    Drain,
    Fault,
    FlipBit,
    Kill,
    LoseRun,
    MeddleWith,
    Partition,
    Request,
    Scenario,
    Slow,
    Stop,
)
from simulation.transcript import MessageTeller

# After everything healed and the last deadline passed, a node may hold something for a request for so long: the grace
# of the control stream, and the quarantine behind a stream that broke without a word.
_QUIET_BOUND_S = 40.0
# A client hears of its end at its deadline, and a router that is up never keeps it longer.
_DEADLINE_BOUND_S = 0.5
# Within this time after everything healed a router knows its nodes again and nodes know one another.
_RECOVERY_BOUND_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run showed. `lines` is the transcript, empty unless it was asked for."""

    scenario: Scenario
    findings: tuple[Finding, ...]
    lines: tuple[str, ...]
    num_callbacks: int
    simulated_s: float
    statuses: tuple[str, ...]

    def kinds(self) -> frozenset[str]:
        return frozenset(finding.kind for finding in self.findings)


def simulate(scenario: Scenario, *, is_verbose: bool = False) -> Outcome:
    """Runs a scenario in this thread; the same scenario gives the same outcome."""
    simulation = _Simulation(scenario, is_verbose=is_verbose)
    with _undisturbed(simulation.journal):
        return simulation.run()


@contextmanager
def _undisturbed(journal: Journal) -> Iterator[None]:
    """No garbage collection at odd moments, and the log goes to the journal."""
    handler = JournalHandler(journal, _running_process)
    root = logging.getLogger()
    level, propagated = root.level, root.handlers[:]
    root.handlers[:] = [handler]
    root.setLevel(handler.level)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        root.handlers[:] = propagated
        root.setLevel(level)


def _running_process() -> str:
    running: object = asyncio._get_running_loop()
    return running.name if isinstance(running, Process) else "engine"


class _Simulation:
    def __init__(self, scenario: Scenario, *, is_verbose: bool) -> None:
        self.scenario = scenario
        self.world = World()
        self.journal = Journal(self.world, is_verbose=is_verbose)
        self.ledger = Ledger(self.journal)
        rng = Random(scenario.seed ^ 0x5EED)
        self.network = Network(rng, scenario.pace.control_s)
        self.data = DataNetwork(self.world, rng, self.ledger, kind=scenario.plane, extra_landing_s=scenario.pace.data_s)
        self.meddling = MeddlingPlan()
        self.network.meddler = self.meddling
        self.network.tracer = self._trace
        self.director = Process(self.world, "director", self._on_error)
        around = Surroundings(
            world=self.world,
            network=self.network,
            data=self.data,
            ledger=self.ledger,
            journal=self.journal,
            rng=rng,
            compute_factor=scenario.pace.compute_factor,
            director=self.director,
        )
        addresses = {
            name: f"{name}:7000" for name in (*scenario.prefill_names, *scenario.decode_names, "router", "client")
        }
        prefill = [addresses[name] for name in scenario.prefill_names]
        decode = [addresses[name] for name in scenario.decode_names]
        self.compute: dict[str, ComputeHost] = {
            name: PrefillHost(name, addresses[name], around, settings)
            for name, settings in zip(scenario.prefill_names, scenario.prefill, strict=True)
        }
        for name, settings in zip(scenario.decode_names, scenario.decode, strict=True):
            self.compute[name] = DecodeHost(name, addresses[name], around, settings, prefill)
        self.router = RouterHost("router", addresses["router"], around, prefill, decode)
        self.hosts: dict[str, Host] = {**self.compute, "router": self.router}
        self.client = Process(self.world, "client", self._on_error)
        self.clients: Clients | None = None
        self.answers: list[Answer] = []
        self.judge = Judge(scenario, self.journal, self.compute)
        self.teller = MessageTeller()

    def run(self) -> Outcome:
        try:
            self._play()
        except Livelock as error:
            self.journal.find("livelock", str(error))
        finally:
            for host in self.hosts.values():
                host.close()
            for process in (self.client, self.director, self.data.carrier):
                process.close_tasks()
        return Outcome(
            scenario=self.scenario,
            findings=tuple(self.journal.findings),
            lines=tuple(self.journal.lines),
            num_callbacks=self.world.num_callbacks,
            simulated_s=self.world.now_s,
            statuses=tuple(answer.status or "NONE" for answer in self.answers),
        )

    def _play(self) -> None:
        scenario, world = self.scenario, self.world
        for host in self.compute.values():
            host.boot()
        self.director.call_at(0.2, self.router.boot)
        self.client.call_soon(self._start_clients)
        for fault in scenario.faults:
            self.director.call_at(fault.at_s, self._begin, fault)
        for request in scenario.requests:
            self.client.call_at(request.at_s, self._ask, request)
        world.run_until(scenario.heal_s)
        self._heal()
        last_deadline_s = max(request.at_s + request.timeout_s for request in scenario.requests)
        world.run_until(max(last_deadline_s, scenario.heal_s) + _DEADLINE_BOUND_S, self._is_all_answered)
        self._judge_ends()
        self._wait_for_quiet()
        self._ask_late_requests()
        self._wait_for_quiet()
        self._judge_leftovers()
        for host in self.compute.values():
            host.clear_cache()

    # What happens.

    def _start_clients(self) -> None:
        transport = self.router.transport(self.client)
        self.clients = Clients(self.router.address, transport, self.journal)

    def _ask(self, request: Request) -> None:
        if self.clients is not None:
            answer = Answer(request=request)
            self.answers.append(answer)
            self.client.create_task(self.clients.ask(answer))

    def _begin(self, fault: Fault) -> None:
        self.journal.note("FAULT", lambda: str(fault))
        match fault:
            case Kill():
                self.hosts[fault.host].kill(silently=fault.silently)
                self.director.call_later(fault.restart_after_s, self.hosts[fault.host].boot)
            case Stop():
                self.hosts[fault.host].stop_running()
                self.director.call_later(fault.for_s, self.hosts[fault.host].resume)
            case Drain():
                self.compute[fault.host].drain(fault.restart_after_s)
            case Partition():
                self._set_partition(fault, is_on=True)
                self.director.call_later(fault.for_s, partial(self._set_partition, fault, is_on=False))
            case Slow():
                self._slow_down(fault, factor=1.0)
                self.director.call_later(fault.for_s, partial(self._slow_down, fault, factor=0.0))
            case MeddleWith():
                self.meddling.add(fault)
            case FlipBit():
                self.data.runs_until_flip[fault.source, fault.target] = fault.nth
            case LoseRun():
                self.data.runs_until_loss[fault.source, fault.target] = fault.nth
            case _:
                assert_never(fault)

    def _set_partition(self, fault: Partition, *, is_on: bool) -> None:
        ways = [(fault.source, fault.target)]
        if fault.is_mutual:
            ways.append((fault.target, fault.source))
        for source, target in ways:
            if fault.control:
                (self.network.block if is_on else self.network.unblock)(source, target)
            if fault.data:
                (self.data.block if is_on else self.data.unblock)(source, target)

    def _slow_down(self, fault: Slow, *, factor: float) -> None:
        self.network.slow_down(fault.host, fault.control_s * factor)
        self.data.slow_down(fault.host, fault.data_s * factor)
        host = self.hosts[fault.host]
        host.slowness = fault.compute_factor if factor else 1.0

    def _heal(self) -> None:
        self.journal.note("director", lambda: "all faults are over")
        self.meddling.due.clear()
        self.data.runs_until_loss.clear()
        self.data.runs_until_flip.clear()
        for host in self.hosts.values():
            host.resume()
            if not host.is_draining:
                host.boot()

    def _is_all_answered(self) -> bool:
        return len(self.answers) == len(self.scenario.requests) and all(answer.status for answer in self.answers)

    def _is_quiet(self) -> bool:
        return all(host.is_quiet() for host in self.compute.values())

    def _wait_for_quiet(self) -> None:
        end_s = self.world.now_s + _QUIET_BOUND_S
        while not self._is_quiet() and self.world.now_s < end_s:
            self.world.run_until(self.world.now_s + 0.5)
        for host in self.compute.values():
            if not host.is_quiet():
                self.journal.find("not quiet", f"{_QUIET_BOUND_S:g} s after the last request {host.describe()}")

    def _ask_late_requests(self) -> None:
        """The mesh must serve again, and right, whatever it went through."""
        end_s = self.world.now_s + _RECOVERY_BOUND_S
        for number in range(1, 3):
            first = self.scenario.requests[0]
            while True:
                request = Request(
                    request_id=f"late-{number}",
                    at_s=self.world.now_s,
                    prompt=(*first.prompt[: 8 * number], number),
                    max_tokens=3,
                    seed=number,
                    timeout_s=5.0,
                )
                self.client.call_soon(self._ask, request)
                self.world.run_until(self.world.now_s + 6.0, lambda: bool(self.answers[-1].status))
                answer = self.answers[-1]
                if answer.status == "OK" or self.world.now_s >= end_s:
                    break
                self.answers.remove(answer)
                self.world.run_until(self.world.now_s + 0.5)
            if answer.status != "OK":
                self.journal.find("no recovery", f"{request.request_id} ends in {answer.status}: {answer.message}")
            self.judge.judge(answer)

    # What must hold.

    def _judge_leftovers(self) -> None:
        """No coroutine outlives what it was there for."""
        # On every compute node the stream by which the router watches its health. On decode nodes a watcher and what it
        # waits for, per prefill node; on the router the same for discovery, and a watcher per node with their parent.
        allowed = dict.fromkeys(self.scenario.prefill_names, 1)
        allowed |= dict.fromkeys(self.scenario.decode_names, 1 + 2 * len(self.scenario.prefill))
        allowed["router"] = 3 + len(self.compute)
        for name, num_allowed in allowed.items():
            process = self.hosts[name].process
            # A poll may be under way: it takes less than this.
            end_s = self.world.now_s + 10.0
            while process is not None and process.num_tasks > num_allowed and self.world.now_s < end_s:
                self.world.run_until(self.world.now_s + 0.7)
            if process is not None and process.num_tasks > num_allowed:
                self.journal.find("leftover", f"{name} has {process.num_tasks} coroutines, {num_allowed} are expected")

    def _judge_ends(self) -> None:
        for answer in self.answers:
            request = answer.request
            if answer.status is None:
                self.journal.find(
                    "no end", f"{request.request_id} has not ended {_DEADLINE_BOUND_S} s after its deadline"
                )
                answer.status = "NONE"
            else:
                self.judge.judge(answer)

    # What is watched.

    def _trace(self, source: str, target: str, method: str, frame: Frame) -> None:
        if method != HANDOFF_METHOD or not isinstance(frame, Data):
            return
        is_request = source in self.scenario.decode_names
        if is_request:
            self._watch_grant(source, target, frame.data)
        self.journal.note(source, lambda: f"-> {target} {self.teller.tell(frame, is_request=is_request)}")

    def _watch_grant(self, source: str, target: str, data: bytes) -> None:
        message = handoff_pb2.HandoffRequest.FromString(data)
        writer = self.hosts[target].process
        if message.HasField("grant") and writer is not None:
            blocks = [(group.group_id, block) for group in message.grant.groups for block in group.block_ids]
            self.ledger.on_grant_sent(source, writer, blocks)

    def _on_error(self, message: str, error: BaseException | None) -> None:
        self.journal.find("exception", f"{message}: {error!r}")

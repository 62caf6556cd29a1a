"""Carries out one scenario and judges it.

The order: nodes start, requests and faults come, everything heals, the mesh gets quiet, late requests show that it
still works, and at the end every block must be free.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from pdmesh.v1 import handoff_pb2

from node_runtime.rpc.loopback_wire import Data, Frame
from simulation.beliefs import misbeliefs
from simulation.calls import CallWatch
from simulation.client import Answer, Clients
from simulation.compute_hosts import ComputeHost, DecodeHost, FusedHost, PrefillHost
from simulation.dice import Dice
from simulation.director import Director
from simulation.findings import Finding, Journal, JournalHandler
from simulation.hosts import Host, RouterHost, Surroundings
from simulation.judge import Judge
from simulation.kernel import Livelock, Process, World
from simulation.ledger import Ledger
from simulation.meddling import MeddlingPlan
from simulation.network import HANDOFF_METHOD, Network
from simulation.operations import Operator
from simulation.plane import DataNetwork
from simulation.scenario import BEGIN_S, ROUTER, Request, Scenario
from simulation.streams import GENERATES, StreamWatch
from simulation.tenants import ROOMY, credentials_of
from simulation.transcript import MessageTeller

# After everything healed and the last deadline passed, a node may hold something for a request for so long: the grace
# of the control stream, and the quarantine behind a stream that broke without a word.
_QUIET_BOUND_S = 40.0
# A node leaves within its grace period and is ready soon after its start.
_RESTART_BOUND_S = 70.0
# A client hears of its end at its deadline, and a router that is up never keeps it longer.
_DEADLINE_BOUND_S = 0.5
# Within this time after everything healed a router knows its nodes again and nodes know one another.
_RECOVERY_BOUND_S = 20.0
# Within this time a router knows what its nodes have cached: a stream that broke without a word is made anew.
_BELIEF_BOUND_S = 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run showed. `lines` is the transcript, empty unless it was asked for."""

    scenario: Scenario
    findings: tuple[Finding, ...]
    lines: tuple[str, ...]
    num_callbacks: int
    simulated_s: float
    statuses: tuple[str, ...]
    # How often what not every run sees happened, by name.
    seen: Mapping[str, int]

    def kinds(self) -> frozenset[str]:
        return frozenset(finding.kind for finding in self.findings)


def simulate(scenario: Scenario, *, is_verbose: bool = False) -> Outcome:
    """Runs a scenario in this thread; the same scenario gives the same outcome."""
    simulation = _Simulation(scenario, is_verbose=is_verbose)
    with _undisturbed(simulation.journal, simulation.world):
        return simulation.run()


@contextmanager
def _undisturbed(journal: Journal, world: World) -> Iterator[None]:
    """No garbage collection at odd moments, and the log goes to the journal."""
    handler = JournalHandler(journal, _name_of_running(world), begins_at_s=BEGIN_S)
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


def _name_of_running(world: World) -> Callable[[], str]:
    return lambda: "nobody" if world.running is None else world.running.name


class _Simulation:
    def __init__(self, scenario: Scenario, *, is_verbose: bool) -> None:
        self.scenario = scenario
        self.world = World()
        self.journal = Journal(self.world, is_verbose=is_verbose)
        self.ledger = Ledger(self.journal)
        dice = Dice(scenario.seed)
        self.network = Network(dice, scenario.pace.control_s)
        self.data = DataNetwork(
            self.world, dice, self.ledger, kind=scenario.plane, extra_landing_s=scenario.pace.data_s
        )
        self.meddling = MeddlingPlan()
        self.network.meddler = self.meddling
        self.network.tracer = self._trace
        self.director_process = Process(self.world, "director", self._on_error)
        around = Surroundings(
            world=self.world,
            network=self.network,
            data=self.data,
            ledger=self.ledger,
            journal=self.journal,
            dice=dice,
            compute_factor=scenario.pace.compute_factor,
            director=self.director_process,
        )
        addresses = {name: f"{name}:7000" for name in (*scenario.compute_names, ROUTER)}
        prefill = [addresses[name] for name in scenario.prefill_names]
        decode = [addresses[name] for name in scenario.decode_names]
        fused = [addresses[name] for name in scenario.fused_names]
        self.compute: dict[str, ComputeHost] = {
            name: PrefillHost(name, addresses[name], around, settings)
            for name, settings in zip(scenario.prefill_names, scenario.prefill, strict=True)
        }
        for name, settings in zip(scenario.decode_names, scenario.decode, strict=True):
            self.compute[name] = DecodeHost(name, addresses[name], around, settings, prefill)
        for name, settings in zip(scenario.fused_names, scenario.fused, strict=True):
            self.compute[name] = FusedHost(name, addresses[name], around, settings)
        self.router = RouterHost(
            ROUTER, addresses[ROUTER], around, scenario.router, prefill=prefill, decode=decode, fused=fused
        )
        self.hosts: dict[str, Host] = {**self.compute, ROUTER: self.router}
        # By tenant.
        self.clients: dict[str, Clients] = {}
        operator = Process(self.world, "operator", self._on_error)
        self.operator = Operator(operator, self.router.transport(operator), self.hosts, self.journal)
        self.outside = (operator, self.director_process, self.data.carrier)
        self.director = Director(around, self.hosts, self.compute, self.meddling, self.operator)
        self.streams = StreamWatch(self.hosts, self.journal)
        self.calls = CallWatch(ROUTER, may_hedge=scenario.router.hedges, touched=scenario.touched, journal=self.journal)
        self.answers: list[Answer] = []
        self.judge = Judge(scenario, self.journal, self.compute)
        self.teller = MessageTeller()

    def run(self) -> Outcome:
        try:
            self._play()
        except Livelock as error:
            self.journal.find("livelock", str(error))
        finally:
            self.journal.close()
            for host in self.hosts.values():
                host.close()
            for process in (*self.outside, *(clients.process for clients in self.clients.values())):
                process.close_tasks()
        return Outcome(
            scenario=self.scenario,
            findings=tuple(self.journal.findings),
            lines=tuple(self.journal.lines),
            num_callbacks=self.world.num_callbacks,
            simulated_s=self.world.now_s,
            statuses=tuple(answer.status or "NONE" for answer in self.answers),
            seen=dict(self.journal.seen),
        )

    def _play(self) -> None:
        scenario, world = self.scenario, self.world
        for host in self.compute.values():
            host.boot()
        self.director_process.call_at(0.2, self.router.boot)
        for fault in scenario.faults:
            self.director.plan(fault)
        for request in scenario.requests:
            self.director_process.call_at(request.at_s, self._ask, request)
        world.run_until(scenario.heal_s)
        self.director.heal()
        last_deadline_s = max(request.at_s + request.timeout_s for request in scenario.requests)
        world.run_until(max(last_deadline_s, scenario.heal_s) + _DEADLINE_BOUND_S, self._is_all_answered)
        self._judge_ends()
        self._wait_for_operator()
        self._wait_for_quiet()
        self._ask_late_requests()
        self._wait_for_quiet()
        self._judge_leftovers()
        self._judge_beliefs()
        for host in self.compute.values():
            host.clear_cache()

    # What happens.

    def _clients_of(self, tenant: str) -> Clients:
        clients = self.clients.get(tenant)
        if clients is None:
            process = Process(self.world, f"clients of {tenant}" if tenant else "clients", self._on_error)
            clients = self.clients[tenant] = Clients(
                process, self.router.address, self.router.transport(process), credentials_of(tenant), self.journal
            )
        return clients

    def _ask(self, request: Request) -> None:
        answer = Answer.to(request)
        self.answers.append(answer)
        self.judge.asked.append(request)
        if request.num_samples > 1:
            self.journal.count("several samples")
        self._clients_of(request.tenant).ask(answer)

    def _is_all_answered(self) -> bool:
        return len(self.answers) == len(self.scenario.requests) and all(answer.status for answer in self.answers)

    def _wait_for_operator(self) -> None:
        """A rolling restart takes as long as it takes."""
        num_nodes = len(self.compute)
        end_s = self.world.now_s + _RESTART_BOUND_S * num_nodes
        self.world.run_until(end_s, lambda: self.operator.is_idle)
        if not self.operator.is_idle:
            self.journal.find("no restart", f"{num_nodes} nodes were not restarted within {_RESTART_BOUND_S:g} s each")

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
                    max_tokens=2,
                    seed=number,
                    timeout_s=5.0,
                    tenant=ROOMY if self.scenario.router.has_tenants else "",
                )
                self.director_process.call_soon(self._ask, request)
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
        scenario = self.scenario
        # On every compute node the watch of its engine and the stream by which the router follows it, on prefill nodes
        # one more stream for each decode node; on decode nodes a watcher and what it follows, per prefill node; on the
        # router discovery, and a watcher per node.
        allowed = dict.fromkeys(scenario.prefill_names, 2 + len(scenario.decode))
        allowed |= dict.fromkeys(scenario.decode_names, 2 + 2 * len(scenario.prefill))
        allowed |= dict.fromkeys(scenario.fused_names, 2)
        allowed[ROUTER] = 1 + len(self.compute)
        if scenario.router.follows:
            allowed = {name: count + (len(self.compute) if name == ROUTER else 1) for name, count in allowed.items()}
        for name, num_allowed in allowed.items():
            process = self.hosts[name].process
            # A poll may be under way: it takes less than this.
            end_s = self.world.now_s + 10.0
            while process is not None and process.num_tasks > num_allowed and self.world.now_s < end_s:
                self.world.run_until(self.world.now_s + 0.7)
            if process is not None and process.num_tasks > num_allowed:
                self.journal.find("leftover", f"{name} has {process.num_tasks} coroutines, {num_allowed} are expected")

    def _judge_beliefs(self) -> None:
        """What the router believes of its nodes is so, once they had the time to tell."""
        router = self.router.router
        if router is None:
            return
        settings = self.scenario.router
        requests = self.judge.asked if settings.placement_policy == "cache_aware" else ()
        end_s = self.world.now_s + _BELIEF_BOUND_S
        while wrong := misbeliefs(router.observations, self.compute, requests, is_told=settings.follows):
            if self.world.now_s >= end_s:
                break
            self.world.run_until(self.world.now_s + 0.5)
        for text in wrong:
            self.journal.find("misbelief", text)

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
        if method in GENERATES:
            self.streams.on_frame(source, target, frame)
            self.calls.on_frame(source, target, method, frame)
        elif method == HANDOFF_METHOD and isinstance(frame, Data):
            self._watch_handoff(source, target, frame)

    def _watch_handoff(self, source: str, target: str, frame: Data) -> None:
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

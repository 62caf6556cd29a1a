"""Makes faults happen: each at its time, to the hosts, the networks or by the operator."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import assert_never

from simulation.compute_hosts import ComputeHost
from simulation.faults import (
    ClearCache,
    Drain,
    Fault,
    FlipBit,
    Hang,
    Kill,
    KillRank,
    LateRank,
    LoseRun,
    MeddleWith,
    Partition,
    RollingRestart,
    Slow,
    Stop,
    name_of,
)
from simulation.hosts import Host, Surroundings
from simulation.meddling import MeddlingPlan
from simulation.operations import Operator


class Director:
    """Of one world."""

    def __init__(
        self,
        around: Surroundings,
        hosts: Mapping[str, Host],
        compute: Mapping[str, ComputeHost],
        meddling: MeddlingPlan,
        operator: Operator,
    ) -> None:
        self._around = around
        self._hosts = hosts
        self._compute = compute
        self._meddling = meddling
        self._operator = operator

    def plan(self, fault: Fault) -> None:
        self._around.director.call_at(fault.at_s, self._begin, fault)

    def heal(self) -> None:
        """Nothing more befalls anybody, and whoever is down is started."""
        self._around.journal.note("director", lambda: "all faults are over")
        self._meddling.due.clear()
        self._around.data.runs_until_loss.clear()
        self._around.data.runs_until_flip.clear()
        for host in self._hosts.values():
            host.resume()
            if not host.is_leaving:
                host.boot()

    def _begin(self, fault: Fault) -> None:
        around, later = self._around, self._around.director.call_later
        around.journal.note("FAULT", lambda: str(fault))
        around.journal.count(f"fault: {name_of(fault)}")
        match fault:
            case Kill():
                self._hosts[fault.host].kill(silently=fault.silently)
                later(fault.restart_after_s, self._hosts[fault.host].boot)
            case KillRank():
                self._compute[fault.host].kill_rank(fault.restart_after_s)
            case LateRank():
                self._compute[fault.host].delay_rank(fault.seconds)
                later(fault.for_s, self._compute[fault.host].delay_rank, 0.0)
            case Stop():
                self._hosts[fault.host].stop_running()
                later(fault.for_s, self._hosts[fault.host].resume)
            case Hang():
                self._compute[fault.host].hang(fault.for_s)
            case Drain():
                self._operator.drain(fault.host, fault.asking, fault.restart_after_s)
            case RollingRestart():
                self._operator.restart_all(fault)
            case ClearCache():
                self._operator.clear(fault.host)
            case Partition():
                self._set_partition(fault, is_on=True)
                later(fault.for_s, partial(self._set_partition, fault, is_on=False))
            case Slow():
                self._slow_down(fault, is_on=True)
                later(fault.for_s, partial(self._slow_down, fault, is_on=False))
            case MeddleWith():
                self._meddling.add(fault)
            case FlipBit():
                around.data.runs_until_flip[fault.source, fault.target] = fault.nth
            case LoseRun():
                around.data.runs_until_loss[fault.source, fault.target] = fault.nth
            case _:
                assert_never(fault)

    def _set_partition(self, fault: Partition, *, is_on: bool) -> None:
        network, data = self._around.network, self._around.data
        ways = [(fault.source, fault.target)]
        if fault.is_mutual:
            ways.append((fault.target, fault.source))
        for source, target in ways:
            if fault.control:
                (network.block if is_on else network.unblock)(source, target)
            if fault.data:
                (data.block if is_on else data.unblock)(source, target)

    def _slow_down(self, fault: Slow, *, is_on: bool) -> None:
        self._around.network.slow_down(fault.host, fault.control_s if is_on else 0.0)
        self._around.data.slow_down(fault.host, fault.data_s if is_on else 0.0)
        self._hosts[fault.host].slowness = fault.compute_factor if is_on else 1.0

"""The control network between simulated processes: ordered connections with latency, and everything that befalls them.

A connection delivers frames in order or breaks; frames on a blocked way wait until it opens again, as retransmissions
would. Whoever waits for a peer that does not answer notices by keepalive. Faults are asked for by others: this module
draws latencies and knows no scenario.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, unique
from typing import NamedTuple, TypeAlias

from node_runtime.rpc.loopback_wire import Connection, Data, Frame, OpenCall, Receiver
from node_runtime.rpc.options import PEER_NOTICE_BOUND_S
from simulation.dice import Dice
from simulation.kernel import Process

HANDOFF_METHOD = "/pdmesh.v1.Prefill/Handoff"
_LATENCY_S = (0.0001, 0.002)
_KEEPALIVE_S = (5.0, PEER_NOTICE_BOUND_S)
_RESET = "connection reset by peer"
# Old messages that may come back.
_MAX_REMEMBERED = 64


@unique
class Meddling(Enum):
    """What may happen to one frame."""

    BREAK = "break"  # lost, and with it the connection
    DELAY = "delay"  # late, and so is all that follows it
    DUPLICATE = "duplicate"  # twice; messages of a handoff only
    REPLAY = "replay"  # an earlier message of another handoff between the two comes first; messages of a handoff only


HANDOFF_MEDDLINGS = frozenset({Meddling.DUPLICATE, Meddling.REPLAY})
"""What happens to messages of handoffs only."""


class Meddled(NamedTuple):
    """One decision. `seconds` is used by DELAY alone."""

    kind: Meddling
    seconds: float = 0.0


Meddler: TypeAlias = Callable[[str, str, str, Frame], Meddled | None]
"""Asked about every frame: name of the sender, name of the receiver, method of the call, frame."""
_Way: TypeAlias = tuple[str, str]
Tracer: TypeAlias = Callable[[str, str, str, Frame], None]


@dataclass(slots=True, eq=False)
class _Listener:
    process: Process
    accept: Callable[[Connection], Receiver]


class Network:
    """All control connections of a world."""

    def __init__(self, dice: Dice, extra_latency_s: float) -> None:
        """`extra_latency_s` is added, in part, to all that is sent."""
        self._dice = dice
        self._extra_latency_s = extra_latency_s
        self._listeners: dict[str, _Listener] = {}
        # Ways on which nothing gets through.
        self.blocked: set[_Way] = set()
        self._slow_s: dict[str, float] = {}
        self._draws: dict[_Way, Callable[[], float]] = {}
        self._ends: list[_End] = []
        self._remembered: list[tuple[_Way, int, bytes]] = []
        self.meddler: Meddler | None = None
        self.tracer: Tracer | None = None

    def wire_of(self, process: Process) -> ProcessWire:
        """How `process` dials and listens."""
        return ProcessWire(self, process)

    # Faults.

    def block(self, source: str, target: str) -> None:
        """Nothing gets from one process to the other until `unblock`; the way back stays as it is."""
        self.blocked.add((source, target))
        for end in self._ends_between(source, target):
            end.watch()

    def unblock(self, source: str, target: str) -> None:
        self.blocked.discard((source, target))
        for end in self._ends_between(source, target):
            if end.process.name == source:
                end.flush()

    def slow_down(self, name: str, seconds: float) -> None:
        """Adds latency to all that comes from or goes to a process; 0 lifts it."""
        self._slow_s[name] = seconds

    def drop_process(self, process: Process, *, silently: bool = False) -> None:
        """The process is dead: its kernel closes its connections; `silently`: the whole machine is gone."""
        self._listeners = {key: item for key, item in self._listeners.items() if item.process is not process}
        for end in [end for end in self._ends if end.process is process]:
            if silently:
                end.vanish()
            else:
                end.close()

    def suspend(self, process: Process) -> None:
        """The process does not answer any more; its peers may notice."""
        for end in [end for end in self._ends if end.peer.process is process]:
            end.watch()

    # For the ends.

    def is_unresponsive(self, here: Process, peer: Process) -> bool:
        """Whether `here` gets no answer to a ping of `peer`."""
        return peer.is_stopped or (here.name, peer.name) in self.blocked or (peer.name, here.name) in self.blocked

    def is_listening(self, name: str) -> bool:
        """Whether a process of that host takes connections."""
        return any(listener.process.name == name for listener in self._listeners.values())

    def latency_s(self, way: _Way) -> float:
        draw = self._draws.get(way)
        if draw is None:
            draw = self._draws[way] = self._dice.of("latency", *way).random
        extra_s, slow_s = self._extra_latency_s, self._slow_s
        if slow_s:
            extra_s += slow_s.get(way[0], 0.0) + slow_s.get(way[1], 0.0)
        least_s, most_s = _LATENCY_S
        return least_s + (most_s - least_s) * draw() + extra_s * draw()

    def keepalive_s(self, process: Process) -> float:
        return self._dice.of("keepalive", process.name).uniform(*_KEEPALIVE_S)

    def remember(self, way: _Way, frame: Data) -> None:
        """Messages of handoffs, so that late ones can be made."""
        self._remembered.append((way, frame.call_id, frame.data))
        del self._remembered[:-_MAX_REMEMBERED]

    def recall(self, way: _Way, frame: Data) -> bytes | None:
        """A message that was sent the same way on an earlier call."""
        known = [data for known_way, call_id, data in self._remembered if known_way == way and call_id != frame.call_id]
        return self._dice.of("recall", *way).choice(known) if known else None

    # For the wires.

    def dial(
        self, process: Process, address: str, receiver: Receiver, on_end: Callable[[Connection | str], None]
    ) -> None:
        listener = self._listeners.get(address)
        if listener is None:
            process.call_later(self.latency_s((process.name, process.name)), on_end, "connection refused")
            return
        way = (process.name, listener.process.name)
        if way in self.blocked or way[::-1] in self.blocked:
            return  # the packets are lost; the caller's connect timeout ends it
        near, far = _End(self, process), _End(self, listener.process)
        near.join(far)
        far.join(near)
        near.receiver = receiver
        self._ends += (near, far)

        def accept() -> None:
            far.receiver = listener.accept(far)
            far.confirm(on_end)

        listener.process.call_later(self.latency_s(way), accept)

    def listen(self, process: Process, address: str, accept: Callable[[Connection], Receiver]) -> None:
        if address in self._listeners:
            raise RuntimeError(f"{address} is in use")
        self._listeners[address] = _Listener(process, accept)

    def close_listener(self, address: str) -> None:
        self._listeners.pop(address, None)

    def forget(self, end: _End) -> None:
        if not end.is_open and not end.peer.is_open:
            self._ends = [other for other in self._ends if other is not end and other is not end.peer]

    def _ends_between(self, one: str, other: str) -> list[_End]:
        names = {one, other}
        return [end for end in self._ends if {end.process.name, end.peer.process.name} == names]


class ProcessWire:
    """`Wire` of one process."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process

    def dial(self, address: str, receiver: Receiver, on_end: Callable[[Connection | str], None]) -> None:
        self._network.dial(self._process, address, receiver, on_end)

    def listen(self, address: str, accept: Callable[[Connection], Receiver]) -> None:
        self._network.listen(self._process, address, accept)

    def close_listener(self, address: str) -> None:
        self._network.close_listener(address)


class _Connected(NamedTuple):
    """The first thing the dialling end hears."""

    on_end: Callable[[Connection | str], None]


class _Broken(NamedTuple):
    """The last thing a peer hears."""

    reason: str


class _End:
    """One end of a connection: what it sends is delivered in order to its peer."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self.process = process
        self.peer: _End = self
        self._way: _Way = (process.name, process.name)
        self.receiver: Receiver | None = None
        self.is_open = True
        self._last_delivery_s = 0.0
        self._stalled: list[Frame | _Connected | _Broken] = []
        self._methods: dict[int, str] = {}
        self._started: set[int] = set()
        self._is_watching = False
        self._has_vanished = False

    def join(self, peer: _End) -> None:
        """Makes `peer` the other end."""
        self.peer = peer
        self._way = (self.process.name, peer.process.name)

    # Connection.

    def send(self, frame: Frame) -> None:
        if not self.is_open:
            return
        network, method = self._network, self._method_of(frame)
        source, target = self._way
        if network.tracer is not None:
            network.tracer(source, target, method, frame)
        meddled = None if network.meddler is None else network.meddler(source, target, method, frame)
        if meddled is None and method != HANDOFF_METHOD:
            self._transmit(frame)
        else:
            self._send_meddled(frame, method, meddled)

    def _send_meddled(self, frame: Frame, method: str, meddled: Meddled | None) -> None:
        """What something happens to, and what may come back."""
        network, delay_s = self._network, 0.0
        if method == HANDOFF_METHOD and isinstance(frame, Data):
            # What opens a stream comes first, and on no other.
            is_first = frame.call_id not in self._started
            self._started.add(frame.call_id)
            if meddled is not None and meddled.kind is Meddling.REPLAY and not is_first:
                old = network.recall(self._way, frame)
                if old is not None:
                    self._transmit(Data(frame.call_id, old))
            if not is_first:
                network.remember(self._way, frame)
            if meddled is not None and meddled.kind is Meddling.DUPLICATE:
                self._transmit(frame)
        if meddled is not None and meddled.kind is Meddling.BREAK:
            self.fail(_RESET)
            self._tell_peer(_RESET)
            return
        if meddled is not None and meddled.kind is Meddling.DELAY:
            delay_s = meddled.seconds
        self._transmit(frame, delay_s)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._tell_peer("the peer closed the connection")
            self._network.forget(self)

    # The network's side.

    def confirm(self, on_end: Callable[[Connection | str], None]) -> None:
        """Tells the dialling end that it is connected."""
        self._deliver_later(_Connected(on_end), 0.0)

    def fail(self, reason: str) -> None:
        """This end is told that the connection is broken."""
        if self.is_open:
            self.is_open = False
            self.process.call_soon(self._report, reason)
            self._network.forget(self)

    def vanish(self) -> None:
        """This end is gone without a word: its machine is."""
        self.is_open = False
        self._has_vanished = True
        self.peer.watch()

    def watch(self) -> None:
        """From now on the peer does not answer: a keepalive notices unless that ends before."""
        if self.is_open and not self._is_watching:
            self._is_watching = True
            self.process.call_later(self._network.keepalive_s(self.process), self._check_peer)

    def flush(self) -> None:
        stalled, self._stalled = self._stalled, []
        for item in stalled:
            self._deliver_later(item, 0.0)

    def _check_peer(self) -> None:
        self._is_watching = False
        is_gone = self.peer._has_vanished or self._network.is_unresponsive(self.process, self.peer.process)
        if self.is_open and is_gone:
            self.is_open = False
            self._report("keepalive watchdog timeout")
            self._tell_peer(_RESET)
            self._network.forget(self)

    def _method_of(self, frame: Frame) -> str:
        if isinstance(frame, OpenCall):
            self._methods[frame.call_id] = self.peer._methods[frame.call_id] = frame.method
            return frame.method
        return self._methods.get(frame.call_id, "")

    def _transmit(self, frame: Frame, delay_s: float = 0.0) -> None:
        network, peer = self._network, self.peer
        if self._way in network.blocked:
            self._stalled.append(frame)
            self.watch()
        elif peer._has_vanished:
            # A machine that was started again knows nothing of the connection and says so.
            if network.is_listening(peer.process.name):
                self.process.call_later(network.latency_s(self._way), self.fail, _RESET)
            else:
                self.watch()
        else:
            if peer.process.is_stopped:
                self.watch()
            self._deliver_later(frame, delay_s)

    def _tell_peer(self, reason: str) -> None:
        if self._way in self._network.blocked:
            self._stalled.append(_Broken(reason))
            self.peer.watch()
        else:
            self._deliver_later(_Broken(reason), 0.0)

    def _deliver_later(self, item: Frame | _Connected | _Broken, delay_s: float) -> None:
        peer = self.peer
        process = peer.process
        at_s = process.world.now_s + self._network.latency_s(self._way) + delay_s
        if at_s < self._last_delivery_s:
            at_s = self._last_delivery_s
        self._last_delivery_s = at_s
        process.call_at(at_s, peer.take, item)

    def take(self, item: Frame | _Connected | _Broken) -> None:
        if not self.is_open:
            return
        if isinstance(item, _Broken):
            self.is_open = False
            self._report(item.reason)
            self._network.forget(self)
        elif isinstance(item, _Connected):
            item.on_end(self)
        elif self.receiver is not None:
            self.receiver.on_frame(item)

    def _report(self, reason: str) -> None:
        if self.receiver is not None:
            self.receiver.on_broken(reason)

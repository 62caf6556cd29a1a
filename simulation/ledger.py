"""Who may write where: the grants of every decode node, watched from the scheduler's plans and events on one side and
the data plane's landings on the other.

It checks that a block is granted once at a time, that nobody else gets it while it is, that nothing lands in it
outside of its grant or from another node, that Done comes after the last byte, and that no request runs before Done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from cache_runtime.recipes.plan import CacheMemoryPlan
from cache_runtime.transfer.engine import Run
from scheduler_core import Capacity, DoneEvent, Event, Plan, QuiescedEvent
from simulation.findings import Journal
from simulation.kernel import Process
from simulation.plane import SimulatedPlane
from simulation.watched import SchedulerWatch

_CELL_BYTES = 16
_Span = tuple[int, int]


@dataclass(slots=True, eq=False)
class _Grant:
    number: int
    request_id: str
    spans: tuple[_Span, ...]
    missing: npt.NDArray[np.bool_]
    writer: Process | None = None


@dataclass(slots=True, eq=False)
class _Memory:
    """The arena of one incarnation of a decode node, in cells."""

    process: Process
    plan: CacheMemoryPlan
    base_address: int
    # The grant of each cell, and the last one before it.
    owner: npt.NDArray[np.int32]
    former: npt.NDArray[np.int32]
    # What became of grants that are over, by number.
    ends: dict[int, str] = field(default_factory=dict)
    grants: dict[str, _Grant] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    waiting: set[str] = field(default_factory=set)

    def former_grant(self, cell: int) -> str:
        """What is known of the last grant of a cell that has none now."""
        end = self.ends.get(int(self.former[cell]))
        return "" if end is None else f"; it belonged {end}"


class Ledger:
    """`WriteWatcher` of a world, and the checker of its decode nodes' grants."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._memories: dict[str, _Memory] = {}
        self._num_grants = 0

    def add_memory(self, endpoint: str, process: Process, plan: CacheMemoryPlan, base_address: int) -> None:
        """A decode node starts with an empty arena; `endpoint` is its data plane's."""
        owner = np.zeros(plan.num_arena_bytes // _CELL_BYTES, dtype=np.int32)
        self._memories[endpoint] = _Memory(process, plan, base_address, owner, owner.copy())

    def on_plan(self, endpoint: str, plan: Plan) -> None:
        memory = self._memories[endpoint]
        for group, blocks in enumerate(plan.zero_blocks):
            for begin, end in _spans(memory.plan, group, blocks.tolist()):
                if memory.owner[begin:end].any():
                    self._find_granted_twice(memory, begin, end)
        for remote in plan.remote_prefills:
            self._open(memory, remote.request_id, [blocks.tolist() for blocks in remote.block_ids])
        for request_id in plan.request_ids:
            if request_id in memory.grants:
                self._journal.find("early read", f"{memory.process.name} runs {request_id} before its Done")

    def on_events(self, endpoint: str, events: Sequence[Event]) -> None:
        memory = self._memories[endpoint]
        for event in events:
            if isinstance(event, DoneEvent):
                grant = memory.grants.get(event.request_id)
                if grant is not None and grant.missing.any():
                    num_bytes = int(grant.missing.sum()) * _CELL_BYTES
                    text = f"{memory.process.name} takes {event.request_id} for done with {num_bytes} bytes missing"
                    self._journal.find("early done", text)
            if isinstance(event, DoneEvent | QuiescedEvent):
                self._close(memory, event.request_id, "done" if isinstance(event, DoneEvent) else "quiet")

    def on_grant_sent(self, source: str, writer: Process, blocks: Iterable[tuple[str, int]]) -> None:
        """A grant message goes from the decode node `source` to `writer`; `blocks` are (group id, block id)."""
        memory = next((item for item in self._memories.values() if item.process.name == source), None)
        if memory is None or memory.process.is_dead:
            return
        groups = {spec.group_id: index for index, spec in enumerate(memory.plan.groups)}
        for group_id, block in blocks:
            for begin, end in _spans(memory.plan, groups[group_id], [block]):
                number = int(memory.owner[begin:end].max())
                for grant in memory.grants.values():
                    if grant.number == number:
                        grant.writer = writer
                return

    # WriteWatcher.

    def on_landed(self, source: SimulatedPlane, target: SimulatedPlane, run: Run) -> None:
        memory = self._memories.get(target.endpoint)
        if memory is None or not 0 <= run.target_address - memory.base_address < memory.plan.num_arena_bytes:
            return
        begin = (run.target_address - memory.base_address) // _CELL_BYTES
        end = begin + -(-run.length_bytes // _CELL_BYTES)
        owners = memory.owner[begin:end]
        number = int(owners[0])
        if number == 0 or (owners != number).any():
            where = f"{_blocks_at(memory.plan, begin)} of {target.process.name}"
            text = f"{source.process.name} writes into {where}, which is granted to nobody{memory.former_grant(begin)}"
            self._journal.find("stray write", text)
            return
        grant = next(grant for grant in memory.grants.values() if grant.number == number)
        if grant.writer is not None and grant.writer is not source.process:
            where = f"{_blocks_at(memory.plan, begin)} of {target.process.name}"
            text = f"{source.process.name} writes into {where}, granted to {grant.writer.name} for {grant.request_id}"
            self._journal.find("stray write", text)
        self._journal.note(
            source.process.name,
            lambda: f"=> {target.process.name} writes {_blocks_at(memory.plan, begin, end)} for {grant.request_id}",
        )
        grant.missing[begin:end] = False

    def on_damaged(self) -> None:
        self._journal.count("wrong bit")

    def _open(self, memory: _Memory, request_id: str, block_ids: Sequence[Sequence[int]]) -> None:
        self._num_grants += 1
        spans = tuple(span for group, blocks in enumerate(block_ids) for span in _spans(memory.plan, group, blocks))
        missing = np.zeros(len(memory.owner), dtype=np.bool_)
        for begin, end in spans:
            if memory.owner[begin:end].any():
                self._find_granted_twice(memory, begin, end)
            memory.owner[begin:end] = self._num_grants
            missing[begin:end] = True
        memory.grants[request_id] = _Grant(self._num_grants, request_id, spans, missing)

    def _close(self, memory: _Memory, request_id: str, why: str) -> None:
        grant = memory.grants.pop(request_id, None)
        if grant is not None:
            memory.ends[grant.number] = f"to {request_id} until {self._journal.now_s:.4f} s, when it was {why}"
            cells = memory.owner == grant.number
            memory.owner[cells], memory.former[cells] = 0, grant.number
            self._journal.note(memory.process.name, lambda: f"{request_id} is {why}: its grant is over")

    def _find_granted_twice(self, memory: _Memory, begin: int, end: int) -> None:
        number = int(memory.owner[begin:end].max())
        holder = next((grant.request_id for grant in memory.grants.values() if grant.number == number), "?")
        text = f"{memory.process.name} gives {_blocks_at(memory.plan, begin)} away while it is granted for {holder}"
        self._journal.find("granted twice", text)


class GrantWatch(SchedulerWatch):
    """Brings what the scheduler of one decode node decides and hears to the ledger."""

    def __init__(self, ledger: Ledger, endpoint: str) -> None:
        self._ledger = ledger
        self._endpoint = endpoint

    @override
    def on_plan(self, plan: Plan, capacity: Capacity) -> None:
        self._ledger.on_plan(self._endpoint, plan)

    @override
    def on_events(self, events: Sequence[Event]) -> None:
        self._ledger.on_events(self._endpoint, events)


def _spans(plan: CacheMemoryPlan, group: int, blocks: Iterable[int]) -> Iterator[_Span]:
    """[begin, end) of the cells of some blocks of one group, field by field."""
    for offset, stride, num_bytes in _fields_of(plan)[group]:
        for block in blocks:
            begin = (offset + block * stride) // _CELL_BYTES
            yield begin, begin + num_bytes // _CELL_BYTES


def _blocks_at(plan: CacheMemoryPlan, begin: int, end: int | None = None) -> str:
    """The blocks that cells [begin, end) belong to, as plans and grants name them; by default that of one cell."""
    last_byte = (begin + 1 if end is None else end) * _CELL_BYTES - 1
    found: list[tuple[int, int, str]] = []
    for spec, fields in zip(plan.groups, _fields_of(plan), strict=True):
        for offset, stride, num_bytes in fields:
            first, within = divmod(begin * _CELL_BYTES - offset, stride)
            if first >= 0 and within < num_bytes:
                found.append((first, (last_byte - offset) // stride, spec.group_id))
    # Fields lie one behind another, and only in its own a block has a number that small.
    first, last, group_id = min(found, default=(0, 0, "no group"))
    return f"block {first} of {group_id}" if last == first else f"blocks {first}-{last} of {group_id}"


@lru_cache(maxsize=64)
def _fields_of(plan: CacheMemoryPlan) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    return tuple(
        tuple(
            (item.offset_bytes, item.block_stride_bytes, item.block_bytes)
            for item in plan.fields
            if item.group_id == spec.group_id
        )
        for spec in plan.groups
    )

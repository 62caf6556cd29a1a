"""Who may write where: the grants of every decode node, watched from the scheduler's plans and events on one side and
the data plane's landings on the other.

It checks that a block is granted once at a time, that nobody else gets it while it is, that nothing lands in it
outside of its grant or from another node, that Done comes after the last byte on every tensor rank, and that no request
runs before Done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

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
    # Cells that nothing has landed in, by tensor rank.
    missing: tuple[set[int], ...]
    writer: Process | None = None


@dataclass(slots=True, eq=False)
class _Memory:
    """The arenas of one incarnation of a decode node, in cells. Its tensor ranks use theirs alike: a grant is of the
    same cells of all.
    """

    process: Process
    plan: CacheMemoryPlan
    base_addresses: tuple[int, ...]
    # By cell: the number of its grant, 0 for none, and of the last one before it.
    owner: list[int]
    former: list[int]
    # What became of grants that are over, by number.
    ends: dict[int, str] = field(default_factory=dict)
    grants: dict[str, _Grant] = field(default_factory=dict)
    by_number: dict[int, _Grant] = field(default_factory=dict)
    _spans: dict[tuple[int, int], tuple[_Span, ...]] = field(default_factory=dict)

    def former_grant(self, cell: int) -> str:
        """What is known of the last grant of a cell that has none now."""
        end = self.ends.get(self.former[cell])
        return "" if end is None else f"; it belonged {end}"

    def spans(self, group: int, block: int) -> tuple[_Span, ...]:
        """[begin, end) of the cells of a block, field by field."""
        spans = self._spans.get((group, block))
        if spans is None:
            group_id = self.plan.groups[group].group_id
            begins = (
                ((item.offset_bytes + block * item.block_stride_bytes) // _CELL_BYTES, item.block_bytes // _CELL_BYTES)
                for item in self.plan.fields
                if item.group_id == group_id
            )
            spans = self._spans[group, block] = tuple((begin, begin + num_cells) for begin, num_cells in begins)
        return spans

    def find(self, address: int) -> tuple[int, int] | None:
        """Rank and cell of an address, None for one outside of all arenas."""
        for rank, base_address in enumerate(self.base_addresses):
            cell = (address - base_address) // _CELL_BYTES
            if 0 <= cell < len(self.owner):
                return rank, cell
        return None


class Ledger:
    """`WriteWatcher` of a world, and the checker of its decode nodes' grants."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._memories: dict[str, _Memory] = {}
        self._num_grants = 0

    def add_memory(
        self, endpoint: str, process: Process, plan: CacheMemoryPlan, base_addresses: tuple[int, ...]
    ) -> None:
        """A decode node starts with empty arenas, one for each tensor rank; `endpoint` is its data plane's."""
        num_cells = plan.num_arena_bytes // _CELL_BYTES
        self._memories[endpoint] = _Memory(process, plan, base_addresses, [0] * num_cells, [0] * num_cells)

    def on_plan(self, endpoint: str, plan: Plan) -> None:
        memory = self._memories[endpoint]
        if memory.grants:
            for group, blocks in enumerate(plan.zero_blocks):
                for block in blocks.tolist():
                    self._check_free(memory, memory.spans(group, block))
        for remote in plan.remote_prefills:
            self._open(memory, remote.request_id, [blocks.tolist() for blocks in remote.block_ids])
        if memory.grants:
            for request_id in plan.request_ids:
                if request_id in memory.grants:
                    self._journal.find("early read", f"{memory.process.name} runs {request_id} before its Done")

    def on_events(self, endpoint: str, events: Sequence[Event]) -> None:
        memory = self._memories[endpoint]
        for event in events:
            if isinstance(event, DoneEvent):
                grant = memory.grants.get(event.request_id)
                num_missing = 0 if grant is None else sum(map(len, grant.missing))
                if num_missing:
                    text = (
                        f"{memory.process.name} takes {event.request_id} for done with {num_missing * _CELL_BYTES} "
                        "bytes missing"
                    )
                    self._journal.find("early done", text)
                self._close(memory, event.request_id, "done")
            elif isinstance(event, QuiescedEvent):
                self._close(memory, event.request_id, "quiet")

    def on_grant_sent(self, source: str, writer: Process, blocks: Iterable[tuple[str, int]]) -> None:
        """A grant message goes from the decode node `source` to `writer`; `blocks` are (group id, block id)."""
        memory = next((item for item in self._memories.values() if item.process.name == source), None)
        if memory is None or memory.process.is_dead:
            return
        groups = {spec.group_id: index for index, spec in enumerate(memory.plan.groups)}
        for group_id, block in blocks:
            for begin, end in memory.spans(groups[group_id], block):
                grant = memory.by_number.get(max(memory.owner[begin:end]))
                if grant is not None:
                    grant.writer = writer
                return

    # WriteWatcher.

    def on_landed(self, source: SimulatedPlane, target: SimulatedPlane, run: Run) -> None:
        memory = self._memories.get(target.endpoint)
        place = None if memory is None else memory.find(run.target_address)
        if memory is None or place is None:
            return
        rank, begin = place
        end = begin + -(-run.length_bytes // _CELL_BYTES)
        number = memory.owner[begin]
        if number == 0 or memory.owner[begin:end].count(number) != end - begin:
            where = f"{_blocks_at(memory.plan, begin)} of {target.process.name}"
            text = f"{source.process.name} writes into {where}, which is granted to nobody{memory.former_grant(begin)}"
            self._journal.find("stray write", text)
            return
        grant = memory.by_number[number]
        if grant.writer is not None and grant.writer is not source.process:
            where = f"{_blocks_at(memory.plan, begin)} of {target.process.name}"
            text = f"{source.process.name} writes into {where}, granted to {grant.writer.name} for {grant.request_id}"
            self._journal.find("stray write", text)
        self._journal.note(
            source.process.name,
            lambda: f"=> {target.process.name} writes {_blocks_at(memory.plan, begin, end)} for {grant.request_id}",
        )
        grant.missing[rank].difference_update(range(begin, end))

    def on_damaged(self) -> None:
        self._journal.count("wrong bit")

    def _open(self, memory: _Memory, request_id: str, block_ids: Sequence[Sequence[int]]) -> None:
        self._num_grants += 1
        number = self._num_grants
        spans = tuple(
            span for group, blocks in enumerate(block_ids) for block in blocks for span in memory.spans(group, block)
        )
        missing: set[int] = set()
        for begin, end in spans:
            self._check_free(memory, ((begin, end),))
            memory.owner[begin:end] = [number] * (end - begin)
            missing.update(range(begin, end))
        grant = _Grant(number, request_id, spans, tuple(set(missing) for _ in memory.base_addresses))
        memory.grants[request_id] = memory.by_number[number] = grant

    def _close(self, memory: _Memory, request_id: str, why: str) -> None:
        grant = memory.grants.pop(request_id, None)
        if grant is None:
            return
        number = grant.number
        del memory.by_number[number]
        memory.ends[number] = f"to {request_id} until {self._journal.now_s:.4f} s, when it was {why}"
        for begin, end in grant.spans:
            for cell in range(begin, end):
                # Somebody else may have been given it, which was found then.
                if memory.owner[cell] == number:
                    memory.owner[cell], memory.former[cell] = 0, number
        self._journal.note(memory.process.name, lambda: f"{request_id} is {why}: its grant is over")

    def _check_free(self, memory: _Memory, spans: Iterable[_Span]) -> None:
        for begin, end in spans:
            number = max(memory.owner[begin:end])
            if number:
                holder = memory.by_number.get(number)
                where = f"{memory.process.name} gives {_blocks_at(memory.plan, begin)} away"
                name = "?" if holder is None else holder.request_id
                self._journal.find("granted twice", f"{where} while it is granted for {name}")


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


def _blocks_at(plan: CacheMemoryPlan, begin: int, end: int | None = None) -> str:
    """The blocks that cells [begin, end) belong to, as plans and grants name them; by default that of one cell."""
    last_byte = (begin + 1 if end is None else end) * _CELL_BYTES - 1
    found: list[tuple[int, int, str]] = []
    for item in plan.fields:
        first, within = divmod(begin * _CELL_BYTES - item.offset_bytes, item.block_stride_bytes)
        if first >= 0 and within < item.block_bytes:
            found.append((first, (last_byte - item.offset_bytes) // item.block_stride_bytes, item.group_id))
    # Fields lie one behind another, and only in its own a block has a number that small.
    first, last, group_id = min(found, default=(0, 0, "no group"))
    return f"block {first} of {group_id}" if last == first else f"blocks {first}-{last} of {group_id}"

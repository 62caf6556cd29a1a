"""Pushes finished cache blocks to decode nodes, layer by layer while the prompt is being computed.

The sender rides on the engine thread: after each stage of a forward pass it posts the blocks that this chunk
completed in that stage, for every prompt that has a grant. A prompt that was computed, wholly or partly, before its
grant came is caught up when the grant arrives. One cursor per stage and group makes "exactly once" hold by
construction: what lies behind the cursor was posted, what lies ahead was not.

It sends for all tensor ranks of the node, whose arenas are in reach of this process: a stage has finished when every
rank has stored its rows, and one transfer carries what each of them has for each rank of the peer.

It knows no gRPC and no session states. Source rows are never modified after their stage has finished, and the
scheduler keeps the blocks until the handoff is over, so a posted write always reads what was computed.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from cache_runtime.transfer.lanes import LanePlanner, RankLane
from cache_runtime.transfer.planner import coalesce, plan_block_runs
from cache_runtime.transfer.runs import RunTable
from cache_runtime.transfer.schema import LogicalManifest, RankPlacement
from node_runtime.handoff.messages import Grant, GroupGrant
from prefill_node.checksums import ShippedBlocks, TransferChecksums
from prefill_node.outgoing import OutgoingTransfer

if TYPE_CHECKING:
    from scheduler_core import Plan

_log = logging.getLogger(__name__)

BlockTables: TypeAlias = Callable[[str], Sequence[npt.NDArray[np.int32]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupFields:
    """The fields of one group that become complete in one stage."""

    group_index: int
    group_id: str
    block_granularity: int
    field_ids: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class _Delivery:
    """Where the blocks of one prompt go, and how far each stage has got."""

    grants: tuple[GroupGrant, ...]  # in the scheduler's order of groups
    lanes: tuple[RankLane, ...]
    transfer: OutgoingTransfer
    checksums: TransferChecksums | None
    next_slots: list[list[int]]  # [stage][group]: first table slot that was not posted
    open_stages: set[int]  # not yet posted to the prompt's end


@dataclass(slots=True, kw_only=True)
class _Prompt:
    """One admitted prompt: how many of its tokens are in the arena, stage by stage."""

    request_id: str
    num_tokens: int
    num_computed_tokens: list[int]
    delivery: _Delivery | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Granted:
    request_id: str
    grant: Grant
    lanes: tuple[RankLane, ...]
    transfer: OutgoingTransfer
    checksums: TransferChecksums | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forgotten:
    request_id: str


@dataclass(frozen=True, slots=True)
class _ChunkRow:
    """One prefill row of the plan that is being executed."""

    prompt: _Prompt
    end_token: int


class PrefillSender:
    """StepHooks of the prefill role. `grant` and `forget` are safe from every thread; the rest is for the engine's."""

    def __init__(
        self, *, logical: LogicalManifest, sources: Sequence[RankPlacement], block_tables: BlockTables
    ) -> None:
        """
        Args:
            logical: Groups in the scheduler's order, fields and stages of this node's cache.
            sources: Placement of each rank's arena, with addresses of this process.
            block_tables: The scheduler's current block tables of a request, one array per group; those of all ranks.
        """
        self._lanes = LanePlanner(logical, sources)
        self._block_tables = block_tables
        self._group_ids = tuple(group.group_id for group in logical.groups)
        self._stages = tuple(_stage_fields(logical, stage.field_ids) for stage in logical.stages)
        self._prompts: dict[str, _Prompt] = {}
        self._rows: tuple[_ChunkRow, ...] = ()
        self._mail: deque[_Granted | _Forgotten] = deque()
        self._num_stages = 0

    @property
    def num_stages(self) -> int:
        """Stages computed so far, of all prompts: stands still when the engine does. Readable from every thread."""
        return self._num_stages

    def grant(
        self,
        request_id: str,
        grant: Grant,
        targets: Sequence[RankPlacement],
        transfer: OutgoingTransfer,
        checksums: TransferChecksums | None = None,
    ) -> None:
        """Opens the way for a prompt's blocks to all ranks of a peer, each in its arena at the same block ids.

        Takes effect at the next stage, or the next `poll` of an idle engine.
        """
        lanes = self._lanes.lanes_to(targets)
        self._mail.append(
            _Granted(request_id=request_id, grant=grant, lanes=lanes, transfer=transfer, checksums=checksums)
        )

    def forget(self, request_id: str) -> None:
        """Drops what is known about a prompt whose handoff is over. Stopping its transfer is the caller's business."""
        self._mail.append(_Forgotten(request_id=request_id))

    def on_admitted(self, plan: Plan) -> None:
        request_ids = list(plan.request_ids[: plan.num_prefill_rows])
        begins = plan.begins[: plan.num_prefill_rows].tolist()
        lengths = plan.input_lengths[: plan.num_prefill_rows].tolist()
        prompt_lengths = plan.prefill_lengths[: plan.num_prefill_rows].tolist()
        rows = []
        for request_id, begin, length, num_tokens in zip(request_ids, begins, lengths, prompt_lengths, strict=True):
            prompt = self._prompts.get(request_id)
            if prompt is None:
                # The tokens before the first chunk are a prefix hit: their rows are complete in every stage.
                prompt = _Prompt(
                    request_id=request_id, num_tokens=num_tokens, num_computed_tokens=[begin] * len(self._stages)
                )
                self._prompts[request_id] = prompt
            rows.append(_ChunkRow(prompt, begin + length))
        self._rows = tuple(rows)
        self.poll()

    def on_stage(self, stage: int, plan: Plan) -> None:
        del plan  # its rows were read once, in on_admitted
        self._num_stages += 1
        for row in self._rows:
            row.prompt.num_computed_tokens[stage] = row.end_token
        self.poll()
        for row in self._rows:
            self._push(row.prompt, (stage,))

    def poll(self) -> None:
        """Carries out what other threads asked for."""
        while self._mail:
            mail = self._mail.popleft()
            if isinstance(mail, _Forgotten):
                self._prompts.pop(mail.request_id, None)
            else:
                self._open_delivery(mail)

    def _open_delivery(self, mail: _Granted) -> None:
        prompt = self._prompts.get(mail.request_id)
        if prompt is None or prompt.delivery is not None:
            return
        by_id = {group.group_id: group for group in mail.grant.groups}
        grants = tuple(by_id[group_id] for group_id in self._group_ids)
        prompt.delivery = _Delivery(
            grants=grants,
            lanes=mail.lanes,
            transfer=mail.transfer,
            checksums=mail.checksums,
            next_slots=[[group.first_slot for group in grants] for _ in self._stages],
            open_stages=set(range(len(self._stages))),
        )
        # With checksums stage by stage, so that what has landed is compared while the rest is on its way.
        stages = range(len(self._stages))
        for some in [stages] if mail.checksums is None else [(stage,) for stage in stages]:
            self._push(prompt, some)

    def _push(self, prompt: _Prompt, stages: Sequence[int]) -> None:
        """Posts what `stages` have completed and not yet posted. A fault ends this delivery and no other."""
        delivery = prompt.delivery
        if delivery is None or not delivery.open_stages:
            return
        shipped: list[ShippedBlocks] = []
        try:
            runs = self._take_runs(prompt, delivery, stages, shipped)
        except Exception as error:
            _log.exception("the blocks of %s cannot be sent", prompt.request_id)
            delivery.open_stages.clear()
            delivery.transfer.fail(error)
            return
        if runs:
            hashed = None if delivery.checksums is None else delivery.checksums.posting(shipped)
            delivery.transfer.post(runs, hashed)
        if not delivery.open_stages:
            delivery.transfer.complete()
            if delivery.checksums is not None:
                delivery.checksums.complete()

    def _take_runs(
        self, prompt: _Prompt, delivery: _Delivery, stages: Sequence[int], shipped: list[ShippedBlocks]
    ) -> RunTable:
        """The runs, and into `shipped` which blocks they move."""
        runs: list[RunTable] = []
        tables: Sequence[npt.NDArray[np.int32]] | None = None
        for stage in delivery.open_stages.intersection(stages):
            num_tokens = prompt.num_computed_tokens[stage]
            is_whole = num_tokens == prompt.num_tokens
            for fields in self._stages[stage]:
                begin_slot = delivery.next_slots[stage][fields.group_index]
                end_slot = _num_sendable_slots(num_tokens, fields.block_granularity, is_whole)
                if end_slot <= begin_slot:
                    continue
                tables = self._block_tables(prompt.request_id) if tables is None else tables
                delivery.next_slots[stage][fields.group_index] = end_slot
                blocks = tables[fields.group_index][begin_slot:end_slot].tolist()
                shipped.append(ShippedBlocks(field_ids=fields.field_ids, first_slot=begin_slot, blocks=tuple(blocks)))
                runs.append(self._plan(delivery, fields, tables[fields.group_index], begin_slot, end_slot))
            if is_whole:
                delivery.open_stages.remove(stage)
        return coalesce(RunTable.joined(runs))

    def _plan(
        self, delivery: _Delivery, fields: _GroupFields, table: npt.NDArray[np.int32], begin_slot: int, end_slot: int
    ) -> RunTable:
        granted = delivery.grants[fields.group_index]
        targets = granted.block_ids[begin_slot - granted.first_slot : end_slot - granted.first_slot]
        return RunTable.joined(
            [
                plan_block_runs(
                    lane.source,
                    lane.target,
                    fields.field_ids,
                    table[begin_slot:end_slot],
                    targets,
                    group_id=fields.group_id,
                    strips=lane.strips,
                )
                for lane in delivery.lanes
            ]
        )


def _num_sendable_slots(num_tokens: int, block_granularity: int, is_whole: bool) -> int:
    """Slots whose rows will not change any more: complete blocks, and the partial one of a finished prompt."""
    return -(-num_tokens // block_granularity) if is_whole else num_tokens // block_granularity


def _stage_fields(logical: LogicalManifest, field_ids: Sequence[str]) -> tuple[_GroupFields, ...]:
    group_of = {item.field_id: item.group_id for item in logical.fields}
    return tuple(
        _GroupFields(
            group_index=index,
            group_id=group.group_id,
            block_granularity=group.block_granularity,
            field_ids=members,
        )
        for index, group in enumerate(logical.groups)
        if (members := tuple(field_id for field_id in field_ids if group_of[field_id] == group.group_id))
    )

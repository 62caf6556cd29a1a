"""How the rows of a plan are laid out in its columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reference_model.requests import Request
from reference_model.values import GroupKind, Plan, SchedulerShape


@dataclass(slots=True)
class Row:
    """Inputs at [begin, begin + num_tokens), the first `num_replay_tokens` of which are fed once more. A decode row
    begins behind one token for each of the `num_results_out` before it; it may turn out to begin later."""

    request: Request
    begin: int
    num_tokens: int
    num_results_out: int
    is_prefill: bool
    num_replay_tokens: int = 0

    @property
    def end(self) -> int:
        return self.begin + self.num_tokens


def lay_out(shape: SchedulerShape, plan: Plan, prefill_rows: Sequence[Row], decode_rows: Sequence[Row]) -> None:
    """Prefill rows, then decode rows. Tables are padded with -1 to the longest of the plan, group by group."""
    rows = [*prefill_rows, *decode_rows]
    plan.num_rows, plan.num_prefill_rows = len(rows), len(prefill_rows)
    for row in rows:
        plan.request_ids.append(row.request.request_id)
        plan.request_slots.append(row.request.slot)
        plan.input_lengths.append(row.num_tokens)
        plan.replay_lengths.append(row.num_replay_tokens)
        plan.begins.append(row.begin)
        plan.num_results_out.append(row.num_results_out)
        plan.prefill_lengths.append(row.request.num_prompt_tokens if row.is_prefill else 0)
        plan.logits_wanted.append(int(not row.is_prefill or row.end == row.request.num_prompt_tokens))
        plan.checkpoint_tokens.append(checkpoint_inside(shape, row))
        landed = row.request.tokens[row.begin : row.end]
        plan.token_ids += landed + [-1] * (row.num_tokens - len(landed))
    for position, group in enumerate(shape.groups):
        is_state = group.kind is GroupKind.STATE
        plan.state_input_slots.append([slot_of(row.begin, group.block_granularity) for row in rows if is_state])
        plan.state_output_slots.append([slot_of(row.end, group.block_granularity) for row in rows if is_state])
        tables = [row.request.tables[position].block_ids() for row in rows]
        width = max(map(len, tables), default=0)
        plan.block_tables.append([table + [-1] * (width - len(table)) for table in tables])


def slot_of(num_tokens: int, block_granularity: int) -> int:
    """Of the state after that many tokens. -1: before the first one there is none."""
    return (num_tokens - 1) // block_granularity if num_tokens else -1


def checkpoint_inside(shape: SchedulerShape, row: Row) -> int:
    """A grain boundary at the end of a chunk needs no snapshot of its own: the final state is one."""
    boundary = row.end // shape.prefix_granularity * shape.prefix_granularity
    return boundary if shape.has_state and row.is_prefill and row.begin < boundary < row.end else 0

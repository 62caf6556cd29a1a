"""What blocks hold, so that nothing is read that was not written for it.

A row of tokens is stood for by the tokens up to it, a state by the tokens that it sums up. A block that is acquired
anew holds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from reference_model.group_policies import GroupPolicy, State
from reference_model.groups import Entry
from reference_model.layout import Row, checkpoint_inside
from reference_model.pool import Block, Table
from reference_model.requests import Request
from reference_model.values import SchedulerShape


def compute(shape: SchedulerShape, policies: Sequence[GroupPolicy], chunks: Sequence[Row]) -> None:
    """Writes what the chunks of a plan write, and each must find what it reads. A state may be left where it was."""
    parts = [(row, *pair) for row in chunks for pair in zip(policies, row.request.tables, strict=True)]
    for row, policy, table in parts:
        if isinstance(policy, State):
            require_readable(policy, table, row.request, row.begin)
    for row, policy, table in parts:
        if isinstance(policy, State):
            write_state(policy, table, row.request, checkpoint_inside(shape, row))
            write_state(policy, table, row.request, row.end)
        else:
            first_new = row.begin + (row.num_replay_tokens if policy.is_cached else 0)
            write(policy, table, row.request, range(first_new, row.end))
    for row, policy, table in parts:
        if not isinstance(policy, State):
            require_readable(policy, table, row.request, row.begin + row.num_replay_tokens)


def land_prompt(policies: Sequence[GroupPolicy], request: Request) -> None:
    """A peer has written what it was granted, and the next token finds all it reads."""
    num_tokens = request.num_prompt_tokens
    for policy, table in zip(policies, request.tables, strict=True):
        if isinstance(policy, State):
            write_state(policy, table, request, num_tokens)
        else:
            num_before = max(policy.num_hit_slots(request.num_hit_tokens), policy.num_expired_slots(num_tokens))
            write(policy, table, request, range(num_before * policy.block_granularity, num_tokens))
        require_readable(policy, table, request, num_tokens)


def land_step(policies: Sequence[GroupPolicy], request: Request, num_landed_tokens: int) -> None:
    """A decode row has fed the token that was the last, and of its drafts one less than have landed were right. Where
    it began shows only now, and so does what it read."""
    end = len(request.tokens) - 1
    begin = end - num_landed_tokens
    for policy, table in zip(policies, request.tables, strict=True):
        require_readable(policy, table, request, begin)
        if isinstance(policy, State):
            write_state(policy, table, request, end)
        else:
            write(policy, table, request, range(begin, end))


def write(policy: GroupPolicy, table: Table, request: Request, positions: range) -> None:
    for position in positions:
        block_at(policy, table, position).content[position] = tuple(request.tokens[: position + 1])


def write_state(policy: GroupPolicy, table: Table, request: Request, num_tokens: int) -> None:
    if num_tokens:
        block_at(policy, table, num_tokens - 1).content = {num_tokens - 1: tuple(request.tokens[:num_tokens])}


def block_at(policy: GroupPolicy, table: Table, position: int) -> Block:
    block = table.slots[position // policy.block_granularity]
    assert block is not None, f"{table.owner} lacks the block of {position}"
    return block


def require_readable(policy: GroupPolicy, table: Table, request: Request, begin: int) -> None:
    """A query at `begin` sees a window, a full history or the state of all before it."""
    seen = range(begin) if policy.is_closed else range(max(0, begin - policy.window_tokens + 1), begin)
    for position in seen:
        content = block_at(policy, table, position).content.get(position)
        assert content == tuple(request.tokens[: position + 1]), f"{request.request_id} cannot read {position}"


def require_written(policy: GroupPolicy, entry: Entry) -> None:
    """Whoever hits the entry finds what its prefix says, and of a state the one on the grain boundary."""
    first = entry.end_token - (1 if isinstance(policy, State) else policy.block_granularity)
    for position in range(first, entry.end_token):
        assert entry.block.content.get(position) == entry.prefix.tokens[: position + 1], "a hole was published"

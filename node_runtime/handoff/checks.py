"""What each side demands of the other's messages before it acts on them: nothing a peer says is trusted.

Pure functions of the message and of facts both nodes agreed on at bootstrap. They raise InvalidRequest that names field
and limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from node_runtime.errors import InvalidRequest
from node_runtime.handoff.messages import Done, Grant, GroupGrant, Ready, Start
from node_runtime.request_rules import check_lengths, check_token_ids, check_tokens_in_vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantedGroup:
    """What bounds a grant in one group: tokens per slot, and the peer's number of blocks, block 0 included."""

    group_id: str
    block_granularity: int
    num_peer_blocks: int


def check_start(start: Start, *, vocab_size: int, context_tokens: int) -> None:
    """Refuses a prompt that leaves no place in the model's context or holds tokens outside the vocabulary."""
    check_token_ids(start.token_ids, vocab_size)
    # This node samples one token.
    check_lengths(len(start.token_ids), 1, context_tokens)


def check_ready(ready: Ready, *, num_prompt_tokens: int) -> None:
    """Refuses more cached tokens than a prompt can have: its last token is always computed."""
    if ready.cached_tokens >= num_prompt_tokens:
        raise InvalidRequest(f"cached_tokens: {ready.cached_tokens} given, less than {num_prompt_tokens} required")


def check_done(done: Done, *, vocab_size: int, num_granted_blocks: int) -> None:
    """Refuses a first token outside [0, vocab_size), and a transfer of other than the granted blocks."""
    if done.transferred_blocks != num_granted_blocks:
        raise InvalidRequest(
            f"transferred_blocks: {done.transferred_blocks} given, {num_granted_blocks} blocks were granted"
        )
    check_tokens_in_vocabulary((done.first_token.token_id,), vocab_size, field="first_token")


def check_grant(
    grant: Grant, *, num_prompt_tokens: int, prefix_granularity: int, groups: Mapping[str, GrantedGroup]
) -> None:
    """Refuses a grant that does not cover exactly the missing part of the prompt with blocks the peer really has."""
    if grant.from_token >= num_prompt_tokens or grant.from_token % prefix_granularity:
        raise InvalidRequest(
            f"from_token: {grant.from_token} given, a multiple of {prefix_granularity} below {num_prompt_tokens} "
            "required"
        )
    given = [group.group_id for group in grant.groups]
    if sorted(given) != sorted(groups):
        raise InvalidRequest(f"groups: {sorted(given)} given, {sorted(groups)} required")
    for group in grant.groups:
        _check_group(group, groups[group.group_id], grant.from_token, num_prompt_tokens)


def _check_group(group: GroupGrant, limits: GrantedGroup, from_token: int, num_prompt_tokens: int) -> None:
    name = f'group "{group.group_id}"'
    first_slot = from_token // limits.block_granularity
    end_slot = -(-num_prompt_tokens // limits.block_granularity)
    if group.first_slot != first_slot or group.end_slot != end_slot:
        raise InvalidRequest(
            f"{name} slots: [{group.first_slot}, {group.end_slot}) given, [{first_slot}, {end_slot}) required"
        )
    for block_id in group.block_ids:
        if not 1 <= block_id < limits.num_peer_blocks:
            raise InvalidRequest(f"{name} block_ids: {block_id} is outside [1, {limits.num_peer_blocks})")
    if len(set(group.block_ids)) != len(group.block_ids):
        raise InvalidRequest(f"{name} block_ids: a block is granted twice")

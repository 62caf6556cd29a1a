"""What each side demands of the other's messages before it acts on them: nothing a peer says is trusted.

Pure functions of the message and of facts both nodes agreed on at bootstrap. They raise InvalidRequest that names field
and limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cache_runtime.recipes.spec import CacheFamily
from cache_runtime.transfer.schema import GroupSchema
from node_runtime.errors import InvalidRequest
from node_runtime.handoff.messages import XXH3, Done, Grant, GroupGrant, Ready, Start
from node_runtime.request_rules import (
    check_lengths,
    check_logit_bias,
    check_num_prompt_logprobs,
    check_token_ids,
    check_tokens_in_vocabulary,
)

_STATE_WINDOW_TOKENS = 2
# So that a lease survives a Beat that comes late.
MIN_BEATS_PER_LEASE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantedGroup:
    """What bounds a grant in one group: tokens per slot, and the peer's number of blocks, block 0 included.

    `window_tokens` is what the group still keeps behind a computed prompt, None for all of it. `is_replayable`: a
    prefix hit leaves out nothing, because the group is not cached.
    """

    group_id: str
    block_granularity: int
    num_peer_blocks: int
    window_tokens: int | None = None
    is_replayable: bool = False

    @classmethod
    def of(cls, group: GroupSchema, num_peer_blocks: int) -> GrantedGroup:
        # A state continues from the snapshot after the last token, which is kept like a window of two tokens.
        is_state = group.family is CacheFamily.STATE
        return cls(
            group_id=group.group_id,
            block_granularity=group.block_granularity,
            num_peer_blocks=num_peer_blocks,
            window_tokens=_STATE_WINDOW_TOKENS if is_state else group.sliding_window_tokens,
            is_replayable=group.replayable,
        )

    def slots(self, from_token: int, num_prompt_tokens: int) -> tuple[int, int]:
        """[first, end) of the slots that a grant from `from_token` must name: neither hit nor expired."""
        num_hit = 0 if self.is_replayable else from_token // self.block_granularity
        num_expired_tokens = 0 if self.window_tokens is None else num_prompt_tokens - self.window_tokens + 1
        first_slot = max(num_hit, num_expired_tokens // self.block_granularity)
        return first_slot, -(-num_prompt_tokens // self.block_granularity)


def check_start(start: Start, *, vocab_size: int, context_tokens: int) -> None:
    """Refuses a prompt that leaves no place in the model's context or holds tokens outside the vocabulary."""
    check_token_ids(start.token_ids, vocab_size)
    check_logit_bias(dict(start.sampling.logit_bias), vocab_size)
    check_num_prompt_logprobs(start.sampling.num_prompt_logprobs, len(start.token_ids))
    # This node samples one token.
    check_lengths(len(start.token_ids), 1, context_tokens)


def check_ready(ready: Ready, start: Start) -> None:
    """Refuses more cached tokens than a prompt can have, whose last token is always computed, too rare Beats, and
    checksums of a kind that was not offered.
    """
    if ready.beat_interval_ms * MIN_BEATS_PER_LEASE > start.lease_ms:
        raise InvalidRequest(
            f"beat_interval_ms: {ready.beat_interval_ms} given, at most {start.lease_ms // MIN_BEATS_PER_LEASE} "
            f"allowed with lease_ms={start.lease_ms}"
        )
    num_prompt_tokens = len(start.token_ids)
    if ready.cached_tokens >= num_prompt_tokens:
        raise InvalidRequest(f"cached_tokens: {ready.cached_tokens} given, less than {num_prompt_tokens} required")
    offered = (*start.checksum_kinds, XXH3)
    if ready.checksum_kind not in offered:
        raise InvalidRequest(f'checksum_kind: "{ready.checksum_kind}" given, offered were {", ".join(offered)}')


def check_lease(grant: Grant, start: Start) -> None:
    """Refuses a grant whose lease is not the one that Start announced."""
    if grant.lease_ms != start.lease_ms:
        raise InvalidRequest(f"lease_ms: {grant.lease_ms} given, Start announced {start.lease_ms}")


def check_done(done: Done, start: Start, *, vocab_size: int, num_granted_blocks: int) -> None:
    """Refuses a first token outside [0, vocab_size), a transfer of other than the granted blocks, and log-probabilities
    of another prompt.
    """
    if done.transferred_blocks != num_granted_blocks:
        raise InvalidRequest(
            f"transferred_blocks: {done.transferred_blocks} given, {num_granted_blocks} blocks were granted"
        )
    check_tokens_in_vocabulary((done.first_token.token_id,), vocab_size, field="first_token")
    is_wanted = start.sampling.num_prompt_logprobs is not None
    given = tuple(token.token_id for token in done.prompt_logprobs)
    # A prefill node of an older release knows none.
    if given and (not is_wanted or given != start.token_ids[1:]):
        raise InvalidRequest(f"prompt_logprobs: of {len(given)} tokens that are not the prompt's")


def check_checksum_parts(done: Done, *, num_received: int) -> None:
    """Refuses fewer parts than came before: what was told of them would not be waited for."""
    if done.num_checksum_parts < num_received:
        raise InvalidRequest(f"num_checksum_parts: {done.num_checksum_parts} given, {num_received} came")


def check_grant(
    grant: Grant, *, num_prompt_tokens: int, prefix_granularity: int, groups: Mapping[str, GrantedGroup]
) -> None:
    """Refuses a grant that does not cover exactly the missing part of the prompt with blocks the peer really has.

    Of a group whose blocks expire that is the part that is still kept once the prompt is computed.
    """
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
    first_slot, end_slot = limits.slots(from_token, num_prompt_tokens)
    if group.first_slot != first_slot or group.end_slot != end_slot:
        raise InvalidRequest(
            f"{name} slots: [{group.first_slot}, {group.end_slot}) given, [{first_slot}, {end_slot}) required"
        )
    for block_id in group.block_ids:
        if not 1 <= block_id < limits.num_peer_blocks:
            raise InvalidRequest(f"{name} block_ids: {block_id} is outside [1, {limits.num_peer_blocks})")
    if len(set(group.block_ids)) != len(group.block_ids):
        raise InvalidRequest(f"{name} block_ids: a block is granted twice")

"""What one kind of cache group does differently from another. Everything else is common to all groups.

Slots are absolute: slot i of a group covers tokens [i * block_granularity, (i + 1) * block_granularity) for ever.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum

from reference_model.values import GroupKind, GroupShape, Role, SchedulerShape


class Boundary(IntEnum):
    """Why a grain boundary was computed up to; the higher, the likelier it is hit."""

    CHUNK = 0  # a chunk or a decode step happened to reach it
    ENDPOINT = 1  # the last one of a prompt
    PROMOTED = 2  # the prompt was stopped there because others share it up to there


class Tier(IntEnum):
    """Which blocks of one epoch go first."""

    PROBATIONARY = 0
    ESTABLISHED = 1
    CLOSED_PREFIX = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The tokens [begin, end) of a prompt, computed here or filled by a peer, of a request that never gets longer than
    `num_limit_tokens`. `num_secured_tokens`: full groups hold room for as many. `step_tokens`: room behind the prompt
    that a first decode row needs. `replay_tokens` before `begin` are fed once more."""

    begin: int
    end: int
    num_prompt_tokens: int
    num_secured_tokens: int
    num_limit_tokens: int
    step_tokens: int
    is_local: bool
    replay_tokens: int

    @property
    def is_last(self) -> bool:
        return self.end == self.num_prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The tokens [begin, end), whole grains, that are published now. `boundary`: what kind `end` is of. A state was
    computed into a block of the table at `checkpoint`, 0 for nowhere."""

    begin: int
    end: int
    boundary: Boundary
    checkpoint: int


class GroupPolicy(ABC):
    """Of a group whose blocks expire (an open group), until a subclass says otherwise."""

    is_closed = False  # a hit needs every block before it, and nothing expires
    is_cached = True  # matched and published

    def __init__(self, shape: SchedulerShape, group: GroupShape) -> None:
        self.shape = shape
        self.block_granularity = group.block_granularity
        self.window_tokens = group.window_tokens

    # What is kept.

    def blocks_for(self, num_tokens: int) -> int:
        return -(-max(0, num_tokens) // self.block_granularity)

    def blocks_at_worst(self, num_tokens: int) -> int:
        """That many tokens in a row touch at most, wherever they begin."""
        return self.blocks_for(num_tokens + self.block_granularity - 1)

    def step_tokens(self) -> int:
        """Behind the last token: what a decode row feeds, and what the rows planned ahead of it feed."""
        return self.shape.verify_width + self.shape.overlap_tokens

    def num_expired_slots(self, num_computed_tokens: int) -> int:
        """A slot has expired when the next token, at position `num_computed_tokens`, and all behind it see none of its
        tokens: they see `window_tokens`, their own included."""
        return max(0, num_computed_tokens - self.window_tokens + 1) // self.block_granularity

    # What is cached.

    def slots_behind(self, end_slot: int) -> range:
        """The slots that must be cached for a request to go on at `end_slot`."""
        num_seen_tokens = self.window_tokens - 1
        return range(max(0, end_slot - self.blocks_for(num_seen_tokens)), end_slot)

    def num_hit_slots(self, hit_tokens: int) -> int:
        """That a hit fills, be it with holes."""
        return hit_tokens // self.block_granularity

    @abstractmethod
    def slots_to_publish(self, completed: Completed) -> range:
        """Those that are worth an entry; holes among them have none."""

    def eviction_place(self, boundary: Boundary, was_hit: bool, end_token: int) -> tuple[Tier, int]:
        """(tier, position) among blocks of one epoch, smallest first. `end_token`: where the block ends. Of chance
        boundaries that nobody hit the longest frontier stays; else what others depend on goes after them."""
        if boundary is Boundary.CHUNK and not was_hit:
            return Tier.PROBATIONARY, end_token
        return Tier.ESTABLISHED, -end_token

    # What is acquired.

    @abstractmethod
    def first_slot(self, span: Span) -> int:
        """The first that an admission for `span` fills. What lies before stays as it is, or becomes holes."""

    @abstractmethod
    def reserve_tokens(self, span: Span) -> int:
        """Held behind the end of `span`, for what comes after it."""

    @abstractmethod
    def held_at_most(self, num_prompt_tokens: int, num_limit_tokens: int, *, is_local: bool) -> int:
        """Blocks that a request holds at one time, up to its first decode step."""

    @abstractmethod
    def held_while_decoding(self) -> int:
        """The same from then on."""


class FullHistory(GroupPolicy):
    is_closed = True

    def num_expired_slots(self, num_computed_tokens: int) -> int:
        return 0

    def slots_behind(self, end_slot: int) -> range:
        return range(end_slot)

    def slots_to_publish(self, completed: Completed) -> range:
        return range(completed.begin // self.block_granularity, completed.end // self.block_granularity)

    def eviction_place(self, boundary: Boundary, was_hit: bool, end_token: int) -> tuple[Tier, int]:
        return Tier.CLOSED_PREFIX, -end_token

    def first_slot(self, span: Span) -> int:
        return self.num_hit_slots(span.begin)

    def reserve_tokens(self, span: Span) -> int:
        return span.num_secured_tokens - span.end

    def held_at_most(self, num_prompt_tokens: int, num_limit_tokens: int, *, is_local: bool) -> int:
        return self.blocks_for(num_limit_tokens + self.shape.overlap_tokens)

    def held_while_decoding(self) -> int:
        raise NotImplementedError("nothing is promised to a full group: it is reserved in the table")


class SlidingWindow(GroupPolicy):
    def slots_to_publish(self, completed: Completed) -> range:
        """What continuing from the newest boundary reads, whichever chunk computed it."""
        return self.slots_behind(completed.end // self.block_granularity)

    def first_slot(self, span: Span) -> int:
        """A peer sends only what the first token behind the prompt sees."""
        if span.is_local:
            return self.num_hit_slots(span.begin)
        return self.num_expired_slots(span.num_prompt_tokens)

    def reserve_tokens(self, span: Span) -> int:
        return span.step_tokens if span.is_last else 0

    def held_at_most(self, num_prompt_tokens: int, num_limit_tokens: int, *, is_local: bool) -> int:
        """What the first token of a chunk sees, the longest chunk and a step behind it. A peer's landing: what was
        claimed, apart from it what the first token behind the prompt sees, and a step."""
        num_seen, num_step = self.window_tokens - 1, self.step_tokens()
        if is_local:
            num_chunk = min(self.shape.token_budget, num_prompt_tokens)
            num_blocks = self.blocks_at_worst(num_seen + num_chunk + num_step)
        else:
            num_blocks = self.blocks_for(num_seen) + self.blocks_at_worst(num_seen + num_step)
        return min(self.blocks_for(num_limit_tokens + self.shape.overlap_tokens), num_blocks)

    def held_while_decoding(self) -> int:
        return self.blocks_at_worst(self.window_tokens - 1 + self.step_tokens())


class Replayable(SlidingWindow):
    """A window that is computed again behind a hit instead of being cached. Its blocks are nobody else's."""

    is_cached = False

    def slots_behind(self, end_slot: int) -> range:
        return range(end_slot, end_slot)

    def num_hit_slots(self, hit_tokens: int) -> int:
        return 0

    def slots_to_publish(self, completed: Completed) -> range:
        return range(0)

    def first_slot(self, span: Span) -> int:
        if span.is_local:
            return (span.begin - span.replay_tokens) // self.block_granularity
        return self.num_expired_slots(span.num_prompt_tokens)


class State(GroupPolicy):
    """Snapshots: of everything up to a token, in the slot of that token. The next token continues from the newest one,
    so the group keeps and matches like a window of two tokens."""

    def __init__(self, shape: SchedulerShape, group: GroupShape) -> None:
        super().__init__(shape, group)
        self.window_tokens = 2

    def slot_of(self, num_tokens: int) -> int:
        return (num_tokens - 1) // self.block_granularity

    def slots_to_publish(self, completed: Completed) -> range:
        """A snapshot that was recorded in what is published now, if it is worth it: the last boundary of its prompt or
        one that others share. Owning a slot is no proof that a state was computed into it."""
        is_recorded = completed.begin < completed.checkpoint <= completed.end
        if completed.boundary is Boundary.CHUNK or not is_recorded:
            return range(0)
        slot = self.slot_of(completed.checkpoint)
        return range(slot, slot + 1)

    def first_slot(self, span: Span) -> int:
        """Of a chunk: where it leaves a snapshot on the last grain boundary it passes, else its final state, which is
        all that a peer sends."""
        boundary = span.end // self.shape.prefix_granularity * self.shape.prefix_granularity
        return self.slot_of(boundary if span.is_local and boundary > span.begin else span.end)

    def reserve_tokens(self, span: Span) -> int:
        return self.reserve_behind_prompt() if span.is_last else 0

    def reserve_behind_prompt(self) -> int:
        """So that the first step over a block boundary finds its block. The prefill role makes no such step."""
        if self.shape.role is Role.PREFILL:
            return 0
        return max(self.block_granularity, self.step_tokens())

    def held_at_most(self, num_prompt_tokens: int, num_limit_tokens: int, *, is_local: bool) -> int:
        """The state that a chunk continues from, and what it writes. A peer's landing continues from none."""
        grain = self.shape.prefix_granularity
        num_blocks = self.written_at_most(tail_tokens=0)
        if is_local:
            num_hit = int(self.shape.enable_prefix_cache)
            num_blocks = num_hit + self.written_at_most(self.longest_tail(num_prompt_tokens - grain))
            if num_prompt_tokens > grain:
                num_second = 1 + self.written_at_most(self.longest_tail(num_prompt_tokens - 2 * grain))
                num_blocks = max(num_blocks, num_second)
        num_end_tokens = num_limit_tokens + self.shape.overlap_tokens
        num_last_tokens = max(num_end_tokens, num_prompt_tokens + self.reserve_behind_prompt())
        return min(self.blocks_for(num_last_tokens), num_blocks)

    def written_at_most(self, tail_tokens: int) -> int:
        """A snapshot on a grain boundary, the slots of the tail behind it, and the reserve."""
        return 1 + self.blocks_for(tail_tokens + self.reserve_behind_prompt())

    def longest_tail(self, num_tokens_left: int) -> int:
        """Behind the last grain boundary of a chunk: short of a grain, within the budget beside one grain, and within
        what the prompt has left behind the grains that lie before."""
        grain = self.shape.prefix_granularity
        return max(0, min(grain - 1, self.shape.token_budget - grain, num_tokens_left))

    def held_while_decoding(self) -> int:
        return self.written_at_most(tail_tokens=0)


def policy_of(shape: SchedulerShape, group: GroupShape) -> GroupPolicy:
    match group.kind:
        case GroupKind.FULL:
            return FullHistory(shape, group)
        case GroupKind.SLIDING:
            return Replayable(shape, group) if group.is_replayable else SlidingWindow(shape, group)
        case GroupKind.STATE:
            return State(shape, group)

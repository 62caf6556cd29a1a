"""What the model is told and what it tells: plain values, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    FUSED = "fused"


class EventKind(Enum):
    RESULT = "result"
    FINISH = "finish"
    ABORT = "abort"
    READY = "ready"
    GRANTED = "granted"
    DONE = "done"
    HANDED_OVER = "handed_over"
    FAILED = "failed"
    QUIESCED = "quiesced"
    RESERVE = "reserve"
    RETRACT = "retract"


class GroupKind(Enum):
    FULL = "full"
    SLIDING = "sliding"
    STATE = "state"


class Eviction(Enum):
    LRU = "lru"
    AGED_FREQUENCY = "aged_frequency"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """One cache group. `block_granularity`: tokens per table slot. `window_tokens`: of a sliding group."""

    group_id: str
    kind: GroupKind = GroupKind.FULL
    block_granularity: int
    cache_blocks_per_lcm_block: int
    window_tokens: int = 0
    is_replayable: bool = False
    shard_count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerShape:
    """The configuration, in the words of the native one."""

    role: Role
    prefix_granularity: int
    num_lcm_blocks: int
    max_batch_size: int
    token_budget: int
    groups: tuple[GroupShape, ...]
    enable_prefix_cache: bool = True
    max_ready_ungranted: int = 64
    verify_width: int = 1
    overlap_depth: int = 0
    eviction: Eviction = Eviction.LRU
    num_host_lcm_blocks: int = 0
    enable_storage: bool = False

    @property
    def readmits_first(self) -> bool:
        """A retracted request whose return is cheap, or that a peer cannot prefill again, comes before new ones."""
        return self.role is Role.DECODE or (self.role is Role.FUSED and self.num_host_lcm_blocks > 0)

    @property
    def overlap_tokens(self) -> int:
        """What rows planned ahead of results may feed behind the last token. The prefill role plans no such row."""
        return 0 if self.role is Role.PREFILL else self.overlap_depth * self.verify_width

    @property
    def has_state(self) -> bool:
        return any(group.kind is GroupKind.STATE for group in self.groups)

    @property
    def replay_window_tokens(self) -> int:
        """Tokens before a hit that are fed again: the largest window of a replayable group."""
        return max((group.window_tokens for group in self.groups if group.is_replayable), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    request_id: str
    tokens: tuple[int, ...]
    max_new_tokens: int | None  # None: undeclared
    extra_keys: tuple[bytes, ...] = ()
    local_prefill: bool = False


@dataclass(frozen=True, slots=True)
class Event:
    """`tokens`: those of a result, or the one of done. Of a reservation the number of tokens alone."""

    kind: EventKind
    request_id: str
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StoreDone:
    """`created`: keys (see `groups.py`) that storage did not have before."""

    operation_id: int
    created: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadDone:
    """Without success the rows of the load's plan were not run; `missed`: keys that storage did not have."""

    operation_id: int
    is_success: bool = True
    missed: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class Copy:
    group: int
    source: int
    destination: int
    key: object


@dataclass(frozen=True, slots=True)
class StoreOperation:
    operation_id: int
    is_pinned: bool
    copies: list[Copy]


@dataclass(frozen=True, slots=True)
class LoadOperation:
    operation_id: int
    copies: list[Copy]
    reads_storage: list[int]


@dataclass(frozen=True, slots=True)
class RemotePrefill:
    request_id: str
    from_token: int
    first_slots: list[int]
    block_ids: list[list[int]]


@dataclass(frozen=True, slots=True)
class Handover:
    request_id: str
    token: int


@dataclass(frozen=True, slots=True)
class Admission:
    request_id: str
    device_hit_tokens: int
    host_hit_tokens: int = 0
    storage_hit_tokens: int = 0


@dataclass(slots=True)
class Plan:
    """The fields of a native plan, arrays as lists. `block_tables`: per group a list of rows of one length."""

    num_rows: int = 0
    num_prefill_rows: int = 0
    request_ids: list[str] = field(default_factory=list)
    request_slots: list[int] = field(default_factory=list)
    input_lengths: list[int] = field(default_factory=list)
    replay_lengths: list[int] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    num_results_out: list[int] = field(default_factory=list)
    prefill_lengths: list[int] = field(default_factory=list)
    logits_wanted: list[int] = field(default_factory=list)
    checkpoint_tokens: list[int] = field(default_factory=list)
    state_input_slots: list[list[int]] = field(default_factory=list)
    state_output_slots: list[list[int]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    block_tables: list[list[list[int]]] = field(default_factory=list)
    stores: list[StoreOperation] = field(default_factory=list)
    zero_blocks: list[list[int]] = field(default_factory=list)
    loads: list[LoadOperation] = field(default_factory=list)
    remote_prefills: list[RemotePrefill] = field(default_factory=list)
    handovers: list[Handover] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    retracted: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    num_stalled_plans: int = 0
    is_empty: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """What a group has of the parents of the device."""

    lcm_blocks: int
    cached_lcm_blocks: int
    taken_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """Each parent is in exactly one of the four counts behind the total."""

    total_lcm_blocks: int
    empty_lcm_blocks: int
    active_lcm_blocks: int
    cached_lcm_blocks: int
    quarantined_lcm_blocks: int
    num_waiting: int
    num_running: int
    num_live_requests: int
    groups: list[Occupancy]
    total_host_lcm_blocks: int
    empty_host_lcm_blocks: int
    active_host_lcm_blocks: int
    cached_host_lcm_blocks: int

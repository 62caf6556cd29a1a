# Written by nanobind's stubgen; checked by a test.
# ruff: noqa
# fmt: off
"""
The native scheduler: decides what a node computes next. Pure; not thread-safe.
"""

from collections.abc import Sequence
import enum
from typing import Annotated, overload

import numpy
from numpy.typing import NDArray


class ConfigError(ValueError):
    pass

class SubmitError(ValueError):
    pass

class ContractError(RuntimeError):
    pass

class Role(enum.Enum):
    """What a scheduler does in the mesh."""

    PREFILL = 0
    """computes prompts and hands their blocks over"""

    DECODE = 1
    """has prompts filled by a peer and generates"""

    FUSED = 2
    """does both in one place"""

class Family(enum.Enum):
    """What the blocks of a group hold."""

    HISTORY = 0
    """rows of tokens"""

    STATE = 1
    """one state snapshot each"""

class Retention(enum.Enum):
    """Which blocks of a group a request keeps."""

    FULL_HISTORY = 0

    SLIDING_WINDOW = 1

class EvictionPolicy(enum.Enum):
    """Which cached blocks go first."""

    LRU = 0
    """least recently used"""

    AGED_FREQUENCY = 1
    """
    least frequently used, with dynamic aging and a memory of evicted prefixes
    """

class CacheGroupConfig:
    """One attention structure of the model."""

    def __init__(self, *, group_id: str, family: Family, retention: Retention, block_granularity: int, cache_blocks_per_lcm_block: int = 1, sliding_window_tokens: int | None = None, replayable: bool = False, shard_count: int = 1) -> None: ...

    @property
    def group_id(self) -> str: ...

    @property
    def family(self) -> Family: ...

    @property
    def retention(self) -> Retention: ...

    @property
    def block_granularity(self) -> int: ...

    @property
    def cache_blocks_per_lcm_block(self) -> int: ...

    @property
    def sliding_window_tokens(self) -> int | None: ...

    @property
    def replayable(self) -> bool: ...

    @property
    def shard_count(self) -> int: ...

class SchedulerConfig:
    """Everything a scheduler is built from."""

    def __init__(self, *, role: Role, prefix_granularity: int, num_lcm_blocks: int, max_batch_size: int, token_budget: int, cache_groups: Sequence[CacheGroupConfig], enable_prefix_cache: bool = True, max_ready_ungranted: int = 64, verify_width: int = 1, overlap_depth: int = 0, eviction_policy: EvictionPolicy = EvictionPolicy.LRU, enable_prefix_events: bool = False, num_host_lcm_blocks: int = 0, enable_storage: bool = False) -> None: ...

    def validate(self) -> None:
        """
        Raises ConfigError naming the field, its value and the limit, and the group if there is one.
        """

    def validate_sizing(self) -> None:
        """The part of validate() that needs no count of blocks."""

    @property
    def role(self) -> Role: ...

    @property
    def prefix_granularity(self) -> int: ...

    @property
    def num_lcm_blocks(self) -> int: ...

    @property
    def max_batch_size(self) -> int: ...

    @property
    def token_budget(self) -> int: ...

    @property
    def cache_groups(self) -> list[CacheGroupConfig]: ...

    @property
    def enable_prefix_cache(self) -> bool: ...

    @property
    def max_ready_ungranted(self) -> int: ...

    @property
    def verify_width(self) -> int: ...

    @property
    def overlap_depth(self) -> int: ...

    @property
    def eviction_policy(self) -> EvictionPolicy: ...

    @property
    def enable_prefix_events(self) -> bool: ...

    @property
    def num_host_lcm_blocks(self) -> int: ...

    @property
    def enable_storage(self) -> bool: ...

class CapacityModel:
    """
    How much storage requests need, from the configuration alone: what a pool is sized by before it exists, and what the scheduler then accepts and reserves. num_lcm_blocks may be 0 for sizing. IndexError: no such group; ValueError: a negative number.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        """
        Raises ConfigError for what validate() refuses, counts of blocks apart.
        """

    def blocks(self, group: int, num_tokens: int) -> int:
        """
        Blocks of a group that one request of num_tokens holds at most at one time.
        """

    def lcm_blocks(self, num_tokens: int) -> int:
        """Parents that such a request occupies at most when it is alone."""

    def concurrent_blocks(self, *, group: int, num_requests: int, num_tokens: int, context_tokens: int) -> int:
        """
        Blocks of a group that num_requests of up to context_tokens each hold at most, num_tokens in all.
        """

    def lcm_blocks_for_concurrency(self, *, num_requests: int, num_tokens: int, context_tokens: int) -> int:
        """Parents that all groups together need for that."""

    @property
    def max_request_tokens(self) -> int:
        """Largest request that fits the configured number of parents alone."""

class ResultEvent:
    """
    The result of a scheduled row: no token for a chunk before the last, one for the last, up to verify_width for a decode row.
    """

    def __init__(self, request_id: str, tokens: Sequence[int]) -> None: ...

    @property
    def request_id(self) -> str: ...

    @property
    def tokens(self) -> list[int]: ...

class DoneEvent:
    """
    Decode role: every granted block has landed; the token is the first of the completion.
    """

    def __init__(self, request_id: str, token: int) -> None: ...

    @property
    def request_id(self) -> str: ...

    @property
    def token(self) -> int: ...

class ReserveEvent:
    """
    The room, in tokens, that the next decode step of a request makes in groups that keep everything, once and in place of what it would take by itself; never less than its row needs. The last one counts.
    """

    def __init__(self, request_id: str, num_tokens: int) -> None: ...

    @property
    def request_id(self) -> str: ...

    @property
    def num_tokens(self) -> int: ...

class FinishEvent:
    """The runtime found the end of the completion."""

    def __init__(self, request_id: str) -> None: ...

    @property
    def request_id(self) -> str: ...

class AbortEvent:
    """The request is given up; legal in every state."""

    def __init__(self, request_id: str) -> None: ...

    @property
    def request_id(self) -> str: ...

class ReadyEvent:
    """Decode role: the prefill node has started on the prompt."""

    def __init__(self, request_id: str) -> None: ...

    @property
    def request_id(self) -> str: ...

class GrantedEvent:
    """Prefill role: the peer has said where the blocks go."""

    def __init__(self, request_id: str) -> None: ...

    @property
    def request_id(self) -> str: ...

class HandedOverEvent:
    """Prefill role: the peer has everything."""

    def __init__(self, request_id: str) -> None: ...

    @property
    def request_id(self) -> str: ...

class FailedEvent:
    """The handoff broke."""

    def __init__(self, request_id: str) -> None: ...

    @property
    def request_id(self) -> str: ...

class QuiescedEvent:
    """
    Nothing is being written or read for the request any more, and nothing will be.
    """

    def __init__(self, request_id: str) -> None: ...

    @property
    def request_id(self) -> str: ...

class RetractEvent:
    """
    Decode and fused roles: what the request's rows computed is given up; it starts over with the tokens that have landed. No result of a row planned before may be reported after it.
    """

    def __init__(self, request_id: str) -> None: ...

    @property
    def request_id(self) -> str: ...

class StorageKey:
    """What a block holds, whatever tier it lies on."""

    def __init__(self, *, group: int, digest: bytes, grain_offset: int) -> None: ...

    @property
    def group(self) -> int: ...

    @property
    def digest(self) -> bytes:
        """32 bytes: the grain the block lies in"""

    @property
    def grain_offset(self) -> int:
        """which of the grain's blocks it is"""

    def __eq__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class StoreOperation:
    """Blocks to copy from the device to the host."""

    @property
    def operation_id(self) -> int:
        """rises, never used again"""

    @property
    def copies(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None, 3), order='C', writable=False)]:
        """
        int32[num_copies, 3]: group, source block id, destination block id; group by group
        """

    @property
    def keys(self) -> list[StorageKey]:
        """per copy: what the blocks hold"""

    @property
    def is_pinned(self) -> bool:
        """
        nobody writes to the sources before StoreDoneEvent; if not, the plan itself may grant them to others and the copies go before everything else
        """

class LoadOperation:
    """Blocks to copy from the host to the device."""

    @property
    def operation_id(self) -> int:
        """rises, never used again"""

    @property
    def copies(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None, 3), order='C', writable=False)]:
        """
        int32[num_copies, 3]: group, source block id, destination block id; group by group
        """

    @property
    def keys(self) -> list[StorageKey]:
        """per copy: what the blocks hold"""

    @property
    def reads_storage(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', writable=False)]:
        """uint8[num_copies], 1 where the source is read from storage first"""

class StoreDoneEvent:
    """
    The copies of a store are done and, with storage, backed up; created are the keys that storage did not have before.
    """

    def __init__(self, operation_id: int, created: Sequence[StorageKey] = []) -> None: ...

    @property
    def operation_id(self) -> int: ...

    @property
    def created(self) -> list[StorageKey]: ...

class LoadDoneEvent:
    """
    The copies of a load are done. Without success nothing of it was copied and the rows of its plan were not run: reported before the next plan is asked for and behind the results of earlier plans; missed are the keys that storage did not have.
    """

    def __init__(self, operation_id: int, success: bool = True, missed: Sequence[StorageKey] = []) -> None: ...

    @property
    def operation_id(self) -> int: ...

    @property
    def success(self) -> bool: ...

    @property
    def missed(self) -> list[StorageKey]: ...

class RemotePrefill:
    """Decode role: a grant to send; a peer fills these blocks."""

    @property
    def request_id(self) -> str: ...

    @property
    def from_token(self) -> int:
        """the prompt before it is cached here already"""

    @property
    def first_slots(self) -> list[int]:
        """per group: slot of the first granted block"""

    @property
    def block_ids(self) -> list[Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', writable=False)]]:
        """per group: int32[n], granted blocks up to the prompt's end"""

class Handover:
    """Prefill role: a prompt is computed and its first token landed."""

    @property
    def request_id(self) -> str: ...

    @property
    def token(self) -> int: ...

class Admission:
    """
    An admission of a prompt, that of a retracted request included: where it was found.
    """

    @property
    def request_id(self) -> str: ...

    @property
    def device_hit_tokens(self) -> int: ...

    @property
    def host_hit_tokens(self) -> int: ...

    @property
    def storage_hit_tokens(self) -> int: ...

class Plan:
    """
    What to carry out next, in this order: stores that are not pinned, zero blocks, loads, send remote prefills and handovers, run the rows; pinned stores beside all of it. Arrays are read-only views that keep the plan alive.
    """

    @property
    def num_rows(self) -> int:
        """prefill rows, then decode rows"""

    @property
    def num_prefill_rows(self) -> int: ...

    @property
    def request_ids(self) -> list[str]:
        """per row"""

    @property
    def request_slots(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', writable=False)]:
        """int32[num_rows], from 1"""

    @property
    def input_lengths(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', writable=False)]:
        """int32[num_rows], tokens"""

    @property
    def begins(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', writable=False)]:
        """
        int32[num_rows], position of the row's first input token; of a decode row planned while results are out the earliest, one token counted for each of them
        """

    @property
    def num_results_out(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', writable=False)]:
        """
        int32[num_rows], results of the request that were out when the row was planned
        """

    @property
    def replay_lengths(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', writable=False)]:
        """
        int32[num_rows], inputs at the row's begin whose rows only replayable groups write; the others have them
        """

    @property
    def prefill_lengths(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', writable=False)]:
        """int32[num_rows], whole prompt length, 0 on decode rows"""

    @property
    def logits_wanted(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', writable=False)]:
        """uint8[num_rows], 1 on the last chunk of a prompt and on decode rows"""

    @property
    def checkpoint_tokens(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', writable=False)]:
        """
        int32[num_rows], position inside the row up to which a state is computed as well, 0 for none; its slot is (checkpoint_tokens - 1) // block_granularity
        """

    @property
    def state_input_slots(self) -> list[Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', writable=False)]]:
        """
        per group: int32[num_rows], the table slot whose state a row continues from, -1 for none; empty for history groups
        """

    @property
    def state_output_slots(self) -> list[Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', writable=False)]]:
        """
        per group: int32[num_rows], the table slot a row leaves its final state in; empty for history groups
        """

    @property
    def token_ids(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', writable=False)]:
        """
        int32[sum(input_lengths)], inputs of all rows in row order, -1 for a draft and for a token that has not landed
        """

    @property
    def block_tables(self) -> list[Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', writable=False)]]:
        """per group: int32[num_rows, max_slots], 0 = hole, -1 = padding"""

    @property
    def zero_blocks(self) -> list[Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', writable=False)]]:
        """per group: int32[n], fresh blocks to zero before anything below"""

    @property
    def stores(self) -> list[StoreOperation]:
        """those that are not pinned first"""

    @property
    def loads(self) -> list[LoadOperation]:
        """at most one"""

    @property
    def remote_prefills(self) -> list[RemotePrefill]: ...

    @property
    def handovers(self) -> list[Handover]: ...

    @property
    def admissions(self) -> list[Admission]: ...

    @property
    def retracted(self) -> list[str]:
        """gave their blocks back for others; they come back by themselves"""

    @property
    def finished(self) -> list[str]:
        """requests that ended since the last plan, however they ended"""

    @property
    def num_stalled_plans(self) -> int:
        """
        plans in a row without anything in them while requests live and nobody owes an answer; told at 1024 and at each doubling, else 0
        """

    @property
    def is_empty(self) -> bool: ...

class PrefixStored:
    """
    A grain of a prompt is in the device cache, for every group that is matched.
    """

    @property
    def hash(self) -> int:
        """
        64-bit FNV-1a over, little-endian: u8 1 if there is a parent, else 0; u64 parent hash if there is one; u64 number of tokens; i32 per token
        """

    @property
    def parent_hash(self) -> int | None:
        """None for the first grain of a prompt"""

    @property
    def tokens(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', writable=False)]:
        """int32[prefix_granularity], of this grain alone"""

    @property
    def prefix_granularity(self) -> int: ...

class PrefixRemoved:
    """A stored grain is not whole in the device cache any more."""

    @property
    def hash(self) -> int: ...

class PrefixCleared:
    """The cache was cleared; all that was stored before is gone."""

class PrefixKeyChanges:
    """How the set of keys of cached prefixes changed; applied in this order."""

    @property
    def is_cleared(self) -> bool:
        """All that was stored before is gone."""

    @property
    def removed(self) -> list[int]: ...

    @property
    def stored(self) -> list[int]:
        """Of one prompt its front first."""

    def __bool__(self) -> bool: ...

class RequestSpec:
    """What a caller submits."""

    @overload
    def __init__(self, *, request_id: str, tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], max_new_tokens: int | None = None, extra_keys: Sequence[bytes] = [], local_prefill: bool = False) -> None: ...

    @overload
    def __init__(self, *, request_id: str, tokens: Sequence[int], max_new_tokens: int | None = None, extra_keys: Sequence[bytes] = [], local_prefill: bool = False) -> None: ...

    @property
    def request_id(self) -> str: ...

    @property
    def tokens(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', writable=False)]: ...

    @property
    def max_new_tokens(self) -> int | None:
        """None: undeclared"""

    @property
    def extra_keys(self) -> list[bytes]: ...

    @property
    def local_prefill(self) -> bool: ...

class GroupOccupancy:
    """
    What one group has of the parents of the device; an empty parent belongs to no group.
    """

    @property
    def lcm_blocks(self) -> int: ...

    @property
    def cached_lcm_blocks(self) -> int:
        """held by the prefix cache alone"""

    @property
    def taken_blocks(self) -> int:
        """cache blocks that somebody holds"""

class Capacity:
    """
    Gauges. Each parent is in exactly one of the four block counts of its tier; 0 without a host tier.
    """

    @property
    def total_lcm_blocks(self) -> int: ...

    @property
    def empty_lcm_blocks(self) -> int: ...

    @property
    def active_lcm_blocks(self) -> int: ...

    @property
    def cached_lcm_blocks(self) -> int: ...

    @property
    def quarantined_lcm_blocks(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_live_requests(self) -> int: ...

    @property
    def groups(self) -> list[GroupOccupancy]:
        """in the order of the configuration"""

    @property
    def total_host_lcm_blocks(self) -> int: ...

    @property
    def empty_host_lcm_blocks(self) -> int: ...

    @property
    def active_host_lcm_blocks(self) -> int:
        """a transfer reads or writes there"""

    @property
    def cached_host_lcm_blocks(self) -> int: ...

@overload
def hash_grains(tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], prefix_granularity: int, extra_keys: Sequence[bytes] = []) -> list[bytes]:
    """
    The chained SHA-256 digests of the full grains of a prompt: 32 raw bytes each.
    """

@overload
def hash_grains(tokens: Sequence[int], prefix_granularity: int, extra_keys: Sequence[bytes] = []) -> list[bytes]: ...

def prefix_keys(tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], prefix_granularity: int, extra_keys: Sequence[bytes] = []) -> list[int]:
    """
    The keys of the full grains of a prompt, as Scheduler.drain_prefix_keys tells them: 64-bit numbers.
    """

class Scheduler:
    """submit -> next_plan -> advance(events) -> next_plan ..."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Raises ConfigError."""

    def submit(self, requests: Sequence[RequestSpec]) -> None:
        """
        Raises SubmitError naming the request and the limit; then none of the batch is accepted.
        """

    def advance(self, events: Sequence[ResultEvent | FinishEvent | AbortEvent | ReadyEvent | GrantedEvent | DoneEvent | HandedOverEvent | FailedEvent | QuiescedEvent | ReserveEvent | RetractEvent | StoreDoneEvent | LoadDoneEvent]) -> None:
        """
        Applies events in order; those of requests that are not live change nothing. Raises ContractError when one breaks the agreement; then none of the batch is applied.
        """

    def next_plan(self) -> Plan: ...

    def block_tables(self, request_id: str) -> list[Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', writable=False)]]:
        """
        Per group int32[slots], 0 = hole; empty when the request holds no block. Raises ContractError for a request that is not live.
        """

    def capacity(self) -> Capacity: ...

    def find_cached_tokens(self, tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], extra_keys: Sequence[bytes] = []) -> int:
        """
        How much of a prompt a local prefill would find in the cache now; changes nothing and promises nothing.
        """

    @property
    def max_request_tokens(self) -> int:
        """
        Bound of one request: prompt + completion; prompt + verify_width on the prefill role.
        """

    def can_clear(self) -> bool:
        """
        Whether a clear would succeed: no request lives and no transfer is under way.
        """

    def clear_device_cache(self) -> bool:
        """
        Empties the prefix cache of the device; what the host has can be hit as before. False, with nothing changed, if can_clear is.
        """

    def clear_cache(self) -> bool:
        """
        Empties the prefix cache on both tiers and forgets what storage has. False, with nothing changed, if can_clear is.
        """

    def storage_queries(self) -> list[StorageKey]:
        """
        With storage: what it may be asked for before the next plan, of one prompt its front first. The answer promises nothing.
        """

    def register_storage_keys(self, keys: Sequence[StorageKey]) -> None:
        """
        Storage has these keys, of one prompt its front first. Raises ContractError for a key that no block can have.
        """

    def unregister_storage_keys(self, keys: Sequence[StorageKey]) -> None:
        """Storage does not have them. Raises ContractError likewise."""

    def track_prefix_events(self, *, with_extra_keys: bool) -> None:
        """
        Announces cached prefixes from now on, as enable_prefix_events does from the beginning, on request without those of prompts with extra keys, which others never find. Raises ContractError once a request was submitted.
        """

    def drain_prefix_events(self) -> list[PrefixStored | PrefixRemoved | PrefixCleared]:
        """
        How the set of cached prefixes changed since the last call: apply in order. Empty unless they are announced.
        """

    def track_prefix_keys(self) -> None:
        """
        Keeps track of the keys of cached prefixes from now on. Idempotent. Raises ContractError once a request was submitted.
        """

    def drain_prefix_keys(self) -> PrefixKeyChanges:
        """
        How the set of keys of cached prefixes changed since the last call. Empty unless they are tracked.
        """

    def describe(self) -> str:
        """A stable, line-oriented dump for people and transcripts."""

"""Drives the native scheduler and its reference model together, and compares everything that can be seen of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache

from reference_model import (
    BrokenContract,
    Event,
    EventKind,
    Eviction,
    Gauges,
    GroupKind,
    GroupShape,
    Key,
    LoadDone,
    Plan,
    ReferenceScheduler,
    RefusedSubmission,
    Role,
    SchedulerShape,
    StoreDone,
    Submission,
    require_sound,
)
from reference_model.scheduler import AnyEvent
from reference_model.values import Admission, Handover, LoadOperation, Occupancy, RemotePrefill, StoreOperation

import scheduler_core as sc

from .builders import scheduler_config
from .prefix_router import Router, hashes_of

ROLES = {Role.PREFILL: sc.Role.PREFILL, Role.DECODE: sc.Role.DECODE, Role.FUSED: sc.Role.FUSED}
EVICTIONS = {Eviction.LRU: sc.EvictionPolicy.LRU, Eviction.AGED_FREQUENCY: sc.EvictionPolicy.AGED_FREQUENCY}
PLAIN_EVENTS: dict[EventKind, Callable[[str], sc.Event]] = {
    EventKind.FINISH: sc.FinishEvent,
    EventKind.ABORT: sc.AbortEvent,
    EventKind.READY: sc.ReadyEvent,
    EventKind.GRANTED: sc.GrantedEvent,
    EventKind.HANDED_OVER: sc.HandedOverEvent,
    EventKind.FAILED: sc.FailedEvent,
    EventKind.QUIESCED: sc.QuiescedEvent,
    EventKind.RETRACT: sc.RetractEvent,
}


class Divergence(AssertionError):
    """Core and model disagree."""


@dataclass(slots=True)
class SideBySide:
    shape: SchedulerShape
    make_model: Callable[[SchedulerShape], ReferenceScheduler] = ReferenceScheduler
    native: sc.Scheduler = field(init=False)
    model: ReferenceScheduler = field(init=False)
    router: Router = field(default_factory=Router)
    num_comparisons: int = 0

    def __post_init__(self) -> None:
        self.native = sc.Scheduler(native_config(self.shape))
        self.model = self.make_model(self.shape)
        require_equal("max_request_tokens", self.native.max_request_tokens, self.model.max_request_tokens())
        self.compare()

    def submit(self, submissions: Sequence[Submission]) -> None:
        specs = [native_spec(submission) for submission in submissions]
        try:
            self.model.submit(submissions)
        except RefusedSubmission as refusal:
            require_refused(sc.SubmitError, refusal.words, lambda: self.native.submit(specs))
        else:
            require_accepted(sc.SubmitError, lambda: self.native.submit(specs))
        self.compare()

    def advance(self, events: Sequence[AnyEvent]) -> None:
        native_events = [self.native_event(event) for event in events]
        try:
            self.model.advance(events)
        except BrokenContract as broken:
            require_refused(sc.ContractError, broken.words, lambda: self.native.advance(native_events))
        else:
            require_accepted(sc.ContractError, lambda: self.native.advance(native_events))
        self.compare()

    def plan(self) -> Plan:
        plan = self.model.next_plan()
        native = self.native.next_plan()
        for each in fields(Plan):
            require_equal(f"plan.{each.name}", listed(getattr(native, each.name)), self.told(getattr(plan, each.name)))
        for group, table in enumerate(native.block_tables):
            width = max(map(len, plan.block_tables[group]), default=0)
            require_equal(f"shape of table {group}", table.shape, (plan.num_rows, width))
        self.compare()
        return plan

    def told(self, value: object) -> object:
        """Transfers as (operation, flags, copies, keys), the rest as it is."""
        match value:
            case [StoreOperation(), *_] | [LoadOperation(), *_]:
                return [self.told(each) for each in value]
            case StoreOperation() | LoadOperation():
                flags = value.is_pinned if isinstance(value, StoreOperation) else value.reads_storage
                copies = [[copy.group, copy.source, copy.destination] for copy in value.copies]
                return value.operation_id, flags, copies, [self.native_key(copy.key) for copy in value.copies]
            case _:
                return value

    def native_key(self, key: object) -> sc.StorageKey:
        assert isinstance(key, Key)
        digest = last_digest_of(key.prefix.tokens, self.shape.prefix_granularity, key.prefix.extra_keys)
        return sc.StorageKey(group=key.group, digest=digest, grain_offset=key.offset)

    def native_event(self, event: AnyEvent) -> sc.Event | sc.StoreDoneEvent | sc.LoadDoneEvent:
        match event:
            case StoreDone():
                return sc.StoreDoneEvent(event.operation_id, [self.native_key(key) for key in event.created])
            case LoadDone():
                missed = [self.native_key(key) for key in event.missed]
                return sc.LoadDoneEvent(event.operation_id, event.is_success, missed)
            case _:
                return native_event(event)

    def storage_queries(self) -> list[sc.StorageKey]:
        """Which prompts are likely to start next the core tells; of each all is asked for that neither tier has."""
        asked = self.native.storage_queries()
        require_equal("storage queries, once each", len(set(asked)), len(asked))
        by_request = [set(map(self.native_key, keys)) for keys in self.model.storage_queries()]
        expected = {key for keys in by_request if keys.issubset(asked) for key in keys}
        require_equal("storage queries", set(asked), expected)
        return asked

    def register_storage_keys(self, keys: Sequence[Key]) -> None:
        self.model.register_storage_keys(keys)
        self.native.register_storage_keys([self.native_key(key) for key in keys])
        self.compare()

    def unregister_storage_keys(self, keys: Sequence[Key]) -> None:
        self.model.unregister_storage_keys(keys)
        self.native.unregister_storage_keys([self.native_key(key) for key in keys])
        self.compare()

    def clear_device_cache(self) -> bool:
        is_clear = self.model.clear_device_cache()
        require_equal("clear_device_cache", self.native.clear_device_cache(), is_clear)
        self.compare()
        return is_clear

    def clear_cache(self) -> bool:
        is_clear = self.model.clear_cache()
        require_equal("clear_cache", self.native.clear_cache(), is_clear)
        self.compare()
        return is_clear

    def compare(self) -> None:
        require_sound(self.model.books)
        capacity, gauges = self.native.capacity(), self.model.gauges()
        require_equal("describe", self.native.describe(), self.model.describe(gauges))
        for each in fields(Gauges):
            require_equal(f"capacity.{each.name}", listed(getattr(capacity, each.name)), getattr(gauges, each.name))
        require_equal("can_clear", self.native.can_clear(), self.model.can_clear())
        for request in self.model.books.requests:
            tables = [table.tolist() for table in self.native.block_tables(request.request_id)]
            expected = self.model.block_tables(request.request_id)
            require_equal(f"tables of {request.request_id}", tables, expected)
        self.num_comparisons += 1
        has_events = self.shape.enable_prefix_cache  # without it a snapshot is published, and not told
        if has_events and self.num_comparisons % 3 == 0:  # so that changes between two drains have to cancel
            self.compare_announced_prefixes()

    def compare_announced_prefixes(self) -> None:
        self.router.drain(self.native)
        require_equal("announced prefixes", set(self.router.stored), resident_hashes(self.model))


def resident_hashes(model: ReferenceScheduler) -> set[int]:
    """Of the grains of which every group has all blocks that a hit at their end reads."""
    prefix_granularity = model.books.coordinator.prefix_granularity
    groups = model.books.coordinator.groups
    found = {(group.position, entry.prefix, entry.offset) for group in groups for entry in group.entries}
    resident = set()
    for prefix in {prefix for _, prefix, _ in found}:
        end_grain = len(prefix.tokens) // prefix_granularity
        needed = [
            (group.position, prefix, slot % group.slots_per_grain)
            for group in groups
            for slot in group.policy.slots_behind(end_grain * group.slots_per_grain)
            if slot >= (end_grain - 1) * group.slots_per_grain
        ]
        if found.issuperset(needed):
            resident.add(last_hash_of(prefix.tokens, prefix_granularity))
    return resident


@lru_cache(maxsize=4096)
def last_hash_of(tokens: tuple[int, ...], prefix_granularity: int) -> int:
    return hashes_of(tokens, prefix_granularity)[-1]


@lru_cache(maxsize=4096)
def last_digest_of(tokens: tuple[int, ...], prefix_granularity: int, extra_keys: tuple[bytes, ...]) -> bytes:
    return sc.hash_grains(list(tokens), prefix_granularity, list(extra_keys))[-1]


def native_group(group: GroupShape) -> sc.CacheGroupConfig:
    is_sliding = group.kind is GroupKind.SLIDING
    return sc.CacheGroupConfig(
        group_id=group.group_id,
        family=sc.Family.STATE if group.kind is GroupKind.STATE else sc.Family.HISTORY,
        retention=sc.Retention.SLIDING_WINDOW if is_sliding else sc.Retention.FULL_HISTORY,
        block_granularity=group.block_granularity,
        cache_blocks_per_lcm_block=group.cache_blocks_per_lcm_block,
        sliding_window_tokens=group.window_tokens if is_sliding else None,
        replayable=group.is_replayable,
        shard_count=group.shard_count,
    )


def native_config(shape: SchedulerShape) -> sc.SchedulerConfig:
    return scheduler_config(
        ROLES[shape.role],
        prefix_granularity=shape.prefix_granularity,
        num_lcm_blocks=shape.num_lcm_blocks,
        max_batch_size=shape.max_batch_size,
        token_budget=shape.token_budget,
        cache_groups=[native_group(group) for group in shape.groups],
        enable_prefix_cache=shape.enable_prefix_cache,
        max_ready_ungranted=shape.max_ready_ungranted,
        enable_prefix_events=shape.enable_prefix_cache,
        verify_width=shape.verify_width,
        overlap_depth=shape.overlap_depth,
        eviction_policy=EVICTIONS[shape.eviction],
        num_host_lcm_blocks=shape.num_host_lcm_blocks,
        enable_storage=shape.enable_storage,
    )


def native_spec(submission: Submission) -> sc.RequestSpec:
    return sc.RequestSpec(
        request_id=submission.request_id,
        tokens=list(submission.tokens),
        max_new_tokens=submission.max_new_tokens,
        extra_keys=list(submission.extra_keys),
        local_prefill=submission.local_prefill,
    )


def native_event(event: Event) -> sc.Event:
    if event.kind is EventKind.RESULT:
        return sc.ResultEvent(event.request_id, list(event.tokens))
    if event.kind is EventKind.RESERVE:
        return sc.ReserveEvent(event.request_id, event.tokens[0])
    if event.kind is EventKind.DONE:
        return sc.DoneEvent(event.request_id, event.tokens[0])
    return PLAIN_EVENTS[event.kind](event.request_id)


def listed(value: object) -> object:
    """A field of a native plan in the values of the model."""
    match value:
        case sc.RemotePrefill():
            block_ids = [ids.tolist() for ids in value.block_ids]
            return RemotePrefill(value.request_id, value.from_token, value.first_slots, block_ids)
        case sc.StoreOperation():
            return value.operation_id, value.is_pinned, value.copies.tolist(), value.keys
        case sc.LoadOperation():
            return value.operation_id, value.reads_storage.tolist(), value.copies.tolist(), value.keys
        case sc.GroupOccupancy():
            return Occupancy(
                lcm_blocks=value.lcm_blocks,
                cached_lcm_blocks=value.cached_lcm_blocks,
                taken_blocks=value.taken_blocks,
            )
        case sc.Handover():
            return Handover(value.request_id, value.token)
        case sc.Admission():
            hits = (value.device_hit_tokens, value.host_hit_tokens, value.storage_hit_tokens)
            return Admission(value.request_id, *hits)
        case list():
            return [listed(each) for each in value]
        case int() | str():
            return value
        case _:
            return value.tolist()  # type: ignore[attr-defined]


def require_equal(what: str, native: object, model: object) -> None:
    if native != model:
        raise Divergence(f"{what}:\nnative {native}\nmodel  {model}")


def require_refused(error: type[Exception], words: Sequence[str], call: Callable[[], None]) -> None:
    try:
        call()
    except error as refusal:
        if not all(word in str(refusal) for word in words):
            raise Divergence(f"the model names {words}, the core says: {refusal}") from None
    else:
        raise Divergence(f"the model refuses with {words}, the core accepts")


def require_accepted(error: type[Exception], call: Callable[[], None]) -> None:
    try:
        call()
    except error as refusal:
        raise Divergence(f"the model accepts, the core says: {refusal}") from None

"""The native scheduler of a node: continuous batching, chunked prefill, prefix cache and block allocation.

A face of the C++ module and nothing else: it knows no device, no model and no network. One engine thread owns each
scheduler.
"""

from __future__ import annotations

from typing import TypeAlias

from scheduler_core._core import (
    AbortEvent,
    Admission,
    CacheGroupConfig,
    Capacity,
    CapacityModel,
    ConfigError,
    ContractError,
    DoneEvent,
    EvictionPolicy,
    FailedEvent,
    Family,
    FinishEvent,
    GrantedEvent,
    GroupOccupancy,
    HandedOverEvent,
    Handover,
    LoadDoneEvent,
    LoadOperation,
    Plan,
    PrefixCleared,
    PrefixKeyChanges,
    PrefixRemoved,
    PrefixStored,
    QuiescedEvent,
    ReadyEvent,
    RemotePrefill,
    RequestSpec,
    ReserveEvent,
    ResultEvent,
    Retention,
    RetractEvent,
    Role,
    Scheduler,
    SchedulerConfig,
    StorageKey,
    StoreDoneEvent,
    StoreOperation,
    SubmitError,
    hash_grains,
    prefix_keys,
)

Event: TypeAlias = (
    ResultEvent
    | FinishEvent
    | AbortEvent
    | ReadyEvent
    | GrantedEvent
    | DoneEvent
    | HandedOverEvent
    | FailedEvent
    | QuiescedEvent
    | ReserveEvent
    | RetractEvent
    | StoreDoneEvent
    | LoadDoneEvent
)

PrefixEvent: TypeAlias = PrefixStored | PrefixRemoved | PrefixCleared

__all__ = [
    "AbortEvent",
    "Admission",
    "CacheGroupConfig",
    "Capacity",
    "CapacityModel",
    "ConfigError",
    "ContractError",
    "DoneEvent",
    "Event",
    "EvictionPolicy",
    "FailedEvent",
    "Family",
    "FinishEvent",
    "GrantedEvent",
    "GroupOccupancy",
    "HandedOverEvent",
    "Handover",
    "LoadDoneEvent",
    "LoadOperation",
    "Plan",
    "PrefixCleared",
    "PrefixEvent",
    "PrefixKeyChanges",
    "PrefixRemoved",
    "PrefixStored",
    "QuiescedEvent",
    "ReadyEvent",
    "RemotePrefill",
    "RequestSpec",
    "ReserveEvent",
    "ResultEvent",
    "Retention",
    "RetractEvent",
    "Role",
    "Scheduler",
    "SchedulerConfig",
    "StorageKey",
    "StoreDoneEvent",
    "StoreOperation",
    "SubmitError",
    "hash_grains",
    "prefix_keys",
]

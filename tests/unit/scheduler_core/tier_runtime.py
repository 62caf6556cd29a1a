"""A runtime with host memory and a storage: carries out stores and loads late, and loses objects of the storage.

What a block holds is anything that compares; an arena maps (group, block id) to it. The checks are those a data plane
depends on: a pinned source stays as it is until it is acknowledged, a load keeps both of its ends, and nothing is
acknowledged that was not copied.
"""

from __future__ import annotations

import random
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import scheduler_core as sc

Content = TypeVar("Content")
Arena = MutableMapping[tuple[int, int], Content]
Copy = tuple[tuple[int, int], tuple[int, int], sc.StorageKey]  # source, destination, what the source holds


@dataclass(slots=True)
class Store(Generic[Content]):
    copies: list[Copy]
    contents: list[Content]


@dataclass(slots=True)
class HostMemory(Generic[Content]):
    """Both tiers below the device, and the copies that are under way."""

    scheduler: sc.Scheduler
    device: Arena[Content]
    chance: random.Random
    duplicate: Callable[[Content], Content]
    has_storage: bool = False
    host: dict[tuple[int, int], Content] = field(default_factory=dict)
    storage: dict[sc.StorageKey, Content] = field(default_factory=dict)
    stores: dict[int, Store[Content]] = field(default_factory=dict)
    loads: dict[int, Store[Content]] = field(default_factory=dict)
    newest_operation_id: int = 0
    num_stored_blocks: int = 0
    num_loaded_blocks: int = 0
    num_failed_loads: int = 0

    def ask_storage(self) -> None:
        """Before a plan. An object may be lost as soon as it was said to be there."""
        queries = self.scheduler.storage_queries()
        assert len(set(queries)) == len(queries)
        known = [key for key in queries if key in self.storage]
        self.scheduler.register_storage_keys(known)
        self.scheduler.unregister_storage_keys([key for key in queries if key not in self.storage])
        if known and self.chance.random() < 0.3:
            del self.storage[self.chance.choice(known)]

    def copy_ahead(self, plan: sc.Plan) -> None:
        """What is stored before anything else of the plan, and what is read for the others while it runs."""
        for store in plan.stores:
            self.check_operation(store.operation_id, store.copies.tolist())
            copies = copies_of(store)
            contents = [self.duplicate(self.device[source]) for source, _, _ in copies]
            self.stores[store.operation_id] = Store(copies, contents)
            if not store.is_pinned:
                for (_, destination, _), content in zip(copies, contents, strict=True):
                    self.host[destination] = content

    def load(self, plan: sc.Plan) -> bool:
        """Behind the zeroing. False when storage lost something: then the rows of the plan must not run."""
        assert len(plan.loads) <= 1
        for load in plan.loads:
            self.check_operation(load.operation_id, load.copies.tolist())
            copies = copies_of(load)
            missed = []
            for (source, _, key), reads_storage in zip(copies, load.reads_storage.tolist(), strict=True):
                if not reads_storage:
                    continue
                if key in self.storage:
                    self.host[source] = self.duplicate(self.storage[key])
                else:
                    missed.append(key)
            if missed:
                self.num_failed_loads += 1
                self.scheduler.advance([sc.LoadDoneEvent(load.operation_id, False, missed)])
                return False
            for source, destination, _ in copies:
                self.device[destination] = self.duplicate(self.host[source])
            self.loads[load.operation_id] = Store(copies, [self.duplicate(self.host[c[0]]) for c in copies])
            self.num_loaded_blocks += len(copies)
        return True

    def acknowledge_one(self) -> None:
        operation_ids = [*self.stores, *self.loads]
        if operation_ids:
            self.acknowledge(self.chance.choice(operation_ids))

    def acknowledge_all(self) -> None:
        for operation_id in [*self.stores, *self.loads]:
            self.acknowledge(operation_id)

    def acknowledge(self, operation_id: int) -> None:
        if operation_id in self.loads:
            load = self.loads.pop(operation_id)
            for (source, destination, _), content in zip(load.copies, load.contents, strict=True):
                assert self.device[destination] == content, "a block that is loaded into was given away"
                assert self.host[source] == content, "a host block that is loaded from was given away"
            self.scheduler.advance([sc.LoadDoneEvent(operation_id)] * self.chance.randint(1, 2))
            return
        store = self.stores.pop(operation_id)
        created = []
        for (source, destination, key), content in zip(store.copies, store.contents, strict=True):
            if destination not in self.host or self.host[destination] != content:
                assert self.device[source] == content, "a pinned block was given away"
                self.host[destination] = self.duplicate(content)
            if self.has_storage and key not in self.storage:
                created.append(key)
                self.storage[key] = self.duplicate(content)
        self.num_stored_blocks += len(store.copies)
        self.scheduler.advance([sc.StoreDoneEvent(operation_id, created)] * self.chance.randint(1, 2))

    def check_operation(self, operation_id: int, copies: list[list[int]]) -> None:
        assert operation_id > self.newest_operation_id
        self.newest_operation_id = operation_id
        assert copies
        assert len({tuple(copy) for copy in copies}) == len(copies)
        assert [copy[0] for copy in copies] == sorted(copy[0] for copy in copies)


def copies_of(operation: sc.StoreOperation | sc.LoadOperation) -> list[Copy]:
    return [
        ((group, source), (group, destination), key)
        for (group, source, destination), key in zip(operation.copies.tolist(), operation.keys, strict=True)
    ]

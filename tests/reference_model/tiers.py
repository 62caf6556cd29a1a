"""What lies below the device: copies in host memory, the storage behind it, and the copies that are under way.

Knows keys and blocks, no requests. A transfer is one more owner of the blocks that it reads or writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from reference_model.group_policies import Boundary, State
from reference_model.groups import INDEX, Entry, Group, Key, Prefix, Use
from reference_model.pool import Block, Pool, transfer_name
from reference_model.values import Copy, LoadOperation, SchedulerShape, StoreOperation

NEVER_HIT = Use(value=0)
HIT = Use(value=1)


@dataclass(slots=True)
class Transfer:
    """One copy. `source`: of a store the device's block, held only if it is pinned. `device`, `host`: both ends."""

    name: str
    key: Key
    device: Block
    host: Block
    epoch: int
    end_token: int
    boundary: Boundary = Boundary.CHUNK
    is_device_held: bool = True
    reads_storage: bool = False
    is_published_later: bool = False


@dataclass(slots=True)
class Shadow:
    """Which keys storage is known to have, and which could not be read although it said so; the oldest come first."""

    max_keys: int
    known: list[Key] = field(default_factory=list)
    unreadable: list[Key] = field(default_factory=list)

    def register(self, keys: Sequence[Key]) -> None:
        """The gapless front of a prefix stays, so its rear counts as older."""
        readable = [key for key in keys if key not in self.unreadable]
        for key in reversed(readable[: self.max_keys]):
            self.forget([key])
            self.known.append(key)
        self.known = self.known[-self.max_keys :]

    def forget(self, keys: Sequence[Key]) -> None:
        self.known = [key for key in self.known if key not in keys]

    def note_missed(self, key: Key) -> None:
        self.forget([key])
        self.unreadable = ([other for other in self.unreadable if other != key] + [key])[-self.max_keys :]

    def note_created(self, keys: Sequence[Key]) -> None:
        self.unreadable = [key for key in self.unreadable if key not in keys]


class Tiers:
    def __init__(self, shape: SchedulerShape, device_groups: Sequence[Group]) -> None:
        self.device_groups = device_groups
        packing = [group.cache_blocks_per_lcm_block for group in shape.groups]
        self.pool = Pool(shape.num_host_lcm_blocks, packing, [group.shard_count for group in shape.groups])
        self.groups = [
            Group(group.position, group.shape, group.policy, shape.prefix_granularity) for group in device_groups
        ]
        num_blocks = shape.num_host_lcm_blocks * sum(packing)
        self.shadow = Shadow(num_blocks) if shape.enable_storage else None
        self.queued: list[Key] = []
        self.stores_ahead: list[Transfer] = []
        self.wanted_loads: list[Transfer] = []
        self.pinned_stores: dict[int, list[Transfer]] = {}
        self.free_stores: dict[int, list[Transfer]] = {}  # ran ahead of their plan
        self.loads: dict[int, list[Transfer]] = {}
        self.num_operations = 0
        self.num_transfers = 0

    # Reading.

    def has_load(self) -> bool:
        return bool(self.loads or self.wanted_loads)

    def is_idle(self) -> bool:
        return not (self.pinned_stores or self.free_stores or self.stores_ahead or self.has_load())

    def stores(self) -> list[Transfer]:
        under_way = [*self.free_stores.values(), *self.pinned_stores.values()]
        return self.stores_ahead + [store for stores in under_way for store in stores]

    def transfers(self) -> list[Transfer]:
        return self.stores() + self.wanted_loads + [load for loads in self.loads.values() for load in loads]

    def find(self, key: Key) -> Entry | None:
        return self.groups[key.group].find_key(key.prefix, key.offset)

    def has(self, key: Key) -> bool:
        """A copy, or storage to read one from."""
        return self.find(key) is not None or (self.shadow is not None and key in self.shadow.known)

    # Room.

    def next_name(self) -> str:
        self.num_transfers += 1
        return transfer_name(self.num_transfers)

    def place(self, group: Group, bucket: int, owner: str) -> Block | None:
        """A free place; else that of the group's coldest copy in the bucket; else a whole parent of another group, the
        one whose warmest copy is coldest. None if all of that is held."""
        block = self.pool.acquire_in(group.position, bucket, owner)
        if block is not None:
            return block
        own = self.groups[group.position]
        coldest = sorted((each for each in own.evictable() if each.block.bucket == bucket), key=own.rank)[:1]
        for entry in coldest or self.coldest_foreign_parent(group):
            self.drop(entry)
        return self.pool.acquire_in(group.position, bucket, owner)

    def coldest_foreign_parent(self, group: Group) -> list[Entry]:
        parents: list[list[Entry]] = []
        for other in self.groups:
            evictable = sorted(other.evictable(), key=other.rank) if other.position != group.position else []
            for lcm_block in {entry.block.lcm_block for entry in evictable}:
                entries = [entry for entry in evictable if entry.block.lcm_block == lcm_block]
                if len(entries) == len(self.pool.children_of(lcm_block)):
                    parents.append(entries)
        return min(parents, key=lambda entries: self.rank(entries[-1]), default=[])

    def rank(self, entry: Entry) -> tuple[int, ...]:
        return self.groups[entry.block.group].rank(entry)

    def drop(self, entry: Entry) -> None:
        self.groups[entry.block.group].entries.remove(entry)
        self.pool.release(entry.block, INDEX)

    # Transfers.

    def queue_store(self, key: Key) -> None:
        """Holds nothing until the plan ends."""
        self.queued.append(key)

    def store_ahead(self, key: Key) -> None:
        """What the device has under the key now."""
        self.stores_ahead += self.make_store(key, is_pinned=False)

    def make_store(self, key: Key, *, is_pinned: bool) -> list[Transfer]:
        """Nothing if the device lost it, the host has it or gets it already, or has no room."""
        group = self.device_groups[key.group]
        entry = group.find_key(key.prefix, key.offset)
        if entry is None or self.find(key) is not None or key in [store.key for store in self.stores()]:
            return []
        name = self.next_name()
        place = self.place(group, entry.block.bucket, name)
        if place is None:
            return []
        place.content = dict(entry.block.content)
        store = Transfer(name, key, entry.block, place, entry.epoch, entry.end_token, entry.boundary, is_pinned)
        if is_pinned:
            entry.block.owners.append(name)
        return [store]

    def start(self, *, holds_stores_back: bool) -> tuple[list[StoreOperation], list[LoadOperation]]:
        """Makes operations of what is wanted, at the end of a plan."""
        stores: list[StoreOperation] = []
        if self.stores_ahead:
            ahead, self.stores_ahead = self.stores_ahead, []
            stores.append(self.store_operation(ahead, is_pinned=False))
            self.free_stores[self.num_operations] = ahead
        if not holds_stores_back:
            pinned: list[Transfer] = []
            operation_id = self.num_operations + 1
            for key in self.queued:
                pinned += self.make_store(key, is_pinned=True)
                if pinned:
                    self.pinned_stores[operation_id] = pinned
            self.queued = []
            if pinned:
                stores.append(self.store_operation(pinned, is_pinned=True))
        loads: list[LoadOperation] = []
        if self.wanted_loads:
            wanted, self.wanted_loads = self.wanted_loads, []
            self.num_operations += 1
            self.loads[self.num_operations] = wanted
            by_group = sorted(wanted, key=lambda load: load.key.group)
            copies = [Copy(load.key.group, load.host.block_id, load.device.block_id, load.key) for load in by_group]
            loads.append(LoadOperation(self.num_operations, copies, [int(load.reads_storage) for load in by_group]))
        return stores, loads

    def store_operation(self, stores: Sequence[Transfer], *, is_pinned: bool) -> StoreOperation:
        self.num_operations += 1
        by_group = sorted(stores, key=lambda store: store.key.group)
        copies = [Copy(store.key.group, store.device.block_id, store.host.block_id, store.key) for store in by_group]
        return StoreOperation(self.num_operations, is_pinned, copies)

    def publish_on_host(self, transfer: Transfer) -> None:
        """Nothing but an acknowledgement makes a copy one that can be hit. One that is there already stays."""
        entry = self.find(transfer.key)
        if entry is None:
            group = self.groups[transfer.key.group]
            group.enter_key(transfer.key, transfer.host, transfer.epoch, transfer.boundary, NEVER_HIT)
        else:
            entry.refresh(transfer.epoch, transfer.boundary, NEVER_HIT)

    def release(self, device_pool: Pool, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            if transfer.is_device_held:
                device_pool.release(transfer.device, transfer.name)
            self.pool.release(transfer.host, transfer.name)

    def complete_store(self, device_pool: Pool, operation_id: int, created: Sequence[Key]) -> None:
        stores = self.pinned_stores.pop(operation_id, None) or self.free_stores.pop(operation_id, [])
        for store in stores:
            self.publish_on_host(store)
        if self.shadow is not None and stores:
            self.shadow.note_created(created)
            self.shadow.register([store.key for store in sorted(stores, key=lambda store: store.end_token)])
        self.release(device_pool, stores)

    def complete_load(self, device_pool: Pool, operation_id: int, missed: Sequence[Key], *, is_success: bool) -> None:
        loads = self.loads.pop(operation_id, [])
        for load in loads:
            group = self.device_groups[load.key.group]
            entry = group.find_key(load.key.prefix, load.key.offset)
            if is_success:
                if load.reads_storage:
                    self.publish_on_host(load)
                if load.is_published_later and entry is None:
                    group.enter_key(load.key, load.device, load.epoch, Boundary.CHUNK, Use())
                elif load.is_published_later and entry is not None:
                    entry.refresh(load.epoch, Boundary.CHUNK, Use())
            elif entry is not None and entry.block is load.device:
                group.entries.remove(entry)
                device_pool.release(entry.block, INDEX)
        for key in missed:
            if self.shadow is not None and not is_success and key in [load.key for load in loads]:
                self.shadow.note_missed(key)
        self.release(device_pool, loads)

    # Clearing.

    def clear(self) -> None:
        for group in self.groups:
            for entry in sorted(group.evictable(), key=group.rank):
                self.drop(entry)
        if self.shadow is not None:
            self.shadow.known, self.shadow.unreadable = [], []


def content_of(group: Group, prefix: Prefix, end_token: int) -> dict[int, tuple[int, ...]]:
    """What storage has under a key: see `contents.py`."""
    num_positions = 1 if isinstance(group.policy, State) else group.policy.block_granularity
    return {position: prefix.tokens[: position + 1] for position in range(end_token - num_positions, end_token)}

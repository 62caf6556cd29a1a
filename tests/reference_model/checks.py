"""What must hold after every step, whatever was decided. Read off the model; what the core shows is equal to it."""

from __future__ import annotations

from collections import Counter

from reference_model.books import Books
from reference_model.contents import require_written
from reference_model.groups import INDEX
from reference_model.pool import Block, Table
from reference_model.promises import KEPT
from reference_model.requests import Phase


def require_sound(books: Books) -> None:
    require_balanced_owners(books)
    require_sound_parents(books)
    require_sound_entries(books)
    require_kept_promises(books)
    require_sound_tables(books)


def tables_of(books: Books) -> list[Table]:
    return [table for request in books.requests for table in request.tables]


def require_balanced_owners(books: Books) -> None:
    """A block has the owners that it says, as often as they hold it, and is free when it has none."""
    held: Counter[tuple[int, str]] = Counter()
    blocks: dict[int, Block] = {}

    def count(block: Block, owner: str) -> None:
        held[id(block), owner] += 1
        blocks[id(block)] = block

    for table in tables_of(books):
        for block in table.blocks() + table.duplicates:
            count(block, table.owner)
    for group in books.coordinator.groups:
        for entry in group.entries:
            count(entry.block, INDEX)
        for block in books.coordinator.promises.kept[group.position]:
            count(block, KEPT)
    if books.coordinator.tiers is not None:
        for transfer in books.coordinator.tiers.transfers():
            if transfer.is_device_held:
                count(transfer.device, transfer.name)
    said = Counter((id(block), owner) for block in books.coordinator.pool.taken for owner in block.owners)
    assert held == said
    assert all(block.owners == [KEPT] for block in blocks.values() if KEPT in block.owners)
    assert all(number == 1 for number in held.values()), "somebody holds a block twice"


def require_sound_parents(books: Books) -> None:
    """Each parent is empty or serves one group, and no slot is given out twice."""
    pool = books.coordinator.pool
    places = [(block.lcm_block, block.slot) for block in pool.taken]
    assert len(set(places)) == len(places)
    bound = {block.lcm_block for block in pool.taken}
    assert sorted([*bound, *pool.empty]) == list(range(1, pool.num_lcm_blocks + 1))
    assert len({(block.lcm_block, block.group) for block in pool.taken}) == len(bound)


def require_sound_entries(books: Books) -> None:
    """A block has one key and a key one block; nothing that a peer may still fill can be hit."""
    for group in books.coordinator.groups:
        assert len({id(entry.block) for entry in group.entries}) == len(group.entries)
        assert len({(entry.prefix, entry.offset) for entry in group.entries}) == len(group.entries)
        assert group.policy.is_cached or not group.entries
        for entry in group.entries:
            require_written(group.policy, entry)
        published = [id(entry.block) for entry in group.entries]
        for request in books.in_phase(Phase.REMOTE_PREFILLING, Phase.QUARANTINED):
            first_slot = group.policy.num_hit_slots(request.num_hit_tokens)
            for block in request.tables[group.position].slots[first_slot:]:
                assert id(block) not in published


def require_kept_promises(books: Books) -> None:
    """Nobody holds more than it was promised, and the rest is there."""
    promises = books.coordinator.promises
    for group in books.coordinator.groups:
        if group.policy.is_closed:
            assert not promises.kept[group.position]
            continue
        assert promises.num_missing(group) == 0
        for table in [request.tables[group.position] for request in books.requests if request.tables]:
            assert len(table.blocks()) <= promises.promised[table.owner][group.position]
    assert set(promises.promised) == {table.owner for table in tables_of(books)}


def require_sound_tables(books: Books) -> None:
    """What the next token sees is there, and nothing that none sees any more was taken."""
    for request in books.requests:
        if not request.is_resident:
            continue
        for policy, table in zip(books.policies, request.tables, strict=True):
            end_slot = policy.blocks_for(request.num_computed_tokens)
            first_slot = policy.num_expired_slots(request.num_computed_tokens)
            assert None not in table.slots[first_slot:end_slot], f"{request.request_id} misses what it needs"

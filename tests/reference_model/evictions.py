"""Which published blocks must go for others to be acquired."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reference_model.groups import Entry, Group
from reference_model.pool import Block, Pool


@dataclass(frozen=True, slots=True)
class Victim:
    group: Group
    entry: Entry


def plan_evictions(
    pool: Pool, groups: Sequence[Group], demand: Sequence[int], protected: Sequence[Entry] = ()
) -> list[Victim] | None:
    """A set of which no member can be left out, in eviction order, for `demand` blocks by group; None if nothing that
    may go makes them fit. Victims are taken in the common order of all groups until it fits; then the set is walked
    backwards, and every block that turns out not to be needed stays."""
    candidates = [Victim(group, entry) for group in groups for entry in group.evictable() if entry not in protected]
    candidates.sort(key=lambda victim: victim.group.rank(victim.entry))
    chosen: list[Victim] = []
    while not fits(pool, groups, demand, chosen):
        if not candidates:
            return None
        chosen.append(candidates.pop(0))
    for victim in reversed(list(chosen)):
        without = [other for other in chosen if other is not victim]
        if fits(pool, groups, demand, without):
            chosen = without
    return chosen


def fits(pool: Pool, groups: Sequence[Group], demand: Sequence[int], gone: Sequence[Victim]) -> bool:
    """Whether the blocks of all groups could be acquired if the victims were gone."""
    gone_blocks = [victim.entry.block for victim in gone]
    return fits_beside(pool, groups, demand, [block for block in pool.taken if block not in gone_blocks])


def fits_beside(pool: Pool, groups: Sequence[Group], demand: Sequence[int], left: Sequence[Block]) -> bool:
    """The same if no others than `left` were taken. Free slots serve the group that bound their parent; what they do
    not cover takes whole empty parents."""
    num_empty = pool.num_lcm_blocks - len({block.lcm_block for block in left})
    for group, num_blocks in zip(groups, demand, strict=True):
        own = [block for block in left if block.group == group.position]
        packing = group.shape.cache_blocks_per_lcm_block
        num_holes = len({block.lcm_block for block in own}) * packing - len(own)
        num_empty -= -(-max(0, num_blocks - num_holes) // packing)
    return num_empty >= 0

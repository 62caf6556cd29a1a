"""CacheRuntimeContract: the geometry that the mapping and the scheduler bridge read.

Derived from the memory plan by the arena, its sole publisher. Physical counts shape storage; virtual counts bound the
block ids the scheduler hands out, and differ from the physical ones only where a group is sharded.
"""

from __future__ import annotations

from dataclasses import dataclass

from cache_runtime.errors import UnknownGroupError
from cache_runtime.recipes.plan import CacheGroupLayout, CacheMemoryPlan
from cache_runtime.recipes.spec import CacheFamily, CacheGroupSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroupContract:
    """One group's published geometry. Both counts include the null block 0.

    `block_stride_rows` is how many rows lie between the first rows of neighbouring blocks, at least those of a block;
    None for a state group, which has no rows.
    """

    spec: CacheGroupSpec
    packing: int
    virtual_packing: int
    num_blocks: int
    num_virtual_blocks: int
    block_stride_rows: int | None

    @property
    def group_id(self) -> str:
        return self.spec.group_id

    @property
    def block_granularity(self) -> int:
        """Tokens covered by one block-table slot."""
        return self.spec.block_granularity


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRuntimeContract:
    """The identity grain, the usable parents, and every group in the order the scheduler indexes them."""

    prefix_granularity: int
    num_lcm_blocks: int
    groups: tuple[CacheGroupContract, ...]

    @classmethod
    def from_plan(cls, plan: CacheMemoryPlan) -> CacheRuntimeContract:
        return cls(
            prefix_granularity=plan.prefix_granularity,
            num_lcm_blocks=plan.num_lcm_blocks,
            groups=tuple(_publish(group, plan) for group in plan.layout.groups),
        )

    def group(self, group_id: str) -> CacheGroupContract:
        """Raises UnknownGroupError."""
        for group in self.groups:
            if group.group_id == group_id:
                return group
        raise UnknownGroupError(f'group "{group_id}" was never published (groups: {", ".join(self.group_ids)})')

    @property
    def group_ids(self) -> tuple[str, ...]:
        return tuple(group.group_id for group in self.groups)


def _publish(group: CacheGroupLayout, plan: CacheMemoryPlan) -> CacheGroupContract:
    packing = group.cache_blocks_per_lcm_block
    virtual_packing = group.virtual_blocks_per_lcm_block
    return CacheGroupContract(
        spec=group.spec,
        packing=packing,
        virtual_packing=virtual_packing,
        num_blocks=plan.num_lcm_blocks * packing + 1,
        num_virtual_blocks=plan.num_lcm_blocks * virtual_packing + 1,
        block_stride_rows=plan.layout.block_stride_rows(group) if group.spec.family is CacheFamily.HISTORY else None,
    )

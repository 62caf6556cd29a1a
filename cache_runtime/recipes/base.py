"""CacheRecipe: the one place where layers -> group -> pack -> bind appear in order.

A model family fills in the named seams and restates no stage. Knows no device and allocates nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cache_runtime.errors import CacheConfigError
from cache_runtime.recipes.plan import ARENA_ALIGNMENT_BYTES, CacheLayout, CacheMemoryPlan, pack
from cache_runtime.recipes.spec import CacheFamily, CacheFieldSpec, CacheGroupSpec, GroupDeclaration, check_row_field


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSetup:
    """What a recipe hands to the runtime.

    `producer_fields_by_step[i]` are the field ids whose rows of a forward are complete once step i (one layer, as a
    rule) has run; together they cover every field of the plan exactly once.
    """

    plan: CacheMemoryPlan
    num_layers: int
    producer_fields_by_step: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        produced = [field_id for step in self.producer_fields_by_step for field_id in step]
        planned = [field.field_id for field in self.plan.fields]
        if sorted(produced) != sorted(planned):
            odd = sorted(set(produced) ^ set(planned)) or sorted({f for f in produced if produced.count(f) > 1})
            raise CacheConfigError(f"producer_fields_by_step must cover every field exactly once, differs in {odd}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRecipe(ABC):
    """Template of a model family's cache. `setup` runs the stages; every other method is a seam.

    `prefix_granularity` is in tokens. `memory_bytes` is what the cache may use, workspace included.
    """

    prefix_granularity: int
    memory_bytes: int

    def setup(self) -> CacheSetup:
        """Raises CacheConfigError naming the culprit before anything is allocated."""
        declarations = self.groups()
        layout = pack(
            declarations,
            prefix_granularity=self.prefix_granularity,
            alignment_bytes=self.alignment_bytes(),
            max_padding_fraction=self.max_padding_fraction(),
            packing=self.packing(),
        )
        self.check_layout(layout)
        return CacheSetup(
            plan=layout.bind(self.num_lcm_blocks(layout)),
            num_layers=len(self.group_ids()),
            producer_fields_by_step=self.producer_fields_by_step(),
        )

    def groups(self) -> tuple[GroupDeclaration, ...]:
        """Walk the layers once; one declaration per distinct group id, in order of first appearance."""
        fields_by_group: dict[str, list[CacheFieldSpec]] = {}
        for layer, group_id in enumerate(self.group_ids()):
            fields_by_group.setdefault(group_id, []).extend(self.fields_for_layer(layer))
        return tuple((self.group_spec(group_id), tuple(fields)) for group_id, fields in fields_by_group.items())

    @abstractmethod
    def group_ids(self) -> Sequence[str]:
        """Cache group of each layer, by layer index."""

    @abstractmethod
    def group_spec(self, group_id: str) -> CacheGroupSpec:
        """Declaration of one of the ids in `group_ids`."""

    @abstractmethod
    def fields_for_layer(self, layer: int) -> tuple[CacheFieldSpec, ...]:
        """What a layer deposits in its group."""

    def alignment_bytes(self) -> int:
        return ARENA_ALIGNMENT_BYTES

    def max_padding_fraction(self) -> float:
        return 0.0

    def packing(self) -> Mapping[str, int] | None:
        """Blocks per parent by group id; None lets `pack` solve them."""
        return None

    def check_layout(self, layout: CacheLayout) -> None:
        """Refuse a layout the family's kernels cannot use. By default every history field must start with its rows."""
        for group in layout.groups:
            if group.spec.family is CacheFamily.HISTORY:
                for field in group.fields:
                    check_row_field(group.spec, field.field_id, field.block_shape)

    def workspace_bytes(self) -> int:
        """Bytes set aside before the arena is sized."""
        return 0

    def producer_fields_by_step(self) -> tuple[tuple[str, ...], ...]:
        return tuple(
            tuple(field.field_id for field in self.fields_for_layer(layer)) for layer in range(len(self.group_ids()))
        )

    def num_lcm_blocks(self, layout: CacheLayout) -> int:
        """Usable parents that fit the memory; refused when one request could not even hold one prefix grain."""
        budget_bytes = self.memory_bytes - self.workspace_bytes()
        num_lcm_blocks = layout.num_lcm_blocks_within(budget_bytes) if budget_bytes > 0 else -1
        needed_lcm_blocks = max(1, layout.parents_per_prefix_grain())
        if num_lcm_blocks < needed_lcm_blocks:
            needed_bytes = layout.num_arena_bytes(needed_lcm_blocks) + self.workspace_bytes()
            raise CacheConfigError(
                f"memory_bytes {self.memory_bytes} is too small: one prefix grain of {layout.prefix_granularity} "
                f"tokens and the null block need {needed_bytes} bytes"
            )
        return num_lcm_blocks

"""CacheRecipe: the one place where layers -> group -> pack -> bind appear in order.

A model family fills in the named seams and restates no stage. Knows no device and allocates nothing.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from cache_runtime.errors import CacheConfigError
from cache_runtime.recipes.plan import ARENA_ALIGNMENT_BYTES, CacheLayout, CacheMemoryPlan, pack
from cache_runtime.recipes.spec import CacheFamily, CacheFieldSpec, CacheGroupSpec, GroupDeclaration, check_row_field
from cache_runtime.scheduler_bridge import CapacityModel, SchedulerLimits
from scheduler_core import ConfigError

FieldIds = tuple[str, ...]


class CacheLayerType(StrEnum):
    """What the scheduler retains of a layer: a label of storage, not of what the layer computes."""

    FULL = "full"
    SLIDING = "sliding"
    STATE = "state"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSetup:
    """What a recipe hands to the runtime.

    Cache layers of the target model come first, then those of a draft model. `cache_fields_by_stage[i]` are the field
    ids that live on pipeline stage i. `producer_fields_by_step[i]` are the field ids whose rows of a forward are
    complete once step i (one layer, as a rule) has run. Each covers every field of the plan exactly once, in sets that
    need not be neighbours. `token_capacity` is in tokens.
    """

    plan: CacheMemoryPlan
    num_target_layers: int
    num_draft_layers: int
    token_capacity: int
    cache_fields_by_stage: tuple[FieldIds, ...]
    producer_fields_by_step: tuple[FieldIds, ...]

    def __post_init__(self) -> None:
        planned = [field.field_id for field in self.plan.fields]
        _check_cover("cache_fields_by_stage", self.cache_fields_by_stage, planned)
        _check_cover("producer_fields_by_step", self.producer_fields_by_step, planned)

    @property
    def num_layers(self) -> int:
        return self.num_target_layers + self.num_draft_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRecipe(ABC):
    """Template of a model family's cache. `setup` runs the stages; every other method is a seam.

    `prefix_granularity` is in tokens. `memory_bytes` is what the cache may use, workspace included. `scheduler_limits`
    None: nothing is known of the requests, and capacity is the flat product.
    """

    prefix_granularity: int
    memory_bytes: int
    scheduler_limits: SchedulerLimits | None = None

    def setup(self) -> CacheSetup:
        """Raises CacheConfigError naming the culprit before anything is allocated."""
        declarations = self.groups()
        layout = pack(
            declarations,
            prefix_granularity=self.prefix_granularity,
            alignment_bytes=self.alignment(),
            max_padding_fraction=self.max_padding_fraction(),
            packing=self.packing(),
        )
        self.check_layout(layout)
        plan = layout.bind(self.num_lcm_blocks(layout))
        num_draft_layers = self.num_draft_layers()
        return CacheSetup(
            plan=plan,
            num_target_layers=len(self.layer_types()) - num_draft_layers,
            num_draft_layers=num_draft_layers,
            token_capacity=self.token_capacity(layout, plan.num_lcm_blocks),
            cache_fields_by_stage=self._fields_of(self.layers_by_stage()),
            producer_fields_by_step=self._fields_of(self.layers_by_step()),
        )

    def groups(self) -> tuple[GroupDeclaration, ...]:
        """Walk the layers once; one declaration per distinct group id, in order of first appearance."""
        fields_by_group: dict[str, list[CacheFieldSpec]] = {}
        for layer, group_id in enumerate(self.group_ids()):
            fields_by_group.setdefault(group_id, []).extend(self.fields_for_layer(layer))
        return tuple((self.group_spec(group_id), tuple(fields)) for group_id, fields in fields_by_group.items())

    @abstractmethod
    def layer_types(self) -> Sequence[CacheLayerType]:
        """Storage label of each cache layer, target layers then draft layers."""

    def group_ids(self) -> Sequence[str]:
        """Cache group of each layer, by layer index: by default one group per label, named like it."""
        return tuple(label.value for label in self.layer_types())

    @abstractmethod
    def group_spec(self, group_id: str) -> CacheGroupSpec:
        """Declaration of one of the ids in `group_ids`."""

    @abstractmethod
    def fields_for_layer(self, layer: int) -> tuple[CacheFieldSpec, ...]:
        """What a layer deposits in its group."""

    def num_draft_layers(self) -> int:
        """Trailing cache layers that belong to a draft model."""
        return 0

    def alignment(self) -> int:
        """Bytes that the arena and every plane are aligned to."""
        return ARENA_ALIGNMENT_BYTES

    def max_padding_fraction(self) -> float:
        """The share of a parent that each group may leave empty."""
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

    def layers_by_stage(self) -> Sequence[Sequence[int]]:
        """Cache layers that live on each pipeline stage: by default all on one."""
        return (range(len(self.layer_types())),)

    def layers_by_step(self) -> Sequence[Sequence[int]]:
        """Cache layers whose rows are complete after each step of a forward: by default one after the other."""
        return tuple((layer,) for layer in range(len(self.layer_types())))

    def num_lcm_blocks(self, layout: CacheLayout) -> int:
        """Usable parents that fit the memory; refused when one request could not even hold one prefix grain."""
        budget_bytes = self.memory_bytes - self.workspace_bytes()
        num_lcm_blocks = layout.num_lcm_blocks_within(budget_bytes) if budget_bytes > 0 else -1
        needed_lcm_blocks = max(1, self._parents_of_one_grain(layout))
        if num_lcm_blocks < needed_lcm_blocks:
            needed_bytes = layout.num_arena_bytes(needed_lcm_blocks) + self.workspace_bytes()
            raise CacheConfigError(
                f"memory_bytes {self.memory_bytes} is too small: one prefix grain of {layout.prefix_granularity} "
                f"tokens and the null block need {needed_bytes} bytes"
            )
        return num_lcm_blocks

    def token_capacity(self, layout: CacheLayout, num_lcm_blocks: int) -> int:
        """Tokens that so many parents hold, in whole prefix grains: by default the flat product, parents times what the
        full-history groups put into one. A family whose other groups take part calls `_capacity_from_parents`."""
        return layout.token_capacity(num_lcm_blocks)

    def parents_needed(self, model: CapacityModel, num_tokens: int) -> int:
        """Parents that hold `num_tokens` in as few requests as the context allows."""
        return model.parents_needed(-(-num_tokens // model.context_tokens), num_tokens)

    def _capacity_from_parents(self, layout: CacheLayout, num_lcm_blocks: int) -> int:
        """The inverse of `parents_needed`, which grows with the tokens; flat where nothing is known of the requests."""
        flat_tokens = layout.token_capacity(num_lcm_blocks)
        model = self._capacity_model(layout)
        if model is None:
            return flat_tokens
        grain_tokens = layout.prefix_granularity
        num_grains = bisect.bisect_right(
            range(1, flat_tokens // grain_tokens + 1),
            num_lcm_blocks,
            key=lambda grains: self.parents_needed(model, grains * grain_tokens),
        )
        return num_grains * grain_tokens

    def _parents_of_one_grain(self, layout: CacheLayout) -> int:
        model = self._capacity_model(layout)
        return layout.parents_per_prefix_grain() if model is None else model.parents_of_one(layout.prefix_granularity)

    def _capacity_model(self, layout: CacheLayout) -> CapacityModel | None:
        """Raises CacheConfigError for limits that the scheduler would refuse."""
        if self.scheduler_limits is None:
            return None
        try:
            return CapacityModel(layout, self.scheduler_limits)
        except ConfigError as error:
            raise CacheConfigError(str(error)) from error

    def _fields_of(self, layers: Sequence[Sequence[int]]) -> tuple[FieldIds, ...]:
        return tuple(
            tuple(field.field_id for layer in members for field in self.fields_for_layer(layer)) for members in layers
        )


def _check_cover(name: str, sets: Sequence[FieldIds], planned: Sequence[str]) -> None:
    counts = Counter(field_id for members in sets for field_id in members)
    odd = sorted({*(set(counts) ^ set(planned)), *(field_id for field_id, count in counts.items() if count > 1)})
    if odd:
        raise CacheConfigError(f"{name} must cover every field exactly once, differs in {odd}")

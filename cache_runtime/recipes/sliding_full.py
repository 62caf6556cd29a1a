"""Cache recipe of models that alternate sliding-window and full attention (Gemma 3): one group of each kind.

Both groups hold the same rows; they differ in how many layers they have and how long they keep a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from cache_runtime.errors import CacheConfigError
from cache_runtime.recipes.base import CacheLayerType
from cache_runtime.recipes.plan import CacheLayout
from cache_runtime.recipes.rows import RowsCacheRecipe
from cache_runtime.recipes.spec import CacheGroupSpec

SLIDING_GROUP_ID = CacheLayerType.SLIDING.value
"""The group of the layers that see a window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingFullCacheRecipe(RowsCacheRecipe):
    """`is_sliding[i]` says whether layer i keeps `sliding_window_tokens`, the newest token included, or everything.

    Raises CacheConfigError when the layers and the flags differ in number.
    """

    is_sliding: tuple[bool, ...]
    sliding_window_tokens: int

    def __post_init__(self) -> None:
        RowsCacheRecipe.__post_init__(self)
        if len(self.is_sliding) != self.num_layers:
            raise CacheConfigError(f"is_sliding names {len(self.is_sliding)} layers, num_layers is {self.num_layers}")

    @override
    def layer_types(self) -> Sequence[CacheLayerType]:
        return tuple(CacheLayerType.SLIDING if sliding else CacheLayerType.FULL for sliding in self.is_sliding)

    @override
    def group_spec(self, group_id: str) -> CacheGroupSpec:
        is_sliding = group_id == SLIDING_GROUP_ID
        return self.rows_group(group_id, sliding_window_tokens=self.sliding_window_tokens if is_sliding else None)

    @override
    def token_capacity(self, layout: CacheLayout, num_lcm_blocks: int) -> int:
        return self._capacity_from_parents(layout, num_lcm_blocks)

    @override
    def max_padding_fraction(self) -> float:
        """Where one layer number is no multiple of the other, an exact parent can be ten times larger."""
        return 0.125

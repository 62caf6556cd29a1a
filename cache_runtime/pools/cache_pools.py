"""CachePools: the typed views of one arena that a model reads and writes, each over the layers that have its fields."""

from __future__ import annotations

from dataclasses import dataclass

from cache_runtime.arena import CacheArena
from cache_runtime.pools.index_pool import IndexPool
from cache_runtime.pools.kv_pool import KvPool
from cache_runtime.pools.latent_pool import LatentPool
from cache_runtime.pools.state_pool import StatePool
from cache_runtime.recipes.spec import parse_layer_field_id


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CachePools:
    """A pool without layers is legal and serves nobody."""

    kv: KvPool
    latent: LatentPool
    index: IndexPool
    state: StatePool

    @classmethod
    def of(cls, arena: CacheArena) -> CachePools:
        """One view per layer field of the arena's plan."""
        return cls(
            kv=KvPool(arena, _layers_with(arena, "k")),
            latent=LatentPool(arena, _layers_with(arena, "latent")),
            index=IndexPool(arena, _layers_with(arena, "index_key")),
            state=StatePool(arena, _layers_with(arena, "recurrent_state")),
        )


def _layers_with(arena: CacheArena, name: str) -> tuple[int, ...]:
    parsed = (parse_layer_field_id(field.field_id) for field in arena.plan.fields)
    return tuple(sorted(field.layer for field in parsed if field is not None and field.name == name))

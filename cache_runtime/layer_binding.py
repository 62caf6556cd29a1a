"""Binding model layers to cache groups, and the one relation between visibility and storage.

A model layer declares only how far back its kernel may look; which group its rows ride is a fact of the memory plan. A
group must retain every token its layers can see.
"""

from __future__ import annotations

from collections.abc import Iterable

from cache_runtime.errors import CacheConfigError, UnboundLayerError
from cache_runtime.recipes.plan import CacheMemoryPlan
from cache_runtime.recipes.spec import CacheFamily, CacheGroupSpec, CacheRetention, parse_layer_field_id


class PagedAttention:
    """One attention layer's declaration towards the cache.

    `window_left_tokens` is the compute mask: how many tokens before the query the kernel may read; None is full
    visibility. The group is stamped by `bind_cache_groups` at start-up.
    """

    __slots__ = ("_group_id", "layer", "window_left_tokens")

    def __init__(self, *, layer: int, window_left_tokens: int | None = None) -> None:
        if layer < 0:
            raise CacheConfigError(f"layer must not be negative, got {layer}")
        if window_left_tokens is not None and window_left_tokens < 0:
            raise CacheConfigError(f"layer {layer}: window_left_tokens must not be negative, got {window_left_tokens}")
        self.layer = layer
        self.window_left_tokens = window_left_tokens
        self._group_id: str | None = None

    @property
    def group_id(self) -> str:
        """Raises UnboundLayerError before `bind_cache_groups`."""
        if self._group_id is None:
            raise UnboundLayerError(f"layer {self.layer} is not bound to a cache group yet")
        return self._group_id

    def bind(self, group_id: str) -> None:
        """Stamp the group once; the same group again is a no-op. Raises UnboundLayerError on a different one."""
        if self._group_id not in (None, group_id):
            raise UnboundLayerError(
                f'layer {self.layer} is bound to group "{self._group_id}", cannot be bound to "{group_id}"'
            )
        self._group_id = group_id


def history_group_by_layer(plan: CacheMemoryPlan) -> dict[int, str]:
    """Layer -> group id, read back from the planned key fields of history groups."""
    groups: dict[int, str] = {}
    for field in plan.fields:
        parsed = parse_layer_field_id(field.field_id)
        if parsed is None or parsed.name != "k":
            continue
        if plan.group_layout(field.group_id).spec.family is CacheFamily.HISTORY:
            groups[parsed.layer] = field.group_id
    return groups


def bind_cache_groups(layers: Iterable[PagedAttention], plan: CacheMemoryPlan) -> None:
    """Stamp each layer with the group of its planned fields.

    Raises CacheConfigError, before any layer is stamped, for a layer without planned keys or one that sees further back
    than its group retains.
    """
    for layer, group_id in check_cache_groups(layers, plan):
        layer.bind(group_id)


def check_cache_groups(layers: Iterable[PagedAttention], plan: CacheMemoryPlan) -> list[tuple[PagedAttention, str]]:
    """Each layer with the group it would be bound to; needs a plan and no arena. Raises like `bind_cache_groups`."""
    groups = history_group_by_layer(plan)
    bindings: list[tuple[PagedAttention, str]] = []
    for layer in layers:
        if layer.layer not in groups:
            raise CacheConfigError(f"layer {layer.layer}: the memory plan holds no keys for it")
        group_id = groups[layer.layer]
        _check_retention_covers(layer, plan.group_layout(group_id).spec)
        bindings.append((layer, group_id))
    return bindings


def _check_retention_covers(layer: PagedAttention, spec: CacheGroupSpec) -> None:
    if spec.retention is CacheRetention.FULL_HISTORY:
        return
    if layer.window_left_tokens is None:
        raise CacheConfigError(
            f'layer {layer.layer}: full visibility cannot ride group "{spec.group_id}", which retains only '
            f"sliding_window_tokens {spec.sliding_window_tokens}"
        )
    visible_tokens = layer.window_left_tokens + 1
    if spec.sliding_window_tokens is None or visible_tokens > spec.sliding_window_tokens:
        raise CacheConfigError(
            f'layer {layer.layer}: sees {visible_tokens} tokens (window_left_tokens + 1), but group "{spec.group_id}" '
            f"retains sliding_window_tokens {spec.sliding_window_tokens}"
        )

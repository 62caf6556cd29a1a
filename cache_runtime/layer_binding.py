"""Binding model layers to cache groups, and the one relation between visibility and storage.

A model layer declares only what it deposits and how far back its kernel may look; which group that rides is a fact of
the memory plan. A group must retain every token its layers can see.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from typing_extensions import override

from cache_runtime.errors import CacheConfigError, UnboundLayerError
from cache_runtime.recipes.plan import CacheMemoryPlan
from cache_runtime.recipes.spec import CacheFamily, CacheGroupSpec, CacheRetention, layer_field_id


class CacheLayer(ABC):
    """One layer's declaration towards the cache: `layers.{layer}.{field_name}` tells which group it rides.

    The group is stamped by `bind_cache_groups` at start-up. Raises CacheConfigError for a negative layer.
    """

    __slots__ = ("_group_id", "field_name", "layer")

    def __init__(self, *, layer: int, field_name: str) -> None:
        if layer < 0:
            raise CacheConfigError(f"layer must not be negative, got {layer}")
        self.layer = layer
        self.field_name = field_name
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

    @abstractmethod
    def check_group(self, spec: CacheGroupSpec) -> None:
        """Raises CacheConfigError when the group cannot serve the layer."""


class PagedAttention(CacheLayer):
    """A layer that attends over rows.

    `window_left_tokens` is the compute mask: how many tokens before the query the kernel may read; None is full
    visibility. Raises CacheConfigError when it is negative.
    """

    __slots__ = ("window_left_tokens",)

    def __init__(self, *, layer: int, window_left_tokens: int | None = None, field_name: str = "k") -> None:
        super().__init__(layer=layer, field_name=field_name)
        if window_left_tokens is not None and window_left_tokens < 0:
            raise CacheConfigError(f"layer {layer}: window_left_tokens must not be negative, got {window_left_tokens}")
        self.window_left_tokens = window_left_tokens

    @override
    def check_group(self, spec: CacheGroupSpec) -> None:
        _check_family(self, spec, CacheFamily.HISTORY)
        if spec.retention is CacheRetention.FULL_HISTORY:
            return
        if self.window_left_tokens is None:
            raise CacheConfigError(
                f'layer {self.layer}: full visibility cannot ride group "{spec.group_id}", which retains only '
                f"sliding_window_tokens {spec.sliding_window_tokens}"
            )
        visible_tokens = self.window_left_tokens + 1
        if spec.sliding_window_tokens is None or visible_tokens > spec.sliding_window_tokens:
            raise CacheConfigError(
                f"layer {self.layer}: sees {visible_tokens} tokens (window_left_tokens + 1), but group "
                f'"{spec.group_id}" retains sliding_window_tokens {spec.sliding_window_tokens}'
            )


class StateLayer(CacheLayer):
    """A layer whose memory of the past is one state."""

    __slots__ = ()

    def __init__(self, *, layer: int, field_name: str = "recurrent_state") -> None:
        super().__init__(layer=layer, field_name=field_name)

    @override
    def check_group(self, spec: CacheGroupSpec) -> None:
        _check_family(self, spec, CacheFamily.STATE)


def bind_cache_groups(layers: Iterable[CacheLayer], plan: CacheMemoryPlan) -> None:
    """Stamp each layer with the group of its planned field.

    Raises CacheConfigError, before any layer is stamped, for a layer without a planned field, one whose field is in a
    group of the other family, or one that sees further back than its group retains.
    """
    for layer, group_id in check_cache_groups(layers, plan):
        layer.bind(group_id)


def check_cache_groups(layers: Iterable[CacheLayer], plan: CacheMemoryPlan) -> list[tuple[CacheLayer, str]]:
    """Each layer with the group it would be bound to; needs a plan and no arena. Raises like `bind_cache_groups`."""
    group_by_field = {field.field_id: field.group_id for field in plan.fields}
    bindings: list[tuple[CacheLayer, str]] = []
    for layer in layers:
        field_id = layer_field_id(layer.layer, layer.field_name)
        if field_id not in group_by_field:
            raise CacheConfigError(f'layer {layer.layer}: the memory plan holds no field "{field_id}"')
        group_id = group_by_field[field_id]
        layer.check_group(plan.group_layout(group_id).spec)
        bindings.append((layer, group_id))
    return bindings


def _check_family(layer: CacheLayer, spec: CacheGroupSpec, family: CacheFamily) -> None:
    if spec.family is not family:
        raise CacheConfigError(
            f'layer {layer.layer}: "{layer.field_name}" rides a {family} group, but group "{spec.group_id}" is a '
            f"{spec.family} group"
        )

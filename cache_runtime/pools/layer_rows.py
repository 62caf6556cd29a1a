"""Row views of one layer field over a set of layers: what the typed pools of history groups are made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cache_runtime.arena import CacheArena
from cache_runtime.errors import UnknownFieldError
from cache_runtime.recipes.spec import check_row_field, layer_field_id


class LayerRows:
    """`arena.rows` of `layers.{i}.{name}` for every i in `layers`.

    Raises UnknownFieldError when the arena's plan lacks one, CacheConfigError when a field is not a row field.
    """

    def __init__(self, arena: CacheArena, layers: Sequence[int], name: str) -> None:
        self._name = name
        self._rows = {layer: _rows(arena, layer_field_id(layer, name)) for layer in layers}
        self._pages: dict[tuple[int, int], torch.Tensor] = {}

    def __call__(self, layer: int) -> torch.Tensor:
        """[num_rows, *row_shape] of a layer. Raises UnknownFieldError for a layer that is not in the pool."""
        if layer not in self._rows:
            raise UnknownFieldError(f'layer {layer} has no "{self._name}" in this pool (layers: {sorted(self._rows)})')
        return self._rows[layer]

    def pages(self, layer: int, page_tokens: int) -> torch.Tensor:
        """[num_pages, page_tokens, *row_shape]: the same rows. Made once: a forward asks for every layer's."""
        pages = self._pages.get((layer, page_tokens))
        if pages is None:
            pages = self._pages[layer, page_tokens] = self(layer).unflatten(0, (-1, page_tokens))
        return pages


def _rows(arena: CacheArena, field_id: str) -> torch.Tensor:
    field = arena.plan.field(field_id)
    check_row_field(arena.plan.group_layout(field.group_id).spec, field_id, field.block_shape)
    return arena.rows(field_id)

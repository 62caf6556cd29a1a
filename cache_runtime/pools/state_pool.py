"""StatePool: the state snapshots that recurrent layers read and write. Holds views only.

A snapshot is addressed by block id; where one lies in the arena is in the views' strides.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cache_runtime.arena import CacheArena
from cache_runtime.errors import UnknownFieldError
from cache_runtime.recipes.spec import layer_field_id


class StatePool:
    """Views of `layers.{i}.conv_state` and `layers.{i}.recurrent_state` for every i in `layers`.

    Raises UnknownFieldError when the arena's plan lacks a layer's field.
    """

    def __init__(self, arena: CacheArena, layers: Sequence[int]) -> None:
        self.arena = arena
        self._conv_states = _blocks(arena, layers, "conv_state")
        self._recurrent_states = _blocks(arena, layers, "recurrent_state")

    def conv_state(self, layer: int) -> torch.Tensor:
        """[num_blocks, width - 1, num_channels]: the last inputs of the layer's convolution, oldest first."""
        return _of_layer(self._conv_states, layer)

    def recurrent_state(self, layer: int) -> torch.Tensor:
        """[num_blocks, num_heads, ...]: the layer's recurrent state."""
        return _of_layer(self._recurrent_states, layer)


def _blocks(arena: CacheArena, layers: Sequence[int], name: str) -> dict[int, torch.Tensor]:
    return {layer: arena.field(layer_field_id(layer, name)) for layer in layers}


def _of_layer(states: dict[int, torch.Tensor], layer: int) -> torch.Tensor:
    if layer not in states:
        raise UnknownFieldError(f"layer {layer} has no state in this pool (layers: {sorted(states)})")
    return states[layer]

"""AdapterSet: the adapters that one model is built with, and what each of them changes in a layer.

Layers ask for the rows that they hold, so that a tensor rank packs no more than its own. Knows no family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import torch

from model_runtime.errors import AdapterError
from model_runtime.kernels.interface import Kernels, PackedWeight
from model_runtime.lora.peft_files import LoraAdapter
from model_runtime.lora.token_groups import RunningGroups
from model_runtime.weights import TensorRows

ArrangeRows: TypeAlias = Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""Takes the parts of a layer, each [rows, width], and gives their rows in the layer's order. Knows no width: it moves
whole rows, of the matrices and of what is added to them alike.
"""


def stack_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts under one another."""
    return torch.cat(list(parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChange:
    """What one adapter adds to one layer: inputs go `down` to the inner columns of all its matrices, and `up` again.

    A row of `up` has zeros in the inner columns of other matrices: one product serves them all, thin as they are.
    """

    down: PackedWeight
    up: PackedWeight


class AdapterSet:
    """`running` is what the layers look at in every forward; `digests` by name; `num_bytes` is what layers packed."""

    def __init__(self, adapters: Sequence[LoraAdapter] = ()) -> None:
        self._adapters = tuple(adapters)
        self._taken: set[str] = set()
        self.running = RunningGroups()
        self.num_bytes = 0
        self.digests: Mapping[str, bytes] = {adapter.name: adapter.digest for adapter in adapters}

    def take(self, rows: Sequence[TensorRows], arrange: ArrangeRows, kernels: Kernels) -> Mapping[str, LayerChange]:
        """What a layer of these rows is changed by, by adapter; empty where none changes it."""
        self._taken.update(part.name for part in rows)
        changes = {
            adapter.name: _layer_change(adapter, rows, arrange, kernels)
            for adapter in self._adapters
            if any(part.name in adapter.changes for part in rows)
        }
        self.num_bytes += sum(change.down.num_bytes + change.up.num_bytes for change in changes.values())
        return changes

    def finish(self) -> None:
        """The model is built: what it has packed is let go. Raises AdapterError naming a matrix that an adapter changes
        and no layer took.
        """
        adapters, self._adapters = self._adapters, ()
        for adapter in adapters:
            for name in adapter.changes:
                if name not in self._taken:
                    raise AdapterError(
                        f'adapter "{adapter.name}": {adapter.path}: "{name.removesuffix(".weight")}" cannot be changed '
                        "by an adapter: it is an embedding, a head, an expert, or kept in another form"
                    )


def _layer_change(
    adapter: LoraAdapter, rows: Sequence[TensorRows], arrange: ArrangeRows, kernels: Kernels
) -> LayerChange:
    """A matrix of which a layer has several stretches of rows goes down once."""
    names = tuple(dict.fromkeys(part.name for part in rows if part.name in adapter.changes))
    downs = [adapter.changes[name].down for name in names]
    ends = list(accumulate(down.shape[0] for down in downs))
    ups: list[torch.Tensor] = []
    for part in rows:
        up = torch.zeros((part.end - part.begin, ends[-1]))
        if part.name in names:
            index = names.index(part.name)
            inner = slice(ends[index] - downs[index].shape[0], ends[index])
            up[:, inner] = adapter.changes[part.name].up[part.begin : part.end]
        ups.append(up)
    return LayerChange(down=kernels.pack(torch.cat(downs)), up=kernels.pack(arrange(ups).contiguous()))

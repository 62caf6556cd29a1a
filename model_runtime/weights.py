"""Where weights come from, and the check that a file holds exactly the tensors its model needs.

Tensor names here are the canonical ones, which are those of a `transformers` Llama state dict; a source of another
format maps them. Knows no model family and allocates nothing but what the caller asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Protocol

import torch

from model_runtime.config import ModelConfig
from model_runtime.errors import CheckpointError
from model_runtime.kernels.interface import Kernels, PackedWeight

Shape = tuple[int, ...]


class TensorSource(Protocol):
    """One model on disk, opened and structurally sound; tensor data is read on demand."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def content_files(self) -> tuple[Path, ...]:
        """The files that make up the model, in a stable order; their bytes are its identity."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shape of every tensor in the file by canonical name; names without a meaning here are kept as they are."""

    def stored_name(self, name: str) -> str:
        """What the file calls the tensor, for messages."""

    def quantization(self, name: str) -> str | None:
        """GGUF name, such as Q4_1, of how the tensor is quantised; None for plain numbers."""

    def read_into(self, name: str, destination: torch.Tensor) -> None:
        """Fill `destination`, which has the tensor's shape, converting to its dtype. Raises CheckpointError."""

    def read_blocks(self, name: str) -> torch.Tensor:
        """A quantised matrix's blocks, uint8[rows, bytes of a row], rows in the order of `read_into`."""


def check_tensors(source: TensorSource, needed: Mapping[str, Shape]) -> None:
    """Raises CheckpointError naming the first tensor that is missing, of another shape, or not part of the model."""
    found = source.shapes
    for name, shape in needed.items():
        if name not in found:
            raise CheckpointError(
                f'{source.path}: tensor "{source.stored_name(name)}" is missing, expected shape {list(shape)}'
            )
        if found[name] != shape:
            raise CheckpointError(
                f'{source.path}: tensor "{source.stored_name(name)}" has shape {list(found[name])}, '
                f"expected {list(shape)}"
            )
    for name, shape in found.items():
        if name not in needed:
            raise CheckpointError(
                f'{source.path}: tensor "{source.stored_name(name)}" of shape {list(shape)} is not part of a '
                f"{source.config.architecture} model; computing without it would be wrong"
            )


def read_stacked(source: TensorSource, names: tuple[str, ...], dtype: torch.dtype) -> torch.Tensor:
    """[sum of rows, columns]: matrices of equal width under one another, so that one product serves them all."""
    shapes = [source.shapes[name] for name in names]
    stacked = torch.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=dtype)
    begin = 0
    for name, shape in zip(names, shapes, strict=True):
        with torch.device("cpu"):  # where files are read and expanded, wherever the result lies
            source.read_into(name, stacked[begin : begin + shape[0]])
        begin += shape[0]
    return stacked


def pack_stacked(
    source: TensorSource, names: tuple[str, ...], dtype: torch.dtype, kernels: Kernels
) -> tuple[PackedWeight, ...]:
    """Matrices of equal width under one another, packed in as few parts as their quantizations allow.

    What the kernels can keep quantised stays so. Raises CheckpointError for blocks that are no numbers.
    """
    parts: list[PackedWeight] = []
    for quantization, group in groupby(names, key=source.quantization):
        members = tuple(group)
        if quantization is None or quantization not in kernels.quantizations:
            parts.append(kernels.pack(read_stacked(source, members, dtype)))
            continue
        with torch.device("cpu"):
            blocks = torch.cat([source.read_blocks(name) for name in members])
        try:
            parts.append(kernels.pack_blocks(blocks, quantization))
        except ValueError as error:
            stored = ", ".join(f'"{source.stored_name(name)}"' for name in members)
            raise CheckpointError(f"{source.path}: tensor {stored} cannot be read: {error}") from error
    return tuple(parts)

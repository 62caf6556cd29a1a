"""Where weights come from, and the check that a file holds exactly the tensors its model needs.

Tensor names here are the canonical ones, which are those of a `transformers` Llama state dict; a source of another
format maps them. Knows no model family and allocates nothing but what the caller asks for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, Protocol

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

    def read_into(self, name: str, destination: torch.Tensor, first_row: int = 0) -> None:
        """Fill `destination` with the tensor from `first_row` on, converting to its dtype; nothing else is read.

        It has the tensor's shape but for the first axis, which may be shorter. Raises CheckpointError.
        """

    def read_blocks(self, name: str, first_row: int = 0, num_rows: int | None = None) -> torch.Tensor:
        """A quantised matrix's blocks, uint8[rows, bytes of a row], in the order of `read_into`; None: to the last."""


class TensorRows(NamedTuple):
    """Rows [begin, end) of a tensor, by canonical name."""

    name: str
    begin: int
    end: int

    @classmethod
    def of_heads(cls, name: str, heads: range, head_rows: int, first_row: int = 0) -> TensorRows:
        """The rows of some heads, each of `head_rows`, where those of head 0 begin at `first_row`."""
        return cls(name, first_row + heads.start * head_rows, first_row + heads.stop * head_rows)


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


def all_rows(source: TensorSource, name: str) -> TensorRows:
    """The whole tensor."""
    return TensorRows(name, 0, source.shapes[name][0])


def read_stacked(source: TensorSource, parts: Sequence[TensorRows], dtype: torch.dtype) -> torch.Tensor:
    """[sum of rows, columns]: matrices of equal width under one another, so that one product serves them all."""
    columns = source.shapes[parts[0].name][1:]
    stacked = torch.empty((sum(part.end - part.begin for part in parts), *columns), dtype=dtype)
    begin = 0
    for part in parts:
        end = begin + part.end - part.begin
        with torch.device("cpu"):  # where files are read and expanded, wherever the result lies
            source.read_into(part.name, stacked[begin:end], part.begin)
        begin = end
    return stacked


def pack_stacked(
    source: TensorSource, parts: Sequence[TensorRows], dtype: torch.dtype, kernels: Kernels
) -> tuple[PackedWeight, ...]:
    """Matrices of equal width under one another, packed in as few parts as their quantizations allow.

    What the kernels can keep quantised stays so. Raises CheckpointError for blocks that are no numbers.
    """
    packed: list[PackedWeight] = []
    for quantization, group in groupby(parts, key=lambda part: source.quantization(part.name)):
        members = tuple(group)
        if quantization is None or quantization not in kernels.quantizations:
            packed.append(kernels.pack(read_stacked(source, members, dtype)))
            continue
        with torch.device("cpu"):
            blocks = torch.cat([source.read_blocks(part.name, part.begin, part.end - part.begin) for part in members])
        try:
            packed.append(kernels.pack_blocks(blocks, quantization))
        except ValueError as error:
            stored = ", ".join(f'"{source.stored_name(part.name)}"' for part in members)
            raise CheckpointError(f"{source.path}: tensor {stored} cannot be read: {error}") from error
    return tuple(packed)

"""How a node keeps its weights in memory: as float32, or quantised as the file has them. Knows no model family.

The choice changes memory and speed and no result: kernels compute with quantised weights bit for bit what they compute
with the float32 weights that those stand for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch

from model_runtime.config import ModelConfig
from model_runtime.errors import UnsupportedWeightsError
from model_runtime.kernels.interface import Kernels
from model_runtime.weights import Shape, TensorSource

_FLOAT32_BYTES = 4


class WeightChoice(StrEnum):
    """AUTO keeps quantised whatever the kernels can; QUANTIZED refuses a model that would need more than that."""

    AUTO = "auto"
    FLOAT32 = "float32"
    QUANTIZED = "quantized"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFacts:
    """What the weights of a loaded model take in memory. `formats`: "float32" or GGUF names, sorted.

    `adapter_bytes` come on top.
    """

    formats: tuple[str, ...]
    num_bytes: int
    float32_bytes: int
    adapter_bytes: int = 0


class Float32Source:
    """A source whose tensors all look like plain numbers."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source

    @property
    def path(self) -> Path:
        return self._source.path

    @property
    def config(self) -> ModelConfig:
        return self._source.config

    @property
    def content_files(self) -> tuple[Path, ...]:
        return self._source.content_files

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return self._source.shapes

    def stored_name(self, name: str) -> str:
        return self._source.stored_name(name)

    def quantization(self, name: str) -> str | None:
        return None

    def read_into(self, name: str, destination: torch.Tensor, first_row: int = 0) -> None:
        self._source.read_into(name, destination, first_row)

    def read_blocks(self, name: str, first_row: int = 0, num_rows: int | None = None) -> torch.Tensor:
        return self._source.read_blocks(name, first_row, num_rows)


def apply_choice(choice: WeightChoice, source: TensorSource, kernels: Kernels) -> TensorSource:
    """The source a model is to be built from. Raises UnsupportedWeightsError naming the tensor."""
    if choice is WeightChoice.FLOAT32:
        return Float32Source(source)
    if choice is WeightChoice.QUANTIZED:
        _require_quantized(source, kernels)
    return source


def describe_weights(source: TensorSource, kernels: Kernels, *, adapter_bytes: int = 0) -> WeightFacts:
    """Facts of the model that has been built from `source` on `kernels`, which hold nothing but it and its adapters."""
    matrices = [name for name, shape in source.shapes.items() if len(shape) > 1]
    return WeightFacts(
        formats=tuple(sorted({_kept_format(source, name, kernels) for name in matrices})),
        num_bytes=kernels.num_packed_bytes - adapter_bytes,
        adapter_bytes=adapter_bytes,
        float32_bytes=sum(_FLOAT32_BYTES * torch.Size(source.shapes[name]).numel() for name in matrices),
    )


def _kept_format(source: TensorSource, name: str, kernels: Kernels) -> str:
    quantization = source.quantization(name)
    return quantization if quantization is not None and quantization in kernels.quantizations else "float32"


def _require_quantized(source: TensorSource, kernels: Kernels) -> None:
    for name, shape in source.shapes.items():
        if len(shape) > 1 and _kept_format(source, name, kernels) == "float32":
            found = source.quantization(name) or "not quantised"
            raise UnsupportedWeightsError(
                f'{source.path}: tensor "{source.stored_name(name)}" is {found}, weights "quantized" needs one of '
                f"{', '.join(kernels.quantizations)}"
            )

"""The directory of a GGUF file: its metadata scalars and where each tensor lies.

Arrays of the metadata (a vocabulary, mostly) are stepped over, tensor data is never touched. Knows no architecture and
needs no torch. The file is not trusted: `header.GgufCursor` checks every length before it is used.
Source: GGUF specification, ggml repository, docs/gguf.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from model_runtime.errors import CheckpointError
from model_runtime.gguf.header import GgufCursor, open_gguf

GgufScalar = str | int | float | bool

_DEFAULT_ALIGNMENT_BYTES = 32
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """One tensor's place: `[begin_bytes, begin_bytes + num_bytes)` of the file. `shape` is row-major, rows first."""

    name: str
    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    begin_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufDirectory:
    """What a file says about itself. `scalars` leaves arrays out."""

    path: Path
    scalars: Mapping[str, GgufScalar]
    tensors: Mapping[str, GgufTensor]

    def find_integer(self, key: str) -> int | None:
        """None when absent. Raises CheckpointError when the value is no integer."""
        value = self.scalars.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise CheckpointError(f'{self.path}: key "{key}" must be an integer, is {value!r}')
        return value

    def find_number(self, key: str) -> float | None:
        """None when absent. Raises CheckpointError when the value is no number."""
        value = self.scalars.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f'{self.path}: key "{key}" must be a number, is {value!r}')
        return float(value)

    def find_string(self, key: str) -> str | None:
        """None when absent. Raises CheckpointError when the value is no string."""
        value = self.scalars.get(key)
        if value is not None and not isinstance(value, str):
            raise CheckpointError(f'{self.path}: key "{key}" must be a string, is {value!r}')
        return value

    def integer(self, key: str) -> int:
        """Raises CheckpointError when the key is missing or no integer."""
        value = self.find_integer(key)
        if value is None:
            raise self._missing(key)
        return value

    def number(self, key: str) -> float:
        """Raises CheckpointError when the key is missing or no number."""
        value = self.find_number(key)
        if value is None:
            raise self._missing(key)
        return value

    def _missing(self, key: str) -> CheckpointError:
        return CheckpointError(f'{self.path}: key "{key}" is missing')


def read_gguf_directory(path: Path) -> GgufDirectory:
    """Raises CheckpointError naming the key or tensor, and both values, for a file that is corrupt or cut short."""
    with open_gguf(path) as cursor:
        header = cursor.header()
        pairs = cursor.pairs(header, with_arrays=False)
        scalars = {key: value for key, value in pairs.items() if not isinstance(value, tuple)}
        tensors = _read_tensors(cursor, header.num_tensors, _alignment_bytes(path, scalars))
    return GgufDirectory(path=path, scalars=scalars, tensors=tensors)


def _alignment_bytes(path: Path, scalars: Mapping[str, GgufScalar]) -> int:
    alignment = scalars.get("general.alignment", _DEFAULT_ALIGNMENT_BYTES)
    if not isinstance(alignment, int) or alignment < 1:
        raise CheckpointError(f'{path}: key "general.alignment" must be a positive integer, is {alignment!r}')
    return alignment


def _read_tensors(cursor: GgufCursor, num_tensors: int, alignment_bytes: int) -> dict[str, GgufTensor]:
    relative: list[GgufTensor] = []
    for index in range(num_tensors):
        cursor.subject = f"tensor {index} of {num_tensors}"
        relative.append(_read_tensor(cursor))
    data_begin_bytes = -(-cursor.offset // alignment_bytes) * alignment_bytes
    tensors: dict[str, GgufTensor] = {}
    for tensor in relative:
        if tensor.name in tensors:
            raise CheckpointError(f'{cursor.path}: tensor "{tensor.name}" appears twice')
        tensors[tensor.name] = _placed(cursor, tensor, data_begin_bytes)
    return tensors


def _read_tensor(cursor: GgufCursor) -> GgufTensor:
    """One entry of the directory; its `begin_bytes` counts from the beginning of the data."""
    name = cursor.string()
    cursor.subject = f'tensor "{name}"'
    num_dimensions = cursor.u32()
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise cursor.corrupt(f"has {num_dimensions} dimensions, possible are 1 to {_MAX_DIMENSIONS}")
    shape = tuple(reversed([cursor.u64() for _ in range(num_dimensions)]))
    number = cursor.u32()
    try:
        quantization = GGMLQuantizationType(number)
    except ValueError:
        raise cursor.corrupt(f"has the unknown type {number}") from None
    block_elements, block_bytes = GGML_QUANT_SIZES[quantization]
    if shape[-1] % block_elements:
        raise cursor.corrupt(f"has rows of {shape[-1]}, {quantization.name} needs multiples of {block_elements}")
    return GgufTensor(
        name=name,
        shape=shape,
        quantization=quantization,
        begin_bytes=cursor.u64(),
        num_bytes=math.prod(shape) // block_elements * block_bytes,
    )


def _placed(cursor: GgufCursor, tensor: GgufTensor, data_begin_bytes: int) -> GgufTensor:
    begin_bytes = data_begin_bytes + tensor.begin_bytes
    end_bytes = begin_bytes + tensor.num_bytes
    if end_bytes > cursor.num_file_bytes:
        raise CheckpointError(
            f'{cursor.path}: tensor "{tensor.name}" of shape {list(tensor.shape)} ends at byte {end_bytes}, '
            f"the file has {cursor.num_file_bytes}: it is cut short or corrupt"
        )
    return replace(tensor, begin_bytes=begin_bytes)

"""The directory of a GGUF file: its metadata scalars and where each tensor lies.

Arrays of the metadata (a vocabulary, mostly) are stepped over, tensor data is never touched. Knows no architecture. The
file is not trusted: every length is checked against the bytes that are left before it is used.
Source: GGUF specification, ggml repository, docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from model_runtime.errors import CheckpointError

GgufScalar = str | int | float | bool

_MAGIC = b"GGUF"
_SUPPORTED_VERSIONS = (2, 3)
_HEADER = struct.Struct("<4sIQQ")
_DEFAULT_ALIGNMENT_BYTES = 32
_MAX_DIMENSIONS = 4
_STRING = 8
_ARRAY = 9
# struct codes of the fixed-size value types by their number in the file.
_SCALAR_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SCALARS = MappingProxyType({number: struct.Struct(f"<{code}") for number, code in _SCALAR_CODES.items()})


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
    num_file_bytes = path.stat().st_size
    if num_file_bytes < _HEADER.size:
        raise CheckpointError(f"{path}: a file of {num_file_bytes} bytes is too short for a GGUF header")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return _DirectoryReader(path, content).read()


class _DirectoryReader:
    """A cursor over the file; `_subject` is what is being read, for messages."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path = path
        self._content = content
        self._offset = 0
        self._subject = "header"

    def read(self) -> GgufDirectory:
        magic, version, num_tensors, num_pairs = _HEADER.unpack(self._take(_HEADER.size))
        if magic != _MAGIC:
            raise CheckpointError(f"{self._path}: not a GGUF file, it begins with {magic!r}")
        if version not in _SUPPORTED_VERSIONS:
            raise CheckpointError(f"{self._path}: GGUF version {version}, supported are {_SUPPORTED_VERSIONS}")
        scalars = self._read_scalars(num_pairs)
        tensors = self._read_tensors(num_tensors, self._alignment_bytes(scalars))
        return GgufDirectory(path=self._path, scalars=scalars, tensors=tensors)

    def _read_scalars(self, num_pairs: int) -> dict[str, GgufScalar]:
        scalars: dict[str, GgufScalar] = {}
        for index in range(num_pairs):
            self._subject = f"key {index} of {num_pairs}"
            key = self._string()
            self._subject = f'key "{key}"'
            value = self._value(self._u32())
            if value is not None:
                scalars[key] = value
        return scalars

    def _alignment_bytes(self, scalars: Mapping[str, GgufScalar]) -> int:
        alignment = scalars.get("general.alignment", _DEFAULT_ALIGNMENT_BYTES)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f'{self._path}: key "general.alignment" must be a positive integer, is {alignment!r}')
        return alignment

    def _read_tensors(self, num_tensors: int, alignment_bytes: int) -> dict[str, GgufTensor]:
        relative: list[GgufTensor] = []
        for index in range(num_tensors):
            self._subject = f"tensor {index} of {num_tensors}"
            relative.append(self._tensor())
        data_begin_bytes = -(-self._offset // alignment_bytes) * alignment_bytes
        tensors: dict[str, GgufTensor] = {}
        for tensor in relative:
            if tensor.name in tensors:
                raise CheckpointError(f'{self._path}: tensor "{tensor.name}" appears twice')
            tensors[tensor.name] = self._placed(tensor, data_begin_bytes)
        return tensors

    def _tensor(self) -> GgufTensor:
        name = self._string()
        self._subject = f'tensor "{name}"'
        num_dimensions = self._u32()
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self._corrupt(f"has {num_dimensions} dimensions, possible are 1 to {_MAX_DIMENSIONS}")
        shape = tuple(reversed([self._u64() for _ in range(num_dimensions)]))
        number = self._u32()
        try:
            quantization = GGMLQuantizationType(number)
        except ValueError:
            raise self._corrupt(f"has the unknown type {number}") from None
        block_elements, block_bytes = GGML_QUANT_SIZES[quantization]
        if shape[-1] % block_elements:
            raise self._corrupt(f"has rows of {shape[-1]}, {quantization.name} needs multiples of {block_elements}")
        return GgufTensor(
            name=name,
            shape=shape,
            quantization=quantization,
            begin_bytes=self._u64(),
            num_bytes=math.prod(shape) // block_elements * block_bytes,
        )

    def _placed(self, tensor: GgufTensor, data_begin_bytes: int) -> GgufTensor:
        begin_bytes = data_begin_bytes + tensor.begin_bytes
        end_bytes = begin_bytes + tensor.num_bytes
        if end_bytes > len(self._content):
            raise CheckpointError(
                f'{self._path}: tensor "{tensor.name}" of shape {list(tensor.shape)} ends at byte {end_bytes}, '
                f"the file has {len(self._content)}: it is cut short or corrupt"
            )
        return GgufTensor(
            name=tensor.name,
            shape=tensor.shape,
            quantization=tensor.quantization,
            begin_bytes=begin_bytes,
            num_bytes=tensor.num_bytes,
        )

    def _value(self, value_type: int) -> GgufScalar | None:
        """None for an array, which is stepped over."""
        if value_type == _STRING:
            return self._string()
        if value_type == _ARRAY:
            self._skip_array(self._u32(), self._u64())
            return None
        scalar = self._scalar_struct(value_type)
        value: int | float | bool = scalar.unpack(self._take(scalar.size))[0]
        return value

    def _skip_array(self, item_type: int, num_items: int) -> None:
        if item_type != _STRING:
            self._skip(num_items * self._scalar_struct(item_type).size)
            return
        for _ in range(num_items):
            self._skip(self._u64())

    def _scalar_struct(self, value_type: int) -> struct.Struct:
        if value_type not in _SCALARS:
            raise self._corrupt(f"has the unknown value type {value_type}")
        return _SCALARS[value_type]

    def _string(self) -> str:
        try:
            return self._take(self._u64()).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._corrupt(f"is not UTF-8: {error.reason}") from error

    def _u32(self) -> int:
        return int.from_bytes(self._take(4), "little")

    def _u64(self) -> int:
        return int.from_bytes(self._take(8), "little")

    def _take(self, num_bytes: int) -> bytes:
        begin = self._offset
        self._skip(num_bytes)
        return self._content[begin : self._offset]

    def _skip(self, num_bytes: int) -> None:
        num_left_bytes = len(self._content) - self._offset
        if num_bytes > num_left_bytes:
            raise self._corrupt(f"needs {num_bytes} bytes, {num_left_bytes} are left")
        self._offset += num_bytes

    def _corrupt(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: corrupt or cut short, {self._subject} {reason}")

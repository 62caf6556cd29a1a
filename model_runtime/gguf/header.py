"""The front of a GGUF file: header and key-value pairs, read by a cursor that trusts nothing.

Shared by the reader of weights and the reader of vocabularies, so it needs the standard library alone: routers import
it without torch. The file is not trusted: every length is checked against the bytes that are left before it is used. It
knows no key and no architecture.
Source: GGUF specification, ggml repository, docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from model_runtime.errors import CheckpointError

GgufValue = str | int | float | bool | tuple[str, ...] | tuple[int, ...] | tuple[float, ...]

_MAGIC = b"GGUF"
_SUPPORTED_VERSIONS = (2, 3)
_HEADER = struct.Struct("<4sIQQ")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_STRING = 8
_ARRAY = 9
# struct codes of the fixed-size value types by their number in the file.
_SCALAR_CODES: Mapping[int, str] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """How much the file says it holds. Neither number has been checked against anything yet."""

    num_tensors: int
    num_pairs: int


@contextmanager
def open_gguf(path: Path) -> Iterator[GgufCursor]:
    """A cursor at the beginning of the file. Raises CheckpointError for an empty one; OSError passes through."""
    num_bytes = path.stat().st_size
    if num_bytes < _HEADER.size:
        raise CheckpointError(f"{path}: {num_bytes} bytes are too few for a GGUF header, the file is cut short")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        yield GgufCursor(path, content)


class GgufCursor:
    """Reads one value after another. `subject` is what is being read, for messages."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path = path
        self.subject = "header"
        self._content = content
        self._offset = 0

    @property
    def offset(self) -> int:
        """Bytes read so far."""
        return self._offset

    @property
    def num_file_bytes(self) -> int:
        return len(self._content)

    def header(self) -> GgufHeader:
        """Raises CheckpointError for a file that is no little-endian GGUF of a supported version."""
        magic, version, num_tensors, num_pairs = _HEADER.unpack(self._take(_HEADER.size))
        if magic != _MAGIC:
            raise CheckpointError(f"{self.path}: not a GGUF file, it begins with {magic!r}")
        if version not in _SUPPORTED_VERSIONS:
            raise CheckpointError(f"{self.path}: GGUF version {version}, supported are {_SUPPORTED_VERSIONS}")
        return GgufHeader(num_tensors=num_tensors, num_pairs=num_pairs)

    def pairs(self, header: GgufHeader, *, with_arrays: bool) -> dict[str, GgufValue]:
        """The key-value section. Without arrays (a vocabulary, mostly) these are stepped over and left out.

        Raises CheckpointError naming the key for a length or a type that cannot be, and for a key that appears twice.
        """
        values: dict[str, GgufValue] = {}
        seen: set[str] = set()
        for index in range(header.num_pairs):
            self.subject = f"key {index} of {header.num_pairs}"
            key = self.string()
            self.subject = f'key "{key}"'
            if key in seen:
                raise self.corrupt("appears twice")
            seen.add(key)
            value = self._value(with_arrays=with_arrays)
            if value is not None:
                values[key] = value
        return values

    def u32(self) -> int:
        value: int = _U32.unpack(self._take(_U32.size))[0]
        return value

    def u64(self) -> int:
        value: int = _U64.unpack(self._take(_U64.size))[0]
        return value

    def string(self) -> str:
        content = self._take(self._string_bytes())
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.corrupt(f"is not UTF-8: {error.reason}") from error

    def corrupt(self, reason: str) -> CheckpointError:
        """The error for what is wrong with the subject."""
        return CheckpointError(f"{self.path}: corrupt or cut short, {self.subject} {reason}")

    def _value(self, *, with_arrays: bool) -> GgufValue | None:
        """None for an array that was stepped over."""
        value_type = self.u32()
        if value_type == _STRING:
            return self.string()
        if value_type != _ARRAY:
            scalar: int | float | bool = self._scalars(value_type, 1)[0]
            return scalar
        item_type, num_items = self.u32(), self.u64()
        if item_type == _STRING:
            return self._strings(num_items, with_arrays=with_arrays)
        if with_arrays:
            return self._scalars(item_type, num_items)
        self._skip(self._num_scalar_bytes(item_type, num_items))
        return None

    def _strings(self, num_items: int, *, with_arrays: bool) -> tuple[str, ...] | None:
        # A string takes at least its length field, so a count beyond that cannot be true.
        if num_items > self._num_bytes_left() // _U64.size:
            raise self.corrupt(f"claims {num_items} strings, {self._num_bytes_left()} bytes are left")
        if with_arrays:
            return tuple(self.string() for _ in range(num_items))
        for _ in range(num_items):
            self._skip(self._string_bytes())
        return None

    def _scalars(self, item_type: int, num_items: int) -> tuple[int, ...] | tuple[float, ...]:
        content = self._take(self._num_scalar_bytes(item_type, num_items))
        return struct.unpack(f"<{num_items}{_SCALAR_CODES[item_type]}", content)

    def _num_scalar_bytes(self, item_type: int, num_items: int) -> int:
        code = _SCALAR_CODES.get(item_type)
        if code is None:
            raise self.corrupt(f"has the unknown value type {item_type}")
        return num_items * struct.calcsize(f"<{code}")

    def _string_bytes(self) -> int:
        num_bytes = self.u64()
        if num_bytes > self._num_bytes_left():
            raise self.corrupt(f"claims a string of {num_bytes} bytes, {self._num_bytes_left()} are left")
        return num_bytes

    def _take(self, num_bytes: int) -> bytes:
        begin = self._offset
        self._skip(num_bytes)
        return self._content[begin : self._offset]

    def _skip(self, num_bytes: int) -> None:
        if num_bytes > self._num_bytes_left():
            raise self.corrupt(f"claims {num_bytes} bytes, {self._num_bytes_left()} are left")
        self._offset += num_bytes

    def _num_bytes_left(self) -> int:
        return len(self._content) - self._offset

"""Reader of the key-value section of a GGUF file, and of nothing behind it.

A tokenizer needs about 2 MB of a file of hundreds; this reader decodes the metadata of a 49k-token vocabulary in a
tenth of a second and never touches a tensor. It does not know what the keys mean. The file is not trusted: every length
is checked against the bytes that are left before it is used.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from model_runtime.text.errors import TokenizerError

_MAGIC = b"GGUF"
_SUPPORTED_VERSIONS = (2, 3)
_HEADER = struct.Struct("<4sIQQ")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_STRING = 8
_ARRAY = 9
# struct codes of the fixed-size value types by their number in the file.
_SCALAR_CODES: Mapping[int, str] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}

MetadataValue = str | int | float | bool | tuple[str, ...] | tuple[int, ...] | tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufMetadata:
    """The key-value pairs of one file, with typed access.

    Each accessor raises `TokenizerError` that names the file, the key and the type found when the value is of another
    type; the `find_` forms return None for an absent key, the others raise.
    """

    path: Path
    values: Mapping[str, MetadataValue]

    def find_string(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self._wrong_type(key, "a string", value)
        return value

    def find_integer(self, key: str) -> int | None:
        value = self.values.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self._wrong_type(key, "an integer", value)
        return value

    def find_bool(self, key: str) -> bool | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._wrong_type(key, "a bool", value)
        return value

    def string(self, key: str) -> str:
        value = self.find_string(key)
        if value is None:
            raise self._missing(key)
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        items = self._array(key)
        strings = tuple(item for item in items if isinstance(item, str))
        if len(strings) != len(items):
            raise self._wrong_type(key, "an array of strings", items)
        return strings

    def integers(self, key: str) -> tuple[int, ...]:
        items = self._array(key)
        integers = tuple(item for item in items if isinstance(item, int))
        if len(integers) != len(items):
            raise self._wrong_type(key, "an array of integers", items)
        return integers

    def floats(self, key: str) -> tuple[float, ...]:
        items = self._array(key)
        floats = tuple(item for item in items if isinstance(item, float))
        if len(floats) != len(items):
            raise self._wrong_type(key, "an array of floats", items)
        return floats

    def _array(self, key: str) -> tuple[str | int | float, ...]:
        value = self.values.get(key)
        if value is None:
            raise self._missing(key)
        if not isinstance(value, tuple):
            raise self._wrong_type(key, "an array", value)
        return value

    def _missing(self, key: str) -> TokenizerError:
        return TokenizerError(f'{self.path}: key "{key}" is missing')

    def _wrong_type(self, key: str, wanted: str, found: object) -> TokenizerError:
        return TokenizerError(f'{self.path}: key "{key}" must be {wanted}, is {type(found).__name__}')


def read_gguf_metadata(path: Path) -> GgufMetadata:
    """Reads the key-value section of the file at `path`.

    Raises TokenizerError for a file that is no little-endian GGUF of version 2 or 3, is cut short, or holds a length or
    a type that cannot be; the message names the key. OSError passes through.
    Source: GGUF specification, ggml repository, docs/gguf.md.
    """
    with path.open("rb") as file:
        if path.stat().st_size < _HEADER.size:
            raise TokenizerError(f"{path}: {path.stat().st_size} bytes are too few for a GGUF header")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return GgufMetadata(path=path, values=_Reader(path, content).read_all())


class _Reader:
    """A cursor over the file; `_key` is the key being read, for messages."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path = path
        self._content = content
        self._offset = 0
        self._key = "header"

    def read_all(self) -> dict[str, MetadataValue]:
        magic, version, _, num_pairs = _HEADER.unpack(self._take(_HEADER.size))
        if magic != _MAGIC:
            raise TokenizerError(f"{self._path}: not a GGUF file, it begins with {magic!r}")
        if version not in _SUPPORTED_VERSIONS:
            raise TokenizerError(f"{self._path}: GGUF version {version}, supported are {_SUPPORTED_VERSIONS}")
        values: dict[str, MetadataValue] = {}
        for index in range(num_pairs):
            self._key = f"number {index} of {num_pairs}"
            self._key = self._string()
            if self._key in values:
                raise self._corrupt("appears twice")
            values[self._key] = self._value(self._u32())
        return values

    def _value(self, value_type: int) -> MetadataValue:
        if value_type == _STRING:
            return self._string()
        if value_type == _ARRAY:
            return self._array(self._u32(), self._u64())
        scalar: int | float | bool = self._scalars(value_type, 1)[0]
        return scalar

    def _array(self, item_type: int, num_items: int) -> MetadataValue:
        if item_type == _STRING:
            # A string takes at least its length field, so a count beyond that cannot be true.
            if num_items > self._num_bytes_left() // _U64.size:
                raise self._corrupt(f"claims {num_items} strings, {self._num_bytes_left()} bytes are left")
            return tuple(self._string() for _ in range(num_items))
        return self._scalars(item_type, num_items)

    def _scalars(self, item_type: int, num_items: int) -> tuple[int, ...] | tuple[float, ...]:
        code = _SCALAR_CODES.get(item_type)
        if code is None:
            raise self._corrupt(f"has the unknown value type {item_type}")
        num_bytes = num_items * struct.calcsize(code)
        if num_bytes > self._num_bytes_left():
            raise self._corrupt(f"claims {num_bytes} bytes, {self._num_bytes_left()} are left")
        return struct.unpack(f"<{num_items}{code}", self._take(num_bytes))

    def _string(self) -> str:
        begin = self._offset + _U64.size
        if begin > len(self._content):
            raise self._corrupt("is cut short by the end of the file")
        (num_bytes,) = _U64.unpack_from(self._content, self._offset)
        end = begin + num_bytes
        if end > len(self._content):
            raise self._corrupt(f"claims a string of {num_bytes} bytes, {len(self._content) - begin} are left")
        self._offset = end
        try:
            return self._content[begin:end].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._corrupt(f"is not UTF-8: {error.reason}") from error

    def _u32(self) -> int:
        value: int = _U32.unpack(self._take(_U32.size))[0]
        return value

    def _u64(self) -> int:
        value: int = _U64.unpack(self._take(_U64.size))[0]
        return value

    def _take(self, num_bytes: int) -> bytes:
        if num_bytes > self._num_bytes_left():
            raise self._corrupt("is cut short by the end of the file")
        begin = self._offset
        self._offset += num_bytes
        return self._content[begin : self._offset]

    def _num_bytes_left(self) -> int:
        return len(self._content) - self._offset

    def _corrupt(self, reason: str) -> TokenizerError:
        return TokenizerError(f'{self._path}: corrupt GGUF metadata, key "{self._key}" {reason}')

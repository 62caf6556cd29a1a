"""The key-value section of a GGUF file, and nothing behind it.

A tokenizer needs about 2 MB of a file of hundreds; the metadata of a 49k-token vocabulary is decoded in a tenth of a
second and no tensor is touched. It does not know what the keys mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from model_runtime.errors import CheckpointError
from model_runtime.gguf.header import GgufValue, open_gguf
from model_runtime.text.errors import TokenizerError


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufMetadata:
    """The key-value pairs of one file, with typed access.

    Each accessor raises `TokenizerError` that names the file, the key and the type found when the value is of another
    type; the `find_` forms return None for an absent key, the others raise.
    """

    path: Path
    values: Mapping[str, GgufValue]

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


def read_gguf_metadata(path: Path, *, with_arrays: bool = True) -> GgufMetadata:
    """Reads the key-value section of the file at `path`; without arrays it steps over the vocabulary.

    Raises TokenizerError for a file that is no little-endian GGUF of version 2 or 3, is cut short, or holds a length or
    a type that cannot be; the message names the key. OSError passes through.
    """
    try:
        with open_gguf(path) as cursor:
            return GgufMetadata(path=path, values=cursor.pairs(cursor.header(), with_arrays=with_arrays))
    except CheckpointError as error:
        raise TokenizerError(str(error)) from None

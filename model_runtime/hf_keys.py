"""Typed access to the JSON files of a `transformers` checkpoint. Knows no architecture."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from model_runtime.errors import CheckpointError


def read_json_object(path: Path) -> Mapping[str, object]:
    """Raises CheckpointError when the file is missing or holds no JSON object."""
    try:
        content: object = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is missing") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, holds {type(content).__name__}")
    return content


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonKeys:
    """Typed access to one JSON object; every accessor raises CheckpointError naming the key and the value found."""

    path: Path
    values: Mapping[str, object]

    def find_integer(self, key: str) -> int | None:
        value = self.values.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self._wrong(key, "an integer")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.find_integer(key)
        if value is not None:
            return value
        if default is None:
            raise self._wrong(key, "an integer")
        return default

    def number(self, key: str) -> float:
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number")
        return _as_float(value)

    def flag(self, key: str, *, default: bool = False) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def strings(self, key: str) -> tuple[str, ...] | None:
        match self.values.get(key):
            case None:
                return None
            case [*items] if all(isinstance(item, str) for item in items):
                return tuple(map(str, items))
            case _:
                raise self._wrong(key, "an array of strings")

    def integers(self, key: str) -> tuple[int, ...]:
        """Empty where the key is missing or null."""
        match self.values.get(key):
            case None:
                return ()
            case [*items] if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
                return tuple(int(str(item)) for item in items)
            case _:
                raise self._wrong(key, "an array of integers")

    def number_pair(self, key: str) -> tuple[float, float] | None:
        match self.values.get(key):
            case None:
                return None
            case [first, second] if _is_number(first) and _is_number(second):
                return _as_float(first), _as_float(second)
            case _:
                raise self._wrong(key, "an array of two numbers")

    def refuse_others(self, accepted_by_key: Mapping[str, tuple[object, ...]]) -> None:
        """Raises for a key that holds none of the values accepted for it; a missing key is the first of them."""
        for key, accepted in accepted_by_key.items():
            value = self.values.get(key, accepted[0])
            if value not in accepted:
                raise CheckpointError(f'{self.path}: key "{key}" is {value!r}, supported is {accepted[0]!r}')

    def nested(self, key: str) -> JsonKeys | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, "an object")
        return JsonKeys(path=self.path, values=value)

    def _wrong(self, key: str, wanted: str) -> CheckpointError:
        return CheckpointError(f'{self.path}: key "{key}" must be {wanted}, is {self.values.get(key)!r}')


def _is_number(value: object) -> bool:
    match value:
        case bool():
            return False
        case int() | float() | {"__float__": "Infinity"}:
            return True
        case _:
            return False


def _as_float(number: object) -> float:
    """`transformers` writes what JSON has no word for as an object; integers may be too long for a float."""
    try:
        return float(number) if isinstance(number, int | float) else math.inf
    except OverflowError:
        return math.inf


def eos_token_ids(directory: Path, keys: JsonKeys) -> tuple[int, ...]:
    """generation_config.json lists the ends of a chat turn, which config.json may lack; it wins where it is there."""
    generation_path = directory / "generation_config.json"
    for path, values in (
        (generation_path, read_json_object(generation_path) if generation_path.is_file() else {}),
        (keys.path, keys.values),
    ):
        match values.get("eos_token_id"):
            case None:
                continue
            case int(token_id):
                return (token_id,)
            case [*token_ids] if all(isinstance(token_id, int) for token_id in token_ids):
                return tuple(int(str(token_id)) for token_id in token_ids)
            case other:
                raise CheckpointError(f'{path}: key "eos_token_id" must be token ids, is {other!r}')
    return ()

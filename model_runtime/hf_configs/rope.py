"""What all architectures' rotary settings have in common: both spellings, `rope_parameters` (5.x) and before it."""

from __future__ import annotations

from model_runtime.errors import CheckpointError
from model_runtime.hf_keys import JsonKeys

DEFAULT_ROPE_THETA = 10000.0


def number_or(keys: JsonKeys, key: str, default: float) -> float:
    """The key's number, the default where it is absent or null."""
    return default if keys.values.get(key) is None else keys.number(key)


def rope_theta(keys: JsonKeys, rope: JsonKeys | None, default: float) -> float:
    """The rotary base, from the rotary settings or from the config itself."""
    for place in (rope, keys):
        if place is not None and place.values.get("rope_theta") is not None:
            return place.number("rope_theta")
    return default


def rope_kind(rope: JsonKeys) -> object:
    """The name of a frequency scaling, "default" for none."""
    return rope.values.get("rope_type", rope.values.get("type", "default"))


def unsupported_rope(rope: JsonKeys, supported: tuple[str, ...]) -> CheckpointError:
    """The error for a scaling outside `supported`."""
    return CheckpointError(
        f'{rope.path}: rope type "{rope_kind(rope)}" is not supported (supported: {", ".join(supported)})'
    )

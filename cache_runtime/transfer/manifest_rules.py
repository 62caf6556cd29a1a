"""How large a manifest may be, and the checks that its parts share. Knows nothing of what the parts mean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

# Bounds on what a peer may make us allocate and loop over; the largest known models need a tenth of them.
MAX_GROUPS: Final = 64
MAX_FIELDS: Final = 4096
MAX_RANKS: Final = 256
MAX_OFFERS: Final = 16
MAX_BLOCK_AXES: Final = 8
MAX_SECTIONS: Final = 16
MAX_NAME_CHARS: Final = 256
# Dimensions, counts and token spans fit int32, as the kernels that index with them do.
MAX_COUNT: Final = (1 << 31) - 1


class ManifestError(ValueError):
    """A manifest breaks its own rules. The message names the field and both values."""


def check_name(name: str, value: str) -> None:
    if not 1 <= len(value) <= MAX_NAME_CHARS:
        raise ManifestError(f"{name} has {len(value)} characters, not 1 to {MAX_NAME_CHARS}")


def check_count(name: str, value: int) -> None:
    if not 1 <= value <= MAX_COUNT:
        raise ManifestError(f"{name}={value} is outside [1, {MAX_COUNT}]")


def check_size(name: str, values: Sequence[object], limit: int) -> None:
    if not 1 <= len(values) <= limit:
        raise ManifestError(f"{name}: {len(values)} entries, not 1 to {limit}")


def check_unique(name: str, values: Iterable[str]) -> set[str]:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise ManifestError(f'{name}: "{value}" appears twice')
        seen.add(value)
    return seen


def check_same_names(left_name: str, left: set[str], right_name: str, right: set[str]) -> None:
    for name in sorted(left ^ right):
        has, lacks = (left_name, right_name) if name in left else (right_name, left_name)
        raise ManifestError(f'"{name}" is in {has} but not in {lacks}')

"""The form that a whole completion must have, as a value: a JSON schema or a regular expression.

Knows no tokens and no library; `text/grammar.py` makes rules for tokens of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, unique
from typing import Final

MAX_FORM_BYTES: Final = 64 * 1024
"""What bounds the time that a form takes to compile, to a fraction of a second."""


@unique
class FormKind(Enum):
    """What a form is written in; the value is its name in requests."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputForm:
    """`source` is the schema, or the expression that the text matches from its first to its last character.

    Raises ValueError naming the field, its value and the limit.
    """

    kind: FormKind
    source: str

    def __post_init__(self) -> None:
        num_bytes = len(self.source.encode())
        if not 1 <= num_bytes <= MAX_FORM_BYTES:
            raise ValueError(f"{self.kind.value}: {num_bytes} bytes given, 1 to {MAX_FORM_BYTES} allowed")

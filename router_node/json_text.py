"""Reads JSON that others wrote, models among them, so that whatever comes out of it can be sent as text again."""

from __future__ import annotations

import json

from pydantic import JsonValue


def read_json(text: str) -> JsonValue:
    """Raises ValueError for what is no JSON, too deep, or spells half of a character, which no message can hold."""
    try:
        value: JsonValue = json.loads(text)
        # Only escapes can spell one: text itself is made of whole characters.
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError(str(error)) from None
    return value

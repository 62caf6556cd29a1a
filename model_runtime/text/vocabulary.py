"""The bytes behind each token id.

Decoding needs no merge rules, only the spelling of the tokens; two spellings are in use. This module knows them and
nothing about encoding, prompts or files. Immutable; one per tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType

WORD_START = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Spelling(Enum):
    """How the strings of a vocabulary stand for bytes."""

    # Every character stands for one byte, printable bytes for themselves.
    BYTE_LEVEL = auto()
    # Text as it is, with WORD_START for a space and `<0xNN>` for a byte that no token covers.
    SENTENCEPIECE = auto()


def _byte_level_alphabet() -> Mapping[str, int]:
    """Character -> byte. Bytes without a printable Latin-1 character take the code points from 256 on, in order.

    Source: GPT-2's published encoder, `bytes_to_unicode`.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return MappingProxyType(alphabet)


BYTE_LEVEL_ALPHABET = _byte_level_alphabet()


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """`tokens[i]` is the string of token i, None for an id that the model can produce but no text maps to.

    `verbatim` ids stand for exactly their string; `silent` ids (end of turn and the like) stand for no text at all.
    """

    tokens: tuple[str | None, ...]
    spelling: Spelling
    verbatim: frozenset[int]
    silent: frozenset[int]

    def __post_init__(self) -> None:
        for name, token_ids in (("verbatim", self.verbatim), ("silent", self.silent)):
            outside = [token_id for token_id in token_ids if not 0 <= token_id < len(self.tokens)]
            if outside:
                raise ValueError(f"{name}: token id {outside[0]} is outside [0, {len(self.tokens)})")

    def token_bytes(self, token_id: int) -> bytes:
        """Raises IndexError for an id outside [0, len(tokens))."""
        if not 0 <= token_id < len(self.tokens):
            raise IndexError(f"token id {token_id} is outside [0, {len(self.tokens)})")
        token = self.tokens[token_id]
        if token is None or token_id in self.silent:
            return b""
        if token_id in self.verbatim:
            return token.encode("utf-8")
        if self.spelling is Spelling.BYTE_LEVEL:
            return _byte_level_bytes(token)
        return _sentencepiece_bytes(token)


def _byte_level_bytes(token: str) -> bytes:
    spelled = [BYTE_LEVEL_ALPHABET.get(character) for character in token]
    known = [byte for byte in spelled if byte is not None]
    # A token with a character outside the alphabet was never spelled in it.
    return bytes(known) if len(known) == len(spelled) else token.encode("utf-8")


def _sentencepiece_bytes(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    if match is not None:
        return bytes((int(match[1], 16),))
    return token.replace(WORD_START, " ").encode("utf-8")

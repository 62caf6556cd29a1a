"""Prints text that arrives in pieces, wrapped at word boundaries behind an indent.

Knows the width of the lines only. Words are held back until they are complete.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_PARTS = re.compile(r"\n|[^\S\n]+|\S+")


class WrappedText:
    """Feeds whole pieces to `write`. Widths are characters."""

    def __init__(self, write: Callable[[str], None], *, width: int, indent: str = "") -> None:
        if width <= len(indent):
            raise ValueError(f"width ({width}) must be larger than the indent ({len(indent)})")
        self._write = write
        self._width = width
        self._indent = indent
        self._column = 0
        self._space = ""
        self._word = ""

    def feed(self, text: str) -> None:
        """Takes more text."""
        for part in _PARTS.findall(text):
            if part == "\n":
                self._end_word()
                self._end_line()
            elif part.isspace():
                self._end_word()
                self._space += part
            else:
                self._word += part

    def finish(self) -> None:
        """Prints what was held back and ends the line."""
        self._end_word()
        if self._column:
            self._end_line()

    def _end_word(self) -> None:
        word, self._word = self._word, ""
        if not word:
            return
        if self._column and self._column + len(self._space) + len(word) > self._width:
            self._end_line()
        if not self._column:
            self._emit(self._indent)
        self._emit(self._space + word)
        self._space = ""

    def _end_line(self) -> None:
        self._write("\n")
        self._column = 0
        self._space = ""

    def _emit(self, text: str) -> None:
        if text:
            self._write(text)
            self._column += len(text)

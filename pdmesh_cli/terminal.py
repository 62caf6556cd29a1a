"""How wide things are printed, and what of foreign text a terminal may see."""

from __future__ import annotations

from rich.console import Console

_MAX_COLUMNS = 100


def document_console() -> Console:
    """As wide as the terminal, at most 100 columns; 100 where there is no terminal."""
    console = Console(highlight=False)
    width = min(console.width, _MAX_COLUMNS) if console.is_terminal else _MAX_COLUMNS
    return Console(highlight=False, width=width)


def printable(text: str) -> str:
    """`text` without what would move the cursor or change colours: names and messages come from elsewhere."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def format_ms(duration_ms: float) -> str:
    """Milliseconds with one decimal, seconds from ten of them on."""
    return f"{duration_ms:,.1f} ms" if duration_ms < 10_000 else f"{duration_ms / 1000:,.1f} s"

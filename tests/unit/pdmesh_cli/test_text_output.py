"""Text that arrives in pieces, wrapped."""

from __future__ import annotations

import pytest

from pdmesh_cli.text_output import WrappedText


def _wrapped(pieces: list[str], width: int = 20, indent: str = "  ") -> str:
    written: list[str] = []
    output = WrappedText(written.append, width=width, indent=indent)
    for piece in pieces:
        output.feed(piece)
    output.finish()
    return "".join(written)


def test_lines_break_between_words_and_carry_the_indent() -> None:
    assert _wrapped(["The quick brown fox jumps over"]) == "  The quick brown\n  fox jumps over\n"


def test_how_the_text_is_cut_into_pieces_makes_no_difference() -> None:
    text = "The quick  brown\n\n  fox jumps\tover the lazy dog.\n"
    assert _wrapped(list(text)) == _wrapped([text])


def test_line_breaks_of_the_text_are_kept() -> None:
    assert _wrapped(["a\n\nb"]) == "  a\n\n  b\n"


def test_a_word_longer_than_a_line_stays_whole() -> None:
    assert _wrapped(["a " + "x" * 30 + " b"]) == "  a\n  " + "x" * 30 + "\n  b\n"


def test_a_word_is_held_back_until_it_is_complete() -> None:
    written: list[str] = []
    output = WrappedText(written.append, width=40)
    output.feed("one tw")
    assert "".join(written) == "one"
    output.feed("o ")
    assert "".join(written) == "one two"


def test_no_text_is_no_line() -> None:
    assert _wrapped([]) == ""


def test_a_width_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match=r"width \(2\) must be larger than the indent \(2\)"):
        WrappedText(print, width=2, indent="  ")

"""Stop strings are found however the text is cut, and no part of one is ever shown."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_runtime.text.stop_strings import StopScan, StopStringMatcher


def _run(stops: Sequence[str], pieces: Sequence[str]) -> tuple[list[str], str | None]:
    matcher = StopStringMatcher(stops)
    shown: list[str] = []
    for piece in pieces:
        scan = matcher.push(piece)
        shown.append(scan.text)
        if scan.matched is not None:
            return shown, scan.matched
    return [*shown, matcher.finish()], None


def test_without_stop_strings_text_passes_untouched() -> None:
    assert _run((), ["a", "", "b"]) == (["a", "", "b", ""], None)


def test_a_possible_beginning_is_held_back_until_it_is_decided() -> None:
    assert _run(["END"], ["xE", "N", "x"]) == (["x", "", "ENx", ""], None)
    assert _run(["END"], ["xE", "N", "Dy"]) == (["x", "", ""], "END")


def test_what_is_held_back_at_the_end_is_shown() -> None:
    assert _run(["END"], ["xEN"]) == (["x", "EN"], None)


def test_an_overlapping_beginning_is_not_missed() -> None:
    assert _run(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", ""], "aab")


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert _run(["abcd", "c"], ["abcd"]) == (["ab"], "c")
    assert _run(["b", "ab"], ["xab"]) == (["x"], "ab")
    assert _run(["abc", "ab"], ["abc"]) == ([""], "ab")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="stop: a stop string must not be empty"):
        StopStringMatcher(["a", ""])


def _naive(stops: Sequence[str], text: str) -> StopScan:
    for end in range(len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return StopScan(text=text[: end - len(longest)], matched=longest)
    return StopScan(text=text, matched=None)


_texts = st.text(alphabet="abc", max_size=30)
_stops = st.lists(st.text(alphabet="abc", min_size=1, max_size=6), max_size=4)


@given(stops=_stops, pieces=st.lists(st.text(alphabet="abc", max_size=5), max_size=12))
def test_any_cut_of_the_text_gives_what_a_search_of_the_whole_text_gives(stops: list[str], pieces: list[str]) -> None:
    shown, matched = _run(stops, pieces)
    assert StopScan(text="".join(shown), matched=matched) == _naive(stops, "".join(pieces))


@given(stops=_stops, text=_texts)
def test_no_more_is_held_back_than_a_stop_string_could_need(stops: list[str], text: str) -> None:
    scan = StopStringMatcher(stops).push(text)
    if scan.matched is None:
        held = text[len(scan.text) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)
        longer_tails = (text[begin:] for begin in range(len(scan.text)))
        assert not any(stop.startswith(tail) for tail in longer_tails for stop in stops)

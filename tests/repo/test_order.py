"""What a shared run begins with is there."""

from __future__ import annotations

from pathlib import Path

from support.sharing import LONGEST_FIRST, WHOLE_FOLDERS

ROOT = Path(__file__).resolve().parents[2]


def test_what_is_begun_first_or_kept_whole_is_there() -> None:
    assert len(set(LONGEST_FIRST)) == len(LONGEST_FIRST)
    for name in (*LONGEST_FIRST, *WHOLE_FOLDERS):
        assert (ROOT / name).exists(), name

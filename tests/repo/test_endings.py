"""An ending that does not come is told with what it waits for."""

from __future__ import annotations

import asyncio

import pytest
from support.endings import ended


async def test_what_has_not_ended_says_where_it_stands() -> None:
    async def wait_for_nothing() -> None:
        await asyncio.Event().wait()

    with pytest.raises(AssertionError, match=r"(?s)a node has not ended within 0.01 s:.*in wait_for_nothing"):
        await ended(wait_for_nothing(), "a node", timeout_s=0.01)


async def test_how_something_fails_to_end_is_not_hidden() -> None:
    async def break_down() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        await ended(break_down(), "a node")

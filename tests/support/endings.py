"""Endings that are waited for: with a bound, and with what everybody waits for when it is passed."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Coroutine

ENDING_TIMEOUT_S = 30.0


async def ended(work: Coroutine[object, object, None], what: str, timeout_s: float = ENDING_TIMEOUT_S) -> None:
    """Raises AssertionError, with the place at which each task of the loop stands, when `work` takes longer."""
    ending = asyncio.create_task(work, name=f"the end of {what}")
    await asyncio.wait({ending}, timeout=timeout_s)
    if not ending.done():
        told = io.StringIO()
        for task in asyncio.all_tasks():
            task.print_stack(file=told)
        raise AssertionError(f"{what} has not ended within {timeout_s} s:\n{told.getvalue()}")
    ending.result()

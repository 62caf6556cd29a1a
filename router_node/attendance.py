"""Runs what attends to each node for as long as it is a member. Knows neither the nodes nor what is done with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence


class Attendance:
    """One task per node and kind of work. Lives on one event loop."""

    def __init__(
        self,
        works: Sequence[Callable[[str], Coroutine[object, object, None]]],
        *,
        on_end: Callable[[asyncio.Task[None]], None],
    ) -> None:
        """`works` make the coroutines for the node at an address; `on_end` is told of each task that ended."""
        self._works = tuple(works)
        self._on_end = on_end
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}

    def attend_to(self, addresses: Collection[str]) -> tuple[str, ...]:
        """These nodes from now on, and no others. Returns those that are left to themselves."""
        gone = tuple(address for address in self._tasks if address not in addresses)
        for address in gone:
            for task in self._tasks.pop(address):
                task.cancel()
        for address in addresses:
            if address not in self._tasks:
                self._tasks[address] = [self._start(work(address)) for work in self._works]
        return gone

    async def close(self) -> None:
        """Ends all of it."""
        tasks = [task for tasks in self._tasks.values() for task in tasks]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._on_end)
        return task

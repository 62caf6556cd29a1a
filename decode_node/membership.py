"""Which prefill nodes a decode node looks after: those that are listed, and those behind the DNS names that are.

Lives on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from decode_node.peers import PrefillPeers
from node_runtime.dns_names import NodeNames, Resolve, is_name


class PrefillMembership:
    """Tells the peers whom to look after, from `start` to `close`."""

    def __init__(
        self, entries: Sequence[str], peers: PrefillPeers, *, interval_s: float, resolve: Resolve | None = None
    ) -> None:
        """`entries`: `host:port` or `dns:host:port`. `resolve` is by default the system's."""
        self._entries = tuple(entries)
        self._peers = peers
        self._interval_s = interval_s
        self._names = NodeNames(resolve)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Names are resolved once before it returns."""
        await self._refresh()
        if any(map(is_name, self._entries)):
            self._task = asyncio.create_task(self._run(), name="names of prefill nodes")

    async def close(self) -> None:
        """Without effect before `start`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self._refresh()

    async def _refresh(self) -> None:
        await self._names.refresh(self._entries)
        self._peers.watch(self._names.addresses_of(self._entries))

"""Watches the health of nodes, so that the router hears at once when one drains, dies or comes back.

It decides nothing: what it hears makes discovery ask again. Lives on the router's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing

from node_runtime.errors import NodeError, RemoteError
from node_runtime.rpc import ChannelPool, watch_health

_log = logging.getLogger("pdmesh.router")

# Each watch is renewed after this time, for no call of ours is without a deadline.
_WATCH_S = 300.0


class HealthWatch:
    """One stream to each node that it is told to watch."""

    def __init__(self, channels: ChannelPool, *, retry_interval_s: float, on_change: Callable[[], None]) -> None:
        """`on_change` is called when a node may serve or not serve any more. It must be cheap."""
        self._channels = channels
        self._retry_interval_s = retry_interval_s
        self._on_change = on_change

    async def watch(self, address: str) -> None:
        """Runs until it is cancelled, or until it is clear that the node cannot be watched."""
        while True:
            try:
                await self._follow(address)
            except RemoteError as error:
                # An answer, so it would be the same one every time. Discovery goes on polling.
                _log.info("the health of %s cannot be watched: %s", address, error.message)
                return
            except NodeError as error:
                _log.debug("the watch of %s ended: %s", address, error)
            await asyncio.sleep(self._retry_interval_s)

    async def _follow(self, address: str) -> None:
        was_heard = False
        try:
            async with aclosing(watch_health(self._channels.get(address), timeout_s=_WATCH_S)) as healths:
                async for _ in healths:
                    was_heard = True
                    self._on_change()
        finally:
            if was_heard:
                self._on_change()

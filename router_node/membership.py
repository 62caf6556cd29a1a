"""Which nodes there are: the addresses that are listed, and those behind the DNS names that are.

Nodes come and go with the answers of the names. Lives on the router's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from node_runtime.dns_names import NodeNames, Resolve, is_name
from router_node.node_pool import ComputeRole, NodePool


class Membership:
    """Keeps the members of a pool up to date while `run` runs."""

    def __init__(
        self,
        listed: Mapping[ComputeRole, Sequence[str]],
        pool: NodePool,
        *,
        interval_s: float,
        on_change: Callable[[], None],
        resolve: Resolve | None = None,
    ) -> None:
        """`listed`: `host:port` or `dns:host:port`. `on_change` is called when members came or went. `resolve` is by
        default the system's.
        """
        self._listed = {role: tuple(entries) for role, entries in listed.items()}
        self._pool = pool
        self._interval_s = interval_s
        self._on_change = on_change
        self._names = NodeNames(resolve)

    async def run(self) -> None:
        """Runs until it is cancelled; ends at once where there is no name. The first round comes after an interval."""
        while any(is_name(entry) for entries in self._listed.values() for entry in entries):
            await asyncio.sleep(self._interval_s)
            await self.refresh()

    async def refresh(self) -> None:
        """Resolves every name once."""
        await self._names.refresh([entry for entries in self._listed.values() for entry in entries])
        members = {role: self._names.addresses_of(entries) for role, entries in self._listed.items()}
        if self._pool.set_members(members):
            self._on_change()

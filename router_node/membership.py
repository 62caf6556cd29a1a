"""Which nodes there are: the addresses that are listed, and those behind the DNS names that are.

A name that stands for many addresses, as a headless Service of Kubernetes does, is asked for again and again; nodes
come and go with its answers. One that cannot be resolved keeps the nodes that it had. Lives on the router's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, TypeAlias

from node_runtime.rpc import format_address, parse_address
from router_node.node_pool import ComputeRole, NodePool

_log = logging.getLogger("pdmesh.router.membership")

DNS_PREFIX: Final = "dns:"
_MAX_ADDRESSES_PER_NAME: Final = 1024
_RESOLVE_TIMEOUT_S: Final = 5.0

# The addresses of a host name, without duplicates. Raises OSError.
Resolve: TypeAlias = Callable[[str], Awaitable[Sequence[str]]]


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
        """`listed`: `host:port`, or `dns:host:port` for every address of that host. `on_change` is called when members
        came or went. `resolve` is by default the system's.
        """
        self._listed = {role: tuple(entries) for role, entries in listed.items()}
        self._pool = pool
        self._interval_s = interval_s
        self._on_change = on_change
        self._resolve = resolve or resolve_host
        # What each name stood for when it was last resolved.
        self._resolved: dict[str, tuple[str, ...]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The DNS names to resolve, with their prefix."""
        return tuple(
            dict.fromkeys(
                entry for entries in self._listed.values() for entry in entries if entry.startswith(DNS_PREFIX)
            )
        )

    async def run(self) -> None:
        """Runs until it is cancelled; ends at once where there is no name. The first round comes after an interval."""
        while self.names:
            await asyncio.sleep(self._interval_s)
            await self.refresh()

    async def refresh(self) -> None:
        """Resolves every name once."""
        await asyncio.gather(*(self._refresh_name(name) for name in self.names))
        members = {role: [a for e in entries for a in self._addresses_of(e)] for role, entries in self._listed.items()}
        if self._pool.set_members(members):
            self._on_change()

    def _addresses_of(self, entry: str) -> Sequence[str]:
        return self._resolved.get(entry, ()) if entry.startswith(DNS_PREFIX) else (entry,)

    async def _refresh_name(self, name: str) -> None:
        host, port = parse_address(name.removeprefix(DNS_PREFIX))
        try:
            async with asyncio.timeout(_RESOLVE_TIMEOUT_S):
                found = await self._resolve(host)
        except (OSError, TimeoutError) as error:
            kept = len(self._resolved.get(name, ()))
            _log.warning("%s cannot be resolved, its %d nodes are kept: %s", name, kept, error or "no answer")
            return
        if len(found) > _MAX_ADDRESSES_PER_NAME:
            _log.warning("%s has %d addresses, %d are used", name, len(found), _MAX_ADDRESSES_PER_NAME)
        self._resolved[name] = tuple(format_address(each, port) for each in sorted(found)[:_MAX_ADDRESSES_PER_NAME])


async def resolve_host(host: str) -> Sequence[str]:
    """By the system's resolver."""
    answers = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in answers})

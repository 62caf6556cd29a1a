"""Nodes behind DNS names: `dns:host:port` stands for a node at every address of the host.

A headless Service of Kubernetes answers with the addresses of its pods, so a name is asked for again and again. One
that cannot be resolved keeps the addresses that it had.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

from node_runtime.address import format_address, parse_address

_log = logging.getLogger("pdmesh.names")

DNS_PREFIX: Final = "dns:"
_MAX_ADDRESSES_PER_NAME: Final = 1024
_RESOLVE_TIMEOUT_S: Final = 5.0

# The addresses of a host name, without duplicates. Raises OSError.
Resolve: TypeAlias = Callable[[str], Awaitable[Sequence[str]]]


def check_entry(entry: str) -> None:
    """Raises InvalidRequest when `entry` is neither `host:port` nor `dns:host:port`."""
    parse_address(entry.removeprefix(DNS_PREFIX))


def is_name(entry: str) -> bool:
    """Whether an entry stands for any number of nodes."""
    return entry.startswith(DNS_PREFIX)


class NodeNames:
    """Resolves entries to addresses, and remembers what each name stood for. Lives on one event loop."""

    def __init__(self, resolve: Resolve | None = None) -> None:
        """`resolve` is by default the system's."""
        self._resolve = resolve or resolve_host
        self._resolved: dict[str, tuple[str, ...]] = {}

    async def refresh(self, entries: Sequence[str]) -> None:
        """Resolves the names among the entries, each once."""
        await asyncio.gather(*(self._refresh(name) for name in dict.fromkeys(filter(is_name, entries))))

    def addresses_of(self, entries: Sequence[str]) -> tuple[str, ...]:
        """In the order of the entries, each address once."""
        found = (self._resolved.get(entry, ()) if is_name(entry) else (entry,) for entry in entries)
        return tuple(dict.fromkeys(address for addresses in found for address in addresses))

    async def _refresh(self, name: str) -> None:
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

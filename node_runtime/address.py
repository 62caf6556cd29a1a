"""Addresses of nodes: `host:port`, an IPv6 host in brackets."""

from __future__ import annotations

import re

from node_runtime.errors import InvalidRequest

_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?):(?P<port>[0-9]{1,5})")
_MAX_ADDRESS_CHARS = 300


def format_address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def parse_address(text: str, *, field: str = "", min_port: int = 1) -> tuple[str, int]:
    """Host (without brackets) and port. Raises InvalidRequest naming `field` when `text` is no address of a node.

    `min_port` 0 takes the address of a listener that does not mind which port it gets.
    """
    match = _ADDRESS.fullmatch(text) if len(text) <= _MAX_ADDRESS_CHARS else None
    if match is None or not min_port <= int(match["port"]) <= 65535:
        shown = text[:_MAX_ADDRESS_CHARS]
        where = f"{field}: " if field else ""
        raise InvalidRequest(f"{where}expected host:port with a port in [{min_port}, 65535], got {shown!r}")
    return match["host"].strip("[]"), int(match["port"])

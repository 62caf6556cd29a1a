"""Which LoRA adapter a request wants, and which ones a node has: names, and digests of what stands behind them.

Nodes need not serve the same ones. What must never happen is that two of them compute one request with different bytes
under one name, or that one reads a cache that was computed with others: so the digest goes wherever the name goes, and
into the identity of every prefix. Importing this needs neither torch nor gRPC.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from node_runtime.errors import AdapterNotHere, UnknownModel
from node_runtime.request_rules import require

MAX_ADAPTER_NAME_BYTES: Final = 128
ADAPTER_DIGEST_BYTES: Final = 32
# With the digest in hexadecimal digits longer than any isolation key of a request may be, and unlike the printable name
# of one: no salt reaches the cache of an adapter.
_KEY_PREFIX: Final = b"pdmesh.adapter\0"
_SHOWN_DIGITS: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class AdapterId:
    """A name and the SHA-256 of what it stands for; b"" where whoever names it does not know. Raises InvalidRequest."""

    name: str
    digest: bytes = b""

    def __post_init__(self) -> None:
        num_bytes = len(self.name.encode())
        require(
            0 < num_bytes <= MAX_ADAPTER_NAME_BYTES,
            f"adapter.name: {num_bytes} bytes given, 1 to {MAX_ADAPTER_NAME_BYTES} required",
        )
        require(self.name.isprintable(), "adapter.name: must be printable text")
        require(
            len(self.digest) in (0, ADAPTER_DIGEST_BYTES),
            f"adapter.digest: {len(self.digest)} bytes given, {ADAPTER_DIGEST_BYTES} or none allowed",
        )

    def __str__(self) -> str:
        return f'"{self.name}" (sha256 {self.digest.hex()[:_SHOWN_DIGITS] or "not given"})'


def isolation_keys(extra_keys: Sequence[bytes], adapter: AdapterId | None) -> list[bytes]:
    """What enters the identity of every prefix of a request: its own keys, and what its adapter computes."""
    return [*extra_keys, *(() if adapter is None else (_KEY_PREFIX + adapter.digest.hex().encode(),))]


def unknown_adapter(name: str, served: Iterable[str]) -> UnknownModel:
    """The refusal of a name, with those that would do."""
    names = ", ".join(f'"{other}"' for other in sorted(served))
    return UnknownModel(f'adapter: "{name}" is not served here, {f"only {names}" if names else "no adapter is"}')


class ServedAdapters:
    """Those of one node, for its whole life."""

    def __init__(self, node_id: str, adapters: Collection[AdapterId]) -> None:
        self._node_id = node_id
        self._adapters = {adapter.name: adapter for adapter in adapters}

    def resolve(self, wanted: AdapterId | None) -> AdapterId | None:
        """The adapter of this node that is wanted, with its digest.

        Raises UnknownModel for a name that stands alone, and AdapterNotHere where the digest is that of another one:
        whoever sent it knows a node that has it.
        """
        if wanted is None:
            return None
        own = self._adapters.get(wanted.name)
        if not wanted.digest:
            if own is None:
                raise unknown_adapter(wanted.name, self._adapters)
            return own
        if own != wanted:
            has = "no adapter of that name" if own is None else str(own)
            raise AdapterNotHere(f"adapter: {wanted} is wanted, node {self._node_id} has {has}")
        return own

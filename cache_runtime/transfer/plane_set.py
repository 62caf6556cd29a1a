"""All data planes of one node: what is registered or allowed with one is so with each; a peer gets the best of them.

The node's composition root owns the one set of a process.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ._native import digest_spans
from .engine import PeerLink, PeerUnreachable, Permit, Region, Spans, TransferEngine
from .plane_choice import usable_offers
from .schema import PlaneOffer

_LOG = logging.getLogger(__name__)

_SHM = "shm"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenLink:
    """A link, and the name of the plane that it belongs to."""

    link: PeerLink
    data_plane: str


class PlaneSet:
    """The engines of one node. Thread-safe."""

    def __init__(self, engines: Sequence[TransferEngine], *, host_id: str = "") -> None:
        """`host_id` names the running host to those that share memory; empty: nobody does.

        Raises ValueError without engines, or for two of one name.
        """
        self._engines = tuple(engines)
        self._host_id = host_id
        names = [engine.name for engine in self._engines]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"engines: {names} given, at least one and each name once required")

    @property
    def engines(self) -> tuple[TransferEngine, ...]:
        return self._engines

    @property
    def offers(self) -> tuple[PlaneOffer, ...]:
        """What the manifest tells peers."""
        return tuple(
            PlaneOffer(
                name=engine.name,
                endpoint=engine.endpoint,
                protocol=engine.protocol,
                host_id=self._host_id if engine.name == _SHM else "",
            )
            for engine in self._engines
        )

    @property
    def num_refused_runs(self) -> int:
        return sum(engine.num_refused_runs for engine in self._engines)

    def find(self, name: str) -> TransferEngine | None:
        return next((engine for engine in self._engines if engine.name == name), None)

    def register(self, base_address: int, num_bytes: int, *, shared_descriptor: int | None = None) -> None:
        """See `TransferEngine.register`."""
        for engine in self._engines:
            engine.register(base_address, num_bytes, shared_descriptor=shared_descriptor)

    def allow(self, key: bytes, spans: Spans) -> Permit:
        """A permit that holds on every plane; see `TransferEngine.allow`."""
        permits: list[Permit] = []
        try:
            for engine in self._engines:
                permits.append(engine.allow(key, spans))
        except BaseException:
            _Permits(permits).revoke()
            raise
        return _Permits(permits)

    def open_peer(self, offers: Sequence[PlaneOffer], regions: Sequence[Region]) -> ChosenLink:
        """A link over the best plane on which the peer can be reached; see `TransferEngine.open_peer`.

        Raises `PeerUnreachable`, with what was wrong on each plane, when there is none.
        """
        refusals: list[PeerUnreachable] = []
        for offer in usable_offers(self.offers, offers):
            engine = self.find(offer.name)
            if engine is None:
                continue
            try:
                return ChosenLink(link=engine.open_peer(offer.endpoint, regions), data_plane=offer.name)
            except PeerUnreachable as error:
                _LOG.info("data plane %s does not reach %s", offer.name, error)
                refusals.append(error)
        if len(refusals) == 1:
            raise refusals[0]
        endpoints = ", ".join(offer.endpoint for offer in offers)
        reasons = "; ".join(str(error) for error in refusals) or "no data plane in common"
        raise PeerUnreachable(endpoints, reasons)

    def close(self) -> None:
        """See `TransferEngine.close`."""
        for engine in self._engines:
            engine.close()


class _Permits:
    """Several permits as one."""

    def __init__(self, permits: Sequence[Permit]) -> None:
        self._permits = tuple(permits)

    def revoke(self) -> None:
        for permit in self._permits:
            permit.revoke()

    def digests(self, blocks: Spans, kind: str) -> bytes:
        return digest_spans(blocks, kind)

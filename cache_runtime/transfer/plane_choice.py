"""Which data plane two nodes use: a pure function of what they offer.

Both sides can compute it; the writer decides, since only a try shows whether an endpoint can be reached.
"""

from __future__ import annotations

from collections.abc import Sequence

from .schema import PlaneOffer

_SHM = "shm"
_STREAM = "stream"
_MOONCAKE = "mooncake"
_RDMA = "rdma"


def usable_offers(own: Sequence[PlaneOffer], peer: Sequence[PlaneOffer]) -> tuple[PlaneOffer, ...]:
    """Those of the peer's offers that its writer can take up, the best first.

    Shared memory on one host, else RDMA, else a stream, else whatever both have.
    """
    by_name = {offer.name: offer for offer in own}
    usable = [offer for offer in peer if offer.name in by_name and _match(by_name[offer.name], offer)]
    return tuple(sorted(usable, key=_rank))


def _match(own: PlaneOffer, peer: PlaneOffer) -> bool:
    if own.name == _SHM and (not own.host_id or own.host_id != peer.host_id):
        return False
    return own.protocol == peer.protocol or not own.protocol or not peer.protocol


def _rank(offer: PlaneOffer) -> int:
    if offer.name == _SHM:
        return 0
    if offer.name == _MOONCAKE:
        return 1 if offer.protocol == _RDMA else 3
    return 2 if offer.name == _STREAM else 4

"""Which data plane two nodes use, and what happens when the best one does not get through."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from unit.cache_runtime.transfer.manifests import BLOCK_BYTES, FIELD_IDS, logical, rank

from cache_runtime.transfer.block_spans import block_spans
from cache_runtime.transfer.engine import PeerUnreachable, PlaneKind, Region
from cache_runtime.transfer.memory_engine import MemoryEngine, MemoryFabric
from cache_runtime.transfer.mooncake_engine import choose_protocol
from cache_runtime.transfer.placement import check_bridgeable
from cache_runtime.transfer.plane_choice import usable_offers
from cache_runtime.transfer.plane_set import PlaneSet
from cache_runtime.transfer.schema import PlacementManifest, PlaneOffer
from cache_runtime.transfer.shm_engine import host_id, open_shm_engine
from cache_runtime.transfer.stream_engine import open_stream_engine

SHM_HERE = PlaneOffer(name="shm", endpoint="a", protocol="unix", host_id="here")
SHM_THERE = replace(SHM_HERE, host_id="there")
SHM_NOWHERE = replace(SHM_HERE, host_id="")
STREAM = PlaneOffer(name="stream", endpoint="b:1", protocol="tcp")
STREAM_TLS = replace(STREAM, protocol="tls")
MOONCAKE = PlaneOffer(name="mooncake", endpoint="c:1", protocol="tcp")
MOONCAKE_RDMA = replace(MOONCAKE, protocol="rdma")
OLD = PlaneOffer(name="mooncake", endpoint="d:1")


@pytest.mark.parametrize(
    ("own", "peer", "order"),
    [
        ([SHM_HERE, STREAM, MOONCAKE], [MOONCAKE, STREAM, SHM_HERE], ["shm", "stream", "mooncake"]),
        ([SHM_HERE, STREAM, MOONCAKE_RDMA], [MOONCAKE_RDMA, STREAM, SHM_HERE], ["shm", "mooncake", "stream"]),
        ([SHM_HERE, STREAM], [SHM_THERE, STREAM], ["stream"]),
        ([SHM_NOWHERE, STREAM], [SHM_NOWHERE, STREAM], ["stream"]),
        ([STREAM, MOONCAKE], [STREAM_TLS, MOONCAKE], ["mooncake"]),
        ([STREAM_TLS], [STREAM_TLS], ["stream"]),
        ([MOONCAKE, STREAM], [MOONCAKE_RDMA], []),
        ([SHM_HERE, STREAM, MOONCAKE], [OLD], ["mooncake"]),
        ([SHM_HERE, STREAM, MOONCAKE_RDMA], [OLD], ["mooncake"]),
        ([SHM_HERE, STREAM], [OLD], []),
        ([STREAM], [PlaneOffer(name="pigeon", endpoint="roof")], []),
    ],
)
def test_the_best_plane_in_common_comes_first(own: list[PlaneOffer], peer: list[PlaneOffer], order: list[str]) -> None:
    usable = usable_offers(own, peer)
    assert [offer.name for offer in usable] == order
    assert all(offer in peer for offer in usable)


def test_nodes_without_a_plane_in_common_are_refused_with_what_both_have() -> None:
    source = PlacementManifest(logical=logical(), ranks=(replace(rank(), planes=(SHM_HERE, STREAM)),))
    target = PlacementManifest(logical=logical(), ranks=(replace(rank(), planes=(STREAM_TLS, MOONCAKE)),))
    assert check_bridgeable(source, target) == (
        "data_plane source=shm(unix)|stream(tcp), target=stream(tls)|mooncake(tcp)",
    )
    assert check_bridgeable(source, source) == ()


def memory() -> tuple[np.ndarray, Region]:
    array = np.zeros(4096, dtype=np.uint8)
    return array, Region(base_address=int(array.ctypes.data), num_bytes=4096)


def test_a_plane_that_does_not_get_through_is_passed_over() -> None:
    array, region = memory()
    peer = PlaneSet((open_shm_engine(), open_stream_engine("127.0.0.1", bind_host="127.0.0.1")), host_id=host_id())
    peer.register(region.base_address, region.num_bytes)
    own = PlaneSet((open_shm_engine(), open_stream_engine("127.0.0.1", bind_host="127.0.0.1")), host_id=host_id())
    assert own.open_peer(peer.offers, [region]).data_plane == "shm"
    # As from another network namespace of the host: the same boot, but nobody under that name.
    hidden = tuple(replace(offer, endpoint="nobody") if offer.name == "shm" else offer for offer in peer.offers)
    chosen = own.open_peer(hidden, [region])
    assert (chosen.data_plane, chosen.link.peer) == ("stream", peer.engines[1].endpoint)
    peer.close()
    with pytest.raises(PeerUnreachable, match=r"pdmesh-.*: Connection refused; 127\.0\.0\.1:") as caught:
        own.open_peer(peer.offers, [region])
    assert all(offer.endpoint in caught.value.peer for offer in peer.offers)
    own.close()
    assert not array.any()


def test_what_one_plane_is_told_all_are_told() -> None:
    _, region = memory()
    planes = PlaneSet(
        (MemoryEngine(MemoryFabric(), kind=PlaneKind.TWO_SIDED), open_stream_engine("127.0.0.1", bind_host="127.0.0.1"))
    )
    planes.register(region.base_address, region.num_bytes)
    spans = np.array([[region.base_address, region.end_address]])
    permit = planes.allow(b"k" * 16, spans)
    for engine in planes.engines:
        with pytest.raises(ValueError, match="live grant"):
            engine.allow(b"k" * 16, spans)
    permit.revoke()
    # A plane that refuses leaves no permit with those before it.
    last = planes.engines[1].allow(b"k" * 16, spans)
    with pytest.raises(ValueError, match="live grant"):
        planes.allow(b"k" * 16, spans)
    last.revoke()
    planes.allow(b"k" * 16, spans).revoke()
    assert [offer.name for offer in planes.offers] == ["memory", "stream"]
    assert planes.num_refused_runs == 0
    planes.close()


def test_a_node_has_each_plane_once_and_at_least_one() -> None:
    for engines in ((), (MemoryEngine(MemoryFabric()), MemoryEngine(MemoryFabric()))):
        with pytest.raises(ValueError, match="at least one and each name once"):
            PlaneSet(engines)


def test_rdma_is_chosen_where_there_is_a_device(tmp_path) -> None:
    assert choose_protocol(rdma_devices=tmp_path / "none") == "tcp"
    assert choose_protocol(rdma_devices=tmp_path) == "tcp"
    (tmp_path / "mlx5_0").mkdir()
    assert choose_protocol(rdma_devices=tmp_path) == "rdma"


def test_the_spans_of_blocks_are_those_of_all_fields_of_their_group() -> None:
    placement = rank(10)
    spans = block_spans(logical(), placement, {"full": (7, 2), "another": (1,)})
    begins = [
        placement.arena_base + plane * 10 * BLOCK_BYTES + block * BLOCK_BYTES
        for plane in range(len(FIELD_IDS))
        for block in (7, 2)
    ]
    assert spans.tolist() == [[begin, begin + BLOCK_BYTES] for begin in begins]
    assert block_spans(logical(), placement, {"full": ()}).shape == (0, 2)
    assert block_spans(logical(), placement, {}).shape == (0, 2)

"""Bootstrap of decode nodes, as far as it needs no network."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import pytest
from support.fake_compute import fake_core

from cache_runtime.transfer.engine import NO_KEY, NO_SPANS, Region, Run, Spans, TransferFailed, TransferReport
from cache_runtime.transfer.memory_engine import MemoryFabric
from cache_runtime.transfer.plane_set import ChosenLink
from cache_runtime.transfer.schema import PlaneOffer
from node_runtime.errors import NotBootstrapped
from node_runtime.handoff.probe import NONCE_BYTES, ProbeBuffer
from prefill_node.peers import MAX_PEERS, DecodePeers, Introduction
from scheduler_core import Role


class StalledLink:
    """A link whose write ends when the test says so."""

    peer = "decode:1"
    hashes = False

    def __init__(self) -> None:
        self.writes: list[Future[TransferReport]] = []

    def write(
        self,
        runs: Sequence[Run],
        *,
        key: bytes = NO_KEY,
        timeout_s: float,
        is_wanted: Callable[[], bool] = lambda: True,
        hashed: Spans = NO_SPANS,
        digest_kind: str = "xxh3",
    ) -> Future[TransferReport]:
        self.writes.append(Future())
        return self.writes[-1]

    def close(self) -> None:
        pass


class QuickLink(StalledLink):
    """A link whose writes have landed when they are posted."""

    def __init__(self) -> None:
        super().__init__()
        self.is_closed = False

    def write(self, runs: Sequence[Run], **options: object) -> Future[TransferReport]:
        landed: Future[TransferReport] = Future()
        landed.set_result(TransferReport(num_bytes=0, num_runs=len(runs), posted_at_s=0.0, landed_at_s=0.0))
        return landed

    def close(self) -> None:
        self.is_closed = True


class Planes:
    """Every opening makes a link."""

    def __init__(self, make_link: Callable[[], StalledLink]) -> None:
        self._make_link = make_link
        self.links: list[StalledLink] = []

    def open_peer(self, offers: Sequence[PlaneOffer], regions: Sequence[Region]) -> ChosenLink:
        self.links.append(self._make_link())
        return ChosenLink(link=self.links[-1], data_plane="memory")


async def test_decode_nodes_that_restart_under_new_names_do_not_pile_up() -> None:
    manifest = fake_core(Role.PREFILL, fabric=MemoryFabric()).require_data_plane().manifest
    planes = Planes(QuickLink)
    peers = DecodePeers(planes, manifest, ProbeBuffer())

    async def introduce(incarnation: int) -> None:
        nonce = bytes(NONCE_BYTES)
        who = {"node_id": f"decode-{incarnation}", "incarnation": incarnation, "nonce_address": 4096}
        await peers.bootstrap(Introduction(manifest=manifest, nonce=nonce, **who))

    for incarnation in range(1, MAX_PEERS + 1):
        await introduce(incarnation)
    peers.find(1).num_handoffs = 1
    for incarnation in range(MAX_PEERS + 1, MAX_PEERS + 4):
        await introduce(incarnation)
    # The oldest that nothing is under way to made room.
    kept = [status.incarnation for status in peers.statuses()]
    assert kept == [1, *range(5, MAX_PEERS + 4)]
    assert [link.is_closed for link in planes.links] == [False, True, True, True, *[False] * (MAX_PEERS - 1)]
    with pytest.raises(NotBootstrapped):
        peers.find(2)
    peers.close()
    assert all(link.is_closed for link in planes.links)


async def test_a_nonce_that_fails_after_its_caller_left_is_no_unhandled_error() -> None:
    unhandled: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unhandled.append(context))
    manifest = fake_core(Role.PREFILL, fabric=MemoryFabric()).require_data_plane().manifest
    planes = Planes(StalledLink)
    peers = DecodePeers(planes, manifest, ProbeBuffer())
    caller = Introduction(
        node_id="decode", incarnation=1, manifest=manifest, nonce=bytes(NONCE_BYTES), nonce_address=4096
    )
    bootstrap = asyncio.create_task(peers.bootstrap(caller))
    while not any(link.writes for link in planes.links) and not bootstrap.done():
        await asyncio.sleep(0.001)
    bootstrap.cancel()
    await asyncio.sleep(0)
    planes.links[0].writes[0].set_exception(TransferFailed("decode:1", "gone"))
    await asyncio.wait((bootstrap,))
    assert bootstrap.cancelled()
    del bootstrap, peers, planes
    gc.collect()
    await asyncio.sleep(0)
    assert unhandled == []

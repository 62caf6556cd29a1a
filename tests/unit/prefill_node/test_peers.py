"""Bootstrap of decode nodes, as far as it needs no network."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from support.fake_compute import fake_core

from cache_runtime.transfer.engine import NO_KEY, NO_SPANS, Region, Run, Spans, TransferFailed, TransferReport
from cache_runtime.transfer.memory_engine import MemoryFabric
from cache_runtime.transfer.plane_set import ChosenLink
from cache_runtime.transfer.schema import PlaneOffer
from node_runtime.handoff.probe import NONCE_BYTES, ProbeBuffer
from prefill_node.peers import DecodePeers, Introduction
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
    ) -> Future[TransferReport]:
        self.writes.append(Future())
        return self.writes[-1]

    def close(self) -> None:
        pass


class StalledPlanes:
    def __init__(self, link: StalledLink) -> None:
        self._link = link

    def open_peer(self, offers: Sequence[PlaneOffer], regions: Sequence[Region]) -> ChosenLink:
        return ChosenLink(link=self._link, data_plane="memory")


async def test_a_nonce_that_fails_after_its_caller_left_is_no_unhandled_error() -> None:
    unhandled: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unhandled.append(context))
    manifest = fake_core(Role.PREFILL, fabric=MemoryFabric()).require_data_plane().manifest
    link = StalledLink()
    peers = DecodePeers(StalledPlanes(link), manifest, ProbeBuffer())
    caller = Introduction(
        node_id="decode", incarnation=1, manifest=manifest, nonce=bytes(NONCE_BYTES), nonce_address=4096
    )
    bootstrap = asyncio.create_task(peers.bootstrap(caller))
    while not link.writes and not bootstrap.done():
        await asyncio.sleep(0.001)
    bootstrap.cancel()
    await asyncio.sleep(0)
    link.writes[0].set_exception(TransferFailed("decode:1", "gone"))
    await asyncio.wait((bootstrap,))
    assert bootstrap.cancelled()
    del bootstrap, peers, link
    gc.collect()
    await asyncio.sleep(0)
    assert unhandled == []

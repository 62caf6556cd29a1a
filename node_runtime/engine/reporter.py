"""What a compute node tells about itself: the NodeReporter of the roles prefill, decode and fused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from pdmesh.v1 import mesh_pb2

from node_runtime.engine.loop import EngineLoop
from node_runtime.engine.messages import Invoke
from node_runtime.prefix_feed import PrefixFeed


class ComputeReporter:
    """Reads the engine's snapshot and what the role adds. Lives on the event loop."""

    def __init__(
        self,
        *,
        info: mesh_pb2.NodeInfo,
        engine: EngineLoop,
        prefix_feed: PrefixFeed,
        clear_cache: Callable[[], bool],
        is_serving: Callable[[], bool],
        num_handoffs: Callable[[], int],
        peers: Callable[[], Sequence[mesh_pb2.PeerStatus]],
        verifications: Callable[[], tuple[int, int]] = lambda: (0, 0),
        num_local_prefills: Callable[[], int] = lambda: 0,
        num_refused_runs: Callable[[], int] = lambda: 0,
    ) -> None:
        """`clear_cache` is run on the engine thread; the other callables are read on the event loop.

        `verifications` gives the number of verified handoffs and of the damaged ones among them.
        """
        self._info = info
        self._engine = engine
        self._prefix_feed = prefix_feed
        self._clear_cache = clear_cache
        self._is_serving = is_serving
        self._num_handoffs = num_handoffs
        self._num_local_prefills = num_local_prefills
        self._num_refused_runs = num_refused_runs
        self._peers = peers
        self._verifications = verifications

    def info(self) -> mesh_pb2.NodeInfo:
        return self._info

    @property
    def prefix_feed(self) -> PrefixFeed:
        return self._prefix_feed

    async def status(self) -> mesh_pb2.NodeStatus:
        snapshot = self._engine.snapshot
        num_verified, num_damaged = self._verifications()
        return mesh_pb2.NodeStatus(
            serving=self._is_serving(),
            num_waiting_requests=snapshot.num_waiting,
            num_running_requests=snapshot.num_running,
            num_handoffs=self._num_handoffs(),
            arena=mesh_pb2.ArenaStatus(
                total_lcm_blocks=snapshot.total_lcm_blocks,
                empty_lcm_blocks=snapshot.empty_lcm_blocks,
                active_lcm_blocks=snapshot.active_lcm_blocks,
                cached_lcm_blocks=snapshot.cached_lcm_blocks,
                quarantined_lcm_blocks=snapshot.quarantined_lcm_blocks,
                groups=[mesh_pb2.GroupStatus(**group._asdict()) for group in snapshot.groups],
            ),
            peers=self._peers(),
            num_steps=snapshot.num_steps,
            num_retractions=snapshot.num_retractions,
            num_verified_handoffs=num_verified,
            num_damaged_handoffs=num_damaged,
            num_local_prefills=self._num_local_prefills(),
            num_refused_runs=self._num_refused_runs(),
            prefill_tokens_per_s=snapshot.prefill_tokens_per_s,
            decode_step_ms=snapshot.decode_step_s * 1000,
        )

    async def clear_cache(self) -> bool:
        event_loop = asyncio.get_running_loop()
        answer: asyncio.Future[bool] = event_loop.create_future()
        outcome: list[bool] = []

        def clear() -> None:
            outcome.append(self._clear_cache())

        def set_answer() -> None:
            if not answer.done():
                answer.set_result(outcome[0])

        def tell() -> None:
            event_loop.call_soon_threadsafe(set_answer)

        # Two commands: when the second one runs, the snapshot shows what the first one did.
        self._engine.post(Invoke(action=clear))
        self._engine.post(Invoke(action=tell))
        return await answer

"""Which prompts a decode node computes itself, and why.

Two reasons: so little of a prompt is not cached here that a handoff would take longer than computing it, or no prefill
node is to be had. Lives on the event loop; it asks the engine what is cached.
"""

from __future__ import annotations

import asyncio
from enum import Enum, unique

import numpy as np

from node_runtime.engine.loop import EngineLoop
from node_runtime.engine.messages import Invoke
from node_runtime.engine.scheduler import EngineScheduler
from node_runtime.wire.decode import DecodeJob


@unique
class LocalReason(Enum):
    """Why a prompt is computed here; the value is its name in traces."""

    SHORT = "short"
    FALLBACK = "fallback"


class LocalPrefill:
    """The policy of one decode node, and how often it applied."""

    def __init__(
        self, *, is_fallback: bool, max_uncached_tokens: int, scheduler: EngineScheduler, engine: EngineLoop
    ) -> None:
        """`is_fallback`: requests without a prefill node are taken. `scheduler` is used on the engine's thread only."""
        self.is_fallback = is_fallback
        self._max_uncached_tokens = max_uncached_tokens
        self._scheduler = scheduler
        self._engine = engine
        self._num_prompts = 0

    @property
    def num_prompts(self) -> int:
        """Prompts that were to be computed here."""
        return self._num_prompts

    async def reason_for(self, job: DecodeJob) -> LocalReason | None:
        """Why this node computes the prompt, None when a prefill node does."""
        reason: LocalReason | None = None
        if job.prefill_address is None:
            reason = LocalReason.FALLBACK if self.is_fallback else None
        elif self._max_uncached_tokens and await self._is_short(job):
            reason = LocalReason.SHORT
        self._num_prompts += reason is not None
        return reason

    async def _is_short(self, job: DecodeJob) -> bool:
        num_tokens = len(job.token_ids)
        if num_tokens <= self._max_uncached_tokens:
            return True
        return num_tokens - await self._find_cached_tokens(job) <= self._max_uncached_tokens

    async def _find_cached_tokens(self, job: DecodeJob) -> int:
        """Between two steps of the engine; what is found may be gone when the request is admitted."""
        event_loop = asyncio.get_running_loop()
        answer: asyncio.Future[int] = event_loop.create_future()
        tokens = np.asarray(job.token_ids, dtype=np.int32)

        def tell(num_tokens: int) -> None:
            if not answer.done():
                answer.set_result(num_tokens)

        def look() -> None:
            event_loop.call_soon_threadsafe(tell, self._scheduler.find_cached_tokens(tokens, job.isolation_keys))

        self._engine.post(Invoke(action=look))
        return await answer

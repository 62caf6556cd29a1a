"""One request on a decode or fused node: what the engine reported about it, and the tokens not yet sent to the client.

Lives on the event loop. It knows neither the wire nor the handoff protocol; a handoff registers for the grant.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, assert_never

import numpy as np

from node_runtime.engine.loop import EngineLoop
from node_runtime.engine.messages import (
    GenerationEnded,
    GrantOffered,
    HandoverOffered,
    PostEvents,
    RequestAdmitted,
    RequestFailed,
    RequestRetracted,
    StopRule,
    SubmitRequest,
    TokenGenerated,
    Update,
)
from node_runtime.errors import InternalError, NodeError
from node_runtime.wire.decode import DecodeJob
from scheduler_core import AbortEvent, RequestSpec

if TYPE_CHECKING:
    from model_runtime.sampler import SampledToken
    from model_runtime.text.grammar import TokenMatcher


# Of a client that reads slowly: with all their log-probabilities these stay well below the size of a message.
_MAX_BATCH_TOKENS: Final = 256


@dataclass(slots=True, kw_only=True)
class Measured:
    """Monotonic seconds; None: has not happened."""

    arrived_at_s: float
    admitted_at_s: float | None = None
    first_token_at_s: float | None = None
    last_token_at_s: float | None = None
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    storage_hit_tokens: int = 0
    num_tokens: int = 0
    num_retractions: int = 0


class Generation:
    """One attempt to generate: a request of the engine under a name of its own."""

    def __init__(
        self,
        *,
        engine_id: str,
        job: DecodeJob,
        engine: EngineLoop,
        measured: Measured,
        is_local: bool = False,
        matcher: TokenMatcher | None = None,
    ) -> None:
        """`engine_id` is unique for the life of the process; `is_local`: a decode node computes the prompt itself."""
        self._is_local = is_local
        self._matcher = matcher
        self.engine_id = engine_id
        self._job = job
        self._engine = engine
        self._updates: asyncio.Queue[TokenGenerated | GenerationEnded | NodeError] = asyncio.Queue()
        self._is_over = False
        self.measured = measured
        self.on_grant: Callable[[GrantOffered], None] | None = None
        self.on_failure: Callable[[NodeError], None] | None = None
        # Why this node's own engine gave the request up, if it did.
        self.failure: NodeError | None = None
        # Of each prompt token but the first, where this node computed the prompt and they were asked for.
        self.prompt_logprobs: tuple[SampledToken, ...] = ()

    def submit(self) -> None:
        """Hands the request to the engine: it prefills it at once (fused) or waits for the peer (decode)."""
        job = self._job
        spec = RequestSpec(
            request_id=self.engine_id,
            tokens=np.asarray(job.token_ids, dtype=np.int32),
            max_new_tokens=job.max_tokens,
            extra_keys=job.isolation_keys,
            local_prefill=self._is_local,
        )
        stop = StopRule(max_new_tokens=job.max_tokens, stop_token_ids=job.stop_token_ids)
        self._engine.post(
            SubmitRequest(
                spec=spec,
                sampling=job.sampling,
                stop=stop,
                sink=self._on_update,
                num_output_tokens=job.num_output_tokens,
                matcher=self._matcher,
                adapter=None if job.adapter is None else job.adapter.name,
            )
        )

    def abort(self) -> None:
        """Ends the request wherever it is. Without effect on one that is over."""
        if not self._is_over:
            self._is_over = True
            self._engine.post(PostEvents(events=(AbortEvent(self.engine_id),)))

    async def batches(
        self, *, at_least_every_s: float | None = None
    ) -> AsyncIterator[tuple[tuple[SampledToken, ...], GenerationEnded | None]]:
        """What has been generated since the last batch, as far as a message takes it; the last one comes with the end.
        Raises NodeError.

        A batch is empty when nothing was generated for `at_least_every_s`.
        """
        ended: GenerationEnded | None = None
        while ended is None:
            try:
                async with asyncio.timeout(at_least_every_s):
                    updates = [await self._updates.get()]
            except TimeoutError:
                yield (), None
                continue
            while len(updates) < _MAX_BATCH_TOKENS and not self._updates.empty():
                updates.append(self._updates.get_nowait())
            tokens = []
            for update in updates:
                match update:
                    case TokenGenerated():
                        tokens.append(update.token)
                    case GenerationEnded():
                        ended = update
                    case _:
                        raise update
            yield tuple(tokens), ended

    def _on_update(self, update: Update) -> None:
        match update:
            case RequestAdmitted():
                self._note_admission(update)
            case RequestRetracted():
                self.measured.num_retractions += 1
            case GrantOffered():
                if self.on_grant is None:
                    raise InternalError("a grant for a request without a handoff")
                self.on_grant(update)
            case TokenGenerated():
                self._count(update)
                self.prompt_logprobs = update.prompt_logprobs or self.prompt_logprobs
                self._updates.put_nowait(update)
            case GenerationEnded():
                self._is_over = True
                self._updates.put_nowait(update)
            case RequestFailed():
                self.failure = update.error
                self._updates.put_nowait(update.error)
                if self.on_failure is not None:
                    self.on_failure(update.error)
            case HandoverOffered():
                raise InternalError("a handover does not belong to this role")
            case _:
                assert_never(update)

    def _note_admission(self, update: RequestAdmitted) -> None:
        """The first one: what a later one finds in the cache is mostly this request's own."""
        if self.measured.admitted_at_s is None:
            self.measured.admitted_at_s = update.at_s
            self.measured.device_hit_tokens = update.device_hit_tokens
            self.measured.host_hit_tokens = update.host_hit_tokens
            self.measured.storage_hit_tokens = update.storage_hit_tokens

    def _count(self, update: TokenGenerated) -> None:
        self.measured.num_tokens += 1
        self.measured.last_token_at_s = update.at_s
        if self.measured.first_token_at_s is None:
            self.measured.first_token_at_s = update.at_s

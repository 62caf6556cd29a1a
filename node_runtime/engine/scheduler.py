"""The scheduler as the engine loop and the roles know it, and the end of an engine that cannot go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from scheduler_core import Capacity, Event, Plan, PrefixEvent, PrefixKeyChanges, RequestSpec


class EngineBroken(RuntimeError):
    """The engine's parts do not agree any more, for instance because a rank is gone. Nothing it holds can be used."""


class RankGone(EngineBroken):
    """Another rank of the node has ended, or does not answer. The requests that it was needed for are sound."""


class EngineScheduler(Protocol):
    """`scheduler_core.Scheduler` is one. Called from the engine thread."""

    def submit(self, requests: Sequence[RequestSpec], /) -> None:
        """Raises SubmitError naming the request and the limit; then none of the batch is accepted."""

    def advance(self, events: Sequence[Event], /) -> None:
        """Raises ContractError when an event breaks the agreement; then none of the batch is applied."""

    def next_plan(self) -> Plan: ...

    def clear_cache(self) -> bool: ...

    def block_tables(self, request_id: str, /) -> Sequence[npt.NDArray[np.int32]]:
        """Per group int32[slots], 0 where there is no block."""

    def find_cached_tokens(self, tokens: npt.NDArray[np.int32], extra_keys: Sequence[bytes], /) -> int:
        """How much of a prompt a local prefill would find in the cache now; changes nothing and promises nothing."""

    def track_prefix_keys(self) -> None:
        """Keeps track of the keys of cached prefixes; before the first submission."""

    def drain_prefix_keys(self) -> PrefixKeyChanges:
        """How the set of these keys changed since the last call."""

    def track_prefix_events(self, *, with_extra_keys: bool) -> None:
        """Announces cached prefixes, with their tokens, of prompts with extra keys on request; before the first
        submission.
        """

    def drain_prefix_events(self) -> Sequence[PrefixEvent]:
        """How the set of announced prefixes changed since the last call; to be applied in order."""

    def capacity(self) -> Capacity: ...

    @property
    def max_request_tokens(self) -> int: ...

"""What enters and leaves the engine thread: frozen commands in, frozen updates out.

Nothing mutable crosses the boundary. Times are monotonic seconds of the engine's clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, unique
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from node_runtime.errors import NodeError
from node_runtime.handoff.messages import GroupGrant

if TYPE_CHECKING:
    from model_runtime.sampler import SampledToken, SamplingParams
    from model_runtime.text.grammar import TokenMatcher
    from scheduler_core import Event, RequestSpec


@unique
class EndReason(Enum):
    """Why a generation ended by itself."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """When a generation ends: after `max_new_tokens`, or with the first of `stop_token_ids`."""

    max_new_tokens: int
    stop_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: {self.max_new_tokens} given, at least 1 required")

    def find_end(self, token_id: int, num_generated: int) -> EndReason | None:
        """The reason to end after `token_id`, the `num_generated`-th token (counted from 1), or None."""
        if token_id in self.stop_token_ids:
            return EndReason.STOP
        return EndReason.LENGTH if num_generated >= self.max_new_tokens else None


# Updates: engine thread -> whoever owns the request, on the event loop's thread.


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestAdmitted:
    """The scheduler gave the request its memory. Hits are prompt tokens that this node need not compute or receive."""

    device_hit_tokens: int
    host_hit_tokens: int
    storage_hit_tokens: int
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRetracted:
    """The request gave its memory to another one. Another `RequestAdmitted` follows; no token is lost or repeated."""

    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantOffered:
    """Decode role: blocks were allocated (and zeroed) for the prompt tokens from `from_token` on."""

    from_token: int
    groups: tuple[GroupGrant, ...]
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverOffered:
    """Prefill role: the prompt is computed and its first token known to the scheduler."""

    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGenerated:
    """One token, in order."""

    token: SampledToken
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEnded:
    """No token follows; the request holds nothing any more."""

    reason: EndReason
    matched_token_id: int | None
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailed:
    """The engine gave the request up: refused by the scheduler, or hit by a fault of the executor."""

    error: NodeError


Update: TypeAlias = (
    RequestAdmitted
    | RequestRetracted
    | GrantOffered
    | HandoverOffered
    | TokenGenerated
    | GenerationEnded
    | RequestFailed
)
# Takes the updates of one request, in order, on the event loop's thread.
RequestSink: TypeAlias = Callable[[Update], None]


# Commands: any thread -> engine thread.


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitRequest:
    """Submits one request. `stop` is None on the prefill role, where the request ends with its first token.

    `matcher` says which tokens may follow; it belongs to the engine from now on.
    """

    spec: RequestSpec
    sampling: SamplingParams
    stop: StopRule | None
    sink: RequestSink
    matcher: TokenMatcher | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PostEvents:
    """Hands events to the scheduler, in order. Requests that they end get no further update."""

    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptFirstToken:
    """Decode role: the cache of the prompt is in place; `token` is the first of the completion."""

    request_id: str
    token: SampledToken


@dataclass(frozen=True, slots=True, kw_only=True)
class Invoke:
    """Runs `action` on the engine thread between two steps. It must not block or raise."""

    action: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Ends the engine thread before its next step."""


Command: TypeAlias = SubmitRequest | PostEvents | AcceptFirstToken | Invoke | Shutdown


class GroupGauges(NamedTuple):
    """What one cache group has of the arena: its LCM blocks, those of them that the prefix cache alone holds, and the
    cache blocks in them that somebody holds.
    """

    group_id: str
    lcm_blocks: int
    cached_lcm_blocks: int
    taken_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """Gauges of the scheduler after the last iteration. Blocks are LCM blocks."""

    total_lcm_blocks: int
    empty_lcm_blocks: int
    active_lcm_blocks: int
    cached_lcm_blocks: int
    quarantined_lcm_blocks: int
    num_waiting: int
    num_running: int
    num_live_requests: int
    num_steps: int
    num_retractions: int
    groups: tuple[GroupGauges, ...] = ()
    # What was measured of late; 0 where nothing was.
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0

"""What can happen to a handoff, and what its session asks the node to do.

Events go into a session, actions come out; both are frozen values. Messages of the peer (`messages.py`) are events too.
Nothing here performs I/O: the role packages carry the actions out, in the order given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from node_runtime.handoff.messages import (
    Abort,
    Beat,
    Checksums,
    Done,
    Failed,
    Grant,
    GroupGrant,
    HandoffTimings,
    Quiesced,
    Ready,
    Renewed,
    RequestMessage,
    ResponseMessage,
    Start,
)

__all__ = [
    "Abort",
    "AbortScheduling",
    "Admitted",
    "Allocated",
    "Beat",
    "Begin",
    "Checksums",
    "ChecksumsTaken",
    "Completed",
    "DecodeAction",
    "DecodeEvent",
    "Done",
    "Drained",
    "EndWithFailure",
    "ExtendWriting",
    "FailScheduling",
    "Failed",
    "Fenced",
    "GaveUp",
    "Grant",
    "GroupGrant",
    "HandoffTimings",
    "MarkDone",
    "MarkGranted",
    "MarkHandedOver",
    "MarkQuiesced",
    "MarkReady",
    "PrefillAction",
    "PrefillEvent",
    "Progressed",
    "Quiesced",
    "Ready",
    "Renewed",
    "RequestMessage",
    "ResponseMessage",
    "Send",
    "Start",
    "StartWriting",
    "StopWriting",
    "StreamClosed",
    "SubmitPrompt",
    "Tick",
    "Verified",
    "Verify",
]


MessageT = TypeVar("MessageT", RequestMessage, ResponseMessage)


# Events that both sides know.


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamClosed:
    """The control stream is gone: nothing can be sent and nothing will be received. `code` is 0 for an orderly end."""

    code: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GaveUp:
    """This node ends the handoff: a cancelled client, a passed deadline, or a fault of its own.

    `code` is a canonical gRPC status number, never 0.
    """

    code: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed. Sessions act on it only when their `wakeup_at_s` has come."""


# Events of the decode side.


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """The control stream is open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocated:
    """The scheduler admitted the request and asks for these blocks to be filled."""

    from_token: int
    groups: tuple[GroupGrant, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """After Verify: blocks were compared with their checksums. `damage` says where they differ; empty: nowhere."""

    damage: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fenced:
    """Our data plane vouches that nothing more of the peer can land in the granted blocks.

    A plane that places the bytes itself has revoked the grant; of any other, the peer's process is known to be gone and
    its connection is reported closed. Only after the handoff was given up.
    """


# Events of the prefill side.


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The scheduler admitted the prompt; its first chunk is about to be computed."""

    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """Every write of the grant has landed and the first token is known."""

    done: Done


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """After StopWriting: every write that was posted has reached a terminal state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """The engine computed or a write landed since the last such event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChecksumsTaken:
    """Blocks have landed, and these are their checksums."""

    checksums: Checksums


DecodeEvent: TypeAlias = Begin | Allocated | Verified | Fenced | ResponseMessage | StreamClosed | GaveUp | Tick
PrefillEvent: TypeAlias = (
    RequestMessage | Admitted | Progressed | ChecksumsTaken | Completed | Drained | StreamClosed | GaveUp | Tick
)


# Actions that both sides know.


@dataclass(frozen=True, slots=True, kw_only=True)
class Send(Generic[MessageT]):
    """Put this message on the control stream."""

    message: MessageT


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortScheduling:
    """Tell the scheduler that the request is given up by this node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkQuiesced:
    """Tell the scheduler that no write touches the blocks of the request any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndWithFailure:
    """The handoff came to nothing. `code` and `message` say what whoever waits for it is told."""

    code: int
    message: str


# Actions of the decode side.


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkReady:
    """Tell the scheduler that the prefill node computes the prompt: decode memory may be allocated now."""

    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify:
    """Compare some of the granted blocks with their checksums; answer with Verified."""

    groups: tuple[GroupGrant, ...]
    checksums: Checksums


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkDone:
    """Tell the scheduler that the prompt's cache is in place, and the waiting request its first token."""

    done: Done


# Actions of the prefill side.


@dataclass(frozen=True, slots=True, kw_only=True)
class FailScheduling:
    """Tell the scheduler that the transfer of the request failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitPrompt:
    """Submit the prompt to the scheduler."""

    start: Start


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkGranted:
    """Tell the scheduler that the prompt has a place on the decode node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWriting:
    """Write what is computed, and from now on what is being computed, into these blocks of the peer.

    Nothing is posted from `post_until_s` on, which is infinite for a grant without a lease.
    """

    grant: Grant
    post_until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendWriting:
    """The lease was renewed: nothing is posted from `post_until_s` on."""

    post_until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWriting:
    """Post no further write; answer with Drained when all that were posted are terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkHandedOver:
    """Tell the scheduler that the prompt's blocks have been read for the last time."""


DecodeAction: TypeAlias = (
    Send[RequestMessage] | MarkReady | Verify | MarkDone | AbortScheduling | MarkQuiesced | EndWithFailure
)
PrefillAction: TypeAlias = (
    Send[ResponseMessage]
    | SubmitPrompt
    | MarkGranted
    | StartWriting
    | ExtendWriting
    | StopWriting
    | MarkHandedOver
    | AbortScheduling
    | FailScheduling
    | MarkQuiesced
    | EndWithFailure
)

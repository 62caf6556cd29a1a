"""The two state machines of a handoff as tables: which event moves which state, which is late, which breaks the
rules.

A table says only where an event leads; what is done on the way is in `session.py`. Every pair of state and event kind
has exactly one entry, so a missing rule is a test failure and not a surprise.

States hold: OPEN, QUEUED, STARTED, READY and all terminal states nothing that a peer can touch; GRANTED, QUARANTINED
and DRAINING memory of this node that the data plane may still read or write; VERIFYING memory that only we read.

Some entries are where an event leads as a rule; its content can lead elsewhere. A Done before its checksums are
compared leads to VERIFYING, and the last of them to DONE; damage leads to QUARANTINED or CLOSED, as does a stream that
ends before the last checksums; a Grant whose lease is over leads to CLOSED.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, unique
from typing import TypeAlias

from node_runtime.errors import InternalError, InvalidRequest
from node_runtime.handoff.events import (
    Abort,
    Admitted,
    Allocated,
    Beat,
    Begin,
    Checksums,
    ChecksumsTaken,
    Completed,
    Done,
    Drained,
    Failed,
    Fenced,
    GaveUp,
    Grant,
    Progressed,
    Quiesced,
    Ready,
    Renewed,
    Start,
    StreamClosed,
    Tick,
    Verified,
)


@unique
class DecodeState(Enum):
    """Where a handoff is, seen from the decode node."""

    OPEN = "open"  # nothing sent
    STARTED = "started"  # Start sent, Ready awaited
    READY = "ready"  # the peer computes; memory is being allocated
    GRANTED = "granted"  # the peer may write into the granted blocks
    QUARANTINED = "quarantined"  # given up, but the peer may still be writing
    VERIFYING = "verifying"  # everything has landed, and some of it is still compared with its checksums
    DONE = "done"  # terminal: the cache is in place
    CLOSED = "closed"  # terminal: came to nothing


@unique
class PrefillState(Enum):
    """Where a handoff is, seen from the prefill node."""

    OPEN = "open"  # Start awaited
    QUEUED = "queued"  # submitted, waiting for a place
    READY = "ready"  # computing, no grant yet
    GRANTED = "granted"  # writing into the peer's blocks
    DRAINING = "draining"  # given up, but posted writes may not be terminal
    DONE = "done"  # terminal: Done was sent
    CLOSED = "closed"  # terminal: came to nothing


@unique
class Verdict(Enum):
    """What an event means in a state that it does not move."""

    IGNORED = "late or repeated: changes nothing"
    PEER_ERROR = "breaks the protocol: the peer's fault"
    LOCAL_ERROR = "breaks the contract inside this node"


DecodeRow: TypeAlias = Mapping[type, DecodeState | Verdict]
PrefillRow: TypeAlias = Mapping[type, PrefillState | Verdict]

DECODE_EVENT_KINDS: tuple[type, ...] = (
    Begin,
    Allocated,
    Ready,
    Beat,
    Checksums,
    Done,
    Failed,
    Quiesced,
    Verified,
    Fenced,
    StreamClosed,
    GaveUp,
    Tick,
)
PREFILL_EVENT_KINDS: tuple[type, ...] = (
    Start,
    Grant,
    Renewed,
    Abort,
    Admitted,
    Progressed,
    ChecksumsTaken,
    Completed,
    Drained,
    StreamClosed,
    GaveUp,
    Tick,
)

DECODE_TERMINAL = frozenset({DecodeState.DONE, DecodeState.CLOSED})
PREFILL_TERMINAL = frozenset({PrefillState.DONE, PrefillState.CLOSED})

_D = DecodeState
_P = PrefillState
_V = Verdict

DECODE_TABLE: Mapping[DecodeState, DecodeRow] = {
    _D.OPEN: {
        Begin: _D.STARTED,
        Allocated: _V.LOCAL_ERROR,
        Ready: _V.PEER_ERROR,
        Beat: _V.PEER_ERROR,
        Checksums: _V.PEER_ERROR,
        Done: _V.PEER_ERROR,
        Failed: _V.PEER_ERROR,
        Quiesced: _V.PEER_ERROR,
        Verified: _V.LOCAL_ERROR,
        Fenced: _V.IGNORED,
        StreamClosed: _D.CLOSED,
        GaveUp: _D.CLOSED,
        Tick: _V.IGNORED,
    },
    _D.STARTED: {
        Begin: _V.LOCAL_ERROR,
        Allocated: _V.LOCAL_ERROR,
        Ready: _D.READY,
        # It overtook Ready, which says what it is worth.
        Beat: _V.IGNORED,
        Checksums: _V.PEER_ERROR,
        Done: _V.PEER_ERROR,
        Failed: _D.CLOSED,
        # It overtook Failed: nothing was granted, and nothing will come of it.
        Quiesced: _D.CLOSED,
        Verified: _V.LOCAL_ERROR,
        Fenced: _V.IGNORED,
        StreamClosed: _D.CLOSED,
        GaveUp: _D.CLOSED,
        Tick: _V.IGNORED,
    },
    _D.READY: {
        Begin: _V.LOCAL_ERROR,
        Allocated: _D.GRANTED,
        Ready: _V.IGNORED,
        Beat: _D.READY,
        Checksums: _V.PEER_ERROR,
        Done: _V.PEER_ERROR,
        Failed: _D.CLOSED,
        Quiesced: _D.CLOSED,
        Verified: _V.LOCAL_ERROR,
        Fenced: _V.IGNORED,
        StreamClosed: _D.CLOSED,
        GaveUp: _D.CLOSED,
        Tick: _D.CLOSED,
    },
    _D.GRANTED: {
        Begin: _V.LOCAL_ERROR,
        Allocated: _V.LOCAL_ERROR,
        Ready: _V.IGNORED,
        Beat: _D.GRANTED,
        Checksums: _D.GRANTED,
        Done: _D.DONE,
        Failed: _D.QUARANTINED,
        Quiesced: _D.CLOSED,
        Verified: _D.GRANTED,
        Fenced: _V.LOCAL_ERROR,
        StreamClosed: _D.QUARANTINED,
        GaveUp: _D.QUARANTINED,
        Tick: _D.QUARANTINED,
    },
    _D.QUARANTINED: {
        Begin: _V.LOCAL_ERROR,
        Allocated: _V.LOCAL_ERROR,
        Ready: _V.IGNORED,
        # The lease is not renewed any more.
        Beat: _V.IGNORED,
        Checksums: _V.IGNORED,
        # A Done that crossed our Abort says that every write has landed and none will follow: as good as Quiesced.
        Done: _D.CLOSED,
        Failed: _V.IGNORED,
        Quiesced: _D.CLOSED,
        Verified: _V.IGNORED,
        Fenced: _D.CLOSED,
        StreamClosed: _D.QUARANTINED,
        GaveUp: _V.IGNORED,
        Tick: _D.CLOSED,
    },
    _D.VERIFYING: {
        Begin: _V.LOCAL_ERROR,
        Allocated: _V.LOCAL_ERROR,
        Ready: _V.IGNORED,
        Beat: _V.IGNORED,
        Checksums: _D.VERIFYING,
        Done: _V.IGNORED,
        Failed: _V.IGNORED,
        Quiesced: _V.IGNORED,
        Verified: _D.VERIFYING,
        Fenced: _V.IGNORED,
        StreamClosed: _D.VERIFYING,
        GaveUp: _D.CLOSED,
        Tick: _V.IGNORED,
    },
    _D.DONE: {
        Begin: _V.LOCAL_ERROR,
        Allocated: _V.LOCAL_ERROR,
        Ready: _V.IGNORED,
        Beat: _V.IGNORED,
        Checksums: _V.IGNORED,
        Done: _V.IGNORED,
        Failed: _V.IGNORED,
        Quiesced: _V.IGNORED,
        Verified: _V.LOCAL_ERROR,
        Fenced: _V.IGNORED,
        StreamClosed: _V.IGNORED,
        GaveUp: _V.IGNORED,
        Tick: _V.IGNORED,
    },
    _D.CLOSED: {
        Begin: _V.LOCAL_ERROR,
        # The scheduler may have allocated while our abort was on its way to it: MarkQuiesced has followed that abort.
        Allocated: _V.IGNORED,
        Ready: _V.IGNORED,
        Beat: _V.IGNORED,
        Checksums: _V.IGNORED,
        Done: _V.IGNORED,
        Failed: _V.IGNORED,
        Quiesced: _V.IGNORED,
        # The handoff was given up while the blocks were being compared.
        Verified: _V.IGNORED,
        Fenced: _V.IGNORED,
        StreamClosed: _V.IGNORED,
        GaveUp: _V.IGNORED,
        Tick: _V.IGNORED,
    },
}

PREFILL_TABLE: Mapping[PrefillState, PrefillRow] = {
    _P.OPEN: {
        Start: _P.QUEUED,
        Grant: _V.PEER_ERROR,
        Renewed: _V.PEER_ERROR,
        # It overtook Start, which is then late.
        Abort: _P.CLOSED,
        Admitted: _V.LOCAL_ERROR,
        Progressed: _V.LOCAL_ERROR,
        ChecksumsTaken: _V.LOCAL_ERROR,
        Completed: _V.LOCAL_ERROR,
        Drained: _V.LOCAL_ERROR,
        StreamClosed: _P.CLOSED,
        GaveUp: _P.CLOSED,
        Tick: _V.IGNORED,
    },
    _P.QUEUED: {
        Start: _V.IGNORED,
        Grant: _V.PEER_ERROR,
        Renewed: _V.PEER_ERROR,
        Abort: _P.CLOSED,
        Admitted: _P.READY,
        Progressed: _V.IGNORED,
        ChecksumsTaken: _V.LOCAL_ERROR,
        Completed: _V.LOCAL_ERROR,
        Drained: _V.LOCAL_ERROR,
        StreamClosed: _P.CLOSED,
        GaveUp: _P.CLOSED,
        Tick: _V.IGNORED,
    },
    _P.READY: {
        Start: _V.IGNORED,
        Grant: _P.GRANTED,
        # It overtook the grant, which names an older Beat and starts the lease all the same.
        Renewed: _V.IGNORED,
        Abort: _P.CLOSED,
        Admitted: _V.LOCAL_ERROR,
        Progressed: _V.IGNORED,
        ChecksumsTaken: _V.LOCAL_ERROR,
        Completed: _V.LOCAL_ERROR,
        Drained: _V.LOCAL_ERROR,
        StreamClosed: _P.CLOSED,
        GaveUp: _P.CLOSED,
        Tick: _P.READY,
    },
    _P.GRANTED: {
        Start: _V.IGNORED,
        Grant: _V.IGNORED,
        Renewed: _P.GRANTED,
        Abort: _P.DRAINING,
        Admitted: _V.LOCAL_ERROR,
        Progressed: _P.GRANTED,
        ChecksumsTaken: _P.GRANTED,
        Completed: _P.DONE,
        Drained: _V.LOCAL_ERROR,
        StreamClosed: _P.DRAINING,
        GaveUp: _P.DRAINING,
        Tick: _P.GRANTED,
    },
    _P.DRAINING: {
        Start: _V.IGNORED,
        Grant: _V.IGNORED,
        Renewed: _V.IGNORED,
        Abort: _V.IGNORED,
        Admitted: _V.LOCAL_ERROR,
        Progressed: _V.IGNORED,
        ChecksumsTaken: _V.IGNORED,
        # The last write landed while the abort was on its way: the peer no longer wants it, Drained follows.
        Completed: _V.IGNORED,
        Drained: _P.CLOSED,
        StreamClosed: _P.DRAINING,
        GaveUp: _V.IGNORED,
        Tick: _V.IGNORED,
    },
    _P.DONE: {
        Start: _V.IGNORED,
        Grant: _V.IGNORED,
        Renewed: _V.IGNORED,
        Abort: _V.IGNORED,
        Admitted: _V.LOCAL_ERROR,
        Progressed: _V.IGNORED,
        ChecksumsTaken: _V.LOCAL_ERROR,
        Completed: _V.LOCAL_ERROR,
        Drained: _V.LOCAL_ERROR,
        StreamClosed: _V.IGNORED,
        GaveUp: _V.IGNORED,
        Tick: _V.IGNORED,
    },
    _P.CLOSED: {
        Start: _V.IGNORED,
        Grant: _V.IGNORED,
        Renewed: _V.IGNORED,
        Abort: _V.IGNORED,
        # The engine may report an admission that happened while our abort was on its way to it.
        Admitted: _V.IGNORED,
        Progressed: _V.IGNORED,
        ChecksumsTaken: _V.IGNORED,
        Completed: _V.IGNORED,
        Drained: _V.IGNORED,
        StreamClosed: _V.IGNORED,
        GaveUp: _V.IGNORED,
        Tick: _V.IGNORED,
    },
}


def refuse(verdict: Verdict, event: object, state: DecodeState | PrefillState) -> None:
    """Raises InvalidRequest or InternalError for an event that its table calls an error."""
    name = type(event).__name__
    if verdict is Verdict.PEER_ERROR:
        raise InvalidRequest(f"{name} is not allowed while the handoff is {state.value}")
    if verdict is Verdict.LOCAL_ERROR:
        raise InternalError(f"{name} cannot happen while the handoff is {state.value}")

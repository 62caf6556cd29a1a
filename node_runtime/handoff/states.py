"""The two state machines of a handoff as tables: which event moves which state, which is late, which breaks the
rules.

A table says only where an event leads; what is done on the way is in `session.py`. Every pair of state and event kind
has exactly one entry, so a missing rule is a test failure and not a surprise.

States hold: OPEN, QUEUED, STARTED, READY and all terminal states nothing that a peer can touch; GRANTED, QUARANTINED
and DRAINING memory of this node that the data plane may still read or write.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, unique
from typing import TypeAlias

from node_runtime.handoff.events import (
    Abort,
    Admitted,
    Allocated,
    Begin,
    Completed,
    Done,
    Drained,
    Failed,
    GaveUp,
    Grant,
    Quiesced,
    Ready,
    Start,
    StreamClosed,
    Tick,
)


@unique
class DecodeState(Enum):
    """Where a handoff is, seen from the decode node."""

    OPEN = "open"  # nothing sent
    STARTED = "started"  # Start sent, Ready awaited
    READY = "ready"  # the peer computes; memory is being allocated
    GRANTED = "granted"  # the peer may write into the granted blocks
    QUARANTINED = "quarantined"  # given up, but the peer may still be writing
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

DECODE_EVENT_KINDS: tuple[type, ...] = (Begin, Allocated, Ready, Done, Failed, Quiesced, StreamClosed, GaveUp, Tick)
PREFILL_EVENT_KINDS: tuple[type, ...] = (Start, Grant, Abort, Admitted, Completed, Drained, StreamClosed, GaveUp)

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
        Done: _V.PEER_ERROR,
        Failed: _V.PEER_ERROR,
        Quiesced: _V.PEER_ERROR,
        StreamClosed: _D.CLOSED,
        GaveUp: _D.CLOSED,
        Tick: _V.IGNORED,
    },
    _D.STARTED: {
        Begin: _V.LOCAL_ERROR,
        Allocated: _V.LOCAL_ERROR,
        Ready: _D.READY,
        Done: _V.PEER_ERROR,
        Failed: _D.CLOSED,
        Quiesced: _V.PEER_ERROR,
        StreamClosed: _D.CLOSED,
        GaveUp: _D.CLOSED,
        Tick: _V.IGNORED,
    },
    _D.READY: {
        Begin: _V.LOCAL_ERROR,
        Allocated: _D.GRANTED,
        Ready: _V.IGNORED,
        Done: _V.PEER_ERROR,
        Failed: _D.CLOSED,
        Quiesced: _V.PEER_ERROR,
        StreamClosed: _D.CLOSED,
        GaveUp: _D.CLOSED,
        Tick: _V.IGNORED,
    },
    _D.GRANTED: {
        Begin: _V.LOCAL_ERROR,
        Allocated: _V.LOCAL_ERROR,
        Ready: _V.IGNORED,
        Done: _D.DONE,
        Failed: _D.QUARANTINED,
        Quiesced: _V.PEER_ERROR,
        StreamClosed: _D.QUARANTINED,
        GaveUp: _D.QUARANTINED,
        Tick: _V.IGNORED,
    },
    _D.QUARANTINED: {
        Begin: _V.LOCAL_ERROR,
        Allocated: _V.LOCAL_ERROR,
        Ready: _V.IGNORED,
        # A Done that crossed our Abort says that every write has landed and none will follow: as good as Quiesced.
        Done: _D.CLOSED,
        Failed: _V.IGNORED,
        Quiesced: _D.CLOSED,
        StreamClosed: _D.QUARANTINED,
        GaveUp: _V.IGNORED,
        Tick: _D.CLOSED,
    },
    _D.DONE: {
        Begin: _V.LOCAL_ERROR,
        Allocated: _V.LOCAL_ERROR,
        Ready: _V.IGNORED,
        Done: _V.IGNORED,
        Failed: _V.IGNORED,
        Quiesced: _V.IGNORED,
        StreamClosed: _V.IGNORED,
        GaveUp: _V.IGNORED,
        Tick: _V.IGNORED,
    },
    _D.CLOSED: {
        Begin: _V.LOCAL_ERROR,
        # The scheduler may have allocated while our abort was on its way to it: MarkQuiesced has followed that abort.
        Allocated: _V.IGNORED,
        Ready: _V.IGNORED,
        Done: _V.IGNORED,
        Failed: _V.IGNORED,
        Quiesced: _V.IGNORED,
        StreamClosed: _V.IGNORED,
        GaveUp: _V.IGNORED,
        Tick: _V.IGNORED,
    },
}

PREFILL_TABLE: Mapping[PrefillState, PrefillRow] = {
    _P.OPEN: {
        Start: _P.QUEUED,
        Grant: _V.PEER_ERROR,
        Abort: _V.PEER_ERROR,
        Admitted: _V.LOCAL_ERROR,
        Completed: _V.LOCAL_ERROR,
        Drained: _V.LOCAL_ERROR,
        StreamClosed: _P.CLOSED,
        GaveUp: _P.CLOSED,
    },
    _P.QUEUED: {
        Start: _V.IGNORED,
        Grant: _V.PEER_ERROR,
        Abort: _P.CLOSED,
        Admitted: _P.READY,
        Completed: _V.LOCAL_ERROR,
        Drained: _V.LOCAL_ERROR,
        StreamClosed: _P.CLOSED,
        GaveUp: _P.CLOSED,
    },
    _P.READY: {
        Start: _V.IGNORED,
        Grant: _P.GRANTED,
        Abort: _P.CLOSED,
        Admitted: _V.LOCAL_ERROR,
        Completed: _V.LOCAL_ERROR,
        Drained: _V.LOCAL_ERROR,
        StreamClosed: _P.CLOSED,
        GaveUp: _P.CLOSED,
    },
    _P.GRANTED: {
        Start: _V.IGNORED,
        Grant: _V.IGNORED,
        Abort: _P.DRAINING,
        Admitted: _V.LOCAL_ERROR,
        Completed: _P.DONE,
        Drained: _V.LOCAL_ERROR,
        StreamClosed: _P.DRAINING,
        GaveUp: _P.DRAINING,
    },
    _P.DRAINING: {
        Start: _V.IGNORED,
        Grant: _V.IGNORED,
        Abort: _V.IGNORED,
        Admitted: _V.LOCAL_ERROR,
        # The last write landed while the abort was on its way: the peer no longer wants it, Drained follows.
        Completed: _V.IGNORED,
        Drained: _P.CLOSED,
        StreamClosed: _P.DRAINING,
        GaveUp: _V.IGNORED,
    },
    _P.DONE: {
        Start: _V.IGNORED,
        Grant: _V.IGNORED,
        Abort: _V.IGNORED,
        Admitted: _V.LOCAL_ERROR,
        Completed: _V.LOCAL_ERROR,
        Drained: _V.LOCAL_ERROR,
        StreamClosed: _V.IGNORED,
        GaveUp: _V.IGNORED,
    },
    _P.CLOSED: {
        Start: _V.IGNORED,
        Grant: _V.IGNORED,
        Abort: _V.IGNORED,
        # The engine may report an admission that happened while our abort was on its way to it.
        Admitted: _V.IGNORED,
        Completed: _V.IGNORED,
        Drained: _V.IGNORED,
        StreamClosed: _V.IGNORED,
        GaveUp: _V.IGNORED,
    },
}

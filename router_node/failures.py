"""What a failed attempt means: which node is to blame, and whether another attempt could help. Pure, without I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from node_runtime.errors import (
    NodeError,
    PeerDraining,
    PeerUnavailable,
    PrefillDraining,
    PrefillFailed,
    QueueFull,
    RemoteError,
)
from node_runtime.rpc import status_of
from router_node.placement import PlacementChoice


class FailureKind(Enum):
    """What may follow."""

    # The node is well and does not take this request: another node may, the same one is not asked again.
    REFUSED = "refused"
    # The node, or the way to it, broke: another one is better, the same one may do later.
    BROKEN = "broken"
    # The node leaves and says so: another one takes the request at once, and nobody is to blame.
    DRAINING = "draining"
    # It would fail everywhere, or nobody wants it any more.
    FINAL = "final"


_DATA_LOSS = "DATA_LOSS"
_UNAVAILABLE = "UNAVAILABLE"
_KIND_BY_STATUS: Mapping[str, FailureKind] = MappingProxyType(
    {
        _UNAVAILABLE: FailureKind.BROKEN,
        # No node of ours says so: gRPC does, of some connections that broke.
        "UNKNOWN": FailureKind.BROKEN,
        _DATA_LOSS: FailureKind.BROKEN,
        # Our own caller's cancellation comes as an exception of another kind: here a node gave up that was stopped.
        "CANCELLED": FailureKind.BROKEN,
        "RESOURCE_EXHAUSTED": FailureKind.REFUSED,
        "FAILED_PRECONDITION": FailureKind.REFUSED,
    }
)
_ALREADY_EXISTS = "ALREADY_EXISTS"
_RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailure:
    """One attempt that failed. `culprit` is the address of the node it failed by, `decode` that of the decode node.

    `error` is for the client, should there be no other attempt. Both addresses are empty when no node could be chosen.
    """

    kind: FailureKind
    error: NodeError
    culprit: str = ""
    decode: str = ""


def failure_of(error: NodeError, choice: PlacementChoice, *, is_first: bool) -> AttemptFailure:
    """The failure of an attempt on `choice`, by what its decode node, or the connection to it, raised.

    A decode node that does not blame the prefill node is to blame itself.
    """
    status = status_of(error).name
    kind = _KIND_BY_STATUS.get(status, FailureKind.FINAL)
    if isinstance(error, PeerDraining | PrefillDraining):
        kind = FailureKind.DRAINING
    if status == _ALREADY_EXISTS and not is_first:
        # The nodes have not yet noticed that the attempt before this one is over.
        kind = FailureKind.BROKEN
    reason = error.reason if isinstance(error, PeerUnavailable) else error.message
    # A client who is told of nothing but this has cancelled nothing, and chosen no name that was taken.
    told = _UNAVAILABLE if kind is FailureKind.BROKEN and status != _DATA_LOSS else status
    named = RemoteError(told, f"{choice}: {reason}")
    named.retry_after_s = error.retry_after_s
    culprit = choice.decode
    if isinstance(error, PrefillFailed) and choice.prefill is not None:
        culprit = choice.prefill
        if named.retry_after_s is None and status == _RESOURCE_EXHAUSTED:
            # The handoff carries no hint. A prompt that is too long was not placed there, so it is the queue.
            named.retry_after_s = QueueFull.retry_after_s
    return AttemptFailure(kind=kind, error=named, culprit=culprit.address, decode=choice.decode.address)


def nowhere_to_go(lack: NodeError, *, after: AttemptFailure) -> AttemptFailure:
    """No pair of nodes is usable for another attempt; the client still hears what made it necessary."""
    if not after.culprit:
        return after
    error = RemoteError(status_of(after.error).name, f"{lack.message}, after {after.error.message}")
    error.retry_after_s = lack.retry_after_s
    return AttemptFailure(kind=FailureKind.BROKEN, error=error)

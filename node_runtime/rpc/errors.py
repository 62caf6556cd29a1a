"""The one table from error classes to gRPC statuses, and the way back for errors of a peer.

A test fails when a subclass of NodeError has no row.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import grpc

from node_runtime import errors
from node_runtime.errors import NodeError, PrefillFailed, RemoteError
from node_runtime.rpc.status_details import read_details

STATUS_BY_ERROR: Mapping[type[Exception], grpc.StatusCode] = MappingProxyType(
    {
        errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
        errors.ContextExceeded: grpc.StatusCode.INVALID_ARGUMENT,
        errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
        errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
        errors.UnknownModel: grpc.StatusCode.NOT_FOUND,
        errors.UnknownTrace: grpc.StatusCode.NOT_FOUND,
        errors.TracesNotKept: grpc.StatusCode.FAILED_PRECONDITION,
        errors.AdapterNotHere: grpc.StatusCode.FAILED_PRECONDITION,
        errors.DuplicateRequest: grpc.StatusCode.ALREADY_EXISTS,
        errors.IncompatiblePeer: grpc.StatusCode.FAILED_PRECONDITION,
        errors.NotBootstrapped: grpc.StatusCode.FAILED_PRECONDITION,
        errors.NoPrefillNode: grpc.StatusCode.FAILED_PRECONDITION,
        errors.NoPrefillNodeReady: grpc.StatusCode.UNAVAILABLE,
        errors.NodeBusy: grpc.StatusCode.FAILED_PRECONDITION,
        errors.QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
        errors.NoMemoryInTime: grpc.StatusCode.RESOURCE_EXHAUSTED,
        errors.RequestTooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
        errors.PeerUnavailable: grpc.StatusCode.UNAVAILABLE,
        errors.PeerDraining: grpc.StatusCode.UNAVAILABLE,
        errors.NodeDraining: grpc.StatusCode.UNAVAILABLE,
        errors.NodeBroken: grpc.StatusCode.UNAVAILABLE,
        errors.EngineStalled: grpc.StatusCode.UNAVAILABLE,
        errors.TransferBroken: grpc.StatusCode.UNAVAILABLE,
        errors.LinkBusy: grpc.StatusCode.RESOURCE_EXHAUSTED,
        errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
        errors.RequestCancelled: grpc.StatusCode.CANCELLED,
        # Only for a code name that gRPC does not know; `status_of` passes the known ones on.
        errors.RemoteError: grpc.StatusCode.UNKNOWN,
        errors.PrefillFailed: grpc.StatusCode.UNKNOWN,
        errors.PrefillDraining: grpc.StatusCode.UNKNOWN,
        errors.BadConfig: grpc.StatusCode.INTERNAL,
        errors.PortInUse: grpc.StatusCode.INTERNAL,
        errors.NoUsableLogits: grpc.StatusCode.INTERNAL,
        errors.InternalError: grpc.StatusCode.INTERNAL,
    }
)

_STATUS_BY_NAME: Mapping[str, grpc.StatusCode] = MappingProxyType(
    {code.name: code for code in grpc.StatusCode if code is not grpc.StatusCode.OK}
)

# Enough for a list of manifest differences, and below the 8 KiB of metadata that gRPC clients take by default.
MAX_DETAIL_BYTES = 6000


def status_of(error: BaseException) -> grpc.StatusCode:
    """The status that `error` becomes; INTERNAL for what is no operating error."""
    if isinstance(error, RemoteError):
        return _STATUS_BY_NAME.get(error.code_name, grpc.StatusCode.UNKNOWN)
    for error_class in type(error).__mro__:
        if error_class in STATUS_BY_ERROR:
            return STATUS_BY_ERROR[error_class]
    return grpc.StatusCode.INTERNAL


def detail_of(error: NodeError) -> str:
    """The message of `error`, cut to what every client is sure to accept. The cut says how much is missing."""
    encoded = error.message.encode("utf-8", "replace")
    budget = MAX_DETAIL_BYTES
    for position, byte in enumerate(encoded):
        # gRPC percent-encodes what is not printable ASCII: three bytes for one.
        budget -= 1 if 32 <= byte < 127 and byte != ord("%") else 3
        if budget < 0:
            kept = encoded[:position].decode("utf-8", "ignore")
            return f"{kept} ... ({len(encoded) - position} bytes more in the log of the node)"
    return encoded.decode()


# Trailing metadata of a refusal by a node that drains; the value is the node's id.
DRAINING_KEY = "pdmesh-draining"


def trailers_of(error: NodeError) -> tuple[tuple[str, str], ...]:
    """What the status of `error` says to programs, beside the message for people."""
    if isinstance(error, errors.NodeDraining | errors.PeerDraining | errors.PrefillDraining):
        return ((DRAINING_KEY, error.node_id),)
    return ()


def code_number(error: BaseException) -> int:
    """The canonical number of the status that `error` becomes, as `Failed.code` carries it."""
    number: int = status_of(error).value[0]
    return number


def error_from_code(number: int, message: str, address: str) -> NodeError:
    """The error for a canonical status number that a peer put into a message; a number that is none is UNKNOWN."""
    for code in grpc.StatusCode:
        if code.value[0] == number and code is not grpc.StatusCode.OK:
            return _error_for(code, message, address)
    return RemoteError(grpc.StatusCode.UNKNOWN.name, message, address=address)


# How gRPC begins its account of a connection that never came to be; the cause is at its end.
_DIALLING_FAILED = ("failed to connect to all addresses", "errors resolving", "connections to all backends failing")
CANNOT_CONNECT = "cannot connect: "
# What grpcio reports as INTERNAL, in the place of the call's own status, when a write met a call that the peer or the
# network had just ended.
_WRITE_MET_THE_END = "Internal error from Core"


def error_from_rpc(error: grpc.aio.AioRpcError, address: str) -> NodeError:
    """The error for a call to `address` that failed; when it could not be dialled, CANNOT_CONNECT and the cause."""
    message = error.details() or "no details given"
    if message.startswith(_DIALLING_FAILED):
        message = CANNOT_CONNECT + message.rstrip("].").rsplit(": ", 1)[-1]
    if error.code() is grpc.StatusCode.INTERNAL and message == _WRITE_MET_THE_END:
        return errors.PeerUnavailable(address, "the call ended while it was being written to")
    trailers = tuple(error.trailing_metadata() or ())
    details, node_id = read_details(trailers), dict(trailers).get(DRAINING_KEY)
    draining = node_id if isinstance(node_id, str) and error.code() is grpc.StatusCode.UNAVAILABLE else None
    made: NodeError
    if details.prefill_address is not None and draining is not None:
        made = errors.PrefillDraining(message, address=details.prefill_address, node_id=draining)
    elif details.prefill_address is not None:
        made = PrefillFailed(error.code().name, message, address=details.prefill_address)
    elif draining is not None:
        made = errors.PeerDraining(address, message, node_id=draining)
    else:
        made = _error_for(error.code(), message, address)
    made.retry_after_s = details.retry_after_s
    return made


def _error_for(code: grpc.StatusCode, message: str, address: str) -> NodeError:
    if code is grpc.StatusCode.UNAVAILABLE:
        return errors.PeerUnavailable(address, message)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineExceeded(f"deadline exceeded while waiting for {address}")
    if code is grpc.StatusCode.CANCELLED:
        return errors.RequestCancelled(f"the call to {address} was cancelled: {message}")
    return RemoteError(code.name, message, address=address)

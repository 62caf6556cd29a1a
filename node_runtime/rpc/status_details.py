"""What a status says beside its code and message: who is to blame and when to try again, as google.rpc details.

Source: the richer error model of gRPC, a google.rpc.Status in the trailing metadata `grpc-status-details-bin`. A peer's
details are hints and not trusted: what cannot be parsed is as good as absent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from node_runtime.address import parse_address
from node_runtime.errors import InvalidRequest, NodeError, PrefillFailed

DETAILS_KEY: Final = "grpc-status-details-bin"
DOMAIN: Final = "pdmesh"
PREFILL_FAILED: Final = "PREFILL_FAILED"
_ADDRESS: Final = "address"
# A peer cannot make anybody wait for longer than this.
MAX_RETRY_AFTER_S: Final = 60.0
# The message travels twice, and the metadata that clients accept by default is 8 KiB: a long one goes without a hint.
_MAX_HINTED_MESSAGE_BYTES: Final = 2000

Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusDetails:
    """What a peer said; None: nothing."""

    prefill_address: str | None = None
    retry_after_s: float | None = None


def make_details(error: NodeError, code_number: int, message: str) -> Metadata:
    """Trailing metadata for the status that `error` becomes; empty when there is nothing to add to its message."""
    details: list[AnyMessage] = []
    if isinstance(error, PrefillFailed):
        details.append(_packed(ErrorInfo(reason=PREFILL_FAILED, domain=DOMAIN, metadata={_ADDRESS: error.address})))
    if error.retry_after_s is not None and len(message.encode()) <= _MAX_HINTED_MESSAGE_BYTES:
        retry = RetryInfo()
        retry.retry_delay.FromTimedelta(timedelta(seconds=error.retry_after_s))
        details.append(_packed(retry))
    if not details:
        return ()
    return ((DETAILS_KEY, Status(code=code_number, message=message, details=details).SerializeToString()),)


def read_details(metadata: Iterable[tuple[str, str | bytes]]) -> StatusDetails:
    """The details in the trailing metadata of a call that failed."""
    for key, value in metadata:
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return _read(Status.FromString(value))
            except (DecodeError, InvalidRequest):
                return StatusDetails()
    return StatusDetails()


def _read(status: Status) -> StatusDetails:
    """Raises DecodeError or InvalidRequest for what makes no sense."""
    prefill_address: str | None = None
    retry_after_s: float | None = None
    info, retry = ErrorInfo(), RetryInfo()
    for detail in status.details:
        if detail.Unpack(info) and (info.domain, info.reason) == (DOMAIN, PREFILL_FAILED):
            parse_address(info.metadata[_ADDRESS])
            prefill_address = info.metadata[_ADDRESS]
        elif detail.Unpack(retry):
            delay_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
            retry_after_s = min(max(0.0, delay_s), MAX_RETRY_AFTER_S)
    return StatusDetails(prefill_address=prefill_address, retry_after_s=retry_after_s)


def _packed(message: ErrorInfo | RetryInfo) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed

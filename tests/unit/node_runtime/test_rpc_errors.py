"""The table from errors to statuses is total, and peers' statuses come back as errors."""

from __future__ import annotations

import grpc
import pytest

from node_runtime import errors
from node_runtime.errors import NodeError
from node_runtime.rpc.errors import (
    MAX_DETAIL_BYTES,
    STATUS_BY_ERROR,
    code_number,
    detail_of,
    error_from_code,
    error_from_rpc,
    status_of,
)


def subclasses_of(error_class: type[NodeError]) -> set[type[NodeError]]:
    direct = set(error_class.__subclasses__())
    return direct.union(*(subclasses_of(subclass) for subclass in direct))


def test_every_operating_error_has_a_status_and_every_row_is_an_operating_error() -> None:
    defined_here = {cls for cls in subclasses_of(NodeError) if cls.__module__.startswith("node_runtime")}
    assert set(STATUS_BY_ERROR) == defined_here


def test_no_operating_error_becomes_ok() -> None:
    assert grpc.StatusCode.OK not in STATUS_BY_ERROR.values()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidRequest("x"), grpc.StatusCode.INVALID_ARGUMENT),
        (errors.UnknownModel("x"), grpc.StatusCode.NOT_FOUND),
        (errors.DuplicateRequest("r"), grpc.StatusCode.ALREADY_EXISTS),
        (errors.IncompatiblePeer("prefill-1", ["a", "b"]), grpc.StatusCode.FAILED_PRECONDITION),
        (errors.NotBootstrapped("x"), grpc.StatusCode.FAILED_PRECONDITION),
        (errors.NoPrefillNode("x"), grpc.StatusCode.FAILED_PRECONDITION),
        (errors.NodeBusy("x"), grpc.StatusCode.FAILED_PRECONDITION),
        (errors.QueueFull("x"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.RequestTooLarge("x"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.PeerUnavailable("h:1", "x"), grpc.StatusCode.UNAVAILABLE),
        (errors.NodeDraining("x"), grpc.StatusCode.UNAVAILABLE),
        (errors.TransferBroken("x"), grpc.StatusCode.UNAVAILABLE),
        (errors.DeadlineExceeded("x"), grpc.StatusCode.DEADLINE_EXCEEDED),
        (errors.RequestCancelled("x"), grpc.StatusCode.CANCELLED),
        (errors.RemoteError("DATA_LOSS", "x"), grpc.StatusCode.DATA_LOSS),
        (errors.RemoteError("OK", "x"), grpc.StatusCode.UNKNOWN),
        (errors.RemoteError("NO_SUCH_CODE", "x"), grpc.StatusCode.UNKNOWN),
        (errors.InternalError("x"), grpc.StatusCode.INTERNAL),
        (ValueError("x"), grpc.StatusCode.INTERNAL),
    ],
)
def test_each_error_has_the_documented_status(error: Exception, code: grpc.StatusCode) -> None:
    assert status_of(error) is code


def test_a_subclass_takes_the_status_of_its_nearest_base() -> None:
    class LocalRefusal(errors.QueueFull):
        pass

    assert status_of(LocalRefusal("x")) is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("code", "error_class"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.PeerUnavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, errors.RequestCancelled),
    ],
)
def test_connection_level_statuses_come_back_as_errors_of_their_own(
    code: grpc.StatusCode, error_class: type[NodeError]
) -> None:
    error = error_from_rpc(grpc.aio.AioRpcError(code, details="why"), "10.0.0.7:5000")
    assert type(error) is error_class
    assert "10.0.0.7:5000" in error.message


@pytest.mark.parametrize(
    "code",
    [code for code in grpc.StatusCode if code.name not in ("OK", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")],
)
def test_every_other_status_of_a_peer_is_passed_on_unchanged(code: grpc.StatusCode) -> None:
    error = error_from_rpc(grpc.aio.AioRpcError(code, details="why"), "10.0.0.7:5000")
    assert (status_of(error), error.message) == (code, "why")


def test_a_status_number_survives_the_way_through_a_message() -> None:
    for code in grpc.StatusCode:
        if code is not grpc.StatusCode.OK:
            assert status_of(error_from_code(code_number(errors.RemoteError(code.name, "m")), "m", "h:1")) is code


@pytest.mark.parametrize("number", [0, 17, 4096])
def test_a_number_that_is_no_failure_becomes_unknown(number: int) -> None:
    assert status_of(error_from_code(number, "m", "h:1")) is grpc.StatusCode.UNKNOWN


def test_a_list_of_differences_is_shown_whole() -> None:
    differences = [f'field "layers.{layer}.k": dtype prefill=bfloat16, decode=float32' for layer in range(60)]
    detail = detail_of(errors.IncompatiblePeer("prefill-1", differences))
    assert all(difference in detail for difference in differences)


def test_a_message_no_client_would_accept_is_cut_and_says_so() -> None:
    detail = detail_of(errors.InvalidRequest("é" * 10_000))
    assert detail.endswith("bytes more in the log of the node)")
    assert len(detail) < MAX_DETAIL_BYTES

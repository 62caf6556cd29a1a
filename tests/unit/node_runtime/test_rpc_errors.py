"""The table from errors to statuses is total, and peers' statuses come back as errors."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

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
from node_runtime.rpc.status_details import MAX_RETRY_AFTER_S, StatusDetails, make_details, read_details


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
        (errors.AdapterNotHere("x"), grpc.StatusCode.FAILED_PRECONDITION),
        (errors.DuplicateRequest("r"), grpc.StatusCode.ALREADY_EXISTS),
        (errors.IncompatiblePeer("prefill-1", ["a", "b"]), grpc.StatusCode.FAILED_PRECONDITION),
        (errors.NotBootstrapped("x"), grpc.StatusCode.FAILED_PRECONDITION),
        (errors.NoPrefillNode("x"), grpc.StatusCode.FAILED_PRECONDITION),
        (errors.NodeBusy("x"), grpc.StatusCode.FAILED_PRECONDITION),
        (errors.QueueFull("x"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.RequestTooLarge("x"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.PeerUnavailable("h:1", "x"), grpc.StatusCode.UNAVAILABLE),
        (errors.PeerDraining("h:1", "x", node_id="n"), grpc.StatusCode.UNAVAILABLE),
        (errors.NodeDraining("n", "x"), grpc.StatusCode.UNAVAILABLE),
        (errors.TransferBroken("x"), grpc.StatusCode.UNAVAILABLE),
        (errors.LinkBusy("x"), grpc.StatusCode.RESOURCE_EXHAUSTED),
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


def test_a_write_that_met_the_end_of_its_call_is_no_defect_of_the_peer() -> None:
    internal = grpc.StatusCode.INTERNAL
    error = error_from_rpc(grpc.aio.AioRpcError(internal, details="Internal error from Core"), "h:1")
    assert type(error) is errors.PeerUnavailable
    assert status_of(error_from_rpc(grpc.aio.AioRpcError(internal, details="its own"), "h:1")) is internal


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


def _received(error: NodeError) -> NodeError:
    """What the caller makes of the status that `error` became."""
    code, message = status_of(error), detail_of(error)
    metadata = grpc.aio.Metadata(*make_details(error, code.value[0], message))
    return error_from_rpc(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details=message), "10.0.0.7:5000")


def test_who_is_to_blame_survives_the_way_to_the_caller() -> None:
    blamed = errors.PrefillFailed("UNAVAILABLE", "the prefill node died", address="10.0.0.9:5000")
    received = _received(blamed)
    assert isinstance(received, errors.PrefillFailed)
    assert (received.address, received.message) == ("10.0.0.9:5000", "the prefill node died")
    assert status_of(received) is grpc.StatusCode.UNAVAILABLE
    assert type(_received(errors.PeerUnavailable("h:1", "x"))) is errors.PeerUnavailable


@pytest.mark.parametrize(
    ("error", "retry_after_s"),
    [
        (errors.QueueFull("full"), 1.0),
        (errors.NodeDraining("n", "draining"), 1.0),
        (errors.RequestTooLarge("for ever"), None),
        (errors.InvalidRequest("wrong"), None),
    ],
)
def test_when_to_try_again_survives_the_way_to_the_caller(error: NodeError, retry_after_s: float | None) -> None:
    assert _received(error).retry_after_s == retry_after_s


def test_both_details_go_together_and_are_those_of_the_public_error_model() -> None:
    error = errors.PrefillFailed("RESOURCE_EXHAUSTED", "full", address="10.0.0.9:5000")
    error.retry_after_s = 0.25
    ((key, value),) = make_details(error, 8, "full")
    status = status_pb2.Status.FromString(value)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert (key, status.code, status.message) == ("grpc-status-details-bin", 8, "full")
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(retry)
    assert (info.domain, info.reason, dict(info.metadata)) == (
        "pdmesh",
        "PREFILL_FAILED",
        {"address": "10.0.0.9:5000"},
    )
    assert retry.retry_delay.ToMilliseconds() == 250
    assert read_details(((key, value),)) == StatusDetails(prefill_address="10.0.0.9:5000", retry_after_s=0.25)


def _details(*messages: object) -> tuple[tuple[str, bytes], ...]:
    status = status_pb2.Status(code=14)
    for message in messages:
        status.details.add().Pack(message)
    return (("grpc-status-details-bin", status.SerializeToString()),)


def test_the_details_of_a_peer_are_not_trusted() -> None:
    nonsense = error_details_pb2.ErrorInfo(domain="pdmesh", reason="PREFILL_FAILED", metadata={"address": "no address"})
    foreign = error_details_pb2.ErrorInfo(domain="example.com", reason="PREFILL_FAILED", metadata={"address": "h:1"})
    patient = error_details_pb2.RetryInfo()
    patient.retry_delay.seconds = 10**9
    assert read_details((("grpc-status-details-bin", b"\xff\xff"),)) == StatusDetails()
    assert read_details(_details(nonsense)) == StatusDetails()
    assert read_details(_details(foreign)) == StatusDetails()
    assert read_details(_details(patient)).retry_after_s == MAX_RETRY_AFTER_S


def test_a_long_message_goes_without_a_hint_but_never_without_the_blame() -> None:
    error = errors.QueueFull("x" * 3000)
    assert make_details(error, 8, detail_of(error)) == ()
    blamed = errors.PrefillFailed("FAILED_PRECONDITION", "x" * 3000, address="h:1")
    assert read_details(make_details(blamed, 9, detail_of(blamed))).prefill_address == "h:1"

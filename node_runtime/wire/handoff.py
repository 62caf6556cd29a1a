"""Codec of the control messages of a handoff (protos/pdmesh/v1/handoff.proto)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import assert_never

from pdmesh.v1 import handoff_pb2

from node_runtime.errors import InvalidRequest
from node_runtime.handoff.messages import (
    XXH3,
    Abort,
    Beat,
    Checksums,
    Done,
    Failed,
    FieldChecksums,
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
from node_runtime.wire.adapter import adapter_from_proto, adapter_to_proto
from node_runtime.wire.sampling import sampling_from_proto, sampling_to_proto, token_from_proto, token_to_proto


@contextmanager
def _naming(message_name: str | None) -> Iterator[None]:
    """Puts the message before the field in what a refusal says."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(f"{message_name}.{error.message}" if message_name else error.message) from None


def request_to_proto(message: RequestMessage) -> handoff_pb2.HandoffRequest:
    """Decode node to prefill node."""
    match message:
        case Start():
            return handoff_pb2.HandoffRequest(start=_start_to_proto(message))
        case Grant():
            return handoff_pb2.HandoffRequest(grant=_grant_to_proto(message))
        case Renewed():
            renewed = handoff_pb2.Renewed(handoff_id=message.handoff_id, beat=message.beat)
            return handoff_pb2.HandoffRequest(renewed=renewed)
        case Abort():
            abort = handoff_pb2.Abort(handoff_id=message.handoff_id, reason=message.reason)
            return handoff_pb2.HandoffRequest(abort=abort)
        case _:
            assert_never(message)


def request_from_proto(message: handoff_pb2.HandoffRequest) -> RequestMessage:
    """Raises InvalidRequest naming the field; a message that this release does not know is refused as well."""
    kind = message.WhichOneof("message")
    with _naming(kind):
        match kind:
            case "start":
                return _start_from_proto(message.start)
            case "grant":
                return _grant_from_proto(message.grant)
            case "renewed":
                return Renewed(handoff_id=message.renewed.handoff_id, beat=message.renewed.beat)
            case "abort":
                return Abort(handoff_id=message.abort.handoff_id, reason=message.abort.reason)
            case _:
                raise InvalidRequest("message: none of start, grant, renewed, abort is set")


def response_to_proto(message: ResponseMessage) -> handoff_pb2.HandoffResponse:
    """Prefill node to decode node."""
    match message:
        case Ready():
            ready = handoff_pb2.Ready(
                handoff_id=message.handoff_id,
                cached_tokens=message.cached_tokens,
                beat_interval_ms=message.beat_interval_ms,
                # As a release says it that knows no other.
                checksum_kind="" if message.checksum_kind == XXH3 else message.checksum_kind,
            )
            return handoff_pb2.HandoffResponse(ready=ready)
        case Beat():
            return handoff_pb2.HandoffResponse(
                beat=handoff_pb2.Beat(handoff_id=message.handoff_id, number=message.number)
            )
        case Checksums():
            return handoff_pb2.HandoffResponse(checksums=_checksums_to_proto(message))
        case Done():
            return handoff_pb2.HandoffResponse(done=_done_to_proto(message))
        case Failed():
            failed = handoff_pb2.Failed(handoff_id=message.handoff_id, code=message.code, message=message.message)
            return handoff_pb2.HandoffResponse(failed=failed)
        case Quiesced():
            return handoff_pb2.HandoffResponse(quiesced=handoff_pb2.Quiesced(handoff_id=message.handoff_id))
        case _:
            assert_never(message)


def response_from_proto(message: handoff_pb2.HandoffResponse) -> ResponseMessage:
    """Raises InvalidRequest naming the field; a message that this release does not know is refused as well."""
    kind = message.WhichOneof("message")
    with _naming(kind):
        match kind:
            case "ready":
                ready = message.ready
                return Ready(
                    handoff_id=ready.handoff_id,
                    cached_tokens=ready.cached_tokens,
                    beat_interval_ms=ready.beat_interval_ms,
                    checksum_kind=ready.checksum_kind or XXH3,
                )
            case "beat":
                return Beat(handoff_id=message.beat.handoff_id, number=message.beat.number)
            case "checksums":
                return _checksums_from_proto(message.checksums)
            case "done":
                return _done_from_proto(message.done)
            case "failed":
                failed = message.failed
                return Failed(handoff_id=failed.handoff_id, code=failed.code, message=failed.message)
            case "quiesced":
                return Quiesced(handoff_id=message.quiesced.handoff_id)
            case _:
                raise InvalidRequest("message: none of ready, beat, checksums, done, failed, quiesced is set")


def _start_to_proto(start: Start) -> handoff_pb2.Start:
    return handoff_pb2.Start(
        handoff_id=start.handoff_id,
        request_id=start.request_id,
        token_ids=start.token_ids,
        sampling=sampling_to_proto(start.sampling),
        extra_keys=start.extra_keys,
        num_logprobs=start.sampling.num_logprobs,
        decode_incarnation=start.decode_incarnation,
        prefill_incarnation=start.prefill_incarnation,
        lease_ms=start.lease_ms,
        wants_checksums=start.wants_checksums,
        checksum_kinds=start.checksum_kinds,
        num_output_tokens=start.num_output_tokens,
        adapter=adapter_to_proto(start.adapter),
        num_prompt_logprobs=start.sampling.num_prompt_logprobs,
    )


def _start_from_proto(start: handoff_pb2.Start) -> Start:
    return Start(
        handoff_id=start.handoff_id,
        request_id=start.request_id,
        token_ids=tuple(start.token_ids),
        sampling=sampling_from_proto(
            start.sampling,
            num_logprobs=start.num_logprobs if start.HasField("num_logprobs") else None,
            num_prompt_logprobs=start.num_prompt_logprobs if start.HasField("num_prompt_logprobs") else None,
            seed_if_absent=0,
        ),
        extra_keys=tuple(start.extra_keys),
        decode_incarnation=start.decode_incarnation,
        prefill_incarnation=start.prefill_incarnation,
        lease_ms=start.lease_ms,
        wants_checksums=start.wants_checksums,
        checksum_kinds=tuple(start.checksum_kinds),
        num_output_tokens=start.num_output_tokens,
        adapter=adapter_from_proto(start.adapter) if start.HasField("adapter") else None,
    )


def _grant_to_proto(grant: Grant) -> handoff_pb2.Grant:
    return handoff_pb2.Grant(
        handoff_id=grant.handoff_id,
        from_token=grant.from_token,
        groups=[
            handoff_pb2.GroupGrant(group_id=group.group_id, first_slot=group.first_slot, block_ids=group.block_ids)
            for group in grant.groups
        ],
        lease_ms=grant.lease_ms,
        beat=grant.beat,
    )


def _grant_from_proto(grant: handoff_pb2.Grant) -> Grant:
    return Grant(
        handoff_id=grant.handoff_id,
        from_token=grant.from_token,
        groups=tuple(
            GroupGrant(group_id=group.group_id, first_slot=group.first_slot, block_ids=tuple(group.block_ids))
            for group in grant.groups
        ),
        lease_ms=grant.lease_ms,
        beat=grant.beat,
    )


def _checksums_to_proto(checksums: Checksums) -> handoff_pb2.Checksums:
    return handoff_pb2.Checksums(
        handoff_id=checksums.handoff_id,
        part=checksums.part,
        fields=[
            handoff_pb2.FieldChecksums(
                field_id=item.field_id, first_slot=item.first_slot, digests=item.digests, tp_rank=item.tp_rank
            )
            for item in checksums.fields
        ],
    )


def _checksums_from_proto(checksums: handoff_pb2.Checksums) -> Checksums:
    return Checksums(
        handoff_id=checksums.handoff_id,
        part=checksums.part,
        fields=tuple(
            FieldChecksums(
                field_id=item.field_id, first_slot=item.first_slot, digests=item.digests, tp_rank=item.tp_rank
            )
            for item in checksums.fields
        ),
    )


def _done_to_proto(done: Done) -> handoff_pb2.Done:
    timings = done.timings
    return handoff_pb2.Done(
        handoff_id=done.handoff_id,
        first_token=token_to_proto(done.first_token),
        transferred_bytes=done.transferred_bytes,
        transferred_blocks=done.transferred_blocks,
        transferred_runs=done.transferred_runs,
        timings=handoff_pb2.HandoffTimings(
            queue_ms=timings.queue_ms,
            compute_ms=timings.compute_ms,
            transfer_ms=timings.transfer_ms,
            transfer_exposed_ms=timings.transfer_exposed_ms,
        ),
        num_checksum_parts=done.num_checksum_parts,
        prompt_logprobs=map(token_to_proto, done.prompt_logprobs),
    )


def _done_from_proto(done: handoff_pb2.Done) -> Done:
    timings = done.timings
    return Done(
        handoff_id=done.handoff_id,
        first_token=token_from_proto(done.first_token),
        transferred_bytes=done.transferred_bytes,
        transferred_blocks=done.transferred_blocks,
        transferred_runs=done.transferred_runs,
        timings=HandoffTimings(
            queue_ms=timings.queue_ms,
            compute_ms=timings.compute_ms,
            transfer_ms=timings.transfer_ms,
            transfer_exposed_ms=timings.transfer_exposed_ms,
        ),
        num_checksum_parts=done.num_checksum_parts,
        prompt_logprobs=tuple(map(token_from_proto, done.prompt_logprobs)),
    )

"""What a request cost and how it ended: usage, timings, and the first and last message of a decode stream.

Needs neither torch nor gRPC: routers and clients read it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pdmesh.v1 import decode_pb2, inference_pb2

from model_runtime.sampler import SampledToken
from node_runtime.engine.messages import EndReason
from node_runtime.errors import InvalidRequest
from node_runtime.wire.sampling import token_from_proto, token_to_proto

_REASONS: Mapping[EndReason, inference_pb2.FinishReason.ValueType] = MappingProxyType(
    {
        EndReason.STOP: inference_pb2.FINISH_REASON_STOP,
        EndReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedTokens:
    """Prompt tokens that were not computed for a request, by where they came from."""

    prefill_device: int = 0
    decode_device: int = 0
    host: int = 0
    storage: int = 0

    @property
    def total(self) -> int:
        """All sources together."""
        return self.prefill_device + self.decode_device + self.host + self.storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one request. Raises ValueError when more tokens were cached than the prompt has."""

    prompt_tokens: int
    completion_tokens: int
    cached: CachedTokens = CachedTokens()

    def __post_init__(self) -> None:
        if not self.cached.total <= self.prompt_tokens:
            raise ValueError(f"cached: {self.cached.total} tokens of a prompt of {self.prompt_tokens}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """What the serving nodes measured for one request, in milliseconds (see inference.proto)."""

    prefill_queue_ms: float = 0.0
    prefill_compute_ms: float = 0.0
    transfer_ms: float = 0.0
    transfer_exposed_ms: float = 0.0
    transferred_bytes: int = 0
    transferred_runs: int = 0
    transferred_blocks: int = 0
    time_to_first_token_ms: float = 0.0
    decode_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeAdmitted:
    """The first message of a decode stream. `timings` end with the first token.

    `prompt_logprobs` of each prompt token but the first, where they were asked for.
    """

    cached: CachedTokens
    timings: Timings = Timings()
    output_is_structured: bool = False
    prompt_logprobs: tuple[SampledToken, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFinish:
    """The last message of a decode stream."""

    reason: EndReason
    matched_token_id: int | None = None
    usage: Usage
    timings: Timings = Timings()


def end_reason_to_proto(reason: EndReason) -> inference_pb2.FinishReason.ValueType:
    return _REASONS[reason]


def end_reason_from_proto(value: inference_pb2.FinishReason.ValueType) -> EndReason:
    """Raises InvalidRequest for a reason that this release does not know."""
    for reason, number in _REASONS.items():
        if number == value:
            return reason
    raise InvalidRequest(f"reason: unknown value {value}")


def cached_to_proto(cached: CachedTokens) -> inference_pb2.CachedTokens:
    return inference_pb2.CachedTokens(
        prefill_device=cached.prefill_device,
        decode_device=cached.decode_device,
        host=cached.host,
        storage=cached.storage,
    )


def cached_from_proto(message: inference_pb2.CachedTokens) -> CachedTokens:
    return CachedTokens(
        prefill_device=message.prefill_device,
        decode_device=message.decode_device,
        host=message.host,
        storage=message.storage,
    )


def usage_to_proto(usage: Usage) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached=cached_to_proto(usage.cached),
    )


def usage_from_proto(message: inference_pb2.Usage) -> Usage:
    """Raises InvalidRequest when the counts contradict each other."""
    try:
        return Usage(
            prompt_tokens=message.prompt_tokens,
            completion_tokens=message.completion_tokens,
            cached=cached_from_proto(message.cached),
        )
    except ValueError as error:
        raise InvalidRequest(f"usage.{error}") from None


def timings_to_proto(timings: Timings) -> inference_pb2.Timings:
    return inference_pb2.Timings(
        prefill_queue_ms=timings.prefill_queue_ms,
        prefill_compute_ms=timings.prefill_compute_ms,
        transfer_ms=timings.transfer_ms,
        transfer_exposed_ms=timings.transfer_exposed_ms,
        transferred_bytes=timings.transferred_bytes,
        transferred_runs=timings.transferred_runs,
        transferred_blocks=timings.transferred_blocks,
        time_to_first_token_ms=timings.time_to_first_token_ms,
        decode_ms=timings.decode_ms,
    )


def timings_from_proto(message: inference_pb2.Timings) -> Timings:
    return Timings(
        prefill_queue_ms=message.prefill_queue_ms,
        prefill_compute_ms=message.prefill_compute_ms,
        transfer_ms=message.transfer_ms,
        transfer_exposed_ms=message.transfer_exposed_ms,
        transferred_bytes=message.transferred_bytes,
        transferred_runs=message.transferred_runs,
        transferred_blocks=message.transferred_blocks,
        time_to_first_token_ms=message.time_to_first_token_ms,
        decode_ms=message.decode_ms,
    )


def admitted_to_proto(admitted: DecodeAdmitted) -> decode_pb2.DecodeResponse:
    return decode_pb2.DecodeResponse(
        admitted=decode_pb2.DecodeAdmitted(
            cached=cached_to_proto(admitted.cached),
            timings=timings_to_proto(admitted.timings),
            output_is_structured=admitted.output_is_structured,
            prompt_logprobs=map(token_to_proto, admitted.prompt_logprobs),
        )
    )


def admitted_from_proto(message: decode_pb2.DecodeAdmitted) -> DecodeAdmitted:
    return DecodeAdmitted(
        cached=cached_from_proto(message.cached),
        timings=timings_from_proto(message.timings),
        output_is_structured=message.output_is_structured,
        prompt_logprobs=tuple(map(token_from_proto, message.prompt_logprobs)),
    )


def finish_to_proto(finish: DecodeFinish) -> decode_pb2.DecodeResponse:
    return decode_pb2.DecodeResponse(
        finish=decode_pb2.DecodeFinish(
            reason=end_reason_to_proto(finish.reason),
            matched_token_id=finish.matched_token_id,
            usage=usage_to_proto(finish.usage),
            timings=timings_to_proto(finish.timings),
        )
    )


def finish_from_proto(message: decode_pb2.DecodeFinish) -> DecodeFinish:
    """Raises InvalidRequest for an unknown reason or contradictory counts."""
    return DecodeFinish(
        reason=end_reason_from_proto(message.reason),
        matched_token_id=message.matched_token_id if message.HasField("matched_token_id") else None,
        usage=usage_from_proto(message.usage),
        timings=timings_from_proto(message.timings),
    )

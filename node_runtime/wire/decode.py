"""Codec of the decode node's request and token messages. The finish message is in `outcome`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pdmesh.v1 import decode_pb2

from model_runtime.sampler import SampledToken, SamplingParams
from node_runtime.request_rules import (
    check_extra_keys,
    check_lengths,
    check_request_id,
    check_stop_token_ids,
    check_token_ids,
)
from node_runtime.rpc.address import parse_address
from node_runtime.wire.sampling import sampling_from_proto, sampling_to_proto, token_from_proto, token_to_proto


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeJob:
    """One request as a decode node gets it. `max_tokens` is the most to generate."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    extra_keys: tuple[bytes, ...] = ()
    prefill_address: str | None = None


def job_to_proto(job: DecodeJob) -> decode_pb2.DecodeRequest:
    return decode_pb2.DecodeRequest(
        request_id=job.request_id,
        token_ids=job.token_ids,
        sampling=sampling_to_proto(job.sampling),
        max_tokens=job.max_tokens,
        stop_token_ids=sorted(job.stop_token_ids),
        num_logprobs=job.sampling.num_logprobs,
        extra_keys=job.extra_keys,
        prefill_address=job.prefill_address or "",
    )


def job_from_proto(
    message: decode_pb2.DecodeRequest, *, vocab_size: int, context_tokens: int, seed_if_absent: int
) -> DecodeJob:
    """Checks every field of the request. Raises InvalidRequest naming field and limit."""
    check_request_id(message.request_id)
    check_token_ids(message.token_ids, vocab_size)
    check_lengths(len(message.token_ids), message.max_tokens, context_tokens)
    check_stop_token_ids(message.stop_token_ids, vocab_size)
    check_extra_keys(message.extra_keys)
    if message.prefill_address:
        parse_address(message.prefill_address, field="prefill_address")
    return DecodeJob(
        request_id=message.request_id,
        token_ids=tuple(message.token_ids),
        sampling=sampling_from_proto(
            message.sampling,
            num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
            seed_if_absent=seed_if_absent,
        ),
        max_tokens=message.max_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        extra_keys=tuple(message.extra_keys),
        prefill_address=message.prefill_address or None,
    )


def tokens_to_proto(tokens: Iterable[SampledToken]) -> decode_pb2.DecodeResponse:
    return decode_pb2.DecodeResponse(tokens=decode_pb2.DecodeTokens(tokens=[token_to_proto(token) for token in tokens]))


def tokens_from_proto(message: decode_pb2.DecodeTokens) -> tuple[SampledToken, ...]:
    return tuple(token_from_proto(token) for token in message.tokens)

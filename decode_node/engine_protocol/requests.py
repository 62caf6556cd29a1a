"""Codec of a gateway's requests: each becomes one request of the Decode service per sample, or is refused by name.

Whatever a field asks for is done or refused, nothing is passed over. The rules themselves are those of our own
protocol; only the names of the fields in their messages are the gateway's.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from pdmesh.v1 import decode_pb2, inference_pb2
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2

from node_runtime.errors import InvalidRequest
from node_runtime.request_rules import (
    DEFAULT_MAX_TOKENS,
    MAX_CLIENT_STOP_TOKEN_IDS,
    check_num_samples,
    check_request_id,
    check_stop_strings,
    check_stop_token_ids,
    require,
)

_SEED_BITS: Final = 64
_MAX_STOP_BYTES: Final = 1024
# The protocol's own defaults, where they are not what an absent field means to us.
_DEFAULT_TEMPERATURE: Final = 1.0
_ALL_TOKENS: Final = -1
_NO_PROMPT_LOGPROBS: Final = -1

# Fields of our protocol and what the gateway calls them; of several that fit, the first one.
_NAMES: Final = (
    ("token_ids and max_tokens", "tokenized.input_ids and sampling_params.max_new_tokens"),
    ("stop_token_ids", "sampling_params.stop_token_ids"),
    ("token_ids", "tokenized.input_ids"),
    ("prompt", "tokenized.input_ids"),
    ("max_tokens", "sampling_params.max_new_tokens"),
    ("num_logprobs", "top_logprobs_num"),
    ("num_samples", "sampling_params.n"),
    ("stop", "sampling_params.stop"),
    ("sampling.seed", "sampling_params.sampling_seed"),
    ("sampling.structured_output", "sampling_params"),
    ("sampling", "sampling_params"),
)
ErrorT = TypeVar("ErrorT", bound=InvalidRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What the model and the node allow, and the tokens that end a completion."""

    vocab_size: int
    context_tokens: int
    max_request_tokens: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One request of a gateway. `samples` lack only the prefill address.

    `keeps_stop_token`: the stop token that ended a sample is among its tokens. `is_streamed`: chunks are wanted as they
    come.
    """

    request_id: str
    samples: tuple[decode_pb2.DecodeRequest, ...]
    stop: tuple[str, ...]
    keeps_stop_token: bool
    is_streamed: bool


def request_from_proto(message: tokenspeed_scheduler_pb2.GenerateRequest, limits: RequestLimits) -> EngineRequest:
    """Raises InvalidRequest naming field and limit. What depends on the node's state is left to the Decode service."""
    try:
        return _request(message, limits)
    except InvalidRequest as error:
        raise in_its_words(error) from None


def in_its_words(error: ErrorT) -> ErrorT:
    """The same refusal with the field's name in the gateway's protocol."""
    for own, theirs in _NAMES:
        if re.match(rf"{re.escape(own)}(?![A-Za-z_])", error.message):
            return type(error)(theirs + error.message.removeprefix(own))
    return error


def _request(message: tokenspeed_scheduler_pb2.GenerateRequest, limits: RequestLimits) -> EngineRequest:
    for refusal in _refusals(message):
        raise InvalidRequest(refusal)
    check_request_id(message.request_id)
    params = message.sampling_params
    num_samples = params.n or 1
    check_num_samples(num_samples)
    _check_stop(params, limits)
    sampling = _sampling(params)
    first = decode_pb2.DecodeRequest(
        request_id=message.request_id,
        token_ids=message.tokenized.input_ids,
        sampling=sampling,
        max_tokens=_max_tokens(message, limits),
        stop_token_ids=_stop_token_ids(params, limits),
        num_logprobs=_num_logprobs(message),
    )
    return EngineRequest(
        request_id=message.request_id,
        samples=tuple(_sample(first, index, num_samples) for index in range(num_samples)),
        stop=tuple(params.stop),
        keeps_stop_token=params.no_stop_trim,
        is_streamed=message.stream,
    )


def _refusals(message: tokenspeed_scheduler_pb2.GenerateRequest) -> Iterator[str]:
    """What is asked for that no node of ours does."""
    params = message.sampling_params
    if message.HasField("mm_inputs"):
        yield "mm_inputs: given, only text is served"
    if message.HasField("encode_bootstrap_info"):
        yield "encode_bootstrap_info: given, only text is served"
    if message.HasField("kv_bootstrap_info"):
        yield "kv_bootstrap_info: given, but this node has prompts computed by prefill nodes of its own choice"
    if message.HasField("data_parallel_rank") and message.data_parallel_rank != 0:
        yield f"data_parallel_rank: {message.data_parallel_rank} given, there is rank 0 alone"
    if message.token_ids_logprob:
        yield "token_ids_logprob: given, log-probabilities are told of sampled and of the most likely tokens"
    begin = message.logprob_start_len if message.HasField("logprob_start_len") else _NO_PROMPT_LOGPROBS
    if message.return_logprob and 0 <= begin < len(message.tokenized.input_ids):
        yield f"logprob_start_len: {begin} given, -1 required: an answer has no room for the prompt's"
    if message.top_logprobs_num < 0 or (message.top_logprobs_num > 0 and not message.return_logprob):
        yield f"top_logprobs_num: {message.top_logprobs_num} given with return_logprob={message.return_logprob}"
    if params.min_p != 0:
        yield f"sampling_params.min_p: {params.min_p:g} given, 0 required: it is not supported"
    if params.min_new_tokens:
        yield f"sampling_params.min_new_tokens: {params.min_new_tokens} given, 0 required: it is not supported"
    if params.custom_params.fields:
        yield f"sampling_params.custom_params: {sorted(params.custom_params.fields)[0]!r} is not known"
    constraint = params.WhichOneof("constraint")
    if constraint in ("ebnf_grammar", "structural_tag"):
        yield f"sampling_params.{constraint}: given, json_schema and regex are supported"
    if constraint is not None and params.ignore_eos:
        yield f"sampling_params.ignore_eos: not allowed with {constraint}, which ends in an end token"


def _check_stop(params: tokenspeed_scheduler_pb2.SamplingParams, limits: RequestLimits) -> None:
    check_stop_strings(params.stop)
    for index, text in enumerate(params.stop):
        num_bytes = len(text.encode())
        require(
            num_bytes <= _MAX_STOP_BYTES, f"stop[{index}]: {num_bytes} bytes given, at most {_MAX_STOP_BYTES} allowed"
        )
    check_stop_token_ids(params.stop_token_ids, limits.vocab_size, limit=MAX_CLIENT_STOP_TOKEN_IDS)


def _sampling(params: tokenspeed_scheduler_pb2.SamplingParams) -> inference_pb2.SamplingParams:
    sampling = inference_pb2.SamplingParams(
        temperature=params.temperature if params.HasField("temperature") else _DEFAULT_TEMPERATURE,
        top_k=params.top_k if params.HasField("top_k") and _checked_top_k(params.top_k) != _ALL_TOKENS else None,
        top_p=params.top_p if params.HasField("top_p") else None,
        seed=params.sampling_seed if params.HasField("sampling_seed") else secrets.randbits(_SEED_BITS),
        logit_bias=_logit_bias(params),
        presence_penalty=params.presence_penalty if params.HasField("presence_penalty") else None,
        frequency_penalty=params.frequency_penalty if params.HasField("frequency_penalty") else None,
        repetition_penalty=params.repetition_penalty if params.HasField("repetition_penalty") else None,
    )
    match params.WhichOneof("constraint"):
        case "json_schema":
            sampling.structured_output.json_schema = params.json_schema
        case "regex":
            sampling.structured_output.regex = params.regex
    return sampling


def _checked_top_k(top_k: int) -> int:
    require(top_k == _ALL_TOKENS or top_k >= 1, f"sampling.top_k: {top_k} given, at least 1, or -1 for all, required")
    return top_k


def _logit_bias(params: tokenspeed_scheduler_pb2.SamplingParams) -> dict[int, float]:
    """Tokens are spelled in decimal digits."""
    for name in params.logit_bias:
        is_number = name.isascii() and name.isdecimal() and len(name) <= len(str(2**32)) and int(name) < 2**32
        require(is_number, f"sampling.logit_bias: {name!r} is no token id")
    biases = {int(name): bias for name, bias in params.logit_bias.items()}
    require(len(biases) == len(params.logit_bias), "sampling.logit_bias: one token is given twice")
    return biases


def _max_tokens(message: tokenspeed_scheduler_pb2.GenerateRequest, limits: RequestLimits) -> int:
    if message.sampling_params.HasField("max_new_tokens"):
        return message.sampling_params.max_new_tokens
    request_tokens = min(limits.context_tokens, limits.max_request_tokens)
    return min(DEFAULT_MAX_TOKENS, max(1, request_tokens - len(message.tokenized.input_ids)))


def _stop_token_ids(params: tokenspeed_scheduler_pb2.SamplingParams, limits: RequestLimits) -> list[int]:
    own = () if params.ignore_eos else limits.eos_token_ids
    return list(dict.fromkeys((*own, *params.stop_token_ids)))


def _num_logprobs(message: tokenspeed_scheduler_pb2.GenerateRequest) -> int | None:
    return message.top_logprobs_num if message.return_logprob else None


def _sample(first: decode_pb2.DecodeRequest, index: int, num_samples: int) -> decode_pb2.DecodeRequest:
    """As the router makes them: sample i has (seed + i) mod 2^64."""
    sample = decode_pb2.DecodeRequest()
    sample.CopyFrom(first)
    if num_samples > 1:
        sample.request_id = f"{first.request_id}-{index}"
        sample.sampling.seed = (first.sampling.seed + index) % (1 << _SEED_BITS)
    return sample

"""Codec of sampling parameters and sampled tokens. For compute nodes; routers pass these messages on unread."""

from __future__ import annotations

from pdmesh.v1 import inference_pb2

from model_runtime.sampler import SampledToken, SamplingParams
from node_runtime.errors import InvalidRequest
from node_runtime.request_rules import check_num_logprobs, check_sampling
from node_runtime.wire.output_form import form_from_proto, form_to_proto


def sampling_to_proto(params: SamplingParams) -> inference_pb2.SamplingParams:
    """All fields present, so the receiver needs no default. Numbers of log-probabilities travel beside this message."""
    return inference_pb2.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed,
        structured_output=None if params.form is None else form_to_proto(params.form),
        logit_bias=dict(params.logit_bias),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
    )


def sampling_from_proto(
    message: inference_pb2.SamplingParams,
    *,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None = None,
    seed_if_absent: int,
) -> SamplingParams:
    """Raises InvalidRequest naming field and limit. That biases are of tokens in the vocabulary is for the caller."""
    check_sampling(message)
    check_num_logprobs(num_logprobs)
    check_num_logprobs(num_prompt_logprobs, field="num_prompt_logprobs")
    try:
        return SamplingParams(
            temperature=message.temperature,
            top_k=message.top_k if message.HasField("top_k") else None,
            top_p=message.top_p if message.HasField("top_p") else 1.0,
            seed=message.seed if message.HasField("seed") else seed_if_absent,
            num_logprobs=num_logprobs,
            form=form_from_proto(message),
            num_prompt_logprobs=num_prompt_logprobs,
            # In the order of the tokens: equal requests have equal parameters.
            logit_bias=tuple(sorted(message.logit_bias.items())),
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        )
    except ValueError as error:
        raise InvalidRequest(f"sampling.{error}") from None


def token_to_proto(token: SampledToken) -> inference_pb2.SampledToken:
    return inference_pb2.SampledToken(
        token_id=token.token_id,
        logprob=token.logprob,
        top_logprobs=[
            inference_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in token.top_logprobs
        ],
    )


def token_from_proto(message: inference_pb2.SampledToken, *, vocab_size: int | None = None) -> SampledToken:
    """Raises InvalidRequest for a token outside [0, vocab_size), where that is known."""
    if vocab_size is not None and message.token_id >= vocab_size:
        raise InvalidRequest(f"token_id: {message.token_id} is outside [0, {vocab_size})")
    return SampledToken(
        token_id=message.token_id,
        logprob=message.logprob if message.HasField("logprob") else None,
        top_logprobs=tuple((item.token_id, item.logprob) for item in message.top_logprobs),
    )

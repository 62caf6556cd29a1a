"""The rules that protos/pdmesh/v1 states for fields of requests, one function each: the client's and a peer's alike.

Each raises InvalidRequest naming field and limit, and returns nothing. Every request passes many of them several times,
so a complaint is put into words only where there is one. Knows no model: limits that depend on it are arguments.
Importing this needs neither torch nor gRPC.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from node_runtime.errors import ContextExceeded, InvalidRequest

if TYPE_CHECKING:
    from pdmesh.v1 import inference_pb2

# What is generated for a client that does not say how much, where the context leaves it.
DEFAULT_MAX_TOKENS: Final = 256
MAX_REQUEST_ID_BYTES: Final = 128
MAX_NODE_ID_BYTES: Final = 256
MAX_STOP_STRINGS: Final = 16
MAX_CLIENT_STOP_TOKEN_IDS: Final = 64
MAX_STOP_TOKEN_IDS: Final = 80
MAX_LOGPROBS: Final = 20
MAX_SAMPLES: Final = 64
MAX_LOGIT_BIASES: Final = 1024
MAX_LOGIT_BIAS: Final = 100.0
MAX_PENALTY: Final = 2.0
MIN_REPETITION_PENALTY: Final = 0.0078125
MAX_REPETITION_PENALTY: Final = 10.0
# What keeps a message of prompt log-probabilities well below the size that gRPC clients accept by default.
MAX_PROMPT_LOGPROB_VALUES: Final = 131_072
MAX_EXTRA_KEYS: Final = 8
MAX_EXTRA_KEY_BYTES: Final = 64
MIN_PROGRESS_INTERVAL_MS: Final = 50
MAX_PROGRESS_INTERVAL_MS: Final = 60_000


def require(condition: bool, text: str) -> None:
    """Raises InvalidRequest with `text` unless `condition` holds."""
    if not condition:
        raise InvalidRequest(text)


def check_request_id(value: str, *, allow_empty: bool = False) -> None:
    """1 to 128 bytes without control characters; empty only where the server makes one up."""
    num_bytes = len(value.encode())
    require(allow_empty or num_bytes > 0, "request_id: must not be empty")
    if num_bytes > MAX_REQUEST_ID_BYTES:
        raise InvalidRequest(f"request_id: {num_bytes} bytes given, at most {MAX_REQUEST_ID_BYTES} allowed")
    require(value.isprintable(), "request_id: must be printable text")


def check_node_id(value: str) -> None:
    """1 to 256 bytes without control characters: the name appears in logs, traces and statuses."""
    num_bytes = len(value.encode())
    if not 0 < num_bytes <= MAX_NODE_ID_BYTES:
        raise InvalidRequest(f"node_id: {num_bytes} bytes given, 1 to {MAX_NODE_ID_BYTES} required")
    require(value.isprintable(), "node_id: must be printable text")


def check_incarnation(value: int) -> None:
    """Any number but 0, which is what an absent field reads as."""
    require(value != 0, "incarnation: 0 given, a random number required")


def check_token_ids(token_ids: Sequence[int], vocab_size: int, *, field: str = "token_ids") -> None:
    """At least one token, each in [0, vocab_size)."""
    if not token_ids:
        raise InvalidRequest(f"{field}: empty, at least one token required")
    check_tokens_in_vocabulary(token_ids, vocab_size, field=field)


def check_tokens_in_vocabulary(token_ids: Collection[int], vocab_size: int, *, field: str) -> None:
    """Each token in [0, vocab_size); an empty collection passes."""
    if not token_ids:
        return
    for extreme in (min(token_ids), max(token_ids)):
        if not 0 <= extreme < vocab_size:
            raise InvalidRequest(f"{field}: token {extreme} is outside [0, {vocab_size})")


def check_lengths(num_prompt_tokens: int, max_tokens: int, context_tokens: int) -> None:
    """At least one token to generate, and prompt plus completion within the model's context.

    Raises ContextExceeded, which is an InvalidRequest, for the latter.
    """
    if max_tokens < 1:
        raise InvalidRequest(f"max_tokens: {max_tokens} given, at least 1 required")
    if num_prompt_tokens >= context_tokens:
        raise ContextExceeded(
            f"prompt: {num_prompt_tokens} tokens given, at most {context_tokens - 1} fit a context of {context_tokens}"
        )
    if num_prompt_tokens + max_tokens > context_tokens:
        raise ContextExceeded(
            f"max_tokens: {max_tokens} given, at most {context_tokens - num_prompt_tokens} fit a context of "
            f"{context_tokens} tokens behind a prompt of {num_prompt_tokens}"
        )


def check_sampling(sampling: inference_pb2.SamplingParams) -> None:
    """Finite temperature >= 0, top_k >= 1, top_p in (0, 1]; absent fields pass."""
    temperature = sampling.temperature
    if not (math.isfinite(temperature) and temperature >= 0):
        raise InvalidRequest(f"sampling.temperature: {temperature:g} given, a finite number >= 0 required")
    if sampling.HasField("top_k") and sampling.top_k < 1:
        raise InvalidRequest(f"sampling.top_k: {sampling.top_k} given, at least 1 required")
    # Written so that NaN fails as well.
    if sampling.HasField("top_p") and not 0 < sampling.top_p <= 1:
        raise InvalidRequest(f"sampling.top_p: {sampling.top_p:g} given, a number in (0, 1] required")
    _check_penalties(sampling)


def _check_penalties(sampling: inference_pb2.SamplingParams) -> None:
    for name, penalty in (
        ("presence_penalty", sampling.presence_penalty),
        ("frequency_penalty", sampling.frequency_penalty),
    ):
        if not -MAX_PENALTY <= penalty <= MAX_PENALTY:
            raise InvalidRequest(
                f"sampling.{name}: {penalty:g} given, a number in [-{MAX_PENALTY:g}, {MAX_PENALTY:g}] required"
            )
    penalty = sampling.repetition_penalty
    if sampling.HasField("repetition_penalty") and not MIN_REPETITION_PENALTY <= penalty <= MAX_REPETITION_PENALTY:
        raise InvalidRequest(
            f"sampling.repetition_penalty: {penalty:g} given, a number in [{MIN_REPETITION_PENALTY:g}, "
            f"{MAX_REPETITION_PENALTY:g}] required"
        )


def check_logit_bias(biases: Mapping[int, float], vocab_size: int) -> None:
    """At most 1024 tokens, each in [0, vocab_size), each bias in [-100, 100]."""
    field = "sampling.logit_bias"
    if len(biases) > MAX_LOGIT_BIASES:
        raise InvalidRequest(f"{field}: {len(biases)} tokens given, at most {MAX_LOGIT_BIASES} allowed")
    check_tokens_in_vocabulary(biases.keys(), vocab_size, field=field)
    for token_id, bias in biases.items():
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"{field}[{token_id}]: {bias:g} given, a number in [-{MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}] required"
            )


def check_num_logprobs(num_logprobs: int | None, *, field: str = "num_logprobs") -> None:
    """At most 20 alternatives."""
    if num_logprobs is not None and not 0 <= num_logprobs <= MAX_LOGPROBS:
        raise InvalidRequest(f"{field}: {num_logprobs} given, at most {MAX_LOGPROBS} allowed")


def check_num_prompt_logprobs(num_logprobs: int | None, num_prompt_tokens: int) -> None:
    """At most 20 alternatives, and no more than 131,072 log-probabilities in all."""
    check_num_logprobs(num_logprobs, field="num_prompt_logprobs")
    if num_logprobs is not None:
        num_values = num_prompt_tokens * (1 + num_logprobs)
        if num_values > MAX_PROMPT_LOGPROB_VALUES:
            raise InvalidRequest(
                f"num_prompt_logprobs: {num_logprobs} given for {num_prompt_tokens} tokens, {num_values} values in "
                f"all, at most {MAX_PROMPT_LOGPROB_VALUES} allowed"
            )


def check_num_samples(num_samples: int) -> None:
    """1 to 64 answers."""
    if not 1 <= num_samples <= MAX_SAMPLES:
        raise InvalidRequest(f"num_samples: {num_samples} given, 1 to {MAX_SAMPLES} allowed")


def check_stop_strings(stop: Sequence[str]) -> None:
    """At most 16, none empty."""
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop: {len(stop)} strings given, at most {MAX_STOP_STRINGS} allowed")
    for index, text in enumerate(stop):
        if not text:
            raise InvalidRequest(f"stop[{index}]: must not be empty")


def check_stop_token_ids(token_ids: Collection[int], vocab_size: int, *, limit: int = MAX_STOP_TOKEN_IDS) -> None:
    """At most `limit`, each in [0, vocab_size)."""
    if len(token_ids) > limit:
        raise InvalidRequest(f"stop_token_ids: {len(token_ids)} given, at most {limit} allowed")
    check_tokens_in_vocabulary(token_ids, vocab_size, field="stop_token_ids")


def check_extra_keys(extra_keys: Sequence[bytes]) -> None:
    """At most 8 keys of at most 64 bytes."""
    if len(extra_keys) > MAX_EXTRA_KEYS:
        raise InvalidRequest(f"extra_keys: {len(extra_keys)} given, at most {MAX_EXTRA_KEYS} allowed")
    for index, key in enumerate(extra_keys):
        if len(key) > MAX_EXTRA_KEY_BYTES:
            raise InvalidRequest(f"extra_keys[{index}]: {len(key)} bytes given, at most {MAX_EXTRA_KEY_BYTES} allowed")


def check_progress_interval(interval_ms: int) -> None:
    """50 to 60,000 ms; 0: no progress is wanted."""
    if interval_ms != 0 and not MIN_PROGRESS_INTERVAL_MS <= interval_ms <= MAX_PROGRESS_INTERVAL_MS:
        raise InvalidRequest(
            f"progress_interval_ms: {interval_ms} given, {MIN_PROGRESS_INTERVAL_MS} to {MAX_PROGRESS_INTERVAL_MS} or "
            "none allowed"
        )


def check_cache_salt(salt: bytes) -> None:
    """At most 64 bytes; empty: none."""
    if len(salt) > MAX_EXTRA_KEY_BYTES:
        raise InvalidRequest(f"cache_salt: {len(salt)} bytes given, at most {MAX_EXTRA_KEY_BYTES} allowed")

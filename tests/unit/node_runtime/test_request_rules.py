"""Each rule of the wire contract refuses what breaks it, naming field and limit, and passes what is just inside."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from pdmesh.v1 import decode_pb2, inference_pb2

from node_runtime import request_rules as rules
from node_runtime.errors import InvalidRequest
from node_runtime.rpc import format_address, parse_address
from node_runtime.wire.decode import job_from_proto


def sampling(**fields: float) -> inference_pb2.SamplingParams:
    return inference_pb2.SamplingParams(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: rules.check_request_id(""), "request_id: must not be empty"),
        (lambda: rules.check_request_id("é" * 65), "request_id: 130 bytes given, at most 128"),
        (lambda: rules.check_request_id("a\nb"), "request_id: must be printable"),
        (lambda: rules.check_node_id(""), "node_id: 0 bytes given, 1 to 256 required"),
        (lambda: rules.check_node_id("n" * 257), "node_id: 257 bytes given"),
        (lambda: rules.check_node_id("a\nb"), "node_id: must be printable"),
        (lambda: rules.check_incarnation(0), "incarnation: 0 given"),
        (lambda: rules.check_token_ids([], 10), "token_ids: empty"),
        (lambda: rules.check_token_ids([3, 10, 2], 10), r"token_ids: token 10 is outside \[0, 10\)"),
        (lambda: rules.check_token_ids([3, -1], 10), r"token_ids: token -1 is outside \[0, 10\)"),
        (lambda: rules.check_lengths(5, 0, 10), "max_tokens: 0 given, at least 1"),
        (lambda: rules.check_lengths(10, 1, 10), "prompt: 10 tokens given, at most 9 fit a context of 10"),
        (lambda: rules.check_lengths(5, 6, 10), "max_tokens: 6 given, at most 5 fit a context of 10"),
        (lambda: rules.check_sampling(sampling(temperature=float("nan"))), "sampling.temperature: nan given"),
        (lambda: rules.check_sampling(sampling(temperature=float("inf"))), "sampling.temperature: inf given"),
        (lambda: rules.check_sampling(sampling(temperature=-0.5)), "sampling.temperature: -0.5 given"),
        (lambda: rules.check_sampling(sampling(top_p=0)), "sampling.top_p: 0 given"),
        (lambda: rules.check_sampling(sampling(top_p=1.5)), "sampling.top_p: 1.5 given"),
        (lambda: rules.check_sampling(sampling(top_p=float("nan"))), "sampling.top_p: nan given"),
        (lambda: rules.check_sampling(inference_pb2.SamplingParams(top_k=0)), "sampling.top_k: 0 given"),
        (lambda: rules.check_num_logprobs(21), "num_logprobs: 21 given, at most 20"),
        (lambda: rules.check_num_prompt_logprobs(21, 1), "num_prompt_logprobs: 21 given, at most 20"),
        (lambda: rules.check_num_prompt_logprobs(1, 65_537), "1 given for 65537 tokens, 131074 values in all, at most"),
        (lambda: rules.check_num_samples(0), "num_samples: 0 given, 1 to 64"),
        (lambda: rules.check_num_samples(65), "num_samples: 65 given, 1 to 64"),
        (lambda: rules.check_progress_interval(49), "progress_interval_ms: 49 given, 50 to 60000 or none"),
        (lambda: rules.check_progress_interval(60_001), "progress_interval_ms: 60001 given"),
        (lambda: rules.check_sampling(sampling(presence_penalty=2.1)), "sampling.presence_penalty: 2.1 given"),
        (lambda: rules.check_sampling(sampling(frequency_penalty=float("nan"))), "sampling.frequency_penalty: nan"),
        (lambda: rules.check_sampling(sampling(repetition_penalty=0)), "sampling.repetition_penalty: 0 given"),
        (lambda: rules.check_sampling(sampling(repetition_penalty=1e-45)), r"\[0\.0078125, 10\] required"),
        (lambda: rules.check_logit_bias({10: 0.0}, 10), r"sampling.logit_bias: token 10 is outside \[0, 10\)"),
        (lambda: rules.check_logit_bias({3: -100.5}, 10), r"sampling.logit_bias\[3\]: -100.5 given"),
        (lambda: rules.check_logit_bias(dict.fromkeys(range(1025), 0.0), 2000), "1025 tokens given, at most 1024"),
        (lambda: rules.check_stop_strings(["x"] * 17), "stop: 17 strings given, at most 16"),
        (lambda: rules.check_stop_strings(["a", ""]), r"stop\[1\]: must not be empty"),
        (lambda: rules.check_stop_token_ids([1] * 81, 10), "stop_token_ids: 81 given, at most 80"),
        (lambda: rules.check_stop_token_ids([1] * 65, 10, limit=64), "stop_token_ids: 65 given, at most 64"),
        (lambda: rules.check_stop_token_ids([10], 10), "stop_token_ids: token 10 is outside"),
        (lambda: rules.check_extra_keys([b""] * 9), "extra_keys: 9 given, at most 8"),
        (lambda: rules.check_extra_keys([b"", b"x" * 65]), r"extra_keys\[1\]: 65 bytes given, at most 64"),
        (lambda: rules.check_cache_salt(b"x" * 65), "cache_salt: 65 bytes given, at most 64"),
    ],
)
def test_a_broken_rule_is_refused_with_field_and_limit(check: Callable[[], None], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check()


@pytest.mark.parametrize(
    "check",
    [
        lambda: rules.check_request_id("x" * 128),
        lambda: rules.check_request_id("", allow_empty=True),
        lambda: rules.check_node_id("n" * 256),
        lambda: rules.check_incarnation(2**64 - 1),
        lambda: rules.check_token_ids([0, 9], 10),
        lambda: rules.check_lengths(9, 1, 10),
        lambda: rules.check_sampling(inference_pb2.SamplingParams()),
        lambda: rules.check_sampling(inference_pb2.SamplingParams(temperature=0, top_k=1, top_p=1)),
        lambda: rules.check_num_logprobs(None),
        lambda: rules.check_num_logprobs(0),
        lambda: rules.check_num_logprobs(20),
        lambda: rules.check_stop_strings(["x"] * 16),
        lambda: rules.check_stop_token_ids([], 10),
        lambda: rules.check_stop_token_ids([9] * 80, 10),
        lambda: rules.check_extra_keys([b"x" * 64] * 8),
        lambda: rules.check_cache_salt(b"x" * 64),
        lambda: rules.check_num_samples(64),
        lambda: rules.check_num_prompt_logprobs(None, 10**9),
        lambda: rules.check_num_prompt_logprobs(1, 65_536),
        lambda: rules.check_progress_interval(0),
        lambda: rules.check_progress_interval(50),
        lambda: rules.check_sampling(sampling(presence_penalty=-2, frequency_penalty=2, repetition_penalty=10)),
        lambda: rules.check_logit_bias({0: 100.0, 9: -100.0}, 10),
    ],
)
def test_what_is_just_inside_every_limit_passes(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"request_id": ""}, "request_id"),
        ({"token_ids": []}, "token_ids: empty"),
        ({"token_ids": [1000]}, "token_ids: token 1000"),
        ({"max_tokens": 0}, "max_tokens: 0"),
        ({"max_tokens": 4_000_000_000}, "max_tokens: 4000000000 given, at most 62"),
        ({"sampling": inference_pb2.SamplingParams(temperature=float("nan"))}, "sampling.temperature"),
        ({"stop_token_ids": [1000]}, "stop_token_ids"),
        ({"num_logprobs": 21}, "num_logprobs"),
        ({"num_prompt_logprobs": 21}, "num_prompt_logprobs: 21"),
        ({"num_prompt_logprobs": 0, "num_output_tokens": 1}, "num_prompt_logprobs: not with num_output_tokens=1"),
        ({"progress_interval_ms": 1}, "progress_interval_ms: 1 given"),
        ({"sampling": inference_pb2.SamplingParams(logit_bias={1000: 1.0})}, "sampling.logit_bias: token 1000"),
        ({"extra_keys": [b"x" * 65]}, "extra_keys"),
        ({"prefill_address": "nowhere"}, "prefill_address: expected host:port"),
    ],
)
def test_a_decode_request_is_checked_field_by_field(changes: dict[str, object], message: str) -> None:
    request = decode_pb2.DecodeRequest(**{"request_id": "r", "token_ids": [1, 2], "max_tokens": 3, **changes})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=message):
        job_from_proto(request, vocab_size=1000, context_tokens=64, seed_if_absent=0)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:5000", "127.0.0.1", 5000), ("node-1.mesh.svc:1", "node-1.mesh.svc", 1), ("[::1]:65535", "::1", 65535)],
)
def test_addresses_are_read_and_written(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)
    assert format_address(host, port) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        "host:",
        ":5",
        "host:0",
        "host:65536",
        "::1:5",
        "http://host:5",
        "unix:/tmp/x:1",
        "a b:5",
        "h:5\n",
        "h" * 400,
    ],
)
def test_what_is_no_address_is_refused_and_names_the_field(text: str) -> None:
    with pytest.raises(InvalidRequest, match="prefill_address: expected host:port"):
        parse_address(text, field="prefill_address")


def test_rpc_rules_and_outcomes_need_no_torch() -> None:
    modules = "node_runtime.rpc, node_runtime.lifecycle, node_runtime.request_rules, node_runtime.wire.outcome"
    script = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0

"""Bad input gets a documented status that names the field and the limit, and harms nobody."""

from __future__ import annotations

import math
import socket
from pathlib import Path

import grpc
import pytest
from pdmesh.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from support import prompts
from support.mesh import Mesh, start_disaggregated
from support.processes import NodeProcess, stopping
from support.tiny_checkpoint import CONTEXT_TOKENS, write_tiny_checkpoint

from cache_runtime.recipes.dense import DenseCacheRecipe
from cache_runtime.recipes.rows import key_value_fields
from cache_runtime.transfer.manifest_builder import build_manifest
from node_runtime.wire.manifest import manifest_to_proto

VOCAB = 49_152
CONTEXT = 8_192
INVALID = grpc.StatusCode.INVALID_ARGUMENT

BAD_REQUESTS = {
    "no prompt": ({}, INVALID, ("prompt",)),
    "empty text": ({"text": ""}, INVALID, ("text",)),
    "empty chat": ({"chat": []}, INVALID, ("prompt",)),
    "unknown chat role": ({"chat": [("robot", "hi")]}, INVALID, ("role", "robot")),
    "no tokens": ({"token_ids": []}, INVALID, ("token_ids",)),
    "token id out of range": ({"token_ids": [5, VOCAB]}, INVALID, ("token_ids", str(VOCAB))),
    "unknown model": ({"text": "x", "model": "gpt-17"}, grpc.StatusCode.NOT_FOUND, ("model", "gpt-17")),
    "prompt over the context": ({"token_ids": [9] * (CONTEXT + 1)}, INVALID, ("prompt", str(CONTEXT))),
    "max_tokens zero": ({"text": "x", "max_tokens": 0}, INVALID, ("max_tokens", "1")),
    "max_tokens over the context": ({"text": "x", "max_tokens": CONTEXT}, INVALID, ("max_tokens", str(CONTEXT))),
    "negative temperature": ({"text": "x", "sampling": {"temperature": -1.0}}, INVALID, ("temperature", "-1")),
    "NaN temperature": ({"text": "x", "sampling": {"temperature": math.nan}}, INVALID, ("temperature", "nan")),
    "infinite temperature": ({"text": "x", "sampling": {"temperature": math.inf}}, INVALID, ("temperature", "inf")),
    "top_p zero": ({"text": "x", "sampling": {"top_p": 0.0}}, INVALID, ("top_p",)),
    "top_p above one": ({"text": "x", "sampling": {"top_p": 1.5}}, INVALID, ("top_p", "1.5")),
    "top_k zero": ({"text": "x", "sampling": {"top_k": 0}}, INVALID, ("top_k", "1")),
    "too many stops": ({"text": "x", "stop": ["a"] * 17}, INVALID, ("stop", "16")),
    "empty stop": ({"text": "x", "stop": [""]}, INVALID, ("stop",)),
    "too many log-probabilities": ({"text": "x", "num_logprobs": 21}, INVALID, ("num_logprobs", "20")),
    "long request id": ({"text": "x", "request_id": "r" * 129}, INVALID, ("request_id", "128")),
    "long cache salt": ({"text": "x", "cache_salt": b"s" * 65}, INVALID, ("cache_salt", "64")),
    "stop token out of range": ({"text": "x", "stop_token_ids": [VOCAB]}, INVALID, ("stop_token_ids", str(VOCAB))),
    "oversized message": ({"text": "x" * 5_000_000}, grpc.StatusCode.RESOURCE_EXHAUSTED, ("4194304",)),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_the_router_refuses_by_field_and_limit(mesh: Mesh, name: str) -> None:
    fields, code, words = BAD_REQUESTS[name]
    steps = mesh.num_steps()
    got, message = mesh.client.error(**fields)
    assert got == code, message
    for word in words:
        assert word in message, message
    assert mesh.num_steps() == steps


def test_the_mesh_still_answers_after_all_of_it(mesh: Mesh) -> None:
    assert mesh.client.generate(text="The capital of France is", max_tokens=1).text == " Paris"
    mesh.assert_all_blocks_return()


def test_a_second_request_of_the_same_id_is_refused_and_the_first_unharmed(mesh: Mesh) -> None:
    expected = mesh.client.generate(text="Once upon a time", max_tokens=40, ignore_eos=True).token_ids
    first = mesh.client.start(text="Once upon a time", max_tokens=40, ignore_eos=True, request_id="twin")
    next(first)
    code, message = mesh.client.error(text="x", request_id="twin")
    assert code == grpc.StatusCode.ALREADY_EXISTS
    assert "twin" in message
    tokens = [token.token_id for response in first for token in response.delta.tokens]
    assert tokens == expected


def decode_error(mesh: Mesh, **fields: object) -> tuple[grpc.StatusCode, str]:
    request = {"request_id": "direct", "token_ids": [1, 2, 3], "max_tokens": 4, **fields}
    stub = decode_pb2_grpc.DecodeStub(mesh.nodes["decode"].channel)
    try:
        list(stub.Generate(decode_pb2.DecodeRequest(**request), timeout=20))
    except grpc.RpcError as error:
        return error.code(), error.details()
    raise AssertionError("the request succeeded")


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_a_prefill_address_that_refuses_is_unavailable_and_named(mesh: Mesh) -> None:
    address = f"127.0.0.1:{unused_port()}"
    code, message = decode_error(mesh, prefill_address=address)
    assert code == grpc.StatusCode.UNAVAILABLE
    assert address in message


def test_a_prefill_address_that_does_not_resolve_is_unavailable_and_named(mesh: Mesh) -> None:
    code, message = decode_error(mesh, prefill_address="no-such-host.invalid:7001")
    assert code == grpc.StatusCode.UNAVAILABLE
    assert "no-such-host.invalid:7001" in message


def test_a_decode_node_without_a_prefill_address_refuses(mesh: Mesh) -> None:
    code, message = decode_error(mesh, prefill_address="")
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert "prefill_address" in message


def test_the_decode_node_validates_for_itself(mesh: Mesh) -> None:
    address = mesh.nodes["prefill"].address
    steps = mesh.num_steps()
    for fields, word in (
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [VOCAB]}, "token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": CONTEXT}, "max_tokens"),
        ({"request_id": ""}, "request_id"),
        ({"sampling": {"temperature": -2.0}}, "temperature"),
    ):
        code, message = decode_error(mesh, prefill_address=address, **fields)
        assert code == INVALID, message
        assert word in message
    assert mesh.num_steps() == steps
    mesh.assert_all_blocks_return()


def test_a_request_that_can_never_fit_the_arena_is_refused_and_others_go_on(tmp_path: Path) -> None:
    compute = ("--memory", "1MiB", "--num-threads", "1", "--prefix-granularity", "16")
    mesh = start_disaggregated(write_tiny_checkpoint(tmp_path / "model"), tmp_path, compute=compute)
    with stopping(mesh.router, *mesh.nodes.values()):
        limit = mesh.nodes["decode"].info().max_request_tokens
        assert limit < CONTEXT_TOKENS, "it is the arena that limits requests"
        long_prompt = [token_id % 256 for token_id in prompts.token_prompt(limit)]
        code, message = mesh.client.error(token_ids=long_prompt, max_tokens=2)
        assert code in (INVALID, grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert str(limit) in message
        # A full arena makes requests wait for one another, not fail.
        streams = [
            mesh.client.start(token_ids=long_prompt[index : limit - 40], max_tokens=30, ignore_eos=True)
            for index in range(4)
        ]
        assert [sum(len(response.delta.tokens) for response in stream) for stream in streams] == [30] * 4
        mesh.assert_all_blocks_return()


def test_a_peer_that_differs_is_refused_with_every_difference(mesh: Mesh, model_path: Path, tmp_path: Path) -> None:
    compute = ("--memory", "128MiB", "--num-threads", "1", "--prefix-granularity", "32", "--weight-version", "v2")
    other = NodeProcess("prefill", ["--model", str(model_path), "--port", "0", *compute], tmp_path)
    with stopping(other):
        code, message = decode_error(mesh, prefill_address=other.address)
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        for word in ("prefix_granularity", "prefill=32", "decode=64", "weight_version", "v2"):
            assert word in message, message


def test_a_peer_of_another_model_and_dtype_is_refused_with_every_difference(mesh: Mesh) -> None:
    setup = DenseCacheRecipe(
        num_layers=30,
        row_fields=key_value_fields(3, 32),
        dtype="bfloat16",
        prefix_granularity=32,
        memory_bytes=64 << 20,
    ).setup()
    manifest = build_manifest(
        setup.plan,
        stages=setup.producer_fields_by_step,
        model_fingerprint="f" * 64,
        weight_version="",
        arena_base=1 << 20,
        data_plane="mooncake",
        endpoint="127.0.0.1:1",
    )
    request = prefill_pb2.BootstrapRequest(
        node_id="stranger", incarnation=7, manifest=manifest_to_proto(manifest), nonce=bytes(32), nonce_address=64
    )
    stub = prefill_pb2_grpc.PrefillStub(mesh.nodes["prefill"].channel)
    with pytest.raises(grpc.RpcError) as error:
        stub.Bootstrap(request, timeout=10)
    assert error.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    message = error.value.details()
    for words in (
        "model_fingerprint",
        "prefix_granularity prefill=64, decode=32",
        '"layers.0.k", "layers.0.v"',
        '"layers.29.v"',
        "dtype prefill=float32, decode=bfloat16",
        "block_shape prefill=[64, 3, 64], decode=[32, 3, 32]",
    ):
        assert words in message, message

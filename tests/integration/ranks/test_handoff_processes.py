"""A prefill and a decode node of two rank processes each: the data planes of the leaders reach the arenas of all."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from pdmesh.v1 import decode_pb2, decode_pb2_grpc, inference_pb2
from support.processes import NodeProcess, stopping, wait_until
from unit.model_runtime import tiny_llama

from node_runtime.lifecycle import EXIT_FAILURE, EXIT_OK

NUM_TOKENS = 20
SETTINGS = (
    *("--port", "0", "--memory", "4MiB", "--num-threads", "1", "--tensor-parallel", "2"),
    *("--prefix-granularity", "8", "--kernel-page-size", "4", "--max-batch-size", "16", "--token-budget", "16"),
)
NOTICE_TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def reference() -> tiny_llama.LlamaForCausalLM:
    return tiny_llama.make_reference()


@pytest.fixture
def nodes(reference: tiny_llama.LlamaForCausalLM, tmp_path: Path) -> Iterator[tuple[NodeProcess, NodeProcess]]:
    arguments = ("--model", str(tiny_llama.save(reference, tmp_path / "model")), *SETTINGS)
    # Open to the end: processes die with the thread that started them.
    with ThreadPoolExecutor() as pool:
        prefill, decode = pool.map(lambda role: NodeProcess(role, arguments, tmp_path), ("prefill", "decode"))
        with stopping(decode, prefill):
            yield prefill, decode


def stream(decode: NodeProcess, prefill: NodeProcess, prompt: list[int], request_id: str, num_tokens: int):
    request = decode_pb2.DecodeRequest(
        request_id=request_id,
        token_ids=prompt,
        prefill_address=prefill.address,
        max_tokens=num_tokens,
        sampling=inference_pb2.SamplingParams(seed=0),
    )
    return decode_pb2_grpc.DecodeStub(decode.channel).Generate(request, timeout=60)


def generate(decode: NodeProcess, prefill: NodeProcess, prompt: list[int], request_id: str) -> list[int]:
    answer = stream(decode, prefill, prompt, request_id, NUM_TOKENS)
    return [token.token_id for response in answer for token in response.tokens.tokens]


def children_of(process_id: int) -> list[int]:
    """Source: proc(5), children."""
    lists = Path(f"/proc/{process_id}/task").glob("*/children")
    return [int(child) for path in lists for child in path.read_text().split()]


def is_empty(node: NodeProcess) -> bool:
    arena = node.status().arena
    return (
        node.status().num_handoffs == 0 and arena.empty_lcm_blocks + arena.cached_lcm_blocks == arena.total_lcm_blocks
    )


def test_exact_full_attention_between_nodes_of_two_processes_and_the_end_of_one_of_them(
    reference: tiny_llama.LlamaForCausalLM, nodes: tuple[NodeProcess, NodeProcess]
) -> None:
    prefill, decode = nodes
    shared = tiny_llama.random_prompt(40, seed=1)
    for request_id, prompt in {"cold": shared, "warm": [*shared, 3, 1, 4]}.items():
        expected = tiny_llama.reference_greedy(reference, prompt, NUM_TOKENS)
        assert generate(decode, prefill, prompt, request_id) == expected
    assert decode.status().peers[0].data_plane == "shm"
    for node in nodes:
        assert "2 tensor ranks" in node.log_text()
        wait_until(lambda node=node: is_empty(node), NOTICE_TIMEOUT_S, "nothing is held")
        node.clear_cache()
        assert node.status().arena.cached_lcm_blocks == 0

    (follower,) = children_of(decode.process.pid)
    answer = stream(decode, prefill, shared, "cut off", 200)
    while not next(answer).tokens.tokens:
        continue
    os.kill(follower, signal.SIGKILL)
    with pytest.raises(grpc.RpcError) as error:
        list(answer)
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE, error.value.details()
    assert decode.process.wait(NOTICE_TIMEOUT_S) == EXIT_FAILURE
    assert "stopping: the engine broke down" in decode.log_text()
    wait_until(lambda: is_empty(prefill), NOTICE_TIMEOUT_S, "the prefill node is quiet")
    assert prefill.stop() == EXIT_OK
    assert "Traceback" not in prefill.log_text()

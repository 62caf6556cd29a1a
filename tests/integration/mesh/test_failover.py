"""kill -9 under a running mesh: clients get the tokens, text and log-probabilities of an undisturbed run."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pdmesh.v1 import inference_pb2
from support import prompts
from support.mesh import Answer, Mesh, assemble, collect
from support.processes import NodeProcess, stopping, wait_until

COMPUTE = ("--memory", "256MiB", "--num-threads", "1")
GREEDY = {"text": "Once upon a time", "max_tokens": 80, "ignore_eos": True, "num_logprobs": 2}
SAMPLED = {**GREEDY, "text": prompts.STORY, "sampling": {"temperature": 0.9, "top_p": 0.95, "seed": 1234}}


@pytest.fixture
def own_mesh(model_path: Path, tmp_path: Path) -> Iterator[Mesh]:
    """Two prefill and two decode nodes that a test may kill."""
    common = ("--model", str(model_path), "--port", "0", "--node-id")

    def start(role: str, name: str, *options: str) -> NodeProcess:
        return NodeProcess(role, [*common, name, *options], tmp_path, name=name)

    prefill = [start("prefill", f"prefill-{index}", *COMPUTE) for index in range(2)]
    peers = [flag for node in prefill for flag in ("--prefill", node.address)]
    decode = [start("decode", f"decode-{index}", *COMPUTE, *peers) for index in range(2)]
    turns = ("--placement-policy", "least_loaded")
    listed = (*peers, *(flag for node in decode for flag in ("--decode", node.address)))
    router = start("router", "router", *turns, *listed)
    nodes = {node.name: node for node in (*prefill, *decode)}
    with stopping(router, *nodes.values()):
        yield assemble(router, nodes)


def _same(answer: Answer, expected: Answer) -> None:
    assert answer.token_ids == expected.token_ids
    assert answer.text == expected.text
    assert [token.logprob for token in answer.tokens] == [token.logprob for token in expected.tokens]
    assert [token.top_logprobs for token in answer.tokens] == [token.top_logprobs for token in expected.tokens]
    assert answer.finish is not None
    assert expected.finish is not None
    assert answer.finish.reason == expected.finish.reason
    assert answer.finish.usage.prompt_tokens == expected.finish.usage.prompt_tokens
    assert answer.finish.usage.completion_tokens == expected.finish.usage.completion_tokens


def _first_tokens(stream: Iterator[inference_pb2.GenerateResponse], num_tokens: int) -> list:
    """Responses up to and with the one that brings this many tokens."""
    seen: list[inference_pb2.GenerateResponse] = []
    while sum(len(response.delta.tokens) for response in seen) < num_tokens:
        seen.append(next(stream))
    return seen


def test_killed_nodes_are_not_seen_by_clients(own_mesh: Mesh) -> None:
    mesh = own_mesh
    requests = [GREEDY, {"text": "Hello", "max_tokens": 1}, SAMPLED]
    expected = [mesh.client.generate(**fields) for fields in requests]

    # A decode node, in the middle of two streams: requests take turns over the nodes.
    streams = [mesh.client.start(**fields) for fields in requests]
    placements = [next(stream).placement.decode_node for stream in streams]
    assert placements[0] == placements[2] != placements[1]
    seen = {index: _first_tokens(streams[index], 5) for index in (0, 2)}
    mesh.nodes.pop(placements[0]).kill()
    for index, stream in enumerate(streams):
        answer = collect([*seen.get(index, []), *stream])
        _same(answer, expected[index])
        assert answer.finish is not None
        assert (answer.finish.num_replacements > 0) == (index in seen)

    # A prefill node, in the middle of its prompts.
    long_prompts = [prompts.token_prompt(400 + index) for index in range(2)]
    dying = mesh.nodes.pop("prefill-0")
    with ThreadPoolExecutor(len(long_prompts)) as pool:
        running = [pool.submit(mesh.client.generate, token_ids=ids, max_tokens=3) for ids in long_prompts]
        wait_until(lambda: dying.status().num_handoffs == 1, 20.0, "a prompt is being prefilled there")
        dying.kill()
        moved = [future.result() for future in running]
    assert sum(answer.finish.num_replacements for answer in moved if answer.finish) >= 1
    for ids, answer in zip(long_prompts, moved, strict=True):
        # Salted, so that nothing which the moved request left in the caches is read.
        _same(answer, mesh.client.generate(token_ids=ids, max_tokens=3, cache_salt=b"undisturbed"))
    mesh.assert_all_blocks_return()
    assert "Traceback" not in mesh.router.log_text()

"""Clients that leave and processes that die: nothing hangs, nothing leaks, others go on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from pdmesh.v1 import decode_pb2, decode_pb2_grpc
from support import prompts
from support.mesh import Mesh, is_quiet, start_disaggregated
from support.processes import stopping, wait_until

CLIENT = """
import sys
from support.mesh import Client
for response in Client(sys.argv[1]).start(text="Once upon a time", max_tokens=2000, ignore_eos=True):
    print(response.WhichOneof("event"), flush=True)
"""


@pytest.fixture(scope="module")
def breakable_mesh(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    mesh = start_disaggregated(model_path, tmp_path_factory.mktemp("breakable"))
    yield mesh
    mesh.client.close()
    with stopping(mesh.router, *mesh.nodes.values()):
        pass


@pytest.fixture
def own_mesh(breakable_mesh: Mesh) -> Mesh:
    """A mesh whose processes a test may end: whoever is gone is replaced before the next test."""
    mesh = breakable_mesh
    for role, node in mesh.nodes.items():
        if not node.is_running:
            mesh.nodes[role] = node.start_successor()
    if not mesh.router.is_running:
        mesh.router = mesh.router.start_successor()
    mesh.wait_until_whole()
    return mesh


def test_killing_the_client_mid_stream_stops_the_work_on_all_nodes(mesh: Mesh) -> None:
    tests = str(Path(__file__).resolve().parents[2])
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, mesh.router.address],
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": tests},
    )
    assert client.stdout is not None
    for line in client.stdout:
        if line.startswith("delta"):
            break
    steps = mesh.num_steps()
    client.kill()
    client.wait(timeout=10)
    wait_until(lambda: all(is_quiet(node) for node in mesh.nodes.values()), 5.0, "all nodes are quiet")
    # The step under way, and those that began while this process read the counter and sent the signal.
    assert mesh.num_steps()["decode"] <= steps["decode"] + 4
    assert mesh.num_steps()["prefill"] == steps["prefill"]
    mesh.assert_all_blocks_return()


@pytest.mark.parametrize("num_deltas", [0, 1, 5])
def test_cancelling_at_any_point_returns_every_block(mesh: Mesh, num_deltas: int) -> None:
    stream = mesh.client.start(token_ids=prompts.token_prompt(600 + num_deltas), max_tokens=500, ignore_eos=True)
    responses = iter(stream)
    seen = 0
    while seen < num_deltas:
        seen += next(responses).WhichOneof("event") == "delta"
    stream.cancel()
    wait_until(lambda: all(is_quiet(node) for node in mesh.nodes.values()), 10.0, "all nodes are quiet")
    mesh.assert_all_blocks_return()


def test_a_storm_of_cancelled_requests_leaves_the_mesh_as_it_was(mesh: Mesh) -> None:
    streams = [
        mesh.client.start(token_ids=prompts.token_prompt(200 + index), max_tokens=50, ignore_eos=True)
        for index in range(60)
    ]
    for stream in streams[::2]:
        next(stream)
    for stream in streams:
        stream.cancel()
    mesh.assert_all_blocks_return()
    assert mesh.client.generate(text="The capital of France is", max_tokens=1).text == " Paris"


def test_a_deadline_that_passes_ends_the_request_everywhere(mesh: Mesh) -> None:
    code, _ = mesh.client.error(1.0, text="Once upon a time", max_tokens=4000, ignore_eos=True)
    assert code == grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until(lambda: all(is_quiet(node) for node in mesh.nodes.values()), 5.0, "all nodes are quiet")
    mesh.assert_all_blocks_return()


def test_killing_the_prefill_process_fails_only_its_requests_and_a_new_one_is_used(
    own_mesh: Mesh,
) -> None:
    mesh = own_mesh
    expected = mesh.client.generate(text="Once upon a time", max_tokens=200, ignore_eos=True).token_ids
    decoding = mesh.client.start(text="Once upon a time", max_tokens=200, ignore_eos=True)
    tokens = [token.token_id for _ in range(3) for token in next(decoding).delta.tokens]
    with ThreadPoolExecutor(4) as pool:
        prompts_in_prefill = [prompts.token_prompt(4000 + index) for index in range(4)]
        failing = [pool.submit(mesh.client.error, 60.0, token_ids=ids, max_tokens=4) for ids in prompts_in_prefill]
        prefill = mesh.nodes["prefill"]
        wait_until(lambda: prefill.status().num_handoffs == 4, 20.0, "the prompts are being prefilled")
        prefill.kill()
        errors = [future.result() for future in failing]
    for code, message in errors:
        assert code == grpc.StatusCode.UNAVAILABLE, message
        assert "prefill" in message
    # The stream that had left the prefill node goes on as if nothing had happened.
    tokens += [token.token_id for response in decoding for token in response.delta.tokens]
    assert tokens == expected
    decode = mesh.nodes["decode"]
    wait_until(lambda: is_quiet(decode), 40.0, "the decode node holds nothing")

    code, _ = mesh.client.error(10.0, text="x", max_tokens=2)
    assert code == grpc.StatusCode.UNAVAILABLE
    mesh.nodes["prefill"] = prefill.start_successor()
    mesh.router.wait_serving()
    wait_until(
        lambda: mesh.client.generate(text="The capital of France is", max_tokens=1).text == " Paris",
        20.0,
        "the mesh serves again",
    )
    mesh.assert_all_blocks_return()


def test_a_decode_node_that_dies_frees_the_prefill_node(own_mesh: Mesh) -> None:
    mesh = own_mesh
    with ThreadPoolExecutor(2) as pool:
        failing = [
            pool.submit(mesh.client.error, 60.0, token_ids=prompts.token_prompt(4000 + index), max_tokens=4)
            for index in range(2)
        ]
        prefill = mesh.nodes["prefill"]
        wait_until(lambda: prefill.status().num_handoffs == 2, 20.0, "the prompts are being prefilled")
        mesh.nodes["decode"].kill()
        for code, message in (future.result() for future in failing):
            assert code == grpc.StatusCode.UNAVAILABLE, message
    wait_until(lambda: is_quiet(prefill), 20.0, "the prefill node holds nothing")


def test_a_restarted_prefill_node_at_the_same_address_is_a_new_peer(own_mesh: Mesh) -> None:
    mesh = own_mesh
    prefill, decode = mesh.nodes["prefill"], mesh.nodes["decode"]
    stub = decode_pb2_grpc.DecodeStub(decode.channel)

    def ask(request_id: str) -> list[int]:
        request = decode_pb2.DecodeRequest(
            request_id=request_id, token_ids=[504, 3575, 282], max_tokens=3, prefill_address=prefill.address
        )
        return [token.token_id for response in stub.Generate(request, timeout=30) for token in response.tokens.tokens]

    before = ask("before")
    incarnation = prefill.info().incarnation
    prefill.kill()
    mesh.nodes["prefill"] = prefill.start_successor()
    assert mesh.nodes["prefill"].info().incarnation != incarnation
    assert ask("after") == before


def test_sigterm_lets_running_streams_finish_and_ends_every_node_cleanly(own_mesh: Mesh) -> None:
    mesh = own_mesh
    stream = mesh.client.start(text="Once upon a time", max_tokens=61, ignore_eos=True)
    while next(stream).WhichOneof("event") != "delta":
        pass
    decode, prefill = mesh.nodes["decode"], mesh.nodes["prefill"]
    decode.process.terminate()
    assert sum(len(response.delta.tokens) for response in stream) == 60
    assert decode.process.wait(timeout=20) == 0
    assert prefill.stop() == 0
    assert mesh.router.stop() == 0
    for node in (decode, prefill, mesh.router):
        assert "Traceback" not in node.log_text()

"""Models with states over data planes that leave the host: prefill and decode as two processes, no router and no
tokenizer. The other tests of this folder go over shared memory, which nodes of one host choose.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pdmesh.v1 import decode_pb2, decode_pb2_grpc, inference_pb2
from support.processes import NodeProcess, wait_until
from transformers import PreTrainedModel
from unit.model_runtime.reference_models import assert_greedy, random_prompt, save
from unit.model_runtime.tiny_models import TINY_MODELS

GRAIN = 16
NUM_TOKENS = 24
COMPUTE = ("--memory", "8MiB", "--num-threads", "1", "--prefix-granularity", str(GRAIN))
CHUNKS = ("--max-batch-size", "32", "--token-budget", "32")


class Pair:
    """A reference model, and the nodes that run its weights."""

    def __init__(self, reference: PreTrainedModel, prefill: NodeProcess, decode: NodeProcess) -> None:
        self.reference = reference
        self.prefill, self.decode = prefill, decode
        self._stub = decode_pb2_grpc.DecodeStub(decode.channel)
        self._num_requests = 0

    def generate(self, prompt: list[int]) -> tuple[list[int], decode_pb2.DecodeFinish]:
        self._num_requests += 1
        request = decode_pb2.DecodeRequest(
            request_id=f"request-{self._num_requests}",
            token_ids=prompt,
            prefill_address=self.prefill.address,
            max_tokens=NUM_TOKENS,
            sampling=inference_pb2.SamplingParams(seed=0),
        )
        tokens: list[int] = []
        finish = decode_pb2.DecodeFinish()
        for response in self._stub.Generate(request, timeout=60):
            tokens += [token.token_id for token in response.tokens.tokens]
            if response.HasField("finish"):
                finish = response.finish
        return tokens, finish


@pytest.fixture(scope="module", params=[("qwen3_next", "mooncake"), ("kimi", "stream")], ids="-".join)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    name, data_plane = request.param
    reference = TINY_MODELS[name]()
    folder = tmp_path_factory.mktemp(name)
    model = save(reference, folder / "model")
    common = ("--model", str(model), "--port", "0", "--data-plane", data_plane, *COMPUTE, *CHUNKS)
    prefill = NodeProcess("prefill", common, folder)
    decode = NodeProcess("decode", [*common, "--prefill", prefill.address], folder)
    for node in (prefill, decode):
        node.wait_serving()
    assert decode.status().peers[0].data_plane == data_plane
    yield Pair(reference, prefill, decode)
    for node in (decode, prefill):
        node.stop()


@pytest.mark.parametrize("num_tokens", [1, 2 * GRAIN, 75])
def test_exact_over_the_real_data_plane(pair: Pair, num_tokens: int) -> None:
    prompt = random_prompt(num_tokens, num_tokens, pair.reference.config.vocab_size)
    tokens, finish = pair.generate(prompt)
    assert_greedy(pair.reference, prompt, tokens, NUM_TOKENS)
    assert finish.timings.transferred_blocks == -(-num_tokens // GRAIN) + 1, "the rows, and one state"


def test_exact_after_a_prefix_hit_and_every_block_returns(pair: Pair) -> None:
    shared = random_prompt(3 * GRAIN, 5, pair.reference.config.vocab_size)
    for tail in ([5], [9, 8, 7]):
        tokens, finish = pair.generate([*shared, *tail])
        assert_greedy(pair.reference, [*shared, *tail], tokens, NUM_TOKENS)
    assert finish.usage.cached.decode_device == 3 * GRAIN
    for node in (pair.decode, pair.prefill):
        wait_until(lambda node=node: node.status().arena.active_lcm_blocks == 0, 20.0, f"{node.name} let go")
        node.clear_cache()
        arena = node.status().arena
        assert arena.empty_lcm_blocks == arena.total_lcm_blocks

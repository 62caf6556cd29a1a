"""Handoffs between nodes with unlike numbers of tensor ranks, over real models, schedulers and a data plane.

The text and its log-probabilities are those of one rank that does everything, to the bit. What the handoff's messages
would say is said by the test; whatever moves or computes is the nodes' own.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
from support.rank_nodes import RankNode, RankParts
from transformers import PreTrainedModel
from unit.model_runtime import tiny_gemma3, tiny_llama, tiny_qwen3_next
from unit.model_runtime.reference_models import random_prompt, save
from unit.model_runtime.tiny_models import TINY_MODELS

from cache_runtime.transfer.block_spans import block_spans
from cache_runtime.transfer.engine import Region
from cache_runtime.transfer.memory_engine import MemoryFabric
from cache_runtime.transfer.placement import check_bridgeable, logical_differences
from cache_runtime.transfer.schema import RankPlacement
from model_runtime.checkpoint import Checkpoint, open_checkpoint
from model_runtime.sampler import SampledToken
from node_runtime.engine.messages import AcceptFirstToken, GrantOffered, HandoverOffered, PostEvents
from node_runtime.handoff.messages import Grant
from prefill_node.outgoing import OutgoingTransfer, TransferLanded, TransferNews
from prefill_node.rank_transfers import RankTransfers
from scheduler_core import GrantedEvent, HandedOverEvent, ReadyEvent, Role

NUM_TOKENS = 8
LANDING_TIMEOUT_S = 30.0
MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {
    "full": tiny_llama.make_reference,
    "full, one kv head": lambda: tiny_llama.make_reference(num_kv_heads=1),
    "sliding": tiny_gemma3.make_reference,
    "states": tiny_qwen3_next.make_reference,
    "states, one key head": lambda: tiny_qwen3_next.make_reference(linear_num_key_heads=1),
    "latent": TINY_MODELS["deepseek_v2"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A prompt, and one that hits its first grains in the cache of either node; what one rank alone says to both."""

    checkpoint: Checkpoint
    prompts: Mapping[str, list[int]]
    expected: Mapping[str, list[SampledToken]]


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    checkpoint = open_checkpoint(save(MODELS[request.param](), tmp_path_factory.mktemp("model")))
    vocab_size = checkpoint.config.vocab_size
    first = random_prompt(37, 1, vocab_size)
    prompts = {"a": first, "b": [*first[:24], *random_prompt(13, 2, vocab_size)]}
    return Case(checkpoint=checkpoint, prompts=prompts, expected=generate_alone(checkpoint, prompts))


def generate_alone(checkpoint: Checkpoint, prompts: Mapping[str, list[int]]) -> dict[str, list[SampledToken]]:
    with RankNode(Role.FUSED, checkpoint, 1, MemoryFabric()) as node:
        for request_id, prompt in prompts.items():
            node.submit(request_id, prompt, NUM_TOKENS)
            node.run()
        return {request_id: node.tokens(request_id) for request_id in prompts}


def hand_over(prefill: RankNode, decode: RankNode, request_id: str, prompt: list[int]) -> list[SampledToken]:
    """One request through both nodes; the tokens that the client sees."""
    prefill.submit(request_id, prompt, NUM_TOKENS)
    decode.submit(request_id, prompt, NUM_TOKENS)
    decode.loop.post(PostEvents(events=(ReadyEvent(request_id),)))
    decode.run()
    (offer,) = [update for update in decode.updates[request_id] if isinstance(update, GrantOffered)]
    prefill.loop.post(PostEvents(events=(GrantedEvent(request_id),)))
    prefill.run()
    assert any(isinstance(update, HandoverOffered) for update in prefill.updates[request_id])
    grant = Grant(handoff_id=b"h" * 16, from_token=offer.from_token, groups=offer.groups)
    landed = move(prefill, decode, request_id, grant)
    assert landed.summary.num_bytes > 0
    (first,) = prefill.tokens(request_id)
    prefill.loop.post(PostEvents(events=(HandedOverEvent(request_id),)))
    prefill.run()
    decode.loop.post(AcceptFirstToken(request_id=request_id, token=first))
    decode.run()
    return decode.tokens(request_id)


def move(prefill: RankNode, decode: RankNode, request_id: str, grant: Grant) -> TransferLanded:
    """Every rank writes to every rank what is its to write; the completion is that of all.

    Each rank of the target permits the granted blocks and nothing else.
    """
    has_ended = threading.Event()
    news: list[TransferNews] = []

    def hear(joint: TransferNews) -> None:
        news.append(joint)
        has_ended.set()

    blocks = {group.group_id: group.block_ids for group in grant.groups}
    permits = [
        part.engine.allow(grant.handoff_id, block_spans(part.logical, part.placement, blocks)) for part in decode.parts
    ]
    pairs = list(itertools.product(prefill.parts, decode.manifest.ranks))
    transfers = RankTransfers(len(pairs), hear)
    for source, target in pairs:
        open_lane(source, target, request_id, grant, transfers)
    assert has_ended.wait(LANDING_TIMEOUT_S)
    for permit in permits:
        permit.revoke()
    (landed,) = news
    assert isinstance(landed, TransferLanded)
    return landed


def open_lane(
    source: RankParts, target: RankPlacement, request_id: str, grant: Grant, transfers: RankTransfers
) -> None:
    assert source.sender is not None
    region = Region(base_address=target.arena_base, num_bytes=target.arena_bytes)
    link = source.engine.open_peer(target.endpoint, [region])
    transfer = OutgoingTransfer(
        link, transfers.hear, key=grant.handoff_id, now_s=time.monotonic, write_timeout_s=LANDING_TIMEOUT_S
    )
    source.sender.grant(request_id, grant, target, transfer)
    source.sender.poll()  # the engines are idle


@pytest.mark.parametrize(("num_prefill", "num_decode"), list(itertools.product((1, 2), repeat=2)))
def test_text_and_logprobs_are_those_of_one_rank(case: Case, num_prefill: int, num_decode: int) -> None:
    """A prompt in chunks, then one that hits the cache of both nodes and hands over the rest."""
    fabric = MemoryFabric()
    with (
        RankNode(Role.PREFILL, case.checkpoint, num_prefill, fabric) as prefill,
        RankNode(Role.DECODE, case.checkpoint, num_decode, fabric, memory_bytes=3 << 20) as decode,
    ):
        assert not logical_differences(
            prefill.manifest.logical, decode.manifest.logical, local_name="prefill", peer_name="decode"
        )
        assert not check_bridgeable(prefill.manifest, decode.manifest, max_linked_ranks=2)
        tokens = {name: hand_over(prefill, decode, name, prompt) for name, prompt in case.prompts.items()}
        for node in (prefill, decode):
            assert node.scheduler.clear_cache()
            node.end_followers()
            assert not node.failures
            states = {part.scheduler.describe() for part in node.parts}
            assert len(states) == 1
            capacity = node.parts[0].scheduler.capacity()
            assert capacity.empty_lcm_blocks == capacity.total_lcm_blocks
    assert tokens == case.expected

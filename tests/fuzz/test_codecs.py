"""Every codec takes or refuses whatever comes, and a manifest that is taken leads to no write beside its arena."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fuzz.effort import looks
from fuzz.good_messages import decode_requests
from fuzz.messages import hostile
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from pdmesh.v1 import cache_pb2, decode_pb2, inference_pb2, mesh_pb2
from support.fake_compute import NUM_LAYERS, make_memory_plan
from support.handoff_values import done, failed, grant, quiesced, ready, renewed, start
from support.tiny_checkpoint import VOCAB_SIZE

from cache_runtime.transfer.manifest_builder import build_manifest
from cache_runtime.transfer.partition import plan_strips
from cache_runtime.transfer.placement import check_bridgeable
from cache_runtime.transfer.planner import plan_block_runs
from cache_runtime.transfer.schema import PlacementManifest
from node_runtime.errors import InvalidRequest
from node_runtime.node_updates import change_from_proto, change_to_proto
from node_runtime.wire.decode import job_from_proto, job_to_proto
from node_runtime.wire.handoff import request_from_proto, request_to_proto, response_from_proto, response_to_proto
from node_runtime.wire.manifest import manifest_from_proto, manifest_to_proto
from node_runtime.wire.outcome import admitted_from_proto, admitted_to_proto, finish_from_proto, finish_to_proto
from router_node.node_follower import report_of

MANIFEST = build_manifest(
    make_memory_plan(num_lcm_blocks=8),
    stages=tuple((f"layers.{layer}.k", f"layers.{layer}.v") for layer in range(NUM_LAYERS)),
    model_fingerprint="fake",
    weight_version="",
    arena_base=1 << 20,
    data_plane="memory",
    endpoint="memory:1",
)
FINISH = decode_pb2.DecodeFinish(
    reason=inference_pb2.FINISH_REASON_STOP, usage=inference_pb2.Usage(prompt_tokens=4, completion_tokens=2)
)
CHANGES = (
    mesh_pb2.PrefixChanges(sequence=3, base_sequence=2, stored=[1, 2], removed=[3]),
    mesh_pb2.PrefixChanges(sequence=3, is_snapshot=True, stored=[1, 2]),
)
STATUS = mesh_pb2.NodeStatus(
    arena=mesh_pb2.ArenaStatus(total_lcm_blocks=4, empty_lcm_blocks=3),
    peers=[mesh_pb2.PeerStatus(address="a:1", state="ready")],
    prefill_tokens_per_s=100,
    decode_step_ms=3,
)


def job_of(message: Any) -> object:
    return job_from_proto(message, vocab_size=VOCAB_SIZE, context_tokens=4096, seed_if_absent=1)


# By name: good messages, the way in, and the way back where there is one.
CODECS: dict[str, tuple[tuple[Message, ...], Callable[[Any], object], Callable[[Any], Message] | None]] = {
    "decode request": (decode_requests("127.0.0.1:1"), job_of, job_to_proto),
    "handoff request": (
        tuple(map(request_to_proto, (start(), grant(), renewed(1)))),
        request_from_proto,
        request_to_proto,
    ),
    "handoff response": (
        tuple(map(response_to_proto, (ready(), done(), failed(), quiesced()))),
        response_from_proto,
        response_to_proto,
    ),
    "manifest": ((manifest_to_proto(MANIFEST),), manifest_from_proto, manifest_to_proto),
    "finish": ((FINISH,), finish_from_proto, lambda finish: finish_to_proto(finish).finish),
    "admitted": (
        (decode_pb2.DecodeAdmitted(cached=inference_pb2.CachedTokens(decode_device=3)),),
        admitted_from_proto,
        lambda admitted: admitted_to_proto(admitted).admitted,
    ),
    "prefix changes": (CHANGES, change_from_proto, change_to_proto),
    "load": ((STATUS,), lambda status: report_of(status, 1000), None),
}


@pytest.mark.parametrize("name", CODECS)
def test_a_message_becomes_a_value_that_can_be_sent_again_or_is_refused(name: str) -> None:
    good, read, write = CODECS[name]
    seen = Counter[str]()

    @looks(60)
    @given(hostile(good[0].DESCRIPTOR, good))
    def reads(message: Message) -> None:
        try:
            value = read(message)
        except InvalidRequest:
            seen["refused"] += 1
            return
        seen["taken"] += 1
        if write is not None:
            sent = write(value)
            # Not the values themselves: no NaN is equal to itself.
            assert write(read(sent)).SerializeToString(deterministic=True) == sent.SerializeToString(deterministic=True)

    reads()
    assert seen["taken"]
    assert seen["refused"] or name in ("admitted", "load")


def test_what_is_planned_for_any_manifest_that_is_taken_lies_in_its_arena() -> None:
    """A strange logical part is refused as a whole; of the physical one much is allowed."""
    good = manifest_to_proto(MANIFEST)
    num_planned = 0

    @looks(200)
    @given(hostile(good.ranks[0].DESCRIPTOR, (good.ranks[0],)), st.integers(1, 5))
    def plans(rank: cache_pb2.RankPlacement, num_blocks: int) -> None:
        nonlocal num_planned
        try:
            peer = manifest_from_proto(cache_pb2.PlacementManifest(logical=good.logical, ranks=[rank]))
        except InvalidRequest:
            return
        if check_bridgeable(MANIFEST, peer):
            return
        num_planned += 1
        _check_plans(peer, num_blocks)

    plans()
    assert num_planned > 10


def _check_plans(peer: PlacementManifest, num_blocks: int) -> None:
    (source,) = MANIFEST.ranks
    for target in peer.ranks:
        strips = plan_strips(peer.logical, source.tensor_rank, target.tensor_rank)
        for group in peer.logical.groups:
            field_ids = [item.field_id for item in peer.logical.fields if item.group_id == group.group_id]
            last = target.find_num_blocks(group.group_id) or 0
            blocks = range(max(1, last - num_blocks), last)
            table = plan_block_runs(
                source,
                target,
                field_ids,
                range(1, 1 + len(blocks)),
                blocks,
                group_id=group.group_id,
                strips=strips,
            )
            begins, ends = table.rows[:, 1], table.rows[:, 1] + table.rows[:, 2]
            assert (begins >= target.arena_base).all()
            assert (ends <= target.arena_base + target.arena_bytes).all()
            assert (np.sort(begins)[1:] >= np.sort(ends)[:-1]).all(), "no byte is written twice"

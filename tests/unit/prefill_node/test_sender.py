"""Every block of every field that the grant asks for is sent exactly once, and only when it is complete."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_compute import FIELD_IDS, NUM_LAYERS, FakeArena, FakeExecutor, make_memory_plan

from cache_runtime.transfer.engine import Run, Spans, TransferReport
from cache_runtime.transfer.manifest_builder import build_manifest
from cache_runtime.transfer.schema import PlacementManifest
from node_runtime.handoff.messages import Grant, GroupGrant
from prefill_node.outgoing import OutgoingTransfer, TransferFault, TransferLanded, TransferNews
from prefill_node.sender import PrefillSender

PREFIX = 4
NUM_BLOCKS = 41


class CopyingLink:
    """Copies at once and counts how often each target byte was written."""

    peer = "decode"

    def __init__(self, source: FakeArena, target: FakeArena) -> None:
        self._source = source
        self._target = target
        self.num_writes: Counter[int] = Counter()

    def write(
        self,
        runs: Sequence[Run],
        *,
        key: bytes,
        timeout_s: float,
        is_wanted: Callable[[], bool],
        hashed: Spans,
        digest_kind: str,
    ) -> Future[TransferReport]:
        for run in runs:
            source = run.source_address - self._source.base_address
            target = run.target_address - self._target.base_address
            self._target.memory[target : target + run.length_bytes] = self._source.memory[
                source : source + run.length_bytes
            ]
            self.num_writes.update(range(target, target + run.length_bytes))
        future: Future[TransferReport] = Future()
        num_bytes = sum(run.length_bytes for run in runs)
        future.set_result(TransferReport(num_bytes=num_bytes, num_runs=len(runs), posted_at_s=1.0, landed_at_s=2.0))
        return future

    def close(self) -> None:
        pass


@dataclass
class FakePlan:
    """The part of a plan that sender and executor read."""

    request_ids: list[str]
    begins: np.ndarray
    input_lengths: np.ndarray
    prefill_lengths: np.ndarray
    token_ids: np.ndarray
    block_tables: list[np.ndarray]
    logits_wanted: np.ndarray
    num_rows: int
    num_prefill_rows: int


def chunk_plan(request_id: str, tokens: list[int], begin: int, end: int, table: np.ndarray) -> FakePlan:
    return FakePlan(
        request_ids=[request_id],
        begins=np.array([begin], np.int32),
        input_lengths=np.array([end - begin], np.int32),
        prefill_lengths=np.array([len(tokens)], np.int32),
        token_ids=np.array(tokens[begin:end], np.int32),
        block_tables=[table[None, :]],
        logits_wanted=np.array([0], np.uint8),
        num_rows=1,
        num_prefill_rows=1,
    )


def manifest_of(executor: FakeExecutor) -> PlacementManifest:
    return build_manifest(
        executor.arena.plan,
        stages=executor.stages,
        model_fingerprint="m",
        weight_version="",
        arena_base=executor.arena.base_address,
        data_plane="memory",
        endpoint="memory:1",
    )


@dataclass
class Pair:
    """A prefill arena, a decode arena of another size, and a sender between them."""

    block_granularity: int
    source: FakeExecutor = field(init=False)
    target: FakeExecutor = field(init=False)
    news: list[TransferNews] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = {"prefix_granularity": PREFIX, "block_granularity": self.block_granularity}
        self.source = FakeExecutor(make_memory_plan(num_lcm_blocks=NUM_BLOCKS, **shape))
        self.target = FakeExecutor(make_memory_plan(num_lcm_blocks=NUM_BLOCKS + 7, **shape))
        self.tables: dict[str, np.ndarray] = {}
        manifest = manifest_of(self.source)
        self.sender = PrefillSender(
            logical=manifest.logical,
            sources=manifest.ranks,
            block_tables=lambda request_id: [self.tables[request_id]],
        )
        self.link = CopyingLink(self.source.arena, self.target.arena)
        self.transfer = OutgoingTransfer(
            self.link, self.news.append, key=b"k" * 16, now_s=time.monotonic, write_timeout_s=1.0
        )

    def grant(self, request_id: str, from_token: int, target_blocks: list[int]) -> None:
        first_slot = from_token // self.block_granularity
        group = GroupGrant(group_id="full", first_slot=first_slot, block_ids=tuple(target_blocks[first_slot:]))
        grant = Grant(handoff_id=b"h" * 16, from_token=from_token, groups=(group,))
        self.sender.grant(request_id, grant, manifest_of(self.target).ranks, self.transfer)

    def run_chunk(self, plan: FakePlan, at_stage) -> None:
        self.sender.on_admitted(plan)

        def on_stage(stage: int) -> None:
            at_stage(stage)
            self.sender.on_stage(stage, plan)

        self.source.execute(plan, {}, on_stage)


@st.composite
def scenarios(draw) -> dict[str, object]:
    num_tokens = draw(st.integers(1, 40))
    hit_tokens = draw(st.integers(0, (num_tokens - 1) // PREFIX)) * PREFIX
    cuts = draw(st.sets(st.integers(hit_tokens + 1, num_tokens), max_size=6)) | {num_tokens}
    bounds = [hit_tokens, *sorted(cuts)]
    num_chunks = len(bounds) - 1
    return {
        "tokens": draw(st.lists(st.integers(0, 96), min_size=num_tokens, max_size=num_tokens)),
        "bounds": bounds,
        "from_token": draw(st.integers(0, (num_tokens - 1) // PREFIX)) * PREFIX,
        # A chunk and a stage inside it, or after the last chunk.
        "grant_at": draw(st.tuples(st.integers(0, num_chunks), st.integers(0, NUM_LAYERS - 1))),
        "block_granularity": draw(st.sampled_from([1, 2, 4])),
        "order": draw(st.randoms(use_true_random=False)),
    }


@given(scenarios())
def test_any_chunking_any_hit_and_any_time_of_the_grant_sends_each_block_once_and_whole(case: dict) -> None:
    tokens, bounds = case["tokens"], case["bounds"]
    pair = Pair(case["block_granularity"])
    num_slots = -(-len(tokens) // pair.block_granularity)
    source_blocks = case["order"].sample(range(1, pair.source.arena.plan.num_blocks("full")), num_slots)
    target_blocks = case["order"].sample(range(1, pair.target.arena.plan.num_blocks("full")), num_slots)
    table = pair.tables["r"] = np.array(source_blocks, np.int32)
    for position in range(bounds[0]):
        for field_id in FIELD_IDS:
            pair.source.arena.write_row(field_id, table, position, tokens[position])

    for chunk, (begin, end) in enumerate(pairwise(bounds)):

        def at_stage(stage: int, chunk: int = chunk) -> None:
            if (chunk, stage) == case["grant_at"]:
                pair.grant("r", case["from_token"], target_blocks)

        pair.run_chunk(chunk_plan("r", tokens, begin, end, table), at_stage)
    if case["grant_at"][0] == len(bounds) - 1:
        pair.grant("r", case["from_token"], target_blocks)
        pair.sender.poll()

    first_slot = case["from_token"] // pair.block_granularity
    expected_bytes = 0
    for slot, (source, target) in enumerate(zip(source_blocks, target_blocks, strict=True)):
        for field_id in FIELD_IDS:
            block = pair.target.arena.block_bytes(field_id, target)
            if slot >= first_slot:
                expected_bytes += len(block)
                assert block.tobytes() == pair.source.arena.block_bytes(field_id, source).tobytes()
            else:
                assert not block.any()
    assert set(pair.link.num_writes.values()) == {1}
    assert len(pair.link.num_writes) == expected_bytes
    (landed,) = pair.news
    assert isinstance(landed, TransferLanded)
    assert landed.summary.num_bytes == expected_bytes


def test_blocks_leave_stage_by_stage_while_the_chunk_is_still_being_computed() -> None:
    pair = Pair(4)
    pair.tables["r"] = np.array([5, 6], np.int32)
    sent_before_stage: list[int] = []
    plan = chunk_plan("r", list(range(8)), 0, 8, pair.tables["r"])
    pair.grant("r", 0, [7, 8])
    pair.run_chunk(plan, lambda stage: sent_before_stage.append(len(pair.link.num_writes)))
    block_bytes = pair.source.arena.plan.fields[0].block_bytes
    assert sent_before_stage == [0, 4 * block_bytes, 8 * block_bytes]


def test_an_incomplete_block_waits_for_the_chunk_that_completes_it() -> None:
    pair = Pair(4)
    tokens = list(range(8))
    table = pair.tables["r"] = np.array([5, 6], np.int32)
    pair.grant("r", 0, [7, 8])
    pair.run_chunk(chunk_plan("r", tokens, 0, 6, table), lambda stage: None)
    assert not pair.target.arena.block_bytes("layers.0.k", 8).any()
    pair.run_chunk(chunk_plan("r", tokens, 6, 8, table), lambda stage: None)
    assert pair.target.arena.block_bytes("layers.0.k", 8).any()


def test_a_prompt_that_was_forgotten_is_not_sent() -> None:
    pair = Pair(4)
    table = pair.tables["r"] = np.array([5], np.int32)
    pair.run_chunk(chunk_plan("r", [1, 2, 3], 0, 3, table), lambda stage: None)
    pair.sender.forget("r")
    pair.grant("r", 0, [7])
    pair.sender.poll()
    assert not pair.link.num_writes


def test_a_block_outside_the_arena_fails_this_delivery_once_and_not_the_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair = Pair(4)
    table = pair.tables["r"] = np.array([NUM_BLOCKS + 1], np.int32)
    plan = chunk_plan("r", [1, 2, 3], 0, 3, table)
    pair.grant("r", 0, [7])
    pair.sender.on_admitted(plan)
    for stage in range(NUM_LAYERS):
        pair.sender.on_stage(stage, plan)
    assert len(caplog.records) == 1
    (fault,) = pair.news
    assert isinstance(fault, TransferFault)
    assert "outside" in str(fault.error)


def test_the_block_table_is_read_when_it_is_needed() -> None:
    pair = Pair(4)
    table = np.array([5], np.int32)
    pair.run_chunk(chunk_plan("r", [1, 2, 3], 0, 3, table), lambda stage: None)
    pair.tables["r"] = table
    pair.grant("r", 0, [7])
    pair.sender.poll()
    assert pair.target.arena.block_bytes("layers.2.v", 7).any()

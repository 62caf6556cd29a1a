"""What `--verify-transfers all` adds to a handoff: one prompt's cache over a data plane between two processes.

The sender ships every block of every layer, a layer at a time, as a prefill node does for a computed prompt; with
checksums it hashes beside the transfer and tells of what has landed, and the receiver compares while the rest is on its
way. The transfer time counts from the first post until the sender knows that the last byte has landed; the verified one
until the sender has heard that the last block was compared. Both processes and the network between them share this
machine's cores, so what hashing takes away from the transfer counts as well.

Rounds go by turns, without checksums and with each kind of digest that this machine takes; what is added is the median
over rounds of two times of one round, and the goal is that of the kind which two nodes like this one agree on. Time on
a core is counted beside it, of all threads of both processes: where no core is idle the transfer takes longer by as
much as that grows.

The floor is what no implementation avoids: every byte is hashed once on either side, at the rate of one core whose
cache has the bytes already, because they were moved just now. From memory is the rate of hashing at any other time.
Usage: bench_verify.py [--tokens N] [--rounds N] [--planes NAME ...]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from pdmesh.v1 import handoff_pb2
from rich.console import Console
from rows import Report

from cache_runtime.recipes.dense import DenseCacheRecipe
from cache_runtime.recipes.plan import CacheMemoryPlan
from cache_runtime.recipes.rows import key_value_fields
from cache_runtime.shared_memory import SharedMemory
from cache_runtime.transfer import create_engine
from cache_runtime.transfer.block_spans import block_spans
from cache_runtime.transfer.checksums import RUNNABLE_DIGEST_KINDS, BlockHasher
from cache_runtime.transfer.engine import XXH3, DataPlaneError, Region, TransferEngine
from cache_runtime.transfer.manifest_builder import build_manifest
from cache_runtime.transfer.peer_hasher import EqualRanksHasher
from cache_runtime.transfer.planner import plan_block_runs
from cache_runtime.transfer.schema import PlacementManifest
from decode_node.verification import TransferVerifier
from node_runtime.handoff.messages import Checksums, GroupGrant
from node_runtime.wire.handoff import response_from_proto, response_to_proto
from prefill_node.checksums import ChecksumNews, ShippedBlocks, TransferChecksums
from prefill_node.outgoing import OutgoingTransfer, TransferNews

BLOCK_TOKENS = 64
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 30, 3, 64  # SmolLM2-135M
PLANES = ("shm", "stream", "mooncake")
PLAIN = ""
KINDS = (PLAIN, *RUNNABLE_DIGEST_KINDS)
KEYS = {kind: kind.encode().ljust(16) for kind in KINDS}  # of the grants to transfers without and with checksums
HANDOFF_ID = b"h" * 16
# What goes before a message: the place of its kind, and its length in bytes.
FRAME = struct.Struct("<BI")
GOAL_PERCENT = 10.0
PR_SET_PDEATHSIG, SIGKILL = 1, 9
console = Console(stderr=True)


def cache(num_tokens: int) -> CacheMemoryPlan:
    recipe = DenseCacheRecipe(
        prefix_granularity=BLOCK_TOKENS,
        memory_bytes=4 << 30,
        num_layers=NUM_LAYERS,
        row_fields=key_value_fields(NUM_KV_HEADS, HEAD_DIM),
        dtype="float32",
        block_granularity=BLOCK_TOKENS,
    )
    return recipe.setup().plan.layout.bind(num_tokens // BLOCK_TOKENS)


def node(plane: str, num_tokens: int) -> tuple[TransferEngine, SharedMemory, PlacementManifest]:
    plan = cache(num_tokens)
    memory = SharedMemory(plan.num_arena_bytes, "bench-arena")
    contents = np.random.default_rng(os.getpid()).integers(0, 256, memory.num_bytes, dtype=np.uint8)
    np.frombuffer(memory.mapping, dtype=np.uint8)[:] = contents
    engine = create_engine(plane)
    engine.register(memory.base_address, memory.num_bytes, shared_descriptor=memory.descriptor)
    manifest = build_manifest(
        plan,
        stages=[(f"layers.{layer}.k", f"layers.{layer}.v") for layer in range(NUM_LAYERS)],
        model_fingerprint="none",
        weight_version="",
        arena_base=memory.base_address,
        data_plane=engine.name,
        endpoint=engine.endpoint,
    )
    return engine, memory, manifest


def blocks_of(num_tokens: int) -> tuple[int, ...]:
    return tuple(range(1, num_tokens // BLOCK_TOKENS + 1))


def receive(plane: str, num_tokens: int) -> None:
    """The peer process: says where it is, then compares what it is told of and answers each message with a line."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
    engine, _, manifest = node(plane, num_tokens)
    (rank,) = manifest.ranks
    (group,) = manifest.logical.groups
    blocks = blocks_of(num_tokens)
    spans = block_spans(manifest.logical, rank, {group.group_id: blocks})
    permits = {kind: engine.allow(key, spans, hashed_as=kind or None) for kind, key in KEYS.items()}
    verifier = TransferVerifier(manifest.logical, manifest.ranks, fraction=1.0, seed=0)
    grants = (GroupGrant(group_id=group.group_id, first_slot=0, block_ids=blocks),)
    print(json.dumps({"endpoint": rank.endpoint, "arena_base": rank.arena_base}), flush=True)
    while head := sys.stdin.buffer.read(FRAME.size):
        index, num_bytes = FRAME.unpack(head)
        kind = KINDS[index]
        message = handoff_pb2.HandoffResponse.FromString(sys.stdin.buffer.read(num_bytes))
        checksums = response_from_proto(message)
        assert isinstance(checksums, Checksums)
        print(verifier.find_damage(grants, checksums, partial(permits[kind].digests, kind=kind)) or "same", flush=True)
    os._exit(0)


class Sender:
    """Ships the whole cache, with and without checksums."""

    def __init__(self, plane: str, num_tokens: int, peer: subprocess.Popen[bytes]) -> None:
        assert peer.stdin is not None
        assert peer.stdout is not None
        self._said, self._heard = peer.stdin, peer.stdout
        target = json.loads(self._heard.readline())
        engine, self.memory, self.manifest = node(plane, num_tokens)
        (self._source,) = self.manifest.ranks
        self._target = replace(self._source, arena_base=target["arena_base"])
        region = Region(base_address=target["arena_base"], num_bytes=self.memory.num_bytes)
        self._link = engine.open_peer(target["endpoint"], [region])
        self._blocks = blocks_of(num_tokens)
        self._hashing = ThreadPoolExecutor(max_workers=1)
        self.num_bytes = 0

    def round(self, kind: str) -> float:
        """Seconds; with checksums of `kind`, none for `PLAIN`."""
        landed, told = threading.Event(), threading.Event()
        num_parts = num_digests = 0

        def on_news(_: TransferNews) -> None:
            landed.set()

        def on_checksums(news: ChecksumNews) -> None:
            nonlocal num_parts, num_digests
            if isinstance(news, Checksums):
                num_parts += 1
                num_digests += sum(item.num_blocks for item in news.fields)
                message = response_to_proto(news).SerializeToString()
                self._said.write(FRAME.pack(KINDS.index(kind), len(message)) + message)
                self._said.flush()
            else:
                told.set()

        begun_at_s = time.perf_counter()
        key = KEYS[kind]
        transfer = OutgoingTransfer(self._link, on_news, key=key, now_s=time.monotonic, write_timeout_s=60.0)
        checksums = TransferChecksums(
            EqualRanksHasher([self._source]),
            self._hashing,
            handoff_id=HANDOFF_ID,
            tell=on_checksums,
            on_fault=print,
            link_hashes=self._link.hashes,
            kind=kind or XXH3,
        )
        num_bytes = 0
        for stage in self.manifest.logical.stages:
            runs = plan_block_runs(self._source, self._target, stage.field_ids, self._blocks, self._blocks)
            shipped = ShippedBlocks(field_ids=stage.field_ids, first_slot=0, blocks=self._blocks)
            transfer.post(runs, checksums.posting([shipped]) if kind else None)
            num_bytes += runs.num_bytes
        transfer.complete()
        landed.wait()
        if kind:
            checksums.complete()
            told.wait()
            answers = {self._heard.readline().strip() for _ in range(num_parts)}
            num_expected = len(self._blocks) * len(self.manifest.logical.fields)
            assert (answers, num_digests) == ({b"same"}, num_expected), (answers, num_digests)
        self.num_bytes = num_bytes
        return time.perf_counter() - begun_at_s

    def hashing_rate(self, blocks: tuple[int, ...], kind: str) -> float:
        """Bytes per second on a core, of hashing these blocks of every field."""
        hasher, fields = BlockHasher(self._source), self.manifest.logical.fields
        num_bytes = sum(rank_field.block_bytes for rank_field in self._source.fields) * len(blocks)
        begun_s = time.thread_time()
        for item in fields:
            hasher.digests(item.field_id, blocks, kind)
        return num_bytes / (time.thread_time() - begun_s)

    def rate_from_memory(self, kind: str) -> float:
        return self.hashing_rate(self._blocks, kind)

    def rate_in_cache(self, kind: str) -> float:
        """Most of it the same two blocks, again and again."""
        return self.hashing_rate(self._blocks[:2] * 64, kind)


def cpu_s(*pids: int) -> float:
    """Seconds on a core of all threads of these processes. Source: proc(5), schedstat."""
    tasks = (task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir())
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def added(measured: dict[str, list[float]], kind: str) -> float:
    """The share by which `kind` is above what goes without."""
    return statistics.median(more / less - 1 for less, more in zip(measured[PLAIN], measured[kind], strict=True))


def measure(plane: str, num_tokens: int, num_rounds: int, report: Report) -> None:
    command = [sys.executable, __file__, "--receive", plane, "--tokens", str(num_tokens)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as peer:
        sender = Sender(plane, num_tokens, peer)
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        cpu: dict[str, list[float]] = {kind: [] for kind in KINDS}
        from_memory: dict[str, list[float]] = {kind: [] for kind in RUNNABLE_DIGEST_KINDS}
        in_cache: dict[str, list[float]] = {kind: [] for kind in RUNNABLE_DIGEST_KINDS}
        # By turns, so that whatever else the machine does meets all of them. The first round touches memory.
        for index in range(num_rounds + 1):
            for kind in RUNNABLE_DIGEST_KINDS:
                from_memory[kind].append(sender.rate_from_memory(kind))
                in_cache[kind].append(sender.rate_in_cache(kind))
            first = index % len(KINDS)
            for kind in KINDS[first:] + KINDS[:first]:
                begun_s = cpu_s(os.getpid(), peer.pid)
                elapsed_s = sender.round(kind)
                busy_s = cpu_s(os.getpid(), peer.pid) - begun_s
                if index > 0:
                    times[kind].append(elapsed_s)
                    cpu[kind].append(busy_s)
        peer.kill()
    plain, busy = statistics.median(times[PLAIN]), statistics.median(cpu[PLAIN])
    report.higher(f"{plane}: rate without", sender.num_bytes / plain / 1e9, "GB/s")
    report.lower(f"{plane}: transfer", plain * 1000, "ms")
    report.lower(f"{plane}: time on a core", busy * 1000, "ms")
    for kind in RUNNABLE_DIGEST_KINDS:
        goal = GOAL_PERCENT if kind == RUNNABLE_DIGEST_KINDS[0] else None
        case = f"{plane}, {kind}"
        report.higher(f"{case}: hashing from memory, one core", statistics.median(from_memory[kind]) / 1e9, "GB/s")
        report.higher(f"{case}: hashing in cache, one core", statistics.median(in_cache[kind]) / 1e9, "GB/s")
        report.lower(f"{case}: verified transfer", statistics.median(times[kind]) * 1000, "ms")
        report.lower(f"{case}: added", 100 * added(times, kind), "%", goal)
        report.lower(f"{case}: added time on a core", 100 * added(cpu, kind), "%", goal)
        floor = 2 * sender.num_bytes / statistics.median(in_cache[kind])
        report.lower(f"{case}: floor of added time on a core", 100 * floor / busy, "%")
    console.print(f"measured {plane}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--planes", nargs="+", default=list(PLANES), choices=PLANES)
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive is not None:
        receive(options.receive, options.tokens)
    report = Report("verify")
    for plane in options.planes:
        try:
            create_engine(plane).close()
        except DataPlaneError as error:
            console.print(f"without {plane}: {error}")
            continue
        measure(plane, options.tokens, options.rounds, report)
    report.print()
    # Native threads of the data planes may still be at work.
    os._exit(0)


if __name__ == "__main__":
    main()

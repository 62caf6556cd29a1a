"""What `--verify-transfers all` adds to a handoff: one prompt's cache over a data plane between two processes.

The sender ships every block of every layer, a layer at a time, as a prefill node does for a computed prompt; with
checksums it hashes beside the transfer and tells of what has landed, and the receiver compares while the rest is on its
way. The transfer time counts from the first post until the sender knows that the last byte has landed; the verified one
until the sender has heard that the last block was compared. Both processes and the network between them share this
machine's cores, so what hashing takes away from the transfer counts as well.

Rounds go by turns, and what is added is the median over rounds of both times of one round. Time on a core is counted
beside it, of all threads of both processes: where no core is idle the transfer takes longer by as much as that grows.

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
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rows import Report

from cache_runtime.recipes.dense import DenseCacheRecipe
from cache_runtime.recipes.plan import CacheMemoryPlan
from cache_runtime.recipes.rows import key_value_fields
from cache_runtime.shared_memory import SharedMemory
from cache_runtime.transfer import create_engine
from cache_runtime.transfer.block_spans import block_spans
from cache_runtime.transfer.checksums import BlockHasher
from cache_runtime.transfer.engine import DataPlaneError, Region, TransferEngine
from cache_runtime.transfer.manifest_builder import build_manifest
from cache_runtime.transfer.peer_hasher import EqualRanksHasher
from cache_runtime.transfer.planner import plan_block_runs
from cache_runtime.transfer.schema import PlacementManifest
from node_runtime.handoff.messages import Checksums
from prefill_node.checksums import ChecksumNews, ShippedBlocks, TransferChecksums
from prefill_node.outgoing import OutgoingTransfer, TransferNews

BLOCK_TOKENS = 64
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 30, 3, 64  # SmolLM2-135M
PLANES = ("shm", "stream", "mooncake")
KEYS = {False: b"p" * 16, True: b"v" * 16}  # of the grants to plain and to verified transfers
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
    """The peer process: says where it is, then compares what it is told of and answers each line."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
    engine, _, manifest = node(plane, num_tokens)
    (rank,) = manifest.ranks
    (group,) = manifest.logical.groups
    spans = block_spans(manifest.logical, rank, {group.group_id: blocks_of(num_tokens)})
    engine.allow(KEYS[False], spans)
    permit = engine.allow(KEYS[True], spans, hashes=True)
    hasher = BlockHasher(rank)
    print(json.dumps({"endpoint": rank.endpoint, "arena_base": rank.arena_base}), flush=True)
    for line in sys.stdin:
        told = json.loads(line)
        same = all(
            permit.digests(hasher.spans(field_id, range(first + 1, first + 1 + len(digests) // 16))).hex() == digests
            for field_id, first, digests in told
        )
        print("same" if same else "other", flush=True)
    os._exit(0)


class Sender:
    """Ships the whole cache, with and without checksums."""

    def __init__(self, plane: str, num_tokens: int, peer: subprocess.Popen[str]) -> None:
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

    def round(self, *, verify: bool) -> float:
        """Seconds."""
        landed, told = threading.Event(), threading.Event()
        num_parts = num_digests = 0

        def on_news(_: TransferNews) -> None:
            landed.set()

        def on_checksums(news: ChecksumNews) -> None:
            nonlocal num_parts, num_digests
            if isinstance(news, Checksums):
                num_parts += 1
                num_digests += sum(item.num_blocks for item in news.fields)
                lines = [(item.field_id, item.first_slot, item.digests.hex()) for item in news.fields]
                self._said.write(json.dumps(lines) + "\n")
                self._said.flush()
            else:
                told.set()

        begun_at_s = time.perf_counter()
        key = KEYS[verify]
        transfer = OutgoingTransfer(self._link, on_news, key=key, now_s=time.monotonic, write_timeout_s=60.0)
        checksums = TransferChecksums(
            EqualRanksHasher([self._source]),
            self._hashing,
            handoff_id=key,
            tell=on_checksums,
            on_fault=print,
            link_hashes=self._link.hashes,
        )
        num_bytes = 0
        for stage in self.manifest.logical.stages:
            runs = plan_block_runs(self._source, self._target, stage.field_ids, self._blocks, self._blocks)
            shipped = ShippedBlocks(field_ids=stage.field_ids, first_slot=0, blocks=self._blocks)
            transfer.post(runs, checksums.posting([shipped]) if verify else None)
            num_bytes += runs.num_bytes
        transfer.complete()
        landed.wait()
        if verify:
            checksums.complete()
            told.wait()
            answers = {self._heard.readline().strip() for _ in range(num_parts)}
            num_expected = len(self._blocks) * len(self.manifest.logical.fields)
            assert (answers, num_digests) == ({"same"}, num_expected), (answers, num_digests)
        self.num_bytes = num_bytes
        return time.perf_counter() - begun_at_s

    def hashing_rate(self, blocks: tuple[int, ...]) -> float:
        """Bytes per second on a core, of hashing these blocks of every field."""
        hasher, fields = BlockHasher(self._source), self.manifest.logical.fields
        num_bytes = sum(rank_field.block_bytes for rank_field in self._source.fields) * len(blocks)
        begun_s = time.thread_time()
        for item in fields:
            hasher.digests(item.field_id, blocks)
        return num_bytes / (time.thread_time() - begun_s)

    def rate_from_memory(self) -> float:
        return self.hashing_rate(self._blocks)

    def rate_in_cache(self) -> float:
        """Most of it the same two blocks, again and again."""
        return self.hashing_rate(self._blocks[:2] * 64)


def cpu_s(*pids: int) -> float:
    """Seconds on a core of all threads of these processes. Source: proc(5), schedstat."""
    tasks = (task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir())
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def measure(plane: str, num_tokens: int, num_rounds: int, report: Report) -> None:
    command = [sys.executable, __file__, "--receive", plane, "--tokens", str(num_tokens)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        sender = Sender(plane, num_tokens, peer)
        times: dict[bool, list[float]] = {False: [], True: []}
        from_memory, in_cache = [], []
        cpu: dict[bool, list[float]] = {False: [], True: []}
        # By turns, so that whatever else the machine does meets both. The first round touches memory.
        for index in range(num_rounds + 1):
            from_memory.append(sender.rate_from_memory())
            in_cache.append(sender.rate_in_cache())
            round_times, round_cpu = {}, {}
            for verify in times:
                begun_s = cpu_s(os.getpid(), peer.pid)
                round_times[verify] = sender.round(verify=verify)
                round_cpu[verify] = cpu_s(os.getpid(), peer.pid) - begun_s
            if index > 0:
                for verify in times:
                    times[verify].append(round_times[verify])
                    cpu[verify].append(round_cpu[verify])
        peer.kill()
    pairs = tuple(zip(times[False], times[True], strict=True))
    plain = statistics.median(times[False])
    added = statistics.median(verified / without - 1 for without, verified in pairs)
    report.higher(f"{plane}: rate without", sender.num_bytes / plain / 1e9, "GB/s")
    report.higher(f"{plane}: hashing from memory, one core", statistics.median(from_memory) / 1e9, "GB/s")
    report.higher(f"{plane}: hashing in cache, one core", statistics.median(in_cache) / 1e9, "GB/s")
    report.lower(f"{plane}: transfer", plain * 1000, "ms")
    report.lower(f"{plane}: verified transfer", statistics.median(times[True]) * 1000, "ms")
    report.lower(f"{plane}: added", 100 * added, "%", GOAL_PERCENT)
    busy = statistics.median(cpu[False])
    busier = statistics.median(more / less - 1 for less, more in zip(cpu[False], cpu[True], strict=True))
    floor = 2 * sender.num_bytes / statistics.median(in_cache)
    report.lower(f"{plane}: time on a core", busy * 1000, "ms")
    report.lower(f"{plane}: added time on a core", 100 * busier, "%", GOAL_PERCENT)
    report.lower(f"{plane}: floor of added time on a core", 100 * floor / busy, "%")
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

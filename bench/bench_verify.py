"""What `--verify-transfers all` adds to a handoff: one prompt's cache over the data plane between two processes.

The sender ships every block of every layer, a layer at a time, as a prefill node does for a computed prompt; with
checksums it hashes beside the transfer and tells of what has landed, and the receiver compares while the rest is on its
way. Measured is the time until the last byte has landed, and until the last block was compared; both processes and the
network between them share this machine's cores. Prints one JSON object.
Usage: bench_verify.py [NUM_TOKENS] [NUM_ROUNDS]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from cache_runtime.recipes.dense import DenseCacheRecipe
from cache_runtime.recipes.plan import CacheMemoryPlan
from cache_runtime.recipes.rows import key_value_fields
from cache_runtime.transfer import create_engine
from cache_runtime.transfer.checksums import BlockHasher
from cache_runtime.transfer.engine import Region, TransferEngine
from cache_runtime.transfer.planner import plan_block_runs
from cache_runtime.transfer.schema import PlacementManifest, build_manifest
from node_runtime.handoff.messages import Checksums
from prefill_node.checksums import ChecksumNews, ShippedBlocks, TransferChecksums
from prefill_node.outgoing import OutgoingTransfer, TransferNews

BLOCK_TOKENS = 64
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 30, 3, 64  # SmolLM2-135M


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


def node(num_tokens: int) -> tuple[TransferEngine, npt.NDArray[np.uint8], PlacementManifest]:
    plan = cache(num_tokens)
    memory = np.random.default_rng(0).integers(0, 256, plan.num_arena_bytes, dtype=np.uint8)
    engine = create_engine("mooncake")
    engine.register(int(memory.ctypes.data), memory.nbytes)
    manifest = build_manifest(
        plan,
        stages=[(f"layers.{layer}.k", f"layers.{layer}.v") for layer in range(NUM_LAYERS)],
        model_fingerprint="none",
        weight_version="",
        arena_base=int(memory.ctypes.data),
        data_plane=engine.name,
        endpoint=engine.endpoint,
    )
    return engine, memory, manifest


def receive(num_tokens: int) -> None:
    """The peer process: says where it is, then compares what it is told of and answers each line."""
    _, _, manifest = node(num_tokens)
    (rank,) = manifest.ranks
    hasher = BlockHasher(rank)
    print(json.dumps({"endpoint": rank.endpoint, "arena_base": rank.arena_base}), flush=True)
    for line in sys.stdin:
        told = json.loads(line)
        same = all(
            hasher.digests(field_id, range(first + 1, first + 1 + len(digests) // 16)).hex() == digests
            for field_id, first, digests in told
        )
        print("same" if same else "other", flush=True)
    os._exit(0)


class Sender:
    """Ships the whole cache, with and without checksums."""

    def __init__(self, num_tokens: int, peer: subprocess.Popen[str]) -> None:
        assert peer.stdin is not None
        assert peer.stdout is not None
        self._said, self._heard = peer.stdin, peer.stdout
        target = json.loads(self._heard.readline())
        engine, self._memory, self.manifest = node(num_tokens)
        (self._source,) = self.manifest.ranks
        self._target = replace(self._source, arena_base=target["arena_base"])
        region = Region(base_address=target["arena_base"], num_bytes=self._memory.nbytes)
        self._link = engine.open_peer(target["endpoint"], [region])
        self._blocks = tuple(range(1, num_tokens // BLOCK_TOKENS + 1))
        self._hashing = ThreadPoolExecutor(max_workers=1)

    def round(self, *, verify: bool) -> float:
        """Seconds."""
        landed, told = threading.Event(), threading.Event()
        num_parts = 0

        def on_news(_: TransferNews) -> None:
            landed.set()

        def on_checksums(news: ChecksumNews) -> None:
            nonlocal num_parts
            if isinstance(news, Checksums):
                num_parts += 1
                lines = [(item.field_id, item.first_slot, item.digests.hex()) for item in news.fields]
                self._said.write(json.dumps(lines) + "\n")
                self._said.flush()
            else:
                told.set()

        begun_at_s = time.perf_counter()
        transfer = OutgoingTransfer(self._link, on_news, key=b"h" * 16, now_s=time.monotonic, write_timeout_s=60.0)
        checksums = TransferChecksums(
            BlockHasher(self._source), self._hashing, handoff_id=b"h" * 16, tell=on_checksums, on_fault=print
        )
        for stage in self.manifest.logical.stages:
            runs = plan_block_runs(self._source, self._target, stage.field_ids, self._blocks, self._blocks)
            shipped = ShippedBlocks(field_ids=stage.field_ids, first_slot=0, blocks=self._blocks)
            transfer.post(runs, checksums.posting([shipped]) if verify else None)
        transfer.complete()
        landed.wait()
        if verify:
            checksums.complete()
            told.wait()
            answers = {self._heard.readline().strip() for _ in range(num_parts)}
            assert answers == {"same"}, answers
        return time.perf_counter() - begun_at_s


def main(num_tokens: int, num_rounds: int) -> None:
    command = [sys.executable, __file__, "receive", str(num_tokens)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        sender = Sender(num_tokens, peer)
        times: dict[bool, list[float]] = {False: [], True: []}
        # By turns, so that whatever else the machine does meets both.
        for _ in range(num_rounds):
            for verify, seconds in times.items():
                seconds.append(sender.round(verify=verify))
        plain, verified = (statistics.median(times[verify]) * 1000 for verify in (False, True))
        print(
            json.dumps(
                {
                    "num_tokens": num_tokens,
                    "transfer_ms": round(plain, 1),
                    "verified_transfer_ms": round(verified, 1),
                    "best_transfer_ms": round(min(times[False]) * 1000, 1),
                    "best_verified_transfer_ms": round(min(times[True]) * 1000, 1),
                    "added_percent": round(100 * (verified / plain - 1), 1),
                }
            ),
            flush=True,
        )
        peer.kill()
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["receive"]:
        receive(int(sys.argv[2]))
    else:
        numbers = [int(argument) for argument in sys.argv[1:]]
        main(*(numbers + [4096, 20][len(numbers) :]))

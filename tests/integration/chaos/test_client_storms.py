"""Hundreds of clients that come at once and all leave again."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import grpc
from integration.chaos.field import COMPUTE_NODES, PROMPTS, ROUTER, Field

NUM_REQUESTS = 300
# The first two storms fill pools and caches that are kept; what two more add would be a leak. One of a request's
# buffers, or of one thread or socket each, is far above this.
GROWTH_BOUND_BYTES = 16 << 20
GROWTH_BOUND_FILES = 20
STATUSES = {grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED}


def resident_bytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * 4096


def num_open(pid: int) -> int:
    """Files, sockets and threads."""
    return sum(len(list(Path(f"/proc/{pid}/{kind}").iterdir())) for kind in ("fd", "task"))


def storm(field: Field, seed: int) -> None:
    """Every client leaves: some at once, some when they have heard something, in any order."""
    drawn = random.Random(seed)
    with field.client() as client:
        streams = []
        for _ in range(NUM_REQUESTS):
            prompt, _ = PROMPTS[drawn.choice(sorted(PROMPTS))]
            streams.append(client.start(60.0, token_ids=prompt, max_tokens=2000, ignore_eos=True))
        for stream in drawn.sample(streams, 20):
            with contextlib.suppress(grpc.RpcError, StopIteration):
                next(stream)
        drawn.shuffle(streams)
        for stream in streams:
            stream.cancel()
        assert {stream.code() for stream in streams} <= STATUSES


def test_four_storms_of_300_cancelled_requests_leave_blocks_memory_and_files_as_they_were(field: Field) -> None:
    pids = {name: field.nodes[name].process.pid for name in (*COMPUTE_NODES, ROUTER)}
    before: dict[str, tuple[int, int]] = {}
    for number in range(4):
        storm(field, number)
        field.wait_until_idle()
        if number == 1:
            before = {name: (resident_bytes(pid), num_open(pid)) for name, pid in pids.items()}
    for name, pid in pids.items():
        assert resident_bytes(pid) - before[name][0] < GROWTH_BOUND_BYTES, name
        assert num_open(pid) - before[name][1] < GROWTH_BOUND_FILES, name

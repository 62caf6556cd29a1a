"""Raw large-write rate of shared memory between two processes: what a handoff on one host can at best reach.

Sends one buffer as runs of at most 8 MiB, the longest a handoff posts. Prints one JSON object with bytes per second.
Usage: data_plane_rate.py NUM_BYTES NUM_ROUNDS
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

import numpy as np

from cache_runtime.shared_memory import SharedMemory
from cache_runtime.transfer import create_engine
from cache_runtime.transfer.engine import MAX_RUN_BYTES, NO_KEY, Region, Run


def buffer(num_bytes: int) -> SharedMemory:
    """Touched, so that every page exists."""
    memory = SharedMemory(num_bytes, "bench")
    np.frombuffer(memory.mapping, dtype=np.uint8)[:] = 1
    return memory


def receive(num_bytes: int) -> None:
    """The peer process: registers memory, says where it is, waits until its input closes."""
    engine = create_engine("shm")
    memory = buffer(num_bytes)
    engine.register(memory.base_address, num_bytes)
    engine.allow(NO_KEY, np.array([[memory.base_address, memory.base_address + num_bytes]]))
    print(json.dumps({"endpoint": engine.endpoint, "address": memory.base_address}), flush=True)
    sys.stdin.read()
    os._exit(0)


def send(num_bytes: int, num_rounds: int) -> None:
    command = [sys.executable, __file__, "receive", str(num_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout is not None
        target = json.loads(peer.stdout.readline())
        engine = create_engine("shm")
        memory = buffer(num_bytes)
        engine.register(memory.base_address, num_bytes, shared_descriptor=memory.descriptor)
        region = Region(base_address=target["address"], num_bytes=num_bytes)
        link = engine.open_peer(target["endpoint"], [region])
        runs = [
            Run(memory.base_address + offset, target["address"] + offset, min(MAX_RUN_BYTES, num_bytes - offset))
            for offset in range(0, num_bytes, MAX_RUN_BYTES)
        ]
        reports = [link.write(runs, timeout_s=60).result(timeout=90) for _ in range(num_rounds)]
        seconds = [report.landed_at_s - report.posted_at_s for report in reports]
        rates = [num_bytes / each for each in seconds[1:]]
        row = {"median_bytes_per_s": statistics.median(rates), "best_bytes_per_s": max(rates)}
        print(json.dumps(row), flush=True)
        peer.kill()
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(int(sys.argv[2]))
    else:
        send(int(sys.argv[1]), int(sys.argv[2]))

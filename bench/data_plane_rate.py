"""Raw large-write rate of the Mooncake data plane between two processes: what a handoff can at best reach.

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

from cache_runtime.transfer import create_engine
from cache_runtime.transfer.engine import MAX_RUN_BYTES, Region, Run


def buffer(num_bytes: int) -> np.ndarray:
    """uint8 [num_bytes], touched so that every page exists."""
    return np.ones(num_bytes, dtype=np.uint8)


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def receive(num_bytes: int) -> None:
    """The peer process: registers memory, says where it is, waits until its input closes."""
    engine = create_engine("mooncake")
    memory = buffer(num_bytes)
    engine.register(address(memory), num_bytes)
    print(json.dumps({"endpoint": engine.endpoint, "address": address(memory)}), flush=True)
    sys.stdin.read()
    os._exit(0)


def send(num_bytes: int, num_rounds: int) -> None:
    command = [sys.executable, __file__, "receive", str(num_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout is not None
        target = json.loads(peer.stdout.readline())
        engine = create_engine("mooncake")
        memory = buffer(num_bytes)
        engine.register(address(memory), num_bytes)
        region = Region(base_address=target["address"], num_bytes=num_bytes)
        link = engine.open_peer(target["endpoint"], [region])
        runs = [
            Run(address(memory) + offset, target["address"] + offset, min(MAX_RUN_BYTES, num_bytes - offset))
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

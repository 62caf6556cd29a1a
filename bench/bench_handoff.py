"""Data planes next to what the machine allows: memcpy between two processes' memory, and a plain TCP socket.

A round moves the same bytes once each way of doing it, one after the other, so that ratios hold although the machine is
noisy; a ratio is the median over rounds of both values of one round. Sources are in order and targets are scattered, as
blocks of a cache are; they come as the planner makes them. memcpy is one native loop over the same runs, from memory of
the other process that this one has mapped; the plain socket moves one contiguous buffer with as few calls as it takes,
whatever the runs are. A write counts from the call to its future's end. A stream of short runs spends 93 % of its time
in the kernel, 71 % of all in the kernel's copies, and 6 % in code of ours and Python.
Usage: bench_handoff.py [--rounds N] [--mib N]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import trustme
from rich.console import Console
from rows import Report

from cache_runtime.shared_memory import MappedMemory, SharedMemory
from cache_runtime.transfer import create_engine
from cache_runtime.transfer._native import copy_runs
from cache_runtime.transfer.engine import NO_KEY, DataPlaneError, PeerLink, Region, Run, TransferEngine
from cache_runtime.transfer.runs import RunTable
from cache_runtime.transfer.stream_tls import TlsFiles

BENCH = "handoff"
RUN_BYTES = {"4 KiB": 4 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20}
HOST = "127.0.0.1"
GOALS = {"shm": 0.60, "stream": 0.80}
# Those without a goal that take their time: Mooncake over TCP needs 100 us for a small run.
SLOW = ("stream with TLS", "mooncake")
SLOW_ROUNDS = 5
SLOW_MAX_BYTES = 32 << 20
SLOW_MAX_RUNS = 2048
PR_SET_PDEATHSIG, SIGKILL = 1, 9
console = Console(stderr=True)


def view(memory: SharedMemory) -> npt.NDArray[np.uint8]:
    return np.frombuffer(memory.mapping, dtype=np.uint8)


def open_engines(folder: Path) -> dict[str, TransferEngine]:
    """One engine of each kind that this machine has, by the name of its rows."""
    tls = TlsFiles(certificate=folder / "node.pem", key=folder / "node.key", authority=folder / "authority.pem")
    engines = {
        "shm": create_engine("shm"),
        "stream": create_engine("stream", host=HOST, bind_host=HOST),
        "stream with TLS": create_engine("stream", host=HOST, bind_host=HOST, tls=tls),
    }
    try:
        engines["mooncake"] = create_engine("mooncake", host=HOST, protocol="tcp")
    except DataPlaneError as error:
        console.print(f"without mooncake: {error}")
    return engines


def make_certificates(folder: Path) -> None:
    authority = trustme.CA()
    signed = authority.issue_cert(HOST)
    (folder / "node.pem").write_bytes(b"".join(blob.bytes() for blob in signed.cert_chain_pems))
    (folder / "node.key").write_bytes(signed.private_key_pem.bytes())
    (folder / "authority.pem").write_bytes(authority.cert_pem.bytes())


# The process at the other end.


def receive(num_bytes: int, folder: Path) -> None:
    """Exposes memory on every plane and takes what comes over a plain socket, until its input closes."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
    memory = SharedMemory(num_bytes, "bench-target")
    view(memory)[:] = 1
    engines = open_engines(folder)
    for engine in engines.values():
        engine.register(memory.base_address, num_bytes)
        engine.allow(NO_KEY, np.array([[memory.base_address, memory.base_address + num_bytes]]))
    listener = socket.create_server((HOST, 0))
    threading.Thread(target=take_plain, args=(listener, memory), daemon=True).start()
    hello = {
        "address": memory.base_address,
        "file": f"/proc/{os.getpid()}/fd/{memory.descriptor}",
        "port": listener.getsockname()[1],
        "endpoints": {name: engine.endpoint for name, engine in engines.items()},
    }
    print(json.dumps(hello), flush=True)
    sys.stdin.read()
    os._exit(0)


def take_plain(listener: socket.socket, memory: SharedMemory) -> None:
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    target, num_received = memoryview(memory.mapping), 0
    while (num_bytes := connection.recv_into(target[num_received:])) > 0:
        num_received += num_bytes
        if num_received == len(target):
            num_received = 0
            connection.sendall(b"x")


# The process that measures.


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Source memory here, target memory there, and the ways between them."""

    source: SharedMemory
    mapped: MappedMemory  # the target's memory
    spare: SharedMemory  # what memcpy writes to
    target_address: int
    plain: socket.socket
    links: dict[str, PeerLink]

    def send_plain(self) -> None:
        self.plain.sendall(self.source.mapping)
        if not self.plain.recv(1):
            raise ConnectionError("the plain socket's receiver is gone")


def rate(move: Callable[[], object], num_bytes: int) -> float:
    """Bytes per second of one go."""
    began = time.perf_counter()
    move()
    return num_bytes / (time.perf_counter() - began)


def scattered(source: int, target: int, num_bytes: int, run_bytes: int) -> RunTable:
    num_runs = num_bytes // run_bytes
    rows = np.empty((num_runs, 3), dtype=np.int64)
    rows[:, 0] = source + np.arange(num_runs) * run_bytes
    rows[:, 1] = target + np.random.default_rng(num_runs).permutation(num_runs) * run_bytes
    rows[:, 2] = run_bytes
    return RunTable(rows)


def check(bench: Bench, runs: Sequence[Run], name: str) -> None:
    """What was measured must have happened."""
    here, there = view(bench.source), bench.mapped
    for run in (runs[0], runs[-1]):
        begin = run.source_address - bench.source.base_address
        sent = here[begin : begin + run.length_bytes].tobytes()
        if ctypes.string_at(there.base_address + run.target_address - bench.target_address, len(sent)) != sent:
            raise AssertionError(f"{name}: the bytes did not arrive")


def write(link: PeerLink, runs: Sequence[Run]) -> None:
    link.write(runs, timeout_s=60).result(timeout=90)


def measure(bench: Bench, report: Report, size: str, num_rounds: int) -> None:
    """Adds the rows of one run length."""
    num_bytes, run_bytes = bench.source.num_bytes, RUN_BYTES[size]
    runs = scattered(bench.source.base_address, bench.target_address, num_bytes, run_bytes)
    copies = scattered(bench.mapped.base_address, bench.spare.base_address, num_bytes, run_bytes).rows
    ways: dict[str, Callable[[], object]] = {"memcpy": lambda: copy_runs(copies), "plain socket": bench.send_plain}
    for name, link in bench.links.items():
        if name not in SLOW:
            ways[name] = partial(write, link, runs)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for round_index in range(num_rounds + 1):
        for name, move in ways.items():
            measured = rate(move, num_bytes)
            if round_index > 0:  # the first touches memory
                rates[name].append(measured)
            elif name in bench.links:
                check(bench, runs, name)
    for name, values in rates.items():
        report.higher(f"{name}, runs of {size}", statistics.median(values) / 1e9, "GB/s")
    measure_slow(bench, report, size, runs[: min(SLOW_MAX_RUNS, SLOW_MAX_BYTES // run_bytes)])
    for name, reference in (("shm", "memcpy"), ("stream", "plain socket")):
        pairs = zip(rates[name], rates[reference], strict=True)
        ratio = statistics.median(value / best for value, best in pairs)
        report.higher(f"{name} / {reference}, runs of {size}", ratio, "ratio", GOALS[name])
    console.print(f"measured runs of {size}")


def measure_slow(bench: Bench, report: Report, size: str, runs: Sequence[Run]) -> None:
    num_bytes = sum(run.length_bytes for run in runs)
    for name in SLOW:
        link = bench.links.get(name)
        if link is not None:
            values = [rate(partial(write, link, runs), num_bytes) for _ in range(SLOW_ROUNDS)]
            shown = "mooncake over TCP" if name == "mooncake" else name
            report.higher(f"{shown}, runs of {size}", statistics.median(values) / 1e9, "GB/s")


def send(num_bytes: int, num_rounds: int, folder: Path) -> None:
    make_certificates(folder)
    command = [sys.executable, __file__, "--receive", str(folder), "--mib", str(num_bytes >> 20)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout is not None
        hello = json.loads(peer.stdout.readline())
        source, spare = SharedMemory(num_bytes, "bench-source"), SharedMemory(num_bytes, "bench-spare")
        view(source)[:] = np.random.default_rng(1).integers(0, 256, num_bytes, dtype=np.uint8)
        view(spare)[:] = 1
        region = Region(base_address=hello["address"], num_bytes=num_bytes)
        links = {}
        for name, engine in open_engines(folder).items():
            engine.register(source.base_address, num_bytes, shared_descriptor=source.descriptor)
            links[name] = engine.open_peer(hello["endpoints"][name], [region])
        descriptor = os.open(hello["file"], os.O_RDONLY)
        plain = socket.create_connection((HOST, hello["port"]))
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bench = Bench(
            source=source,
            mapped=MappedMemory(descriptor, num_bytes),
            spare=spare,
            target_address=region.base_address,
            plain=plain,
            links=links,
        )
        report = Report(BENCH)
        for size in RUN_BYTES:
            measure(bench, report, size, num_rounds)
        report.print()
        peer.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--mib", type=int, default=128, help="moved at a time; more than the caches hold")
    parser.add_argument("--receive", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive is not None:
        receive(options.mib << 20, options.receive)
    with tempfile.TemporaryDirectory() as folder:
        send(options.mib << 20, options.rounds, Path(folder))
    # Native threads of the data planes may still be at work.
    os._exit(0)


if __name__ == "__main__":
    main()

"""Latency, throughput and handoff of a whole mesh on this machine, next to transformers and to the raw data plane.

Everything is measured in one run: disaggregated and fused nodes are alive together and take turns (an idle node uses no
processor), so that the ratios hold although the machine is noisy. All nodes use the same number of threads.
Usage: bench_mesh.py [--num-threads N] [--rounds N]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from pdmesh.v1 import mesh_pb2, mesh_pb2_grpc
from rich.console import Console
from rows import Report

from node_runtime.rpc import connect
from pdmesh_cli.client import AsyncPdmeshClient
from pdmesh_cli.client_types import Delta, Finish, GenerateOptions
from pdmesh_cli.logs import FileLogs
from pdmesh_cli.up import RunningMesh, UpOptions, provide_model, running_mesh

BENCH = "mesh"
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 64
CONCURRENCIES = (1, 4, 16)
HANDOFF_PROMPT_TOKENS = (1024, 2048, 4096)
PREFILL_PROMPT_TOKENS = 1024
MIB = 2**20
console = Console(stderr=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One answer. `token_times_s` are times of arrival; `sent_s` is on the same clock."""

    sent_s: float
    token_times_s: tuple[float, ...]
    finish: Finish

    @property
    def first_token_s(self) -> float:
        return self.token_times_s[0] - self.sent_s

    @property
    def token_s(self) -> float:
        return (self.token_times_s[-1] - self.token_times_s[0]) / (len(self.token_times_s) - 1)


class PromptSource:
    """Prompts of ordinary tokens, none of which shares a prefix with another."""

    def __init__(self) -> None:
        self._num_made = 0

    def make(self, num_tokens: int) -> list[int]:
        self._num_made += 1
        return [100 + (7919 * position + 104_729 * self._num_made) % 40_000 for position in range(num_tokens)]


async def run_stream(client: AsyncPdmeshClient, token_ids: list[int], num_tokens: int) -> Stream:
    sent = time.perf_counter()
    times: list[float] = []
    options = GenerateOptions(max_tokens=num_tokens, ignore_eos=True)
    async for event in client.generate(token_ids, options):
        match event:
            case Delta(tokens=tokens):
                times += [time.perf_counter()] * len(tokens)
            case Finish():
                finish = event
    return Stream(sent_s=sent, token_times_s=tuple(times), finish=finish)


async def run_load(client: AsyncPdmeshClient, prompts: PromptSource, concurrency: int) -> list[Stream]:
    """`concurrency` streams that start together."""
    tasks = (run_stream(client, prompts.make(PROMPT_TOKENS), OUTPUT_TOKENS) for _ in range(concurrency))
    return list(await asyncio.gather(*tasks))


def throughput(streams: Sequence[Stream]) -> float:
    """Tokens per second from the first request to the last token, prompt time included."""
    ended = max(stream.token_times_s[-1] for stream in streams)
    return sum(len(stream.token_times_s) for stream in streams) / (ended - min(stream.sent_s for stream in streams))


def decode_rate(streams: Sequence[Stream]) -> float:
    """Tokens per second while every stream is decoding: no prompt is computed in that window."""
    begin = max(stream.token_times_s[0] for stream in streams)
    end = min(stream.token_times_s[-1] for stream in streams)
    return sum(begin < at <= end for stream in streams for at in stream.token_times_s) / (end - begin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Medians over rounds at one concurrency. `token_ms` is a stream's own, waiting for other prompts included."""

    first_token_ms: float
    token_ms: float
    tokens_per_s: float
    decode_tokens_per_s: float


def summarise(rounds: Sequence[list[Stream]]) -> Load:
    streams = [stream for each in rounds for stream in each]
    return Load(
        first_token_ms=1e3 * statistics.median(stream.first_token_s for stream in streams),
        token_ms=1e3 * statistics.median(stream.token_s for stream in streams),
        tokens_per_s=statistics.median(map(throughput, rounds)),
        decode_tokens_per_s=statistics.median(map(decode_rate, rounds)),
    )


async def measure_loads(
    clients: dict[str, AsyncPdmeshClient], prompts: PromptSource, num_rounds: int
) -> dict[tuple[str, int], Load]:
    """Both deployments at every concurrency, taking turns."""
    results: dict[tuple[str, int], list[list[Stream]]] = {}
    for concurrency in CONCURRENCIES:
        for _ in range(num_rounds):
            for name, client in clients.items():
                results.setdefault((name, concurrency), []).append(await run_load(client, prompts, concurrency))
        console.print(f"measured concurrency {concurrency}")
    return {key: summarise(rounds) for key, rounds in results.items()}


def measure_transformers(model: Path, num_threads: int) -> dict[int, dict[str, float]]:
    script = Path(__file__).with_name("transformers_baseline.py")
    arguments = [str(model), num_threads, PROMPT_TOKENS, OUTPUT_TOKENS, *CONCURRENCIES]
    command = [sys.executable, str(script), *map(str, arguments)]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    return {row["batch_size"]: row for row in rows}


def measure_data_plane(num_bytes: int, num_rounds: int) -> float:
    """Median bytes per second of a large write."""
    command = [sys.executable, str(Path(__file__).with_name("data_plane_rate.py")), str(num_bytes), str(num_rounds)]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    return float(json.loads(result.stdout)["median_bytes_per_s"])


async def clear_cache(address: str) -> None:
    channel = connect(address, max_message_bytes=MIB)
    stub = channel.stub(mesh_pb2_grpc.NodeStub)
    await channel.unary(stub.ClearCache, mesh_pb2.ClearCacheRequest(), timeout_s=10)
    await channel.close()


def report_loads(report: Report, loads: dict[tuple[str, int], Load], reference: dict[int, dict[str, float]]) -> None:
    for (name, concurrency), load in loads.items():
        where = f"{name}, concurrency {concurrency}"
        report.lower(f"{where}: time to first token", load.first_token_ms, "ms")
        report.lower(f"{where}: time per token", load.token_ms, "ms")
        report.higher(f"{where}: throughput", load.tokens_per_s, "tokens/s")
        report.higher(f"{where}: decode rate", load.decode_tokens_per_s, "tokens/s")
    for batch_size, row in reference.items():
        where = f"transformers, batch {batch_size}"
        total_s = row["first_token_s"] + (OUTPUT_TOKENS - 1) * row["token_s"]
        report.lower(f"{where}: time to first token", 1e3 * row["first_token_s"], "ms")
        report.lower(f"{where}: time per token, hand-written loop", 1e3 * row["token_s"], "ms")
        report.lower(f"{where}: time per token, generate()", 1e3 * row["generate_token_s"], "ms")
        report.higher(f"{where}: throughput, hand-written loop", batch_size * OUTPUT_TOKENS / total_s, "tokens/s")
        report.higher(f"{where}: decode rate, hand-written loop", batch_size / row["token_s"], "tokens/s")


def report_ratios(report: Report, loads: dict[tuple[str, int], Load], reference: dict[int, dict[str, float]]) -> None:
    for concurrency, goal in ((1, 1.0), (4, None), (16, 1.5)):
        ratio = loads["fused", concurrency].decode_tokens_per_s * reference[concurrency]["token_s"] / concurrency
        report.higher(f"fused decode rate / transformers loop, concurrency {concurrency}", ratio, "ratio", goal)
    for concurrency in CONCURRENCIES:
        rates = [loads[name, concurrency].decode_tokens_per_s for name in ("fused", "disaggregated")]
        ratio = rates[0] / rates[1]
        case = f"disaggregation adds to time per token, concurrency {concurrency}"
        report.lower(case, 100 * (ratio - 1), "%", 15.0)


async def measure_prefill(report: Report, client: AsyncPdmeshClient, prompts: PromptSource, num_rounds: int) -> None:
    rates = []
    for _ in range(num_rounds):
        stream = await run_stream(client, prompts.make(PREFILL_PROMPT_TOKENS), 2)
        rates.append(PREFILL_PROMPT_TOKENS / stream.first_token_s)
    case = f"fused prefill, prompt of {PREFILL_PROMPT_TOKENS} tokens"
    report.higher(case, statistics.median(rates), "tokens/s", 400.0)


async def measure_handoff(
    report: Report, client: AsyncPdmeshClient, decode_address: str, prompts: PromptSource, num_rounds: int
) -> None:
    for num_tokens in HANDOFF_PROMPT_TOKENS:
        hidden, rates, raw_rates = [], [], []
        for _ in range(num_rounds):
            prompt = prompts.make(num_tokens)
            cold = (await run_stream(client, prompt, 2)).finish.timings
            hidden.append(100 * (1 - cold.transfer_exposed_ms / cold.transfer_ms))
            # The prompt is cached on the prefill node and no longer on the decode node: all of it is sent at once.
            await clear_cache(decode_address)
            warm = (await run_stream(client, prompt, 2)).finish.timings
            rates.append(warm.transferred_bytes / (warm.transfer_ms / 1e3))
            raw_rates.append(measure_data_plane(warm.transferred_bytes, 3))
        where = f"prompt of {num_tokens} tokens"
        rate, raw_rate = statistics.median(rates), statistics.median(raw_rates)
        report.lower(f"handoff bytes, {where}", cold.transferred_bytes / MIB, "MiB")
        report.lower(f"handoff runs, {where}", cold.transferred_runs, "runs")
        report.higher(f"transfer hidden behind compute, {where}", statistics.median(hidden), "%", 50.0)
        report.higher(f"handoff rate, cached prompt, {where}", rate / 1e9, "GB/s")
        report.higher(f"raw large-write rate, same bytes, {where}", raw_rate / 1e9, "GB/s")
        report.higher(f"handoff rate / raw rate, {where}", rate / raw_rate, "ratio")
        console.print(f"measured the handoff of a {where}")


def address_of(running: RunningMesh, role: str) -> str:
    return next(node.address for node in running.nodes if node.role == role)


async def run(num_threads: int, num_rounds: int) -> None:
    model = provide_model("smollm2", console)
    console.print("measuring transformers")
    reference = measure_transformers(model, num_threads)
    prompts = PromptSource()
    async with AsyncExitStack() as stack:
        running = {}
        for name, fused in (("disaggregated", False), ("fused", True)):
            options = UpOptions(model="smollm2", fused=fused, num_threads=num_threads, port=0)
            logs = stack.enter_context(FileLogs(Path("build") / "bench-logs" / name))
            running[name] = await stack.enter_async_context(running_mesh(options, model, logs, console))
        clients = {
            name: await stack.enter_async_context(AsyncPdmeshClient(mesh.router.address))
            for name, mesh in running.items()
        }
        for client in clients.values():
            await run_load(client, prompts, 2)
        loads = await measure_loads(clients, prompts, num_rounds)
        report = Report(BENCH)
        report_loads(report, loads, reference)
        report_ratios(report, loads, reference)
        await measure_prefill(report, clients["fused"], prompts, num_rounds)
        decode_address = address_of(running["disaggregated"], "decode")
        await measure_handoff(report, clients["disaggregated"], decode_address, prompts, num_rounds)
    report.print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-threads", type=int, default=2, help="compute threads of every node")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions; medians are reported")
    arguments = parser.parse_args()
    asyncio.run(run(arguments.num_threads, arguments.rounds))


if __name__ == "__main__":
    main()

"""Kernels of layers that keep a state, at the default sizes of transformers' configs, next to what the machine allows.

The least that a machine can do: read and write every state once and every input and output once, or compute every
product, whichever takes longer. Both rates are measured between the rounds, on the arena that holds the states, so that
ratios hold although the machine is noisy; a ratio is the median over rounds of both values of one round. A measurement
walks over the whole arena, which no cache holds, batch by batch.
Usage: bench_states.py [--num-threads N] [--rounds N] [--batches 1,32] [--arena-mib N]
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from rich.console import Console
from rows import Report

from model_runtime.kernels import _native

BENCH = "states"
PREFILL_TOKENS = 512
MATRIX_SIZE = 1024
NOISY_SPREAD = 1.25
NULL_BLOCK = 0  # kernels refuse it
# Operations on one number of a state per token: decay, update and output, and for the delta rule what a key recalls.
SCAN_FLOPS, DELTA_FLOPS = 5, 7
console = Console(stderr=True)


BlockArrays: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of equal length that go on in place, without checkpoints. `block_arrays` as the kernels take them."""

    num_rows: int
    num_tokens: int
    block_arrays: BlockArrays

    @classmethod
    def of(cls, begin: int, end: int, tokens_per_row: int) -> Rows:
        """One row for each block of [begin, end)."""
        blocks = torch.arange(begin, end, dtype=torch.int32)
        zeros = torch.zeros_like(blocks)
        arrays = (blocks, blocks, zeros - 1, zeros, zeros + tokens_per_row)
        return cls(num_rows=end - begin, num_tokens=(end - begin) * tokens_per_row, block_arrays=arrays)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One kernel at the size of one layer. `lane` is what it computes independently: a head or a channel."""

    name: str
    lane: str
    num_lanes: int
    flops_per_token: int
    floats_per_token: int
    states: torch.Tensor
    run: Callable[[Rows], None]

    def walk(self, num_rows: int, tokens_per_row: int) -> list[Rows]:
        """Batches over all blocks but those that fill no batch; one batch where tokens outweigh the states."""
        last = self.states.shape[0] - num_rows if tokens_per_row == 1 else NULL_BLOCK + 1
        begins = range(NULL_BLOCK + 1, last + 1, num_rows)
        return [Rows.of(begin, begin + num_rows, tokens_per_row) for begin in begins]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What this machine did in one round."""

    bytes_per_s: float
    flops_per_s: float

    def floor_s(self, workload: Workload, rows: Rows) -> float:
        """Least seconds of one call."""
        block_bytes = workload.states[0].nbytes
        num_bytes = 2 * rows.num_rows * block_bytes + 4 * workload.floats_per_token * rows.num_tokens
        return max(num_bytes / self.bytes_per_s, workload.flops_per_token * rows.num_tokens / self.flops_per_s)


def measure_machine(arena: torch.Tensor, matrix: torch.Tensor) -> Machine:
    began = time.perf_counter()
    arena.neg_()  # reads and writes every byte, as the kernels do with states
    touched = time.perf_counter()
    matrix @ matrix
    return Machine(
        bytes_per_s=2 * arena.nbytes / (touched - began),
        flops_per_s=2 * MATRIX_SIZE**3 / (time.perf_counter() - touched),
    )


def states_in(arena: torch.Tensor, *block_shape: int) -> torch.Tensor:
    """As many blocks as the arena holds: float32[num_blocks, *block_shape]."""
    floats = math.prod(block_shape)
    num_blocks = arena.numel() // floats
    return arena[: num_blocks * floats].view(num_blocks, *block_shape)


def convolution(
    kernels: _native.CpuKernels, arena: torch.Tensor, num_tokens: int, model: str, *, channels: int, width: int
) -> Workload:
    states = states_in(arena, width - 1, channels)
    tokens, weight = torch.randn(num_tokens, channels), torch.randn(width, channels)
    output = torch.empty_like(tokens)

    def run(rows: Rows) -> None:
        end = rows.num_tokens
        kernels.causal_conv(tokens[:end], weight, None, states, *rows.block_arrays, output[:end])

    return Workload(
        name=f"causal_conv, {model}",
        lane="channel",
        num_lanes=channels,
        flops_per_token=2 * width * channels,
        floats_per_token=2 * channels,
        states=states,
        run=run,
    )


def delta_rule(
    kernels: _native.CpuKernels,
    arena: torch.Tensor,
    num_tokens: int,
    model: str,
    *,
    heads: int,
    key_heads: int,
    head_dim: int,
    decays_per_head: int,
) -> Workload:
    states = states_in(arena, heads, head_dim, head_dim)
    query, key = torch.randn(2, num_tokens, key_heads, head_dim)
    value, strength = torch.randn(num_tokens, heads, head_dim), torch.randn(num_tokens, heads)
    step, step_bias = torch.randn(num_tokens, heads, decays_per_head), torch.randn(heads, decays_per_head)
    rate, output = torch.rand(heads), torch.empty_like(value)

    def run(rows: Rows) -> None:
        end = rows.num_tokens
        kernels.gated_delta_rule(
            query[:end],
            key[:end],
            value[:end],
            step[:end],
            step_bias,
            rate,
            strength[:end],
            states,
            *rows.block_arrays,
            output[:end],
        )

    return Workload(
        name=f"gated_delta_rule, {model}",
        lane="head",
        num_lanes=heads,
        flops_per_token=DELTA_FLOPS * heads * head_dim**2,
        floats_per_token=2 * key_heads * head_dim + heads * (2 * head_dim + decays_per_head + 1),
        states=states,
        run=run,
    )


def scan(
    kernels: _native.CpuKernels,
    arena: torch.Tensor,
    num_tokens: int,
    model: str,
    *,
    heads: int,
    groups: int,
    state_dim: int,
    head_dim: int,
) -> Workload:
    states = states_in(arena, heads, state_dim, head_dim)
    key, query = torch.randn(2, num_tokens, groups, state_dim)
    value, step = torch.randn(num_tokens, heads, head_dim), torch.randn(num_tokens, heads, 1)
    step_bias, rate, skip = torch.randn(heads, 1), torch.rand(heads), torch.randn(heads)
    output = torch.empty_like(value)

    def run(rows: Rows) -> None:
        end = rows.num_tokens
        kernels.selective_scan(
            value[:end],
            key[:end],
            query[:end],
            step[:end],
            step_bias,
            rate,
            skip,
            0.0,
            math.inf,
            states,
            *rows.block_arrays,
            output[:end],
        )

    return Workload(
        name=f"selective_scan, {model}",
        lane="head",
        num_lanes=heads,
        flops_per_token=SCAN_FLOPS * heads * state_dim * head_dim,
        floats_per_token=2 * groups * state_dim + heads * (2 * head_dim + 1),
        states=states,
        run=run,
    )


def measure(
    report: Report,
    workload: Workload,
    walk: Sequence[Rows],
    case: str,
    arena: torch.Tensor,
    matrix: torch.Tensor,
    num_rounds: int,
) -> list[Machine]:
    """Adds the rows of one case; what the machine did meanwhile."""
    machines, times_s, ratios = [], [], []
    num_tokens = sum(rows.num_tokens for rows in walk)
    for round_index in range(num_rounds + 1):
        machine = measure_machine(arena, matrix)
        began = time.perf_counter()
        for rows in walk:
            workload.run(rows)
        seconds = time.perf_counter() - began
        if round_index > 0:  # the first touches memory and starts threads
            machines.append(machine)
            times_s.append(seconds)
            ratios.append(sum(machine.floor_s(workload, rows) for rows in walk) / seconds)
    where = f"{workload.name}, {case}"
    unit = f"ns per token and {workload.lane}"
    report.lower(where, statistics.median(times_s) * 1e9 / (num_tokens * workload.num_lanes), unit)
    report.higher(f"{where}: rate / what the machine allows", statistics.median(ratios), "ratio")
    console.print(f"measured {where}")
    return machines


def report_machine(report: Report, machines: Sequence[Machine], arena_mib: int) -> None:
    for case, values, unit in (
        (f"machine: reading and writing {arena_mib} MiB in place", [m.bytes_per_s / 1e9 for m in machines], "GB/s"),
        (f"machine: float32 matrix product of {MATRIX_SIZE}", [m.flops_per_s / 1e9 for m in machines], "GFLOP/s"),
    ):
        report.higher(case, statistics.median(values), unit)
        deciles = statistics.quantiles(values, n=10)
        if deciles[-1] > NOISY_SPREAD * deciles[0]:
            console.print(f"the machine is noisy: {case} went from {deciles[0]:.3g} to {deciles[-1]:.3g} {unit}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", default="1,32", help="decode batch sizes")
    parser.add_argument("--arena-mib", type=int, default=1024, help="of states; more than the caches hold")
    options = parser.parse_args()
    torch.set_num_threads(options.num_threads)
    torch.manual_seed(0)
    batches = [int(size) for size in options.batches.split(",")]
    arena, matrix = torch.randn(options.arena_mib << 18), torch.rand(MATRIX_SIZE, MATRIX_SIZE)
    kernels, num_tokens = _native.CpuKernels(options.num_threads), max(PREFILL_TOKENS, *batches)
    workloads = (
        scan(kernels, arena, num_tokens, "Bamba", heads=128, groups=1, state_dim=256, head_dim=64),
        delta_rule(kernels, arena, num_tokens, "Qwen3-Next", heads=32, key_heads=16, head_dim=128, decays_per_head=1),
        delta_rule(
            kernels, arena, num_tokens, "Kimi Linear", heads=32, key_heads=32, head_dim=128, decays_per_head=128
        ),
        convolution(kernels, arena, num_tokens, "Qwen3-Next", channels=8192, width=4),
    )
    report, machines = Report(BENCH), []
    for workload in workloads:
        walks = {f"decode, batch {size}": workload.walk(size, 1) for size in batches}
        walks[f"prefill of {PREFILL_TOKENS}"] = workload.walk(1, PREFILL_TOKENS)
        for case, walk in walks.items():
            machines += measure(report, workload, walk, case, arena, matrix, options.rounds)
    report_machine(report, machines, options.arena_mib)
    report.print()


if __name__ == "__main__":
    main()

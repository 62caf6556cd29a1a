"""Prefix hit rates and speed of the native scheduler on public request traces, for every eviction policy.

A trace in Mooncake's format names the 512-token blocks of each prompt by hash ids; equal ids mean equal prefixes. The
token ids of a block are a function of its hash id, so a hit here is a true hit of the prefix index. Requests are served
one at a time, in the order of the trace, and their results are immediate: what is measured is the cache, not batching.

Two ways to play a prompt (`--prompts`, default: both):
- whole: every block of the trace is a full one and one token follows, so that the last block can be hit too. This is
  how the reference hit rates of the traces are defined. The pool has one block more than the cache size, for the token.
- exact: the prompt has the trace's number of tokens. Its last block is partly filled, so it is neither published nor
  hit, but takes its place while the request runs. This is what a node sees.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from rows import Report

import scheduler_core as sc

BLOCK_TOKENS = 512
CACHE_BLOCKS = (1_000, 2_000, 5_000, 10_000, 20_000)
LEAST_GAIN = 1.03  # of the second policy over LRU, mean of all traces and sizes

Prompts = Literal["whole", "exact"]
PROMPTS: tuple[Prompts, ...] = ("whole", "exact")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """`lru_percent`: the published hit rates by cache size, in percent of all blocks, rounded to one decimal."""

    name: str
    file_name: str
    lru_percent: tuple[float, ...]


TRACES = (
    Trace(name="conversation", file_name="conversation_trace.jsonl", lru_percent=(4.5, 5.4, 11.2, 21.2, 28.8)),
    Trace(name="synthetic", file_name="synthetic_trace.jsonl", lru_percent=(8.4, 14.6, 27.9, 42.4, 57.2)),
)
ROUNDING_PERCENT = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    hash_ids: np.ndarray  # int32[blocks]
    num_tokens: int

    def tokens(self, prompts: Prompts) -> np.ndarray:
        """int32[tokens]: block h holds the tokens h * 512 and up."""
        blocks = self.hash_ids[:, None] * np.int32(BLOCK_TOKENS) + np.arange(BLOCK_TOKENS, dtype=np.int32)
        if prompts == "whole":
            return np.append(blocks.reshape(-1), np.int32(0))
        return blocks.reshape(-1)[: self.num_tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    hit_percent: float
    requests_per_s: float


def read_trace(path: Path) -> list[Prompt]:
    with path.open(encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    return [
        Prompt(hash_ids=np.array(record["hash_ids"], dtype=np.int32), num_tokens=record["input_length"])
        for record in records
    ]


def build(num_lcm_blocks: int, policy: sc.EvictionPolicy) -> sc.Scheduler:
    group = sc.CacheGroupConfig(
        group_id="full",
        family=sc.Family.HISTORY,
        retention=sc.Retention.FULL_HISTORY,
        block_granularity=BLOCK_TOKENS,
    )
    return sc.Scheduler(
        sc.SchedulerConfig(
            role=sc.Role.FUSED,
            prefix_granularity=BLOCK_TOKENS,
            num_lcm_blocks=num_lcm_blocks,
            max_batch_size=1,
            token_budget=2**30,
            cache_groups=[group],
            eviction_policy=policy,
        )
    )


def replay(requests: Sequence[Prompt], cache_blocks: int, policy: sc.EvictionPolicy, prompts: Prompts) -> Replay:
    """Plays a trace through one scheduler. Only the scheduler's own CPU time counts, hashing included."""
    scheduler = build(cache_blocks + (prompts == "whole"), policy)
    num_blocks = num_hit_blocks = spent_ns = 0
    for number, request in enumerate(requests):
        name = str(number)
        spec = sc.RequestSpec(request_id=name, tokens=request.tokens(prompts), max_new_tokens=1)
        events: list[sc.Event] = [sc.ResultEvent(name, [1]), sc.FinishEvent(name)]
        begin = time.process_time_ns()
        scheduler.submit([spec])
        plan = scheduler.next_plan()
        scheduler.advance(events)
        spent_ns += time.process_time_ns() - begin
        (admission,) = plan.admissions
        num_hit_blocks += admission.device_hit_tokens // BLOCK_TOKENS
        num_blocks += len(request.hash_ids)
    return Replay(hit_percent=100 * num_hit_blocks / num_blocks, requests_per_s=len(requests) / (spent_ns / 1e9))


def measure(report: Report, trace: Trace, requests: Sequence[Prompt], prompts: Prompts) -> Iterator[float]:
    """Adds the rows of one trace; gives the hit rates of the second policy over those of LRU, size by size."""
    for cache_blocks, reference in zip(CACHE_BLOCKS, trace.lru_percent, strict=True):
        case = f"{trace.name}, {prompts}, {cache_blocks:,} blocks"
        lru = replay(requests, cache_blocks, sc.EvictionPolicy.LRU, prompts)
        aged = replay(requests, cache_blocks, sc.EvictionPolicy.AGED_FREQUENCY, prompts)
        report.higher(f"{case}, hit rate, lru", lru.hit_percent, "%", goal=reference - ROUNDING_PERCENT)
        report.higher(f"{case}, hit rate, aged_frequency", aged.hit_percent, "%", goal=lru.hit_percent)
        report.higher(f"{case}, scheduling, lru", lru.requests_per_s, "requests/s")
        report.higher(f"{case}, scheduling, aged_frequency", aged.requests_per_s, "requests/s")
        yield aged.hit_percent / lru.hit_percent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default_traces = Path(__file__).resolve().parent.parent.parent / "shared" / "traces"
    parser.add_argument("--traces", type=Path, default=default_traces, help="folder of the traces")
    parser.add_argument("--prompts", choices=PROMPTS, nargs="+", default=PROMPTS, help="how prompts are played")
    arguments = parser.parse_args()
    missing = [trace.file_name for trace in TRACES if not (arguments.traces / trace.file_name).is_file()]
    if missing:
        print(f"bench_trace skipped: {arguments.traces} has no {' and no '.join(missing)}", file=sys.stderr)
        return 0
    gc.disable()
    requests = [read_trace(arguments.traces / trace.file_name) for trace in TRACES]
    report = Report("trace")
    for prompts in arguments.prompts:
        ratios = [
            ratio
            for trace, requests_of_trace in zip(TRACES, requests, strict=True)
            for ratio in measure(report, trace, requests_of_trace, prompts)
        ]
        gain = statistics.fmean(ratios)
        report.higher(f"{prompts}: aged_frequency to lru, mean of hit rate ratios", gain, "times", goal=LEAST_GAIN)
        report.higher(f"{prompts}: aged_frequency to lru, lowest ratio", min(ratios), "times", goal=1.0)
    report.print()
    return 0


if __name__ == "__main__":
    sys.exit(main())

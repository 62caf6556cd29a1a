"""CPU cost of the native scheduler: a table on stderr, one JSON line per row on stdout.

Times are CPU times of this process; ratios compare two measurements of one run. Nothing here is a test.
"""

from __future__ import annotations

import gc
import hashlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from rows import Row, print_rows

import scheduler_core as sc

BENCH = "scheduler"
GRAIN_TOKENS = 64
LONG_PROMPT_TOKENS = 32_768
LONG_PROMPT_BLOCKS = LONG_PROMPT_TOKENS // GRAIN_TOKENS


def cpu_us(action: Callable[[], object]) -> float:
    begin = time.process_time_ns()
    action()
    return (time.process_time_ns() - begin) / 1000


FULL_GROUP = sc.CacheGroupConfig(
    group_id="full",
    family=sc.Family.HISTORY,
    retention=sc.Retention.FULL_HISTORY,
    block_granularity=GRAIN_TOKENS,
)
ALL_KINDS = (
    FULL_GROUP,
    sc.CacheGroupConfig(
        group_id="sliding",
        family=sc.Family.HISTORY,
        retention=sc.Retention.SLIDING_WINDOW,
        block_granularity=GRAIN_TOKENS,
        sliding_window_tokens=1024,
    ),
    sc.CacheGroupConfig(
        group_id="state",
        family=sc.Family.STATE,
        retention=sc.Retention.FULL_HISTORY,
        block_granularity=GRAIN_TOKENS,
    ),
)


def build(
    num_lcm_blocks: int, max_batch_size: int = 1024, groups: Sequence[sc.CacheGroupConfig] = (FULL_GROUP,)
) -> sc.Scheduler:
    config = sc.SchedulerConfig(
        role=sc.Role.FUSED,
        prefix_granularity=GRAIN_TOKENS,
        num_lcm_blocks=num_lcm_blocks,
        max_batch_size=max_batch_size,
        token_budget=2**30,
        cache_groups=list(groups),
    )
    return sc.Scheduler(config)


def prompt(number: int, num_tokens: int) -> np.ndarray:
    """Tokens that differ from every other number's in each grain."""
    return np.random.default_rng(number).integers(0, 128_000, num_tokens, dtype=np.int32)


def submit(scheduler: sc.Scheduler, name: str, tokens: np.ndarray, max_new_tokens: int = 1) -> None:
    scheduler.submit([sc.RequestSpec(request_id=name, tokens=tokens, max_new_tokens=max_new_tokens)])


def fill_cache(scheduler: sc.Scheduler, num_blocks: int) -> None:
    for number in range(-(-num_blocks // LONG_PROMPT_BLOCKS)):
        name = f"cached-{number}"
        submit(scheduler, name, prompt(number, LONG_PROMPT_TOKENS))
        scheduler.next_plan()
        scheduler.advance([sc.ResultEvent(name, [1]), sc.FinishEvent(name)])
    scheduler.next_plan()


@dataclass(slots=True)
class DecodeLoad:
    """Requests that decode at 4k tokens of context, and the events that answer each step."""

    scheduler: sc.Scheduler
    results: list[sc.ResultEvent]

    @classmethod
    def start(
        cls,
        num_requests: int,
        num_steps: int,
        spare_blocks: int = 0,
        groups: Sequence[sc.CacheGroupConfig] = (FULL_GROUP,),
    ) -> DecodeLoad:
        context_tokens = 4096
        blocks = -(-(context_tokens + num_steps + 2) // GRAIN_TOKENS)
        num_lcm_blocks = num_requests * blocks * len(groups) + spare_blocks
        scheduler = build(num_lcm_blocks, max_batch_size=num_requests + 1, groups=groups)
        names = [f"request-{number:024d}" for number in range(num_requests)]
        for number, name in enumerate(names):
            submit(scheduler, name, prompt(number, context_tokens), max_new_tokens=num_steps + 1)
        results = [sc.ResultEvent(name, [1]) for name in names]
        scheduler.next_plan()
        scheduler.advance(results)
        return cls(scheduler, results)

    def step(self) -> None:
        self.scheduler.next_plan()
        self.scheduler.advance(self.results)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()


def decode_steps() -> Iterator[Row]:
    num_steps = 192
    warm_up = DecodeLoad.start(64, num_steps, groups=(FULL_GROUP,))  # the first steps of a process cost twice as much
    warm_up.run(num_steps)
    for groups, kinds, goal in (((FULL_GROUP,), "full", 1.0), (ALL_KINDS, "full + sliding + state", 2.5)):
        for num_requests in (64, 256, 1024):
            load = DecodeLoad.start(num_requests, num_steps, groups=groups)
            total_us = cpu_us(partial(load.run, num_steps))
            yield Row(
                bench=BENCH,
                case=f"plan and advance: {num_requests} decoding at 4k context, {kinds}",
                value=total_us / num_steps / num_requests,
                unit="us per request per step",
                goal=goal,
                better="lower",
            )


def plan_hand_over() -> Iterator[Row]:
    load = DecodeLoad.start(1024, 64)
    plan = load.scheduler.next_plan()
    columns = ("request_ids", "request_slots", "begins", "input_lengths", "token_ids", "block_tables")
    samples = [cpu_us(lambda: [getattr(plan, column) for column in columns]) for _ in range(50)]
    yield Row(
        bench=BENCH,
        case="plan to python: tables and columns of 1024 rows",
        value=statistics.median(samples),
        unit="us per plan",
        goal=100.0,
        better="lower",
    )


def hashing() -> Iterator[Row]:
    """Times the first look at prompts that do not fit: it hashes them, and little else."""
    scheduler = build(LONG_PROMPT_BLOCKS + 1)
    submit(scheduler, "holder", prompt(0, GRAIN_TOKENS))
    scheduler.next_plan()
    tokens = prompt(1, LONG_PROMPT_TOKENS)
    content = tokens.tobytes()
    pairs = []
    for number in range(200):
        name = f"hashed-{number}"
        submit(scheduler, name, tokens)
        pairs.append((cpu_us(scheduler.next_plan), cpu_us(lambda: hashlib.sha256(content).digest())))
        scheduler.advance([sc.AbortEvent(name)])
        scheduler.next_plan()
    chained, one_shot = (statistics.median(column) for column in zip(*pairs, strict=True))
    yield Row(
        bench=BENCH,
        case="hashing: grains of 64 tokens of a 32k prompt, against one-shot SHA-256",
        value=one_shot / chained,
        unit="of the one-shot rate",
        goal=0.6,
        better="higher",
    )


def admit_us(scheduler: sc.Scheduler, num_samples: int, num_prompt_tokens: int) -> float:
    """Median of admissions that all stay, each of a prompt never seen before."""
    samples = []
    for number in range(num_samples):
        submit(scheduler, f"new-{num_prompt_tokens}-{number}", prompt(10_000 + number, num_prompt_tokens))
        samples.append(cpu_us(scheduler.next_plan))
    return statistics.median(samples)


def admissions() -> Iterator[Row]:
    num_cached = 100_000 // LONG_PROMPT_BLOCKS * LONG_PROMPT_BLOCKS
    empty = admit_us(build(4096), 100, GRAIN_TOKENS // 2)
    full = build(num_cached + 1)  # the last prompt reserves one block behind its end
    fill_cache(full, num_cached)
    assert full.capacity().cached_lcm_blocks == num_cached
    yield Row(
        bench=BENCH,
        case="admit one block: 100,000 cached and none free, against an empty pool of 4,096",
        value=admit_us(full, 100, GRAIN_TOKENS // 2) / empty,
        unit="times",
        goal=3.0,
        better="lower",
    )
    yield Row(
        bench=BENCH,
        case="admit with eviction: 32k prompt that evicts 512 of 100,000, hashing included",
        value=admit_us(full, 20, LONG_PROMPT_TOKENS - 1) / 1000,
        unit="ms",
        goal=1.0,
        better="lower",
    )
    yield Row(
        bench=BENCH,
        case="gauges: capacity() beside 100,000 cached blocks",
        value=statistics.median(cpu_us(full.capacity) for _ in range(200)),
        unit="us",
        goal=None,
        better="lower",
    )


def full_hit() -> Iterator[Row]:
    scheduler = build(100_000)
    fill_cache(scheduler, 50_000)
    tokens = np.append(prompt(3, LONG_PROMPT_TOKENS), np.int32(7)).astype(np.int32)
    samples = []
    for number in range(20):
        name = f"hit-{number}"
        submit(scheduler, name, tokens)
        begin = time.process_time_ns()
        plan = scheduler.next_plan()
        samples.append((time.process_time_ns() - begin) / 1000)
        assert plan.admissions[0].device_hit_tokens == LONG_PROMPT_TOKENS
        scheduler.advance([sc.AbortEvent(name)])
        scheduler.next_plan()
    yield Row(
        bench=BENCH,
        case="admit with full hit: 32k prompt, all of it cached, hashing included",
        value=statistics.median(samples),
        unit="us",
        goal=300.0,
        better="lower",
    )


def blocked_queue() -> Iterator[Row]:
    num_steps = 128
    free = DecodeLoad.start(256, num_steps)
    queued = DecodeLoad.start(256, num_steps)
    for number in range(16):
        submit(queued.scheduler, f"queued-{number}", prompt(5000 + number, LONG_PROMPT_TOKENS))
    queued.step()
    free.step()
    samples = [(cpu_us(free.step), cpu_us(queued.step)) for _ in range(num_steps - 8)]
    ratio = statistics.median(b for _, b in samples) / statistics.median(a for a, _ in samples)
    yield Row(
        bench=BENCH,
        case="step beside a queue: 256 decodes, 16 long prompts that do not fit, against none",
        value=ratio,
        unit="times",
        goal=1.3,
        better="lower",
    )


def queue_after_an_end() -> Iterator[Row]:
    """Blocks come free, but too few for any of many waiting prompts that share a long cached prefix."""
    shared = prompt(1, LONG_PROMPT_TOKENS // 2)
    load = DecodeLoad.start(256, 64, spare_blocks=2 * LONG_PROMPT_BLOCKS)
    cached = np.append(shared, np.int32(5)).astype(np.int32)
    submit(load.scheduler, "cached", cached)
    load.scheduler.next_plan()
    load.scheduler.advance([sc.ResultEvent("cached", [1]), sc.FinishEvent("cached")])
    for number in range(1000):
        tail = prompt(5000 + number, 2 * LONG_PROMPT_TOKENS)
        submit(load.scheduler, f"queued-{number}", np.concatenate([shared, tail]).astype(np.int32))
    load.step()
    samples = []
    for _ in range(32):
        load.scheduler.advance([sc.FinishEvent(load.results.pop().request_id)])
        samples.append(cpu_us(load.step))
    yield Row(
        bench=BENCH,
        case="step after an end: 224 to 256 decodes, 1000 long prompts that do not fit and share a cached half",
        value=statistics.median(samples),
        unit="us",
        goal=None,
        better="lower",
    )


def main() -> None:
    gc.disable()
    rows: list[Row] = []
    for measure in (decode_steps, plan_hand_over, hashing, admissions, full_hit, blocked_queue, queue_after_an_end):
        rows += measure()
        gc.collect()
    print_rows(rows)


if __name__ == "__main__":
    main()

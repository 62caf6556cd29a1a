"""`pdmesh bench`: a load of random prompts against a mesh that runs, and what its users would have felt.

Measured at the client, from the moment a request is sent: waits for a busy mesh are part of it, and so is this
process, which is good for some thousand tokens per second.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np
from rich.table import Table

from node_runtime.errors import BadConfig
from pdmesh_cli.client import AsyncPdmeshClient
from pdmesh_cli.client_types import Delta, Finish, GenerateOptions, PdmeshError
from pdmesh_cli.report import num_cached_tokens

_PERCENTILES = (50, 95, 99)
_MS = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is sent. All prompts begin with the same `shared_tokens`; the rest of each is its own."""

    num_requests: int
    concurrency: int
    prompt_tokens: int
    shared_tokens: int
    max_tokens: int
    seed: int
    timeout_s: float
    adapter: str = ""

    def __post_init__(self) -> None:
        if self.shared_tokens > self.prompt_tokens:
            raise BadConfig(
                f"shared_tokens: {self.shared_tokens} given, at most prompt_tokens={self.prompt_tokens} allowed"
            )

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Token ids in [0, vocab_size); the same for the same seed."""
        draw = random.Random(self.seed)
        shared = [draw.randrange(vocab_size) for _ in range(self.shared_tokens)]
        num_own = self.prompt_tokens - self.shared_tokens
        return [shared + [draw.randrange(vocab_size) for _ in range(num_own)] for _ in range(self.num_requests)]


@dataclass(slots=True, kw_only=True)
class Outcomes:
    """What was measured. Seconds; `gaps_s` has the mean time between tokens of each request."""

    first_tokens_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    durations_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    num_moves: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    elapsed_s: float = 0.0

    def take(self, finish: Finish, *, first_token_s: float, duration_s: float) -> None:
        """One request that came to its end."""
        usage = finish.usage
        self.first_tokens_s.append(first_token_s)
        self.durations_s.append(duration_s)
        if usage.completion_tokens > 1:
            self.gaps_s.append((duration_s - first_token_s) / (usage.completion_tokens - 1))
        self.prompt_tokens += usage.prompt_tokens
        self.completion_tokens += usage.completion_tokens
        self.cached_tokens += num_cached_tokens(usage.cached)
        self.num_moves += finish.num_replacements

    @property
    def num_ended(self) -> int:
        return len(self.durations_s) + self.failures.total()


Progress = Callable[[Outcomes], None]
"""Told after each request what has come of all by now."""


def ignore_progress(outcomes: Outcomes) -> None:
    """The Progress of a caller that shows none."""


async def run_load(client: AsyncPdmeshClient, load: Load, *, progress: Progress = ignore_progress) -> Outcomes:
    """Sends everything, `concurrency` requests at a time. Raises PdmeshError when the mesh cannot be asked at all."""
    models = await client.list_models()
    if not models:
        raise PdmeshError("NOT_FOUND", "the router serves no model")
    outcomes = Outcomes()
    waiting = iter(load.prompts(models[0].vocab_size))
    began_s = time.perf_counter()
    await asyncio.gather(*(_send(client, load, waiting, outcomes, progress) for _ in range(load.concurrency)))
    outcomes.elapsed_s = time.perf_counter() - began_s
    return outcomes


async def _send(
    client: AsyncPdmeshClient, load: Load, waiting: Iterator[list[int]], outcomes: Outcomes, progress: Progress
) -> None:
    """One request after another, until none is left."""
    options = GenerateOptions(adapter=load.adapter, max_tokens=load.max_tokens, ignore_eos=True)
    for prompt in waiting:
        began_s, first_s = time.perf_counter(), 0.0
        try:
            async with aclosing(client.generate(prompt, options, timeout_s=load.timeout_s)) as events:
                async for event in events:
                    if isinstance(event, Delta) and event.tokens and not first_s:
                        first_s = time.perf_counter()
                    elif isinstance(event, Finish):
                        ended_s = time.perf_counter()
                        outcomes.take(event, first_token_s=(first_s or ended_s) - began_s, duration_s=ended_s - began_s)
        except PdmeshError as error:
            outcomes.failures[error.code] += 1
        progress(outcomes)


def figures(outcomes: Outcomes) -> Mapping[str, float]:
    """Numbers by name; the unit is the end of the name."""
    elapsed_s = max(outcomes.elapsed_s, 1e-9)
    found: dict[str, float] = {
        "requests": len(outcomes.durations_s),
        "failures": outcomes.failures.total(),
        "moves": outcomes.num_moves,
        "elapsed_s": outcomes.elapsed_s,
        "requests_per_s": len(outcomes.durations_s) / elapsed_s,
        "prompt_tokens_per_s": outcomes.prompt_tokens / elapsed_s,
        "completion_tokens_per_s": outcomes.completion_tokens / elapsed_s,
        "cached_fraction": outcomes.cached_tokens / max(outcomes.prompt_tokens, 1),
    }
    for name, values_s in (
        ("first_token", outcomes.first_tokens_s),
        ("per_token", outcomes.gaps_s),
        ("duration", outcomes.durations_s),
    ):
        if values_s:
            found[f"{name}_mean_ms"] = float(np.mean(values_s)) * _MS
            for percentile in _PERCENTILES:
                found[f"{name}_p{percentile}_ms"] = float(np.percentile(values_s, percentile)) * _MS
    return found


def describe_rates(outcomes: Outcomes) -> str:
    """One line about the whole load."""
    found = figures(outcomes)
    return (
        f"{found['requests']:,.0f} requests in {found['elapsed_s']:.1f} s: {found['requests_per_s']:.2f} requests/s, "
        f"{found['completion_tokens_per_s']:,.0f} tokens/s out, {found['prompt_tokens_per_s']:,.0f} in, "
        f"{100 * found['cached_fraction']:.0f} % of the prompts cached"
    )


def load_table(outcomes: Outcomes) -> Table:
    """How the times are distributed. Milliseconds."""
    found = figures(outcomes)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("ms")
    headings = ("mean", *(f"p{percentile}" for percentile in _PERCENTILES))
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, label in (("first_token", "first token"), ("per_token", "per token"), ("duration", "whole answer")):
        if f"{name}_mean_ms" in found:
            table.add_row(label, *(f"{found[f'{name}_{heading}_ms']:,.1f}" for heading in headings))
    return table


def describe_failures(failures: Mapping[str, int]) -> Sequence[str]:
    """A line per status."""
    return [f"{count:,} ended in {code}" for code, count in sorted(failures.items())]

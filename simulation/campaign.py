"""Runs many seeds, on several processes if asked to, and explains those that fail."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from simulation.drawing import draw_scenario
from simulation.minimise import minimise
from simulation.run import Outcome, simulate

# Seeds that one worker takes at a time.
_CHUNK_SEEDS = 4
_SEEDS_PER_FULL_COLLECTION = 64
_LINES_BEHIND_FINDING = 8
_NAME_CHARS = 30


@dataclass(slots=True)
class Tally:
    """What a campaign has seen so far."""

    num_runs: int = 0
    elapsed_s: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)
    # What happened, by name: how often, and in how many runs.
    seen: Counter[str] = field(default_factory=Counter)
    seen_in_runs: Counter[str] = field(default_factory=Counter)
    failed_seeds: list[int] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.num_runs += 1
        self.statuses.update(outcome.statuses)
        self.seen.update(outcome.seen)
        self.seen_in_runs.update(outcome.seen.keys())
        if outcome.findings:
            self.failed_seeds.append(outcome.scenario.seed)

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {status}" for status, count in self.statuses.most_common())
        rate = self.num_runs / self.elapsed_s * 60 if self.elapsed_s else 0.0
        failed = len(self.failed_seeds)
        return f"{self.num_runs} runs, {failed} with findings, {rate:,.0f} runs a minute; requests ended in: {ends}"

    def describe_seen(self) -> str:
        """A table of what happened: a simulator that gets nowhere finds nothing. The most frequent first."""
        rows = (
            f"{name:<{_NAME_CHARS}}{self.seen[name]:>10,}{num_runs / self.num_runs:>9.1%}"
            for name, num_runs in sorted(self.seen_in_runs.items(), key=lambda item: (-item[1], item[0]))
        )
        return "\n".join((f"{'what happened':<{_NAME_CHARS}}{'times':>10}{'runs':>9}", *rows))


def run_seed(seed: int) -> Outcome:
    """One run of the scenario that the seed stands for."""
    return simulate(draw_scenario(seed))


def outcomes(seeds: Iterable[int], num_jobs: int) -> Iterator[Outcome]:
    """The outcomes of all seeds, in any order."""
    if num_jobs == 1:
        was_enabled = gc.isenabled()
        _collect_by_hand()
        try:
            yield from map(_run_and_collect, seeds)
        finally:
            gc.unfreeze()
            if was_enabled:
                gc.enable()
        return
    with multiprocessing.get_context("spawn").Pool(num_jobs, _collect_by_hand) as pool:
        yield from pool.imap_unordered(_run_and_collect, seeds, chunksize=_CHUNK_SEEDS)


def _collect_by_hand() -> None:
    """What is loaded by now stays, and need not be looked at."""
    gc.disable()
    gc.freeze()


def _run_and_collect(seed: int) -> Outcome:
    """What a run leaves behind is looked at while it still lies in the processor's cache."""
    outcome = run_seed(seed)
    # The youngest generation is all that a run has made; what outlives it is looked at now and then.
    gc.collect(2 if seed % _SEEDS_PER_FULL_COLLECTION == 0 else 0)
    return outcome


def run_campaign(
    first_seed: int,
    *,
    num_runs: int | None,
    duration_s: float | None,
    num_jobs: int,
    max_failures: int,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> Tally:
    """Runs seeds from `first_seed` on, `num_runs` of them or as many as `duration_s` allows, and reports through `say`.

    Stops after `max_failures` seeds with findings; each is explained when it comes.
    """
    tally, begin_s = Tally(), clock()
    seeds = itertools.count(first_seed) if num_runs is None else range(first_seed, first_seed + num_runs)
    for outcome in outcomes(seeds, num_jobs):
        tally.add(outcome)
        tally.elapsed_s = clock() - begin_s
        if outcome.findings:
            say(explain(outcome))
            if len(tally.failed_seeds) >= max_failures:
                break
        if tally.num_runs % 2000 == 0:
            say(str(tally))
        # Here and not where seeds are drawn: a pool of processes draws far ahead.
        if duration_s is not None and tally.elapsed_s >= duration_s:
            break
    return tally


def explain(outcome: Outcome) -> str:
    """The findings of a run, the smallest scenario that shows the first of them, and how it came about."""
    smallest = minimise(outcome)
    told = simulate(smallest.scenario, is_verbose=True)
    return "\n".join(
        (
            f"seed {outcome.scenario.seed}: {len(outcome.findings)} findings",
            *(f"  {finding}" for finding in outcome.findings),
            f"smallest scenario with a finding of kind {outcome.findings[0].kind!r}:",
            *told.scenario.describe(),
            "transcript:",
            *_up_to_finding(told),
        )
    )


def _up_to_finding(told: Outcome) -> Iterator[str]:
    """The transcript up to the first finding and a little beyond, when the rest is of no interest."""
    first = next((index for index, line in enumerate(told.lines) if " FINDING " in line), len(told.lines))
    end = first + 1 + _LINES_BEHIND_FINDING
    yield from told.lines[:end]
    if told.lines[end:]:
        yield f"... and {len(told.lines) - end} lines more"

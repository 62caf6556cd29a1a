"""How fast the simulator is: the CPU time of a seed in one process, and seeds a minute on two.

The goal is for two free cores. CPU time hardly depends on what else runs on the machine; seeds a minute do.
Usage: bench_sim.py [--runs N] [--seed N]
"""

from __future__ import annotations

import argparse
import time

from rows import Report

from simulation.campaign import outcomes, run_seed

SEEDS_PER_MINUTE = 2000
NUM_CORES = 2


def cpu_ms(seeds: range) -> float:
    """Per seed, without what the first ones load."""
    for seed in seeds[:10]:
        run_seed(seed)
    began_s = time.process_time()
    for seed in seeds:
        run_seed(seed)
    return (time.process_time() - began_s) / len(seeds) * 1000.0


def seeds_per_minute(seeds: range) -> float:
    """On two processes, their start included."""
    began_s = time.perf_counter()
    num_failed = sum(bool(outcome.findings) for outcome in outcomes(seeds, NUM_CORES))
    if num_failed:
        raise SystemExit(f"{num_failed} of the seeds from {seeds.start} on have findings; run pdmesh sim")
    return len(seeds) / (time.perf_counter() - began_s) * 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    seeds = range(arguments.seed, arguments.seed + arguments.runs)
    report = Report("sim")
    report.lower("CPU time of a seed", cpu_ms(seeds), "ms", NUM_CORES * 60_000.0 / SEEDS_PER_MINUTE)
    report.higher("seeds on two processes", seeds_per_minute(seeds), "1/min", SEEDS_PER_MINUTE)
    report.print()


if __name__ == "__main__":
    main()

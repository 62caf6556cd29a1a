"""What placement is worth: 4 prefill and 4 decode nodes under a trace and every policy, and other roles of 8 machines.

Nodes are simulated in virtual time around the native schedulers (`placement/`), the placement is the router's own. A
trace is paced so that prefill nodes without any cache would be busy for the given share of the time. Without traces a
generated one is played. Usage: bench_placement.py [--traces FOLDER] [--num-requests N] [--cache-blocks N ...]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from placement.costs import Machine, percentile
from placement.mesh import MeshShape, Outcome, SimulatedMesh, single_cache_hit_share
from placement.router_cost import measure_router
from placement.trace import TracedRequest, generate_trace, paced, read_trace
from rows import Report

from router_node.placement_policy import PolicyName

POLICIES: tuple[PolicyName, ...] = ("cache_aware", "least_loaded", "round_robin", "pinned")
TRACE_FILES = {"conversation": "conversation_trace.jsonl", "synthetic": "synthetic_trace.jsonl"}
NUM_NODES = 4
LEAST_SHARE_OF_BOUND = 0.9


def main() -> int:
    arguments = _arguments()
    gc.disable()
    report = Report("placement")
    measure_router(report)
    report.print()
    for name, requests in _traces(arguments.traces, arguments.num_requests):
        for cache_blocks in arguments.cache_blocks:
            # A report of its own: whoever waits for the next one has seen this one.
            report = Report("placement")
            _measure(report, name, requests, cache_blocks, arguments.load)
            report.print()
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=None, help="folder of traces in Mooncake's format")
    parser.add_argument("--num-requests", type=int, default=2000, help="of each trace, from its beginning")
    parser.add_argument(
        "--cache-blocks", type=int, nargs="+", default=[8000], help="blocks of 512 tokens of all prefill nodes together"
    )
    parser.add_argument("--load", type=float, default=0.8, help="busy share of prefill nodes without any cache")
    return parser.parse_args()


def _traces(folder: Path | None, num_requests: int) -> Iterator[tuple[str, list[TracedRequest]]]:
    if folder is None:
        yield "generated", generate_trace(num_requests)
        return
    for name, file_name in TRACE_FILES.items():
        path = folder / file_name
        if path.is_file():
            yield name, read_trace(path, num_requests, max_prompt_tokens=100_000)
        else:
            print(f"{name} skipped: {path} does not exist", file=sys.stderr)


def _measure(report: Report, name: str, requests: Sequence[TracedRequest], cache_blocks: int, load: float) -> None:
    """One trace and one size of cache."""
    machine = Machine()
    work_s = sum(machine.prefill_s(request.prompt_tokens) for request in requests)
    duration_s = requests[-1].arrival_s - requests[0].arrival_s
    trace = paced(requests, work_s / NUM_NODES / load / duration_s)
    case = f"{name}, {cache_blocks:,} blocks"
    bound = single_cache_hit_share(trace, cache_blocks)
    report.higher(f"{case}: hit rate of a single cache of that size", 100 * bound, "%")
    disaggregated = MeshShape(
        num_prefill=NUM_NODES, num_decode=NUM_NODES, node_blocks=cache_blocks // NUM_NODES, machine=machine
    )
    outcomes = {policy: _run(disaggregated, policy, trace) for policy in POLICIES}
    others = [outcomes[policy] for policy in POLICIES if policy != "cache_aware"]
    for policy, outcome in outcomes.items():
        is_ours = policy == "cache_aware"
        goals = (
            100 * LEAST_SHARE_OF_BOUND * bound if is_ours else None,
            min(_mean_ms(other) for other in others) if is_ours else None,
            min(_p99_ms(other) for other in others) if is_ours else None,
        )
        _add_rows(report, f"{case}, 4+4, {policy}", outcome, goals)
    # The same machines in other roles.
    for shape_name, shape in (
        ("6+2", replace(disaggregated, num_prefill=6, num_decode=2)),
        ("8 fused", replace(disaggregated, num_prefill=0, num_decode=0, num_fused=8)),
    ):
        _add_rows(report, f"{case}, {shape_name}, cache_aware", _run(shape, "cache_aware", trace), (None, None, None))


def _run(shape: MeshShape, policy: PolicyName, trace: Sequence[TracedRequest]) -> Outcome:
    began_s = time.perf_counter()
    outcome = SimulatedMesh(shape, policy).run(trace)
    gc.collect()
    print(f"{policy}: simulated in {time.perf_counter() - began_s:.1f} s", file=sys.stderr)
    return outcome


def _mean_ms(outcome: Outcome) -> float:
    return 1000 * statistics.fmean(outcome.first_token_s)


def _p99_ms(outcome: Outcome) -> float:
    return 1000 * percentile(outcome.first_token_s, 99)


def _add_rows(
    report: Report, case: str, outcome: Outcome, goals: tuple[float | None, float | None, float | None]
) -> None:
    least_hit_percent, most_mean_ms, most_p99_ms = goals
    report.higher(f"{case}: hit rate", 100 * outcome.hit_share, "%", goal=least_hit_percent)
    report.lower(f"{case}: time to first token, mean", _mean_ms(outcome), "ms", goal=most_mean_ms)
    report.lower(f"{case}: time to first token, p99", _p99_ms(outcome), "ms", goal=most_p99_ms)
    report.lower(f"{case}: time per later token, p99", 1000 * percentile(outcome.token_gap_s, 99), "ms")
    report.lower(f"{case}: busiest node over the mean", outcome.imbalance, "times")
    report.lower(f"{case}: busy share of nodes that prefill", 100 * outcome.busy_share, "%")


if __name__ == "__main__":
    sys.exit(main())

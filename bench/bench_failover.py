"""What the death of a node costs a client: kill -9 of a decode and of a prefill node under a running request.

A mesh on this machine loses its nodes one after another. Each case runs beside undisturbed requests of the same shape,
so that the ratio holds although the machine is noisy. Detection is the time from the kill to the end of the attempt, as
the router's trace has it. Usage: bench_failover.py [--num-threads N] [--rounds N]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rows import Report

from pdmesh_cli.client import AsyncPdmeshClient
from pdmesh_cli.client_types import Delta, Finish, GenerateOptions, Placement
from pdmesh_cli.logs import FileLogs
from pdmesh_cli.up import RunningMesh, UpOptions, provide_model, running_mesh

PROMPT_TOKENS = 512
OUTPUT_TOKENS = 48
KILL_BEHIND_TOKENS = 16
MAX_RATIO = 2.0
MAX_DETECTION_MS = 1000.0
_FAILED_ATTEMPT = "pdmesh.failed_attempt"
console = Console(stderr=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request. Seconds; `killed_s` and the token times are on one clock, `killed_ns` is the time of day."""

    trace_id: str
    sent_s: float
    token_times_s: tuple[float, ...]
    killed_s: float
    killed_ns: int
    num_replacements: int

    @property
    def first_token_s(self) -> float:
        return self.token_times_s[0] - self.sent_s

    @property
    def pause_s(self) -> float:
        """From the kill to the next token."""
        return min(at for at in self.token_times_s if at > self.killed_s) - self.killed_s


def make_prompt(number: int) -> list[int]:
    """Ordinary tokens that share no prefix with another number's."""
    return [100 + (7919 * position + 104_729 * number) % 40_000 for position in range(PROMPT_TOKENS)]


async def run_request(
    client: AsyncPdmeshClient, number: int, kill: Callable[[Placement], int], *, behind_tokens: int, after_s: float
) -> Outcome:
    """Calls `kill` once: behind that many tokens, or with 0 that long after the placement."""
    sent_s, times, trace_id, num_replacements = time.perf_counter(), list[float](), "", 0
    killed = asyncio.get_running_loop().create_future()

    def kill_now(placement: Placement) -> None:
        killed.set_result((time.perf_counter(), kill(placement)))

    async for event in client.generate(make_prompt(number), GenerateOptions(max_tokens=OUTPUT_TOKENS, ignore_eos=True)):
        if isinstance(event, Placement):
            placement, trace_id = event, event.trace_id
            if not behind_tokens:
                asyncio.get_running_loop().call_later(after_s, kill_now, placement)
        elif isinstance(event, Delta):
            times += [time.perf_counter()] * len(event.tokens)
            if behind_tokens and len(times) >= behind_tokens and not killed.done():
                kill_now(placement)
        elif isinstance(event, Finish):
            num_replacements = event.num_replacements
    killed_s, killed_ns = await killed
    return Outcome(
        trace_id=trace_id,
        sent_s=sent_s,
        token_times_s=tuple(times),
        killed_s=killed_s,
        killed_ns=killed_ns,
        num_replacements=num_replacements,
    )


class Killer:
    """Kills the node of a mesh that a placement names."""

    def __init__(self, running: RunningMesh) -> None:
        self._pids = {node.node_id: node.pid for node in running.nodes}

    def decode(self, placement: Placement) -> int:
        return self._kill(placement.decode_node)

    def prefill(self, placement: Placement) -> int:
        return self._kill(placement.prefill_node)

    def nobody(self, placement: Placement) -> int:
        return time.time_ns()

    def _kill(self, node_id: str) -> int:
        at_ns = time.time_ns()
        os.kill(self._pids[node_id], signal.SIGKILL)
        return at_ns


async def detection_ms(running: RunningMesh, outcome: Outcome) -> float:
    spans = await running.traces.wait_for_trace(outcome.trace_id, required_names=(_FAILED_ATTEMPT,), timeout_s=5.0)
    return min((span.end_ns - outcome.killed_ns) / 1e6 for span in spans if span.name == _FAILED_ATTEMPT)


async def run(num_threads: int, num_rounds: int) -> None:
    model = provide_model("smollm2", console)
    options = UpOptions(
        model="smollm2",
        num_prefill=num_rounds + 1,
        num_decode=num_rounds + 1,
        num_threads=num_threads,
        port=0,
        compute_values={"memory": "128MiB"},
    )
    report = Report("failover")
    logs_path = Path("build") / "bench-logs" / "failover"
    with FileLogs(logs_path) as logs:
        async with (
            running_mesh(options, model, logs, console) as running,
            AsyncPdmeshClient(running.router.address) as client,
        ):
            await measure(report, running, client, num_rounds)
    report.print()


async def measure(report: Report, running: RunningMesh, client: AsyncPdmeshClient, num_rounds: int) -> None:
    killer, number = Killer(running), 0
    for _ in range(2 * (num_rounds + 1)):
        # Every pair of nodes has proved its data plane before anything is measured.
        await run_request(client, number := number + 1, killer.nobody, behind_tokens=1, after_s=0.0)
    for role, kill, behind_tokens in (("decode", killer.decode, KILL_BEHIND_TOKENS), ("prefill", killer.prefill, 0)):
        normal_s, pauses_s, detections_ms = [], [], []
        for _ in range(num_rounds):
            normal = await run_request(client, number := number + 1, killer.nobody, behind_tokens=1, after_s=0.0)
            normal_s.append(normal.first_token_s)
            disturbed = await run_request(
                client, number := number + 1, kill, behind_tokens=behind_tokens, after_s=normal.first_token_s / 2
            )
            if not disturbed.num_replacements:
                raise RuntimeError(f"the {role} node that was killed was not missed; the case measures nothing")
            pauses_s.append(disturbed.pause_s)
            detections_ms.append(await detection_ms(running, disturbed))
        where = f"{role} node killed, prompt of {PROMPT_TOKENS} tokens"
        first_ms, pause_ms = 1e3 * statistics.median(normal_s), 1e3 * statistics.median(pauses_s)
        report.lower(f"{where}: undisturbed time to first token", first_ms, "ms")
        report.lower(f"{where}: kill to next token", pause_ms, "ms", MAX_RATIO * first_ms + MAX_DETECTION_MS)
        report.lower(f"{where}: of it until the router knows", statistics.median(detections_ms), "ms", MAX_DETECTION_MS)
        report.lower(f"{where}: kill to next token / time to first token", pause_ms / first_ms, "ratio")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-threads", type=int, default=1, help="compute threads of every node")
    parser.add_argument("--rounds", type=int, default=3, help="nodes killed of each role; medians are reported")
    arguments = parser.parse_args()
    asyncio.run(run(arguments.num_threads, arguments.rounds))


if __name__ == "__main__":
    main()

"""What leases add to a handoff: CPU time of both sessions and of the codec of every message between them.

Nothing is computed and nothing travels; a clock of the benchmark's own decides how long a handoff takes. A short one
ends before its first Beat, as most do: what is added is the lease's own arithmetic. A long one is told and answers a
Beat every quarter of the lease. What gRPC adds per message is not in it. Handoffs with and without leases go by
turns, and a value is the median over rounds. The goals are a hundredth of what the shortest handoff between two nodes
takes, 6 ms, and of a core while a long one lasts.
Usage: bench_leases.py [--rounds N]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

from pdmesh.v1 import handoff_pb2
from rows import Report

from model_runtime.sampler import SampledToken, SamplingParams
from node_runtime.handoff.decode_session import DecodeHandoff
from node_runtime.handoff.events import Admitted, Allocated, Begin, Completed, Progressed, Send, Tick
from node_runtime.handoff.lease import BEATS_PER_LEASE, DEFAULT_LEASE_S
from node_runtime.handoff.messages import Done, GroupGrant, Start
from node_runtime.handoff.prefill_session import PrefillHandoff
from node_runtime.wire.handoff import request_from_proto, request_to_proto, response_from_proto, response_to_proto

LEASE_MS = round(DEFAULT_LEASE_S * 1000)
BEAT_S = DEFAULT_LEASE_S / BEATS_PER_LEASE
LONG_BEATS = 10
PROMPT = tuple(range(512))
GROUPS = (GroupGrant(group_id="full", first_slot=0, block_ids=tuple(range(1, 33))),)
HANDOFFS_PER_ROUND = 100
SHORTEST_HANDOFF_US = 6000.0
GOAL_SHARE = 0.01


class Handoff:
    """Both sides of one handoff, and a wire between them that loses nothing."""

    def __init__(self, lease_ms: int) -> None:
        self._id = bytes(16)
        opening = Start(
            handoff_id=self._id,
            request_id="bench",
            token_ids=PROMPT,
            sampling=SamplingParams(),
            decode_incarnation=1,
            prefill_incarnation=2,
            lease_ms=lease_ms,
        )
        self._decode = DecodeHandoff(opening, drain_bound_s=8.0, notice_bound_s=8.0, vocab_size=1000)
        self._prefill = PrefillHandoff(check_start=lambda _: None, check_grant=lambda *_: None)
        self._now_s = 1.0
        self.num_messages = 0

    def run(self, num_beats: int) -> None:
        """From Start to Done, which comes so many quarters of a lease after the grant."""
        self._tell_decode(Begin())
        self._tell_prefill(Admitted(cached_tokens=0))
        self._tell_decode(Allocated(from_token=0, groups=GROUPS))
        for _ in range(num_beats):
            self._now_s += BEAT_S
            self._tell_prefill(Progressed())
            self._tell_prefill(Tick())
        done = Done(
            handoff_id=self._id,
            first_token=SampledToken(token_id=7),
            transferred_bytes=1 << 20,
            transferred_blocks=32,
            transferred_runs=1,
        )
        self._tell_prefill(Completed(done=done))
        assert self._decode.is_terminal
        assert self._prefill.is_terminal

    def _tell_decode(self, event: Begin | Allocated) -> None:
        self._carry_requests(self._decode.handle(event, self._now_s))

    def _tell_prefill(self, event: Admitted | Progressed | Tick | Completed) -> None:
        self._carry_responses(self._prefill.handle(event, self._now_s))

    def _carry_requests(self, actions: tuple[object, ...]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.num_messages += 1
                encoded = request_to_proto(action.message).SerializeToString()
                message = request_from_proto(handoff_pb2.HandoffRequest.FromString(encoded))
                self._carry_responses(self._prefill.handle(message, self._now_s))

    def _carry_responses(self, actions: tuple[object, ...]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.num_messages += 1
                encoded = response_to_proto(action.message).SerializeToString()
                message = response_from_proto(handoff_pb2.HandoffResponse.FromString(encoded))
                self._carry_requests(self._decode.handle(message, self._now_s))


def cpu_us(lease_ms: int, num_beats: int) -> float:
    """Of a handoff, the mean over a round."""
    began_s = time.process_time()
    for _ in range(HANDOFFS_PER_ROUND):
        Handoff(lease_ms).run(num_beats)
    return (time.process_time() - began_s) / HANDOFFS_PER_ROUND * 1e6


def num_messages(lease_ms: int, num_beats: int) -> int:
    handoff = Handoff(lease_ms)
    handoff.run(num_beats)
    return handoff.num_messages


def measure(report: Report, length: str, num_beats: int, num_rounds: int, goal_us: float) -> None:
    pairs = [(cpu_us(LEASE_MS, num_beats), cpu_us(0, num_beats)) for _ in range(num_rounds + 1)][1:]
    report.lower(f"{length} without leases", statistics.median(without for _, without in pairs), "us")
    added_us = statistics.median(leased - without for leased, without in pairs)
    report.lower(f"{length}, added by leases", added_us, "us", goal_us)
    added_messages = num_messages(LEASE_MS, num_beats) - num_messages(0, num_beats)
    report.lower(f"{length}, messages added by leases", added_messages, "1", 2 * num_beats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    num_rounds = parser.parse_args().rounds
    gc.disable()
    report = Report("leases")
    measure(report, "handoff without a Beat", 0, num_rounds, GOAL_SHARE * SHORTEST_HANDOFF_US)
    long_us = LONG_BEATS * BEAT_S * 1e6
    measure(report, f"handoff of {LONG_BEATS} Beats", LONG_BEATS, num_rounds, GOAL_SHARE * long_us)
    report.print()


if __name__ == "__main__":
    main()

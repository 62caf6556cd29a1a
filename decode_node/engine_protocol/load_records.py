"""The load of a node on its stream of events: with every batch, and by itself when it changed or nothing was said.

One per subscriber. Pure, without I/O; times are arguments. A gateway that hears it need not ask for it.
"""

from __future__ import annotations

from typing import Final

from smg_grpc_proto.generated import common_pb2, tokenspeed_scheduler_pb2

_MAX_SILENCE_S: Final = 1.0
# What of the memory must have changed to be worth a message.
_LEAST_USAGE: Final = 0.005


class LoadRecords:
    """Numbers what one subscriber is told."""

    def __init__(self) -> None:
        self._num_told = 0
        self._told: tokenspeed_scheduler_pb2.SchedulerLoad | None = None
        self._told_at_s = 0.0

    def is_due(self, load: tokenspeed_scheduler_pb2.SchedulerLoad, now_s: float) -> bool:
        """Whether the subscriber should be told of `load` without waiting for a batch."""
        told = self._told
        if told is None or now_s - self._told_at_s >= _MAX_SILENCE_S:
            return True
        counts = (load.num_running_reqs, load.num_waiting_reqs)
        if counts != (told.num_running_reqs, told.num_waiting_reqs):
            return True
        usages = ((load.token_usage, told.token_usage), (load.active_token_usage, told.active_token_usage))
        return any(abs(now - before) > _LEAST_USAGE for now, before in usages)

    def stamp(
        self, batch: common_pb2.KvEventBatch, load: tokenspeed_scheduler_pb2.SchedulerLoad, now_s: float
    ) -> common_pb2.KvEventBatch:
        """The batch, which is sent now, with the load; without events and state it is there for the load alone."""
        self._num_told += 1
        self._told, self._told_at_s = load, now_s
        batch.load.running_requests = load.num_running_reqs
        batch.load.waiting_requests = load.num_waiting_reqs
        batch.load.token_usage = load.token_usage
        batch.load.active_token_usage = load.active_token_usage
        batch.load.gen_throughput = load.gen_throughput
        batch.load.max_running_requests = load.max_running_requests
        batch.load.sample = self._num_told
        batch.load.load_only = not batch.events
        if self._num_told == 1 or batch.load.load_only:
            batch.load.cache_hit_rate = load.cache_hit_rate
            batch.load.num_used_tokens = load.num_used_tokens
            batch.load.max_total_num_tokens = load.max_total_num_tokens
        return batch

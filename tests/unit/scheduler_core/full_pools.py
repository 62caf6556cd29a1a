"""Schedulers whose pool is full, for the tests of retraction and recovery."""

from __future__ import annotations

import scheduler_core as sc

from .builders import Runtime, scheduler_config, spec


def runtime_of(role: sc.Role = sc.Role.FUSED, **changes: object) -> Runtime:
    return Runtime(sc.Scheduler(scheduler_config(role, **changes)))  # type: ignore[arg-type]


def two_that_fill_the_pool(role: sc.Role = sc.Role.FUSED) -> Runtime:
    """b and the younger a declare no length; both have 21 tokens, and the five blocks of each are all there are."""
    runtime = runtime_of(role, num_lcm_blocks=10)
    start(runtime, spec("b", 17, max_new_tokens=None), spec("a", range(100, 117), max_new_tokens=None))
    for _ in range(4 if role is sc.Role.FUSED else 3):
        runtime.step()
    return runtime


def start(runtime: Runtime, *specs: sc.RequestSpec) -> None:
    """On the decode role a peer fills the prompts; the first token of each is 7."""
    runtime.scheduler.submit(list(specs))
    remote = [each.request_id for each in specs if not each.local_prefill]
    if "role decode" in runtime.scheduler.describe():
        runtime.scheduler.advance([sc.ReadyEvent(request_id) for request_id in remote])
        granted = [grant.request_id for grant in runtime.step().remote_prefills]
        runtime.scheduler.advance([sc.DoneEvent(request_id, 7) for request_id in granted])


def line_of(runtime: Runtime, request_id: str) -> str:
    lines = runtime.scheduler.describe().splitlines()
    return next(line for line in lines if line.startswith(f"request {request_id} "))


def room_of(runtime: Runtime, request_id: str) -> int:
    """Of the first group."""
    lines = runtime.scheduler.describe().splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith(f"request {request_id} "))
    return int(lines[at + 1].rpartition(" ")[2])


def num_blocks(runtime: Runtime, request_id: str) -> int:
    return len(runtime.scheduler.block_tables(request_id)[0])

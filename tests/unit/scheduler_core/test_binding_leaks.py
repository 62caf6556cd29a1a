"""Objects of the native module die with their last reference. Asked of a process that uses all of them and ends."""

from __future__ import annotations

import os
import subprocess
import sys

import scheduler_core._core as core

USE_EVERYTHING = """
import ctypes, importlib.util, sys
spec = importlib.util.spec_from_file_location("scheduler_core._core", sys.argv[1])
sc = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sc)

group = sc.CacheGroupConfig(
    group_id="full", family=sc.Family.HISTORY, retention=sc.Retention.FULL_HISTORY, block_granularity=4
)


def scheduler_of(role):
    config = sc.SchedulerConfig(
        role=role, prefix_granularity=4, num_lcm_blocks=16, max_batch_size=4, token_budget=64, cache_groups=[group],
        enable_prefix_events=True,
    )
    config.validate()
    assert sc.CapacityModel(config).max_request_tokens == 64
    return sc.Scheduler(config)


def request(name, tokens):
    return sc.RequestSpec(request_id=name, tokens=tokens, max_new_tokens=3, extra_keys=[b"key"])


held = []
fused = scheduler_of(sc.Role.FUSED)
fused.submit([request("a", list(range(9)))])
empty = request("b", [])
for refused in (lambda: fused.submit([empty]), lambda: fused.block_tables("ghost"), lambda: fused.advance([1])):
    try:
        refused()
    except (sc.SubmitError, sc.ContractError, TypeError) as error:
        held.append(error)
for _ in range(3):
    plan = fused.next_plan()
    held += [plan.begins, plan.token_ids, plan.block_tables, plan.zero_blocks, plan.admissions, fused.block_tables("a")]
    fused.advance([sc.ResultEvent(name, [7]) for name in plan.request_ids])
fused.advance([sc.FinishEvent("a"), sc.AbortEvent("ghost")])
held += [fused.next_plan(), fused.drain_prefix_events(), fused.capacity(), sc.hash_grains([1, 2, 3, 4], 4)]
assert held[-3], "nothing was announced"
decode = scheduler_of(sc.Role.DECODE)
decode.submit([request("a", list(range(9)))])
decode.advance([sc.ReadyEvent("a")])
grants = decode.next_plan().remote_prefills
held += [grants[0].block_ids, sc.DoneEvent("a", 7), sc.GrantedEvent("a"), sc.HandedOverEvent("a"), sc.FailedEvent("a")]
if "leak" in sys.argv:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(plan))
print("done")
"""


def what_is_left(*arguments: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", USE_EVERYTHING, str(core.__file__), *arguments],
        env=os.environ | {"PDMESH_REPORT_LEAKS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ended.stdout == "done\n"
    return ended.stderr


def test_nothing_outlives_its_last_reference() -> None:
    assert what_is_left() == ""


def test_a_reference_too_many_shows() -> None:
    assert "leaked instance" in what_is_left("leak")

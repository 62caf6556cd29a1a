"""A fused node whose tensor ranks are processes: the bits of one, and an end when a rank ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from integration.ranks.engines import SETTINGS, Engine, config_of
from support.processes import wait_until
from unit.model_runtime import tiny_llama

from decode_node.config import DecodeNodeConfig
from model_runtime.sampler import SampledToken
from node_runtime.engine.core import load_core
from node_runtime.engine.ranks.processes import FollowerProcesses
from node_runtime.engine.scheduler import EngineBroken
from node_runtime.errors import BadConfig
from pdmesh_cli.parent_death import PARENT_PID_VARIABLE
from scheduler_core import Role

TESTS = Path(__file__).resolve().parents[2]
NOTICE_TIMEOUT_S = 30.0


def generate(engine: Engine) -> dict[str, list[SampledToken]]:
    """Chunks beside decoding rows, then a prefix hit."""
    shared = tiny_llama.random_prompt(40, seed=1)
    engine.submit("a", shared)
    engine.submit("b", tiny_llama.random_prompt(5, seed=2))
    engine.loop.run_until_idle()
    engine.submit("c", [*shared, 3, 1, 4])
    engine.loop.run_until_idle()
    return engine.tokens()


def test_two_processes_sample_the_tokens_of_one_and_end_with_the_node(tmp_path: Path) -> None:
    model = tiny_llama.save(tiny_llama.make_reference(), tmp_path)
    expected = generate(Engine(load_core(config_of(model, 1), Role.FUSED)))
    core = load_core(config_of(model, 2), Role.FUSED)
    assert isinstance(core.ranks, FollowerProcesses)
    lost: list[BaseException] = []
    core.ranks.watch(lost.append)
    try:
        assert generate(Engine(core)) == expected
        assert any("2 tensor ranks" in line for line in core.describe())
    finally:
        core.ranks.close()
    (process_id,) = core.ranks.process_ids
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)
    assert not lost


def test_a_node_hears_when_a_rank_is_killed_and_serves_nobody_after_it(tmp_path: Path) -> None:
    core = load_core(config_of(tiny_llama.save(tiny_llama.make_reference(), tmp_path), 2), Role.FUSED)
    assert isinstance(core.ranks, FollowerProcesses)
    lost: list[BaseException] = []
    has_lost = threading.Event()

    def hear(error: BaseException) -> None:
        lost.append(error)
        has_lost.set()

    try:
        core.ranks.watch(hear)
        (process_id,) = core.ranks.process_ids
        os.kill(process_id, signal.SIGKILL)
        assert has_lost.wait(NOTICE_TIMEOUT_S)
        assert str(lost[0]) == f"tensor rank 1 ended with status {-signal.SIGKILL}"
        engine = Engine(core)
        engine.submit("a", [1, 2, 3])
        with pytest.raises(EngineBroken):
            engine.loop.run_until_idle()
    finally:
        core.ranks.close()


def test_a_rank_is_gone_at_once_when_its_node_is_killed_in_the_middle_of_a_pass(tmp_path: Path) -> None:
    model = tiny_llama.save(tiny_llama.make_reference(), tmp_path)
    leader = subprocess.Popen(
        [sys.executable, "-m", "integration.ranks.leading_process", str(model)],
        cwd=TESTS,
        env=os.environ | {PARENT_PID_VARIABLE: str(os.getpid())},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert leader.stdout is not None
        process_id = int(leader.stdout.readline())
        assert is_running(process_id)
    finally:
        leader.kill()
        leader.wait()
    wait_until(lambda: not is_running(process_id), NOTICE_TIMEOUT_S, "the end of the follower")


def is_running(process_id: int) -> bool:
    """Not gone, nor waiting for whoever inherited it."""
    try:
        status = Path(f"/proc/{process_id}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


def test_a_model_that_does_not_share_out_keeps_the_node_from_starting(tmp_path: Path) -> None:
    model = tiny_llama.save(tiny_llama.make_reference(num_heads=6, num_kv_heads=3), tmp_path)
    with pytest.raises(BadConfig, match="3 heads can neither be split over 2 tensor ranks"):
        load_core(config_of(model, 2), Role.FUSED)


def test_a_node_that_hands_caches_over_has_no_more_ranks_than_its_peers_link() -> None:
    values = {**SETTINGS, "model": "none", "tensor_parallel": 33}
    with pytest.raises(BadConfig, match="tensor_parallel: 33 given, peers of a decode node link at most 32 ranks"):
        load_core(DecodeNodeConfig.model_validate(values), Role.DECODE)

"""A serving mesh under attack: processes are killed, stopped and replaced, connections break, clients leave.

One file, so that the processes are started once, whoever shares the tests out.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from integration.chaos.field import APART, COMPUTE_NODES, PROMPTS, PROXIED, ROUTER, Field, Load
from support.preloaded import origin
from support.processes import wait_until

SERVING = health_pb2.HealthCheckResponse.SERVING
# Shorter than any bound by which a peer is given up.
SHORT_PAUSE_S = 0.7
# Clients that wait between two requests, where a test waits for seconds until something is noticed or has started.
THINK_S = 0.3
NUM_REQUESTS = 300
# The first two storms fill pools and caches that are kept; what two more add would be a leak. One of a request's
# buffers, or of one thread or socket each, is far above this.
GROWTH_BOUND_BYTES = 16 << 20
GROWTH_BOUND_FILES = 20
STATUSES = {grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED}


# kill -9.


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_compute_node_costs_no_request_and_its_successor_takes_its_place(field: Field, role: str) -> None:
    drawn = random.Random(f"kill {role}")
    victim = drawn.choice([f"{role}-0", f"{role}-1"])
    incarnations = {node.info().incarnation for node in field.nodes.values()}
    with Load(field, think_s=THINK_S, seed=drawn.randrange(1000)) as load:
        load.wait_for_tokens(drawn.randrange(100, 2000))
        field.kill(victim)
        wait_until(lambda: field.peer_state(victim) != "ready", 20.0, f"the router knows that {victim} is gone")
        # No other node calls itself ill, those of the other role and the router included.
        assert {name for name, node in field.nodes.items() if name != victim and node.health() == SERVING} == {
            name for name in field.nodes if name != victim
        }
        load.wait_for_tokens(1000)
        (successor,) = field.restart(victim)
        field.wait_until_whole()
        load.wait_for_tokens(1000)
    assert successor.info().incarnation not in incarnations
    # Those that ran on the dead node were moved to another one.
    load.assert_flawless()


def test_a_killed_router_ends_the_streams_of_its_clients_and_frees_the_nodes_and_its_successor_serves_on(
    field: Field,
) -> None:
    drawn = random.Random("kill router")
    with Load(field, seed=drawn.randrange(1000)) as load:
        load.wait_for_tokens(drawn.randrange(100, 2000))
        field.kill(ROUTER)
        field.wait_until_idle()
        field.restart(ROUTER)
        field.wait_until_whole()
        load.wait_for_tokens(1000)
    load.assert_only_excusable()


# SIGSTOP and SIGCONT.


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_short_pauses_of_a_process_change_no_text(field: Field, role: str) -> None:
    drawn = random.Random(f"pause {role}")
    names = [ROUTER] if role == "router" else [f"{role}-0", f"{role}-1"]
    with Load(field, seed=drawn.randrange(1000)) as load:
        for _ in range(2):
            load.wait_for_tokens(drawn.randrange(50, 1000))
            with field.paused(drawn.choice(names)):
                time.sleep(SHORT_PAUSE_S)
        load.wait_for_tokens(500)
    load.assert_only_excusable()


def test_a_prefill_node_that_wakes_long_after_it_was_given_up_harms_nobody(field: Field) -> None:
    victim = random.Random("long pause").choice(["prefill-0", "prefill-1"])
    with Load(field, think_s=THINK_S, seed=77) as load:
        load.wait_for_tokens(500)
        with field.paused(victim):
            wait_until(lambda: field.peer_state(victim) != "ready", 60.0, f"the router gave {victim} up")
            load.wait_for_tokens(500)
        field.wait_until_whole()
        load.wait_for_tokens(1000)
    load.assert_only_excusable()


# Networks.


def test_connections_that_are_reset_again_and_again_change_no_text(field: Field) -> None:
    drawn = random.Random("reset")
    with Load(field, seed=drawn.randrange(1000)) as load:
        for _ in range(8):
            load.wait_for_tokens(drawn.randrange(20, 600))
            field.proxies[drawn.choice(PROXIED)].reset()
        field.wait_until_whole()
        load.wait_for_tokens(500)
    load.assert_only_excusable()


def test_nodes_behind_a_network_that_swallows_everything_are_left_out_and_taken_back(field: Field) -> None:
    with Load(field, think_s=THINK_S, seed=5) as load:
        load.wait_for_tokens(500)
        for name in PROXIED:
            field.proxies[name].go_silent()
        for name in PROXIED:
            wait_until(
                lambda name=name: field.peer_state(name) != "ready", 60.0, f"the router knows that {name} is cut off"
            )
        # A decode node looks after its way to each prefill node by itself.
        wait_until(
            lambda: [peer.state for peer in field.nodes["decode-0"].status().peers] == ["ready", "suspect"],
            60.0,
            "decode-0 knows which prefill node it cannot reach",
        )
        load.wait_for_tokens(500)
        for name in PROXIED:
            field.proxies[name].forward()
        field.wait_until_whole()
        load.wait_for_tokens(1000)
    load.assert_only_excusable()


def test_a_prefill_node_whose_writes_and_words_are_swallowed_is_left_out_and_taken_back(field: Field) -> None:
    cable = field.cable
    if cable is None:
        pytest.skip("this machine allows no network namespaces")
    with Load(field, think_s=THINK_S, seed=6, num_clients=12) as load:
        load.wait_for_tokens(500)
        cable.cut()
        try:
            wait_until(lambda: field.peer_state(APART) != "ready", 60.0, f"the router knows that {APART} is cut off")
            load.wait_for_tokens(500)
        finally:
            cable.mend()
        field.wait_until_whole()
        load.wait_for_tokens(1000)
    load.assert_only_excusable()


# Clients.


def resident_bytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * 4096


def num_open(pid: int) -> int:
    """Files, sockets and threads."""
    return sum(len(list(Path(f"/proc/{pid}/{kind}").iterdir())) for kind in ("fd", "task"))


def storm(field: Field, seed: int) -> None:
    """Every client leaves: some at once, some when they have heard something, in any order."""
    drawn = random.Random(seed)
    with field.client() as client:
        streams = []
        for _ in range(NUM_REQUESTS):
            prompt, _ = PROMPTS[drawn.choice(sorted(PROMPTS))]
            streams.append(client.start(60.0, token_ids=prompt, max_tokens=2000, ignore_eos=True))
        for stream in drawn.sample(streams, 20):
            with contextlib.suppress(grpc.RpcError, StopIteration):
                next(stream)
        drawn.shuffle(streams)
        for stream in streams:
            stream.cancel()
        assert {stream.code() for stream in streams} <= STATUSES


def test_four_storms_of_300_cancelled_requests_leave_blocks_memory_and_files_as_they_were(field: Field) -> None:
    pids = {name: field.nodes[name].process.pid for name in (*COMPUTE_NODES, ROUTER)}
    before: dict[str, tuple[int, int]] = {}
    for number in range(4):
        storm(field, number)
        field.wait_until_idle()
        if number == 1:
            before = {name: (resident_bytes(pid), num_open(pid)) for name, pid in pids.items()}
    for name, pid in pids.items():
        assert resident_bytes(pid) - before[name][0] < GROWTH_BOUND_BYTES, name
        assert num_open(pid) - before[name][1] < GROWTH_BOUND_FILES, name


# Operators.


def test_a_rolling_restart_of_all_compute_nodes_under_load_fails_no_stream(field: Field) -> None:
    old = [field.nodes[name] for name in COMPUTE_NODES]
    with Load(field, think_s=THINK_S, seed=11) as load:
        # Half of each pool at a time, which is as much as a pool of two can spare.
        for names in (("prefill-0", "decode-0"), ("prefill-1", "decode-1")):
            load.wait_for_tokens(500)
            signalled, told = (field.nodes[name] for name in names)
            signalled.process.terminate()
            drain = origin().run(("drain", told.address), environment=os.environ, timeout_s=60.0)
            assert drain.returncode == 0, drain.stderr
            assert f"{names[1]} at {told.address} drains" in drain.stdout
            for node in (signalled, told):
                assert node.process.wait(timeout=60) == 0, node.log_text()
                assert "outlived the grace period" not in node.log_text()
            field.restart(*names)
            field.wait_until_whole()
        load.wait_for_tokens(500)
    load.assert_flawless()
    # There was something to finish, and it was finished where it ran.
    assert any("calls finished" in node.log_text() for node in old)


def test_a_router_that_is_replaced_under_load_breaks_no_stream(field: Field) -> None:
    old = field.nodes[ROUTER]
    with Load(field, think_s=THINK_S, seed=12) as load:
        load.wait_for_tokens(300)
        old.process.terminate()
        assert old.process.wait(timeout=60) == 0
        field.restart(ROUTER)
        field.wait_until_whole()
        load.wait_for_tokens(300)
    load.assert_unbroken()
    assert "outlived the grace period" not in old.log_text()
    # There was something to finish.
    assert "calls finished" in old.log_text()

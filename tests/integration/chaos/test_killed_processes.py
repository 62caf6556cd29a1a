"""kill -9 under load, of each role, and a successor at the same address."""

from __future__ import annotations

import random

import pytest
from grpc_health.v1 import health_pb2
from integration.chaos.field import ROUTER, Field, Load
from support.processes import wait_until

SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_compute_node_costs_no_request_and_its_successor_takes_its_place(field: Field, role: str) -> None:
    drawn = random.Random(f"kill {role}")
    victim = drawn.choice([f"{role}-0", f"{role}-1"])
    incarnations = {node.info().incarnation for node in field.nodes.values()}
    with Load(field, think_s=0.1, seed=drawn.randrange(1000)) as load:
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

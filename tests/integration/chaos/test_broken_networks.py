"""Connections that are reset, and a network that swallows everything, between the router and some of its nodes."""

from __future__ import annotations

import random

import pytest
from integration.chaos.field import APART, PROXIED, Field, Load
from support.processes import wait_until


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
    with Load(field, seed=5) as load:
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
    with Load(field, seed=6, num_clients=12) as load:
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

"""SIGSTOP and SIGCONT under load: a process that sleeps through a while of its life and does not know it."""

from __future__ import annotations

import random
import time

import pytest
from integration.chaos.field import ROUTER, Field, Load
from support.processes import wait_until

# Shorter than any bound by which a peer is given up.
SHORT_PAUSE_S = 0.7


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
    with Load(field, seed=77) as load:
        load.wait_for_tokens(500)
        with field.paused(victim):
            wait_until(lambda: field.peer_state(victim) != "ready", 60.0, f"the router gave {victim} up")
            load.wait_for_tokens(500)
        field.wait_until_whole()
        load.wait_for_tokens(1000)
    load.assert_only_excusable()

"""Both transition tables are whole, and every way through them ends in a state that holds nothing."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import pytest

from node_runtime.handoff import states
from node_runtime.handoff.events import GaveUp, StreamClosed, Tick
from node_runtime.handoff.states import DecodeState, PrefillState, Verdict

TABLES = {
    "decode": (states.DECODE_TABLE, DecodeState, states.DECODE_EVENT_KINDS, states.DECODE_TERMINAL),
    "prefill": (states.PREFILL_TABLE, PrefillState, states.PREFILL_EVENT_KINDS, states.PREFILL_TERMINAL),
}


@pytest.fixture(params=TABLES)
def side(request: pytest.FixtureRequest) -> tuple[Mapping, type[Enum], tuple[type, ...], frozenset[Enum]]:
    return TABLES[request.param]


def test_every_state_has_a_rule_for_every_kind_of_event(side) -> None:
    table, state_class, kinds, _ = side
    assert set(table) == set(state_class)
    for state, row in table.items():
        assert set(row) == set(kinds), state


def test_terminal_states_are_never_left_and_take_every_late_message(side) -> None:
    table, _, kinds, terminal = side
    messages = [kind for kind in kinds if kind.__module__.endswith("messages")]
    assert messages
    for state in terminal:
        assert all(isinstance(verdict, Verdict) for verdict in table[state].values())
        assert all(table[state][kind] is Verdict.IGNORED for kind in messages), state


def test_a_broken_stream_or_a_lost_interest_is_legal_everywhere(side) -> None:
    table, *_ = side
    for state, row in table.items():
        for kind in (StreamClosed, GaveUp):
            assert not isinstance(row[kind], Verdict) or row[kind] is Verdict.IGNORED, (state, kind)


def test_from_every_state_a_terminal_one_can_be_reached(side) -> None:
    table, _, _, terminal = side
    reached = set(terminal)
    while True:
        more = {
            state
            for state, row in table.items()
            if state not in reached and any(target in reached for target in row.values())
        }
        if not more:
            break
        reached |= more
    assert reached == set(table)


def test_granted_memory_is_given_back_only_by_done_quiet_a_vouching_plane_or_time() -> None:
    row = states.DECODE_TABLE[DecodeState.QUARANTINED]
    leaving = {kind.__name__ for kind, target in row.items() if target is DecodeState.CLOSED}
    assert leaving == {"Done", "Quiesced", "Fenced", "Tick"}
    assert row[Tick] is DecodeState.CLOSED
    granted = states.DECODE_TABLE[DecodeState.GRANTED]
    assert {kind.__name__ for kind, target in granted.items() if target is DecodeState.DONE} == {"Done"}
    assert {kind.__name__ for kind, target in granted.items() if target is DecodeState.CLOSED} == {"Quiesced"}


def test_source_blocks_are_given_back_only_when_every_write_is_terminal() -> None:
    row = states.PREFILL_TABLE[PrefillState.DRAINING]
    assert {kind.__name__ for kind, target in row.items() if target is PrefillState.CLOSED} == {"Drained"}
    granted = states.PREFILL_TABLE[PrefillState.GRANTED]
    assert {target for target in granted.values() if isinstance(target, PrefillState)} == {
        PrefillState.GRANTED,
        PrefillState.DONE,
        PrefillState.DRAINING,
    }

"""The prefill side of a handoff, driven by events alone."""

from __future__ import annotations

import pytest
from support.handoff_values import GROUPS, ID, OTHER_ID, abort, done, grant, start

from node_runtime.errors import InternalError, InvalidRequest
from node_runtime.handoff import states
from node_runtime.handoff.events import (
    AbortScheduling,
    Admitted,
    Completed,
    Drained,
    EndWithFailure,
    FailScheduling,
    GaveUp,
    MarkGranted,
    MarkHandedOver,
    MarkQuiesced,
    PrefillAction,
    PrefillEvent,
    Send,
    StartWriting,
    StopWriting,
    StreamClosed,
    SubmitPrompt,
)
from node_runtime.handoff.messages import Failed, Grant, Quiesced, Ready, Start
from node_runtime.handoff.session import PrefillHandoff
from node_runtime.handoff.states import PrefillState, Verdict

ADMITTED = Admitted(cached_tokens=4)
COMPLETED = Completed(done=done())
FAULT = GaveUp(code=13, message="the forward pass failed")
BROKEN = StreamClosed(code=1, message="the control stream ended")

EVENTS: dict[type, PrefillEvent] = {
    type(event): event for event in (start(), grant(), abort(), ADMITTED, COMPLETED, Drained(), BROKEN, FAULT)
}
WAYS: dict[PrefillState, tuple[PrefillEvent, ...]] = {
    PrefillState.OPEN: (),
    PrefillState.QUEUED: (start(),),
    PrefillState.READY: (start(), ADMITTED),
    PrefillState.GRANTED: (start(), ADMITTED, grant()),
    PrefillState.DRAINING: (start(), ADMITTED, grant(), abort()),
    PrefillState.DONE: (start(), ADMITTED, grant(), COMPLETED),
    PrefillState.CLOSED: (start(), abort()),
}


def new_session(**checks: object) -> PrefillHandoff:
    rules = {"check_start": lambda _: None, "check_grant": lambda *_: None}
    return PrefillHandoff(**{**rules, **checks})


def in_state(state: PrefillState) -> PrefillHandoff:
    session = new_session()
    for event in WAYS[state]:
        session.handle(event)
    assert session.state is state
    return session


def kinds(actions: tuple[PrefillAction, ...]) -> list[type]:
    return [type(action.message) if isinstance(action, Send) else type(action) for action in actions]


def test_a_good_handoff_says_ready_writes_and_says_done() -> None:
    session = new_session()
    assert session.handle(start()) == (SubmitPrompt(start=start()),)
    assert session.handle(ADMITTED) == (Send(message=Ready(handoff_id=ID, cached_tokens=4)),)
    assert session.handle(grant()) == (MarkGranted(), StartWriting(grant=grant()))
    assert session.handle(COMPLETED) == (Send(message=done()), MarkHandedOver())
    assert session.is_terminal


@pytest.mark.parametrize("state", PrefillState)
@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
def test_the_session_follows_its_table(state: PrefillState, kind: type) -> None:
    session = in_state(state)
    verdict = states.PREFILL_TABLE[state][kind]
    match verdict:
        case Verdict.PEER_ERROR:
            with pytest.raises(
                InvalidRequest, match=f"{kind.__name__} is not allowed while the handoff is {state.value}"
            ):
                session.handle(EVENTS[kind])
            assert session.state is state
        case Verdict.LOCAL_ERROR:
            with pytest.raises(InternalError, match=kind.__name__):
                session.handle(EVENTS[kind])
            assert session.state is state
        case Verdict.IGNORED:
            assert session.handle(EVENTS[kind]) == ()
            assert session.state is state
        case _:
            session.handle(EVENTS[kind])
            assert session.state is verdict


@pytest.mark.parametrize("state", [state for state in PrefillState if state is not PrefillState.OPEN])
@pytest.mark.parametrize("message", [grant(OTHER_ID), abort(OTHER_ID)])
def test_messages_of_another_handoff_change_nothing(state: PrefillState, message: PrefillEvent) -> None:
    session = in_state(state)
    assert session.handle(message) == ()
    assert session.state is state


@pytest.mark.parametrize("state", [state for state in PrefillState if state is not PrefillState.OPEN])
def test_a_second_start_with_other_content_is_refused_and_harms_nothing(state: PrefillState) -> None:
    session = in_state(state)
    with pytest.raises(InvalidRequest, match="second Start"):
        session.handle(start(handoff_id=OTHER_ID))
    assert session.state is state


@pytest.mark.parametrize("state", [PrefillState.GRANTED, PrefillState.DRAINING, PrefillState.DONE])
def test_a_second_grant_with_other_blocks_is_refused_and_harms_nothing(state: PrefillState) -> None:
    session = in_state(state)
    with pytest.raises(InvalidRequest, match="second Grant"):
        session.handle(grant(from_token=4))
    assert session.state is state


def test_a_refused_start_leaves_nothing_behind() -> None:
    def refuse(_: Start) -> None:
        raise InvalidRequest("token_ids: too long")

    session = new_session(check_start=refuse)
    with pytest.raises(InvalidRequest, match="too long"):
        session.handle(start())
    assert session.state is PrefillState.OPEN


def test_a_refused_grant_leaves_the_handoff_waiting_for_a_good_one() -> None:
    def refuse_other_blocks(_: Start, message: Grant) -> None:
        if message.groups != GROUPS:
            raise InvalidRequest("block_ids: 99 is outside")

    session = new_session(check_grant=refuse_other_blocks)
    session.handle(start())
    session.handle(ADMITTED)
    with pytest.raises(InvalidRequest, match="outside"):
        session.handle(grant(groups=()))
    assert session.state is PrefillState.READY
    assert StartWriting(grant=grant()) in session.handle(grant())


@pytest.mark.parametrize("state", [PrefillState.QUEUED, PrefillState.READY])
def test_an_abort_before_the_grant_is_quiet_at_once(state: PrefillState) -> None:
    session = in_state(state)
    assert kinds(session.handle(abort())) == [AbortScheduling, MarkQuiesced, Quiesced]
    assert session.state is PrefillState.CLOSED


def test_an_abort_while_writing_is_quiet_only_when_every_write_is_terminal() -> None:
    session = in_state(PrefillState.GRANTED)
    assert kinds(session.handle(abort())) == [AbortScheduling, StopWriting]
    assert session.handle(COMPLETED) == ()
    assert kinds(session.handle(Drained())) == [MarkQuiesced, Quiesced]
    assert session.state is PrefillState.CLOSED


def test_a_fault_while_writing_is_told_first_and_quiet_later() -> None:
    session = in_state(PrefillState.GRANTED)
    actions = session.handle(FAULT)
    assert kinds(actions) == [FailScheduling, Failed, StopWriting, EndWithFailure]
    assert Send(message=Failed(handoff_id=ID, code=13, message="the forward pass failed")) in actions
    assert kinds(session.handle(Drained())) == [MarkQuiesced, Quiesced]


@pytest.mark.parametrize("state", [PrefillState.QUEUED, PrefillState.READY])
def test_a_fault_before_the_grant_is_told_and_holds_nothing(state: PrefillState) -> None:
    actions = in_state(state).handle(FAULT)
    assert kinds(actions) == [FailScheduling, Failed, MarkQuiesced, Quiesced, EndWithFailure]


def test_nothing_is_sent_on_a_broken_stream_but_the_blocks_are_drained_all_the_same() -> None:
    session = in_state(PrefillState.GRANTED)
    assert kinds(session.handle(BROKEN)) == [AbortScheduling, StopWriting]
    assert kinds(session.handle(Drained())) == [MarkQuiesced]
    assert session.is_terminal


def test_a_stream_that_breaks_while_draining_silences_the_farewell() -> None:
    session = in_state(PrefillState.DRAINING)
    assert session.handle(BROKEN) == ()
    assert kinds(session.handle(Drained())) == [MarkQuiesced]

"""The prefill side of a handoff, driven by events and a time that the test sets."""

from __future__ import annotations

import math

import pytest
from support.handoff_values import GROUPS, ID, OTHER_ID, abort, beat, done, grant, renewed, start

from node_runtime.errors import InternalError, InvalidRequest
from node_runtime.handoff import states
from node_runtime.handoff.events import (
    AbortScheduling,
    Admitted,
    ChecksumsTaken,
    Completed,
    Drained,
    EndWithFailure,
    ExtendWriting,
    FailScheduling,
    GaveUp,
    MarkGranted,
    MarkHandedOver,
    MarkQuiesced,
    PrefillAction,
    PrefillEvent,
    Progressed,
    Send,
    StartWriting,
    StopWriting,
    StreamClosed,
    SubmitPrompt,
    Tick,
)
from node_runtime.handoff.messages import Beat, Checksums, Failed, Grant, Quiesced, Ready, Start
from node_runtime.handoff.prefill_session import PrefillHandoff
from node_runtime.handoff.states import PrefillState, Verdict

ADMITTED = Admitted(cached_tokens=4)
COMPLETED = Completed(done=done())
FAULT = GaveUp(code=13, message="the forward pass failed")
BROKEN = StreamClosed(code=1, message="the control stream ended")

LEASE_S = 4.0
LEASE_MS = 4000
STALL_BOUND_S = 30.0
# When the first Beat is due; prompts are admitted at 0.
NOW_S = 1.0
START = start(lease_ms=LEASE_MS)
# Under a lease that counts from Ready.
GRANT = grant(lease_ms=LEASE_MS)

SUMS = ChecksumsTaken(checksums=Checksums(handoff_id=ID, part=0, fields=()))

EVENTS: dict[type, PrefillEvent] = {
    type(event): event
    for event in (
        START,
        GRANT,
        renewed(1),
        abort(),
        ADMITTED,
        Progressed(),
        SUMS,
        COMPLETED,
        Drained(),
        BROKEN,
        FAULT,
        Tick(),
    )
}
WAYS: dict[PrefillState, tuple[PrefillEvent, ...]] = {
    PrefillState.OPEN: (),
    PrefillState.QUEUED: (START,),
    PrefillState.READY: (START, ADMITTED, Tick()),
    PrefillState.GRANTED: (START, ADMITTED, Tick(), GRANT),
    PrefillState.DRAINING: (START, ADMITTED, Tick(), GRANT, abort()),
    PrefillState.DONE: (START, ADMITTED, Tick(), GRANT, COMPLETED),
    PrefillState.CLOSED: (START, abort()),
}


def new_session(**checks: object) -> PrefillHandoff:
    rules = {"check_start": lambda _: None, "check_grant": lambda *_: None, "stall_bound_s": STALL_BOUND_S}
    return PrefillHandoff(**{**rules, **checks})


def in_state(state: PrefillState) -> PrefillHandoff:
    session = new_session()
    for event in WAYS[state]:
        session.handle(event, 0.0 if event in (START, ADMITTED) else NOW_S)
    assert session.state is state
    return session


def kinds(actions: tuple[PrefillAction, ...]) -> list[type]:
    return [type(action.message) if isinstance(action, Send) else type(action) for action in actions]


def test_a_good_handoff_says_ready_writes_and_says_done() -> None:
    session = new_session()
    assert session.handle(START, 0.0) == (SubmitPrompt(start=START),)
    ready = Ready(handoff_id=ID, cached_tokens=4, beat_interval_ms=1000)
    assert session.handle(ADMITTED, 0.0) == (Send(message=ready),)
    assert session.handle(GRANT, NOW_S) == (MarkGranted(), StartWriting(grant=GRANT, post_until_s=3.6))
    assert session.handle(COMPLETED, NOW_S) == (Send(message=done()), MarkHandedOver())
    assert session.is_terminal


@pytest.mark.parametrize(
    ("offered", "known", "named"),
    [
        (("fast", "slow"), ("slow", "fast"), "fast"),
        (("unheard of", "slow"), ("slow", "fast"), "slow"),
        (("unheard of",), ("fast",), "xxh3"),
        (("fast",), (), "xxh3"),
        ((), ("fast",), "xxh3"),
    ],
)
def test_ready_names_the_first_kind_of_digest_that_both_know(
    offered: tuple[str, ...], known: tuple[str, ...], named: str
) -> None:
    session = new_session(checksum_kinds=known)
    session.handle(start(wants_checksums=True, checksum_kinds=offered), 0.0)
    (said,) = session.handle(ADMITTED, 0.0)
    assert said == Send(message=Ready(handoff_id=ID, cached_tokens=4, checksum_kind=named))
    assert session.checksum_kind == named


def test_checksums_are_sent_while_the_handoff_lives_and_not_after_it_was_given_up() -> None:
    session = in_state(PrefillState.GRANTED)
    assert session.handle(SUMS, NOW_S) == (Send(message=SUMS.checksums),)
    session.handle(abort(), NOW_S)
    assert session.handle(SUMS, NOW_S) == ()


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
                session.handle(EVENTS[kind], NOW_S)
            assert session.state is state
        case Verdict.LOCAL_ERROR:
            with pytest.raises(InternalError, match=kind.__name__):
                session.handle(EVENTS[kind], NOW_S)
            assert session.state is state
        case Verdict.IGNORED:
            assert session.handle(EVENTS[kind], NOW_S) == ()
            assert session.state is state
        case _:
            session.handle(EVENTS[kind], NOW_S)
            assert session.state is verdict


@pytest.mark.parametrize("state", [state for state in PrefillState if state is not PrefillState.OPEN])
@pytest.mark.parametrize("message", [grant(OTHER_ID), renewed(1, OTHER_ID), abort(OTHER_ID)])
def test_messages_of_another_handoff_change_nothing(state: PrefillState, message: PrefillEvent) -> None:
    session = in_state(state)
    assert session.handle(message, NOW_S) == ()
    assert session.state is state


@pytest.mark.parametrize("state", [state for state in PrefillState if state is not PrefillState.OPEN])
def test_a_second_start_with_other_content_is_refused_and_harms_nothing(state: PrefillState) -> None:
    session = in_state(state)
    with pytest.raises(InvalidRequest, match="second Start"):
        session.handle(start(handoff_id=OTHER_ID), NOW_S)
    assert session.state is state


@pytest.mark.parametrize("state", [PrefillState.GRANTED, PrefillState.DRAINING, PrefillState.DONE])
def test_a_second_grant_with_other_blocks_is_refused_and_harms_nothing(state: PrefillState) -> None:
    session = in_state(state)
    with pytest.raises(InvalidRequest, match="second Grant"):
        session.handle(grant(from_token=4, lease_ms=LEASE_MS), NOW_S)
    assert session.state is state


def test_a_refused_start_leaves_nothing_behind() -> None:
    def refuse(_: Start) -> None:
        raise InvalidRequest("token_ids: too long")

    session = new_session(check_start=refuse)
    with pytest.raises(InvalidRequest, match="too long"):
        session.handle(START, NOW_S)
    assert session.state is PrefillState.OPEN


def test_a_refused_grant_leaves_the_handoff_waiting_for_a_good_one() -> None:
    def refuse_other_blocks(_: Start, message: Grant) -> None:
        if message.groups != GROUPS:
            raise InvalidRequest("block_ids: 99 is outside")

    session = new_session(check_grant=refuse_other_blocks)
    session.handle(START, 0.0)
    session.handle(ADMITTED, 0.0)
    with pytest.raises(InvalidRequest, match="outside"):
        session.handle(grant(groups=(), lease_ms=LEASE_MS), NOW_S)
    assert session.state is PrefillState.READY
    assert StartWriting(grant=GRANT, post_until_s=3.6) in session.handle(GRANT, NOW_S)


@pytest.mark.parametrize("state", [PrefillState.QUEUED, PrefillState.READY])
def test_an_abort_before_the_grant_is_quiet_at_once(state: PrefillState) -> None:
    session = in_state(state)
    assert kinds(session.handle(abort(), NOW_S)) == [AbortScheduling, MarkQuiesced, Quiesced]
    assert session.state is PrefillState.CLOSED


def test_an_abort_while_writing_is_quiet_only_when_every_write_is_terminal() -> None:
    session = in_state(PrefillState.GRANTED)
    assert kinds(session.handle(abort(), NOW_S)) == [AbortScheduling, StopWriting]
    assert session.handle(COMPLETED, NOW_S) == ()
    assert kinds(session.handle(Drained(), NOW_S)) == [MarkQuiesced, Quiesced]
    assert session.state is PrefillState.CLOSED


def test_a_fault_while_writing_is_told_first_and_quiet_later() -> None:
    session = in_state(PrefillState.GRANTED)
    actions = session.handle(FAULT, NOW_S)
    assert kinds(actions) == [FailScheduling, Failed, StopWriting, EndWithFailure]
    assert Send(message=Failed(handoff_id=ID, code=13, message="the forward pass failed")) in actions
    assert kinds(session.handle(Drained(), NOW_S)) == [MarkQuiesced, Quiesced]


@pytest.mark.parametrize("state", [PrefillState.QUEUED, PrefillState.READY])
def test_a_fault_before_the_grant_is_told_and_holds_nothing(state: PrefillState) -> None:
    actions = in_state(state).handle(FAULT, NOW_S)
    assert kinds(actions) == [FailScheduling, Failed, MarkQuiesced, Quiesced, EndWithFailure]


def test_nothing_is_sent_on_a_broken_stream_but_the_blocks_are_drained_all_the_same() -> None:
    session = in_state(PrefillState.GRANTED)
    assert kinds(session.handle(BROKEN, NOW_S)) == [AbortScheduling, StopWriting]
    assert kinds(session.handle(Drained(), NOW_S)) == [MarkQuiesced]
    assert session.is_terminal


def test_a_stream_that_breaks_while_draining_silences_the_farewell() -> None:
    session = in_state(PrefillState.DRAINING)
    assert session.handle(BROKEN, NOW_S) == ()
    assert kinds(session.handle(Drained(), NOW_S)) == [MarkQuiesced]


# The lease.


def test_beats_are_sent_from_ready_on_four_times_per_lease() -> None:
    session = new_session()
    session.handle(START, 0.0)
    assert session.wakeup_at_s is None
    session.handle(ADMITTED, 10.0)
    assert session.wakeup_at_s == 11.0
    assert session.handle(Tick(), 10.9) == ()
    assert session.handle(Tick(), 11.0) == (Send(message=beat(1)),)
    session.handle(grant(lease_ms=LEASE_MS, beat=1), 11.5)
    assert session.wakeup_at_s == 12.0
    assert session.handle(Tick(), 12.2) == (Send(message=beat(2)),)
    assert session.wakeup_at_s == 13.2


def test_a_lease_counts_from_the_sending_of_the_beat_that_was_answered() -> None:
    session = in_state(PrefillState.GRANTED)
    session.handle(Tick(), 2.5)
    assert session.handle(renewed(1), 3.0) == (ExtendWriting(post_until_s=NOW_S + 3.6),)
    assert session.handle(renewed(1), 3.0) == ()
    assert session.handle(renewed(2), 3.5) == (ExtendWriting(post_until_s=2.5 + 3.6),)
    assert session.handle(renewed(1), 3.6) == ()
    assert kinds(session.handle(Tick(), 6.4)) == [Beat]
    assert FailScheduling in kinds(session.handle(Tick(), 2.5 + LEASE_S))


@pytest.mark.parametrize("event", [Tick(), renewed(1), COMPLETED], ids=["tick", "renewal", "last write landed"])
def test_at_the_end_of_its_lease_a_handoff_fences_itself_whatever_it_hears_then(event: PrefillEvent) -> None:
    session = in_state(PrefillState.GRANTED)
    actions = session.handle(event, LEASE_S)
    assert kinds(actions) == [FailScheduling, Failed, StopWriting, EndWithFailure]
    assert session.handle(renewed(1), LEASE_S) == session.handle(GRANT, LEASE_S) == ()
    assert kinds(session.handle(Drained(), 100.0)) == [MarkQuiesced, Quiesced]


def test_a_grant_that_comes_after_its_lease_starts_no_write() -> None:
    session = in_state(PrefillState.READY)
    actions = session.handle(GRANT, LEASE_S)
    assert kinds(actions) == [FailScheduling, Failed, MarkQuiesced, Quiesced, EndWithFailure]
    assert session.state is PrefillState.CLOSED


@pytest.mark.parametrize("message", [grant(lease_ms=LEASE_MS, beat=2), grant(lease_ms=500), grant()])
def test_a_grant_with_a_lease_that_was_not_agreed_is_refused(message: Grant) -> None:
    session = in_state(PrefillState.READY)
    with pytest.raises(InvalidRequest, match=r"beat: 2 given, at most 1|Start announced 4000"):
        session.handle(message, NOW_S)
    assert session.state is PrefillState.READY


def test_a_renewal_for_a_beat_that_was_never_sent_is_refused() -> None:
    session = in_state(PrefillState.GRANTED)
    with pytest.raises(InvalidRequest, match="beat: 2 given, at most 1 were sent"):
        session.handle(renewed(2), NOW_S)


def test_a_renewal_that_overtakes_its_grant_does_not_stand_for_it() -> None:
    session = in_state(PrefillState.READY)
    assert session.handle(renewed(1), NOW_S) == ()
    assert StartWriting(grant=GRANT, post_until_s=3.6) in session.handle(GRANT, NOW_S)


def test_a_handoff_that_stands_still_is_given_up_and_one_that_gets_on_is_not() -> None:
    session = in_state(PrefillState.GRANTED)
    for beats in range(2, 40):
        session.handle(Tick(), float(beats))
        session.handle(renewed(beats), float(beats))
        if beats == 20:
            session.handle(Progressed(), 20.0)
    assert session.state is PrefillState.GRANTED
    session.handle(renewed(39), 49.9)
    session = in_state(PrefillState.GRANTED)
    for beats in range(2, 31):
        session.handle(Tick(), float(beats))
        session.handle(renewed(beats), float(beats))
    (failed,) = [
        action.message for action in session.handle(Tick(), NOW_S + STALL_BOUND_S) if isinstance(action, Send)
    ][:1]
    assert isinstance(failed, Failed)
    assert "no progress for 30 s" in failed.message


@pytest.mark.parametrize("opening", [START, start()], ids=["with a lease", "without"])
def test_a_ready_prompt_without_a_grant_is_given_up_after_a_bound_of_its_own(opening: Start) -> None:
    session = new_session(grant_bound_s=20.0)
    session.handle(opening, 0.0)
    session.handle(Tick(), 500.0)
    assert session.state is PrefillState.QUEUED
    session.handle(ADMITTED, 500.0)
    session.handle(Tick(), 519.9)
    assert session.state is PrefillState.READY
    assert session.wakeup_at_s is not None
    actions = session.handle(Tick(), 520.0)
    assert kinds(actions) == [FailScheduling, Failed, MarkQuiesced, Quiesced, EndWithFailure]
    assert EndWithFailure(code=8, message="the decode node had no memory for the prompt within 20 s") in actions
    assert session.is_terminal


def test_a_decode_node_that_knows_no_leases_gets_no_beats_and_no_fence() -> None:
    session = new_session()
    session.handle(start(), 0.0)
    assert session.handle(ADMITTED, 0.0) == (Send(message=Ready(handoff_id=ID, cached_tokens=4)),)
    assert session.handle(Tick(), 5.0) == ()
    assert session.handle(grant(), 50.0) == (MarkGranted(), StartWriting(grant=grant(), post_until_s=math.inf))
    session.handle(Progressed(), 70.0)
    assert session.wakeup_at_s == 100.0
    assert session.handle(COMPLETED, 99.0) == (Send(message=done()), MarkHandedOver())


def test_an_abort_that_overtakes_its_start_leaves_nothing_to_start() -> None:
    session = new_session()
    assert kinds(session.handle(abort(), 0.0)) == [Quiesced]
    assert session.handle(START, 0.0) == ()
    assert session.is_terminal

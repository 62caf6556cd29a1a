"""The decode side of a handoff, driven by events and a time that the test sets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.handoff_values import GROUPS, ID, OTHER_ID, beat, done, failed, grant, quiesced, ready, start

from model_runtime.sampler import SampledToken
from node_runtime.errors import InternalError, InvalidRequest
from node_runtime.handoff import states
from node_runtime.handoff.decode_session import DecodeHandoff
from node_runtime.handoff.events import (
    AbortScheduling,
    Allocated,
    Begin,
    DecodeAction,
    DecodeEvent,
    EndWithFailure,
    Fenced,
    GaveUp,
    MarkDone,
    MarkQuiesced,
    MarkReady,
    Send,
    StreamClosed,
    Tick,
    Verified,
    Verify,
)
from node_runtime.handoff.messages import Abort, Checksums, FieldChecksums, Renewed
from node_runtime.handoff.states import DecodeState, Verdict

DRAIN_BOUND_S = 5.0
NOTICE_BOUND_S = 8.0
LEASE_S = 4.0
VOCAB_SIZE = 50

ALLOCATED = Allocated(from_token=0, groups=GROUPS)
CANCELLED = GaveUp(code=1, message="the client left")
BROKEN = StreamClosed(code=14, message="connection reset")

SUMMED = replace(done(), num_checksum_parts=2)


def checksums(part: int, handoff_id: bytes = ID) -> Checksums:
    """Of one of the two granted blocks."""
    field = FieldChecksums(field_id="k", first_slot=part, digests=bytes(8))
    return Checksums(handoff_id=handoff_id, part=part, fields=(field,))


EVENTS: dict[type, DecodeEvent] = {
    type(event): event
    for event in (
        Begin(),
        ALLOCATED,
        ready(),
        beat(1),
        checksums(0),
        done(),
        failed(),
        quiesced(),
        Verified(),
        Fenced(),
        BROKEN,
        CANCELLED,
        Tick(),
    )
}
# The shortest way into each state.
WAYS: dict[DecodeState, tuple[DecodeEvent, ...]] = {
    DecodeState.OPEN: (),
    DecodeState.STARTED: (Begin(),),
    DecodeState.READY: (Begin(), ready()),
    DecodeState.GRANTED: (Begin(), ready(), ALLOCATED),
    DecodeState.QUARANTINED: (Begin(), ready(), ALLOCATED, CANCELLED),
    DecodeState.VERIFYING: (Begin(), ready(), ALLOCATED, checksums(1), checksums(0), SUMMED),
    DecodeState.DONE: (Begin(), ready(), ALLOCATED, done()),
    DecodeState.CLOSED: (Begin(), CANCELLED),
}


def new_session(lease_s: float = LEASE_S) -> DecodeHandoff:
    return DecodeHandoff(
        start(lease_ms=round(lease_s * 1000), wants_checksums=True),
        drain_bound_s=DRAIN_BOUND_S,
        notice_bound_s=NOTICE_BOUND_S,
        vocab_size=VOCAB_SIZE,
        digests_per_block={"full": 1},
    )


def in_state(state: DecodeState) -> DecodeHandoff:
    session = new_session()
    for event in WAYS[state]:
        session.handle(event, 0.0)
    assert session.state is state
    return session


def kinds(actions: tuple[DecodeAction, ...]) -> list[type]:
    return [type(action.message) if isinstance(action, Send) else type(action) for action in actions]


def test_a_good_handoff_sends_start_and_grant_and_ends_with_the_first_token() -> None:
    session = new_session()
    assert session.handle(Begin(), 0.0) == (Send(message=start(lease_ms=4000, wants_checksums=True)),)
    assert session.handle(ready(), 1.0) == (MarkReady(cached_tokens=4),)
    assert session.handle(ALLOCATED, 2.0) == (Send(message=grant(lease_ms=4000)),)
    assert session.handle(done(), 3.0) == (MarkDone(done=done()),)
    assert session.is_terminal


def test_the_digests_are_of_the_kind_that_ready_names_and_of_none_that_was_not_offered() -> None:
    opening = start(lease_ms=4000, wants_checksums=True, checksum_kinds=("new", "newer"))
    for named in ("newer", "xxh3"):
        session = DecodeHandoff(opening, drain_bound_s=0.0, notice_bound_s=0.0, vocab_size=VOCAB_SIZE)
        session.handle(Begin(), 0.0)
        session.handle(replace(ready(), checksum_kind=named), 0.0)
        assert session.checksum_kind == named
    session = DecodeHandoff(opening, drain_bound_s=0.0, notice_bound_s=0.0, vocab_size=VOCAB_SIZE)
    session.handle(Begin(), 0.0)
    with pytest.raises(InvalidRequest, match='checksum_kind: "other" given, offered were new, newer, xxh3'):
        session.handle(replace(ready(), checksum_kind="other"), 0.0)
    assert session.state is DecodeState.STARTED


@pytest.mark.parametrize("state", DecodeState)
@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
def test_the_session_follows_its_table(state: DecodeState, kind: type) -> None:
    session = in_state(state)
    verdict = states.DECODE_TABLE[state][kind]
    match verdict:
        case Verdict.PEER_ERROR:
            with pytest.raises(
                InvalidRequest, match=f"{kind.__name__} is not allowed while the handoff is {state.value}"
            ):
                session.handle(EVENTS[kind], 0.0)
            assert session.state is state
        case Verdict.LOCAL_ERROR:
            with pytest.raises(InternalError, match=kind.__name__):
                session.handle(EVENTS[kind], 0.0)
            assert session.state is state
        case Verdict.IGNORED:
            assert session.handle(EVENTS[kind], 0.0) == ()
            assert session.state is state
        case _ if kind is Tick:
            assert session.handle(Tick(), 0.0) == ()
            assert session.state is state
        case _:
            session.handle(EVENTS[kind], 0.0)
            assert session.state is verdict


@pytest.mark.parametrize("state", DecodeState)
@pytest.mark.parametrize(
    "message",
    [ready(OTHER_ID), beat(1, OTHER_ID), checksums(0, OTHER_ID), done(OTHER_ID), failed(OTHER_ID), quiesced(OTHER_ID)],
)
def test_messages_of_another_handoff_change_nothing(state: DecodeState, message: DecodeEvent) -> None:
    session = in_state(state)
    assert session.handle(message, 0.0) == ()
    assert session.state is state


@pytest.mark.parametrize("state", [DecodeState.STARTED, DecodeState.READY])
def test_giving_up_before_a_grant_frees_everything_at_once(state: DecodeState) -> None:
    session = in_state(state)
    actions = session.handle(CANCELLED, 0.0)
    assert kinds(actions) == [Abort, AbortScheduling, MarkQuiesced, EndWithFailure]
    assert session.state is DecodeState.CLOSED


def test_an_allocation_that_crosses_the_end_is_not_granted() -> None:
    session = in_state(DecodeState.READY)
    session.handle(CANCELLED, 0.0)
    assert session.handle(ALLOCATED, 0.0) == ()


@pytest.mark.parametrize("end", [CANCELLED, failed(), BROKEN], ids=["given up", "failed", "stream broke"])
def test_granted_blocks_are_quarantined_when_the_handoff_fails(end: DecodeEvent) -> None:
    session = in_state(DecodeState.GRANTED)
    actions = session.handle(end, 0.0)
    assert AbortScheduling in kinds(actions)
    assert MarkQuiesced not in kinds(actions)
    assert session.state is DecodeState.QUARANTINED


@pytest.mark.parametrize("proof", [quiesced(), Fenced()], ids=["the peer is quiet", "our data plane vouches"])
def test_quarantine_ends_with_a_proof_that_nothing_can_land(proof: DecodeEvent) -> None:
    session = in_state(DecodeState.QUARANTINED)
    assert session.handle(proof, 0.5) == (MarkQuiesced(),)
    assert session.state is DecodeState.CLOSED
    assert session.wakeup_at_s is None


@pytest.mark.parametrize("end", [CANCELLED, failed(), BROKEN], ids=["given up", "failed", "stream broke"])
def test_quarantine_without_a_proof_lasts_exactly_the_lease_and_the_drain_bound(end: DecodeEvent) -> None:
    session = in_state(DecodeState.READY)
    session.handle(beat(1), 100.0)
    session.handle(ALLOCATED, 101.0)
    session.handle(end, 102.0)
    assert session.wakeup_at_s == 100.0 + LEASE_S + DRAIN_BOUND_S
    session.handle(BROKEN, 103.0)
    session.handle(beat(2), 103.0)
    assert session.handle(Tick(), 108.999) == ()
    assert session.handle(Tick(), 109.0) == (MarkQuiesced(),)
    assert session.is_terminal
    assert session.wakeup_at_s is None


def test_each_beat_renews_the_lease_of_a_grant_and_is_answered_once() -> None:
    session = in_state(DecodeState.GRANTED)
    assert session.wakeup_at_s == LEASE_S
    assert session.handle(beat(1), 3.0) == (Send(message=Renewed(handoff_id=ID, beat=1)),)
    assert session.wakeup_at_s == 3.0 + LEASE_S
    assert session.handle(beat(3), 4.0) == (Send(message=Renewed(handoff_id=ID, beat=3)),)
    assert session.handle(beat(2), 5.0) == session.handle(beat(3), 5.0) == ()
    assert session.wakeup_at_s == 4.0 + LEASE_S


def test_the_grant_names_the_newest_beat() -> None:
    session = in_state(DecodeState.READY)
    assert session.handle(beat(1), 1.0) == session.handle(beat(2), 2.0) == ()
    assert session.handle(ALLOCATED, 3.0) == (Send(message=grant(lease_ms=4000, beat=2)),)


@pytest.mark.parametrize("state", [DecodeState.READY, DecodeState.GRANTED])
def test_a_peer_that_is_silent_for_a_lease_is_given_up(state: DecodeState) -> None:
    session = in_state(state)
    session.handle(beat(1), 2.0)
    assert session.handle(Tick(), 5.999) == ()
    actions = session.handle(Tick(), 6.0)
    assert kinds(actions)[:2] == [Abort, AbortScheduling]
    assert isinstance(actions[-1], EndWithFailure)
    assert actions[-1].code == 14
    assert "no sign of life for 4 s" in actions[-1].message


def test_waiting_in_the_peers_queue_is_not_silence() -> None:
    session = in_state(DecodeState.STARTED)
    assert session.wakeup_at_s is None
    assert session.handle(Tick(), 1e9) == ()


@pytest.mark.parametrize("state", [DecodeState.STARTED, DecodeState.READY, DecodeState.GRANTED])
def test_a_peer_that_is_quiet_before_it_said_why_has_ended_the_handoff(state: DecodeState) -> None:
    session = in_state(state)
    actions = session.handle(quiesced(), 0.0)
    assert kinds(actions) == [AbortScheduling, MarkQuiesced, EndWithFailure]
    assert session.handle(failed(), 0.0) == ()


# A peer of a release that knows no leases.


def granted_by_an_old_peer() -> DecodeHandoff:
    session = new_session()
    for event in (Begin(), replace(ready(), beat_interval_ms=0)):
        session.handle(event, 0.0)
    assert session.handle(ALLOCATED, 0.0) == (Send(message=grant()),)
    return session


def test_a_peer_that_knows_no_leases_is_not_timed() -> None:
    session = granted_by_an_old_peer()
    assert session.wakeup_at_s is None
    assert session.handle(Tick(), 1e9) == ()
    session.handle(CANCELLED, 1e9)
    assert session.wakeup_at_s is None
    assert session.handle(quiesced(), 2e9) == (MarkQuiesced(),)


def test_without_leases_quarantine_after_a_broken_stream_lasts_until_the_peer_noticed_and_drained() -> None:
    session = granted_by_an_old_peer()
    session.handle(CANCELLED, 10.0)
    session.handle(BROKEN, 50.0)
    session.handle(BROKEN, 54.0)
    assert session.wakeup_at_s == 50.0 + NOTICE_BOUND_S + DRAIN_BOUND_S
    assert session.handle(Tick(), 62.999) == ()
    assert session.handle(Tick(), 63.0) == (MarkQuiesced(),)


def test_a_done_that_crosses_our_abort_proves_that_the_peer_is_quiet() -> None:
    session = in_state(DecodeState.QUARANTINED)
    assert session.handle(done(), 0.0) == (MarkQuiesced(),)
    assert session.state is DecodeState.CLOSED


def test_the_cause_of_a_failure_is_passed_on() -> None:
    for event, code, message in (
        (failed(), 14, "the data plane is broken"),
        (BROKEN, 14, "connection reset"),
        (StreamClosed(code=0, message="ended early"), 14, "ended early"),
        (StreamClosed(code=8, message="queue full"), 8, "queue full"),
    ):
        actions = in_state(DecodeState.STARTED).handle(event, 0.0)
        assert EndWithFailure(code=code, message=message) in actions


def test_an_abort_is_sent_only_where_there_is_somebody_to_hear_it() -> None:
    assert Abort not in kinds(in_state(DecodeState.OPEN).handle(CANCELLED, 0.0))
    sent = in_state(DecodeState.GRANTED).handle(CANCELLED, 0.0)
    assert Send(message=Abort(handoff_id=ID, reason="the client left")) in sent


@pytest.mark.parametrize(
    ("state", "message", "words"),
    [
        (DecodeState.GRANTED, replace(done(), first_token=SampledToken(token_id=50)), r"token 50 is outside \[0, 50\)"),
        (
            DecodeState.GRANTED,
            replace(done(), transferred_blocks=1),
            "transferred_blocks: 1 given, 2 blocks were granted",
        ),
        (DecodeState.STARTED, replace(ready(), cached_tokens=5), "cached_tokens: 5 given, less than 5"),
        (DecodeState.STARTED, replace(ready(), beat_interval_ms=1334), "beat_interval_ms: 1334 given, at most 1333"),
    ],
)
def test_numbers_that_cannot_be_are_refused_and_leave_the_handoff_where_it_was(
    state: DecodeState, message: DecodeEvent, words: str
) -> None:
    session = in_state(state)
    with pytest.raises(InvalidRequest, match=words):
        session.handle(message, 0.0)
    assert session.state is state


# Checksums.


def test_blocks_are_compared_as_they_are_told_of_and_nobody_hears_of_done_before_the_last() -> None:
    session = in_state(DecodeState.GRANTED)
    assert session.handle(checksums(0), 0.0) == (Verify(groups=GROUPS, checksums=checksums(0)),)
    assert session.handle(Verified(), 0.0) == ()
    assert session.handle(checksums(1), 0.0) == (Verify(groups=GROUPS, checksums=checksums(1)),)
    assert session.handle(SUMMED, 0.0) == ()
    assert not session.is_terminal
    assert session.handle(Verified(), 0.0) == (MarkDone(done=SUMMED),)
    assert session.state is DecodeState.DONE


def test_done_ends_a_handoff_whose_blocks_are_all_compared() -> None:
    session = in_state(DecodeState.GRANTED)
    for event in (checksums(0), checksums(1), Verified(), Verified()):
        session.handle(event, 0.0)
    assert session.handle(SUMMED, 0.0) == (MarkDone(done=SUMMED),)


def test_checksums_that_done_overtook_are_waited_for_and_repeated_ones_are_not_compared_again() -> None:
    session = in_state(DecodeState.GRANTED)
    session.handle(checksums(0), 0.0)
    session.handle(Verified(), 0.0)
    assert session.handle(SUMMED, 0.0) == ()
    assert session.handle(checksums(0), 0.0) == ()
    assert session.handle(checksums(1), 0.0) == (Verify(groups=GROUPS, checksums=checksums(1)),)
    assert session.handle(Verified(), 0.0) == (MarkDone(done=SUMMED),)


def test_damage_after_done_is_data_loss_and_the_blocks_are_given_back_unread() -> None:
    session = in_state(DecodeState.VERIFYING)
    actions = session.handle(Verified(damage="differs in k"), 0.0)
    assert actions == (AbortScheduling(), MarkQuiesced(), EndWithFailure(code=15, message="differs in k"))
    assert session.state is DecodeState.CLOSED
    assert session.handle(Verified(), 0.0) == ()


def test_damage_before_done_is_data_loss_and_the_blocks_are_quarantined() -> None:
    session = in_state(DecodeState.GRANTED)
    session.handle(checksums(0), 0.0)
    actions = session.handle(Verified(damage="differs in k"), 0.0)
    assert kinds(actions) == [Abort, AbortScheduling, EndWithFailure]
    assert session.state is DecodeState.QUARANTINED
    assert session.handle(checksums(1), 0.0) == session.handle(Verified(), 0.0) == ()


def test_checksums_of_the_same_blocks_twice_do_not_stand_for_others() -> None:
    session = in_state(DecodeState.GRANTED)
    for event in (checksums(0), Verified(), replace(checksums(1), fields=checksums(0).fields), Verified()):
        session.handle(event, 0.0)
    actions = session.handle(SUMMED, 0.0)
    assert actions[-1] == EndWithFailure(code=15, message="checksums of 1 blocks came, 2 were granted")


def test_checksums_that_leave_blocks_out_are_data_loss() -> None:
    session = in_state(DecodeState.GRANTED)
    for event in (checksums(0), Verified()):
        session.handle(event, 0.0)
    actions = session.handle(replace(SUMMED, num_checksum_parts=1), 0.0)
    assert actions[-1] == EndWithFailure(code=15, message="checksums of 1 blocks came, 2 were granted")
    assert session.state is DecodeState.CLOSED


def test_a_done_that_counts_fewer_checksums_than_came_breaks_the_protocol() -> None:
    session = in_state(DecodeState.GRANTED)
    for event in (checksums(0), Verified(), checksums(1)):
        session.handle(event, 0.0)
    with pytest.raises(InvalidRequest, match="num_checksum_parts: 1 given, 2 came"):
        session.handle(replace(SUMMED, num_checksum_parts=1), 0.0)


def test_a_stream_that_ends_before_the_last_checksums_ends_the_handoff() -> None:
    session = in_state(DecodeState.GRANTED)
    session.handle(SUMMED, 0.0)
    assert kinds(session.handle(BROKEN, 0.0)) == [AbortScheduling, MarkQuiesced, EndWithFailure]
    assert session.is_terminal


def test_checksums_that_were_not_asked_for_are_not_looked_at() -> None:
    session = DecodeHandoff(start(), drain_bound_s=DRAIN_BOUND_S, notice_bound_s=NOTICE_BOUND_S, vocab_size=VOCAB_SIZE)
    for event in (Begin(), ready(beat_interval_ms=0), ALLOCATED):
        session.handle(event, 0.0)
    assert session.handle(checksums(0), 0.0) == ()
    assert session.handle(SUMMED, 0.0) == (MarkDone(done=SUMMED),)


def test_a_peer_that_knows_no_checksums_is_believed() -> None:
    assert in_state(DecodeState.GRANTED).handle(done(), 0.0) == (MarkDone(done=done()),)


def test_whoever_gives_up_during_the_comparison_gets_the_blocks_back_at_once() -> None:
    session = in_state(DecodeState.VERIFYING)
    assert session.handle(BROKEN, 0.0) == ()
    assert MarkQuiesced in kinds(session.handle(CANCELLED, 0.0))
    assert session.handle(Verified(damage="differs"), 0.0) == ()

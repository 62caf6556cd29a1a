"""The two sessions of a handoff against a peer that says anything in any order, while this node's own parts behave.

Nothing but InvalidRequest is raised, each action comes at most as often as it may and in its place, and once the stream
is gone and time has passed nothing is held.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from fuzz.effort import looks
from fuzz.messages import hostile
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from pdmesh.v1 import handoff_pb2
from support.handoff_values import ID, done, failed, grant, quiesced, ready, renewed, start

from model_runtime.sampler import SampledToken
from node_runtime.errors import InvalidRequest
from node_runtime.handoff.checks import GrantedGroup, check_grant, check_start
from node_runtime.handoff.decode_session import DecodeHandoff
from node_runtime.handoff.events import (
    AbortScheduling,
    Admitted,
    Allocated,
    Begin,
    ChecksumsTaken,
    Completed,
    DecodeEvent,
    Drained,
    EndWithFailure,
    ExtendWriting,
    FailScheduling,
    Fenced,
    GaveUp,
    MarkDone,
    MarkGranted,
    MarkHandedOver,
    MarkQuiesced,
    MarkReady,
    PrefillEvent,
    Progressed,
    Send,
    StartWriting,
    StopWriting,
    StreamClosed,
    SubmitPrompt,
    Tick,
    Verified,
    Verify,
)
from node_runtime.handoff.messages import Abort, Beat, Checksums, Done, FieldChecksums, Start
from node_runtime.handoff.prefill_session import PrefillHandoff
from node_runtime.handoff.states import DecodeState
from node_runtime.wire.handoff import request_from_proto, request_to_proto, response_from_proto, response_to_proto

LEASE_MS = 4000
VOCAB_SIZE = 100
GRAIN = 4
# Tokens in two blocks of four.
OPENING = start(lease_ms=LEASE_MS, wants_checksums=True, token_ids=tuple(range(8)))
GROUPS = {"full": GrantedGroup(group_id="full", block_granularity=GRAIN, num_peer_blocks=16)}
GRANT = grant(lease_ms=LEASE_MS)
CHECKSUMS = Checksums(handoff_id=ID, part=0, fields=(FieldChecksums(field_id="k", first_slot=0, digests=b"d" * 16),))
DONE = Done(
    handoff_id=ID,
    first_token=SampledToken(token_id=42),
    transferred_bytes=10,
    transferred_blocks=2,
    transferred_runs=1,
    num_checksum_parts=1,
)

GOOD_REQUESTS = tuple(map(request_to_proto, (OPENING, GRANT, renewed(1), Abort(handoff_id=ID, reason="tired"))))
GOOD_RESPONSES = tuple(
    map(response_to_proto, (ready(), Beat(handoff_id=ID, number=1), CHECKSUMS, DONE, done(), failed(), quiesced()))
)
TIMES_S = (0.0, 0.5, 1.1, 5.0, 40.0, 200.0)


def turns(
    descriptor: Any, good: tuple[Message, ...], own: tuple[str, ...]
) -> st.SearchStrategy[list[Message | str | float]]:
    """Messages of the peer, things that this node does, and time that passes."""
    message = st.sampled_from(good) | hostile(descriptor, good)
    return st.lists(message | st.sampled_from(own) | st.sampled_from(TIMES_S), max_size=16)


class PrefillSide:
    """What a prefill node does with its session."""

    def __init__(self) -> None:
        self.session = PrefillHandoff(
            check_start=partial(check_start, vocab_size=VOCAB_SIZE, context_tokens=64), check_grant=self._check_grant
        )
        self.now_s = 50.0
        self.done = Counter[type]()
        self.is_open, self.is_admitted, self.is_drained = True, False, False

    @staticmethod
    def _check_grant(start: Start, granted: Any) -> None:
        check_grant(granted, num_prompt_tokens=len(start.token_ids), prefix_granularity=GRAIN, groups=GROUPS)

    @property
    def is_writing(self) -> bool:
        return bool(self.done[StartWriting]) and not self.done[StopWriting] and not self.session.is_terminal

    def feed(self, event: PrefillEvent) -> None:
        for action in self.session.handle(event, self.now_s):
            self.done[type(action)] += 1
            self._check(action)

    def hear(self, message: Message) -> None:
        """As the service does it: who breaks a rule ends the handoff."""
        if not self.is_open or self.session.is_terminal:
            return
        try:
            self.feed(request_from_proto(message))
        except InvalidRequest:
            self.feed(GaveUp(code=3, message="a rule was broken"))

    def do(self, name: str) -> None:
        if name == "admit" and self.done[SubmitPrompt] and not self.is_admitted:
            self.is_admitted = True
            self.feed(Admitted(cached_tokens=0))
        elif name == "progress" and self.done[SubmitPrompt]:
            self.feed(Progressed())
        elif name == "checksums" and self.is_writing:
            self.feed(ChecksumsTaken(checksums=CHECKSUMS))
        elif name == "complete" and self.is_writing:
            self.feed(Completed(done=DONE))
        elif name == "drain" and self.done[StopWriting] and not self.is_drained:
            self.is_drained = True
            self.feed(Drained())
        elif name == "close" and self.is_open:
            self.is_open = False
            self.feed(StreamClosed(code=1, message="gone"))

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.feed(Tick())

    def _check(self, action: object) -> None:
        done = self.done
        assert done[type(action)] == 1 or isinstance(action, Send | ExtendWriting), action
        match action:
            case Send():
                assert self.is_open
            case StartWriting():
                assert done[MarkGranted]
                lease_s = action.grant.lease_ms / 1000 or math.inf
                assert action.post_until_s <= self.now_s + lease_s
            case ExtendWriting():
                assert done[StartWriting]
                assert not done[StopWriting]
                assert action.post_until_s <= self.now_s + LEASE_MS / 1000 * 15
            case MarkQuiesced():
                assert not done[StartWriting] or (done[StopWriting] and self.is_drained)
                assert not done[MarkHandedOver]

    def end(self) -> None:
        for name in ("close", "drain"):
            self.do(name)
        assert self.session.is_terminal
        assert self.session.wakeup_at_s is None
        ends = self.done[AbortScheduling] + self.done[FailScheduling] + self.done[MarkHandedOver]
        assert ends == self.done[SubmitPrompt]
        assert self.done[MarkQuiesced] + self.done[MarkHandedOver] == self.done[SubmitPrompt]


class DecodeSide:
    """What a decode node does with its session."""

    def __init__(self) -> None:
        self.session = DecodeHandoff(
            OPENING,
            drain_bound_s=3.0,
            notice_bound_s=8.0,
            vocab_size=VOCAB_SIZE,
            digests_per_block={"full": 1},
        )
        self.now_s = 50.0
        self.done = Counter[type]()
        self.is_open, self.is_allocated, self.num_comparing = True, False, 0
        self.feed(Begin())

    def feed(self, event: DecodeEvent) -> None:
        for action in self.session.handle(event, self.now_s):
            self.done[type(action)] += 1
            self._check(action)

    def hear(self, message: Message) -> None:
        """As the receiver does it: whoever breaks a rule is given up."""
        if not self.is_open:
            return
        try:
            self.feed(response_from_proto(message))
        except InvalidRequest:
            self.feed(GaveUp(code=13, message="the prefill node broke the protocol"))

    def do(self, name: str) -> None:
        if name == "allocate" and self.done[MarkReady] and not self.is_allocated and not self.done[AbortScheduling]:
            self.is_allocated = True
            self.feed(Allocated(from_token=0, groups=GRANT.groups))
        elif name in ("verified", "damaged") and self.num_comparing:
            self.num_comparing -= 1
            self.feed(Verified(damage="" if name == "verified" else "a block differs"))
        elif name == "fence" and self.session.state is DecodeState.QUARANTINED:
            self.feed(Fenced())
        elif name == "give up":
            self.feed(GaveUp(code=1, message="the client left"))
        elif name == "close" and self.is_open:
            self.is_open = False
            self.feed(StreamClosed(code=14, message="gone"))

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.feed(Tick())

    def _check(self, action: object) -> None:
        done = self.done
        assert done[type(action)] == 1 or isinstance(action, Send | Verify), action
        match action:
            case Send():
                assert self.is_open
            case Verify():
                self.num_comparing += 1
                assert self.is_allocated
            case MarkDone():
                assert self.is_allocated
                assert not done[AbortScheduling]
                assert not self.num_comparing
                assert action.done.first_token.token_id < VOCAB_SIZE
            case AbortScheduling() | EndWithFailure() | MarkQuiesced():
                assert not done[MarkDone]

    def end(self) -> None:
        while self.num_comparing:
            self.do("verified")
        self.do("close")
        # Lease, notice bound and drain bound, one after the other.
        for _ in range(3):
            self.wait(60.0)
        assert self.session.is_terminal
        assert self.session.wakeup_at_s is None
        assert self.done[MarkDone] + self.done[AbortScheduling] == 1
        assert self.done[MarkDone] + self.done[MarkQuiesced] == 1


def play(make_side: Callable[[], PrefillSide | DecodeSide], moves: list[Message | str | float]) -> Counter[type]:
    side = make_side()
    for move in moves:
        if isinstance(move, Message):
            side.hear(move)
        elif isinstance(move, str):
            side.do(move)
        else:
            side.wait(move)
    side.end()
    return side.done


def test_a_prefill_session_holds_nothing_in_the_end_whatever_a_decode_node_says() -> None:
    seen = Counter[type]()
    own = ("admit", "admit", "progress", "checksums", "complete", "drain", "close")

    @looks(150)
    @given(turns(handoff_pb2.HandoffRequest.DESCRIPTOR, GOOD_REQUESTS, own))
    def plays(moves: list[Message | str | float]) -> None:
        # Nothing happens before a start, so most begin with one.
        seen.update(play(PrefillSide, moves))
        seen.update(play(PrefillSide, [GOOD_REQUESTS[0], "admit", GOOD_REQUESTS[1], 1.1, *moves]))

    plays()
    assert {SubmitPrompt, StartWriting, ExtendWriting, StopWriting, MarkHandedOver, FailScheduling} <= seen.keys()


def test_a_decode_session_holds_nothing_in_the_end_whatever_a_prefill_node_says() -> None:
    seen = Counter[type]()
    own = ("allocate", "verified", "damaged", "fence", "give up", "close")

    @looks(150)
    @given(turns(handoff_pb2.HandoffResponse.DESCRIPTOR, GOOD_RESPONSES, own))
    def plays(moves: list[Message | str | float]) -> None:
        seen.update(play(DecodeSide, moves))
        seen.update(play(DecodeSide, [GOOD_RESPONSES[0], "allocate", *moves]))

    plays()
    assert {MarkReady, Verify, MarkDone, MarkQuiesced, EndWithFailure} <= seen.keys()

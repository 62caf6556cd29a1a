"""Both sessions over a channel that loses, repeats and reorders messages, with writes that land late and processes that
stop and wake: nothing is raised, nothing is written into blocks that are not granted, nothing is decoded too early, and
both sides end.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from support.handoff_values import GROUPS, ID, OTHER_ID, abort, done, failed, grant, quiesced, ready, start

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
    ExtendWriting,
    FailScheduling,
    GaveUp,
    MarkDone,
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
from node_runtime.handoff.messages import (
    Abort,
    Beat,
    Checksums,
    FieldChecksums,
    Grant,
    Renewed,
    RequestMessage,
    ResponseMessage,
    Start,
)
from node_runtime.handoff.prefill_session import PrefillHandoff

LEASE_S = 4.0
DRAIN_S = 3.0
NOTICE_S = 8.0
STALL_S = 30.0
# The two monotonic clocks have nothing in common but their speed.
DECODE_EPOCH_S = 5000.0

FOREIGN: tuple[RequestMessage | ResponseMessage, ...] = (
    ready(OTHER_ID),
    Beat(handoff_id=OTHER_ID, number=1),
    done(OTHER_ID),
    failed(OTHER_ID),
    quiesced(OTHER_ID),
    grant(OTHER_ID),
    Renewed(handoff_id=OTHER_ID, beat=1),
    abort(OTHER_ID),
)


class World:
    """A prefill and a decode side, what is between them, and what the blocks are used for."""

    def __init__(self, *, decode_has_leases: bool, prefill_has_leases: bool, wants_checksums: bool) -> None:
        opening = start(lease_ms=round(LEASE_S * 1000) if decode_has_leases else 0, wants_checksums=wants_checksums)
        self.has_checksums = wants_checksums and prefill_has_leases
        self.decode_has_leases = decode_has_leases
        self.prefill_has_leases = prefill_has_leases
        self.now_s = 100.0
        self.decode = DecodeHandoff(
            opening, drain_bound_s=DRAIN_S, notice_bound_s=NOTICE_S, vocab_size=50, digests_per_block={"full": 1}
        )
        self.prefill = PrefillHandoff(check_start=lambda _: None, check_grant=lambda *_: None, stall_bound_s=STALL_S)
        self.requests: list[RequestMessage] = []
        self.responses: list[ResponseMessage] = []
        self.decode_stream_open = self.prefill_stream_open = True
        self.stream_broke_at_s = float("inf")
        # The decode side's blocks: granted to this handoff, or anybody's.
        self.is_ready = self.is_allocated = self.is_granted = self.is_done = False
        self.num_comparing = self.num_compared = 0
        # The prefill side.
        self.is_submitted = self.is_admitted = self.is_computed = False
        self.post_until_s: float | None = None
        self.is_stopped = False
        self.outstanding: list[float] = []  # moments by which posted writes have landed
        self.num_landed = 0
        self.source_is_owned = False
        self.feed_decode(Begin())

    # The two sides.

    def feed_decode(self, event: DecodeEvent) -> None:
        for action in self.decode.handle(event, self.now_s + DECODE_EPOCH_S):
            match action:
                case Send():
                    if self.decode_stream_open:
                        self.requests.append(action.message)
                    if isinstance(action.message, Grant):
                        self.is_granted = True
                case MarkReady():
                    self.is_ready = True
                case Verify():
                    self.num_comparing += 1
                case MarkDone():
                    assert self.num_landed == 2, "the decode side reads what has not landed"
                    assert self.num_compared == 2 or not self.has_checksums, (
                        "the decode side reads what is not verified"
                    )
                    self.is_done, self.is_granted = True, False
                case AbortScheduling():
                    self.is_ready = False
                case MarkQuiesced():
                    self.is_granted = False
                case _:
                    pass

    def feed_prefill(self, event: PrefillEvent) -> None:
        for action in self.prefill.handle(event, self.now_s):
            match action:
                case Send():
                    if isinstance(action.message, Beat):
                        assert self.decode_has_leases, "a peer that knows no leases is sent a Beat"
                    if self.prefill_stream_open:
                        self.responses.append(action.message)
                case SubmitPrompt():
                    self.is_submitted = self.source_is_owned = True
                case StartWriting():
                    self.post_until_s = action.post_until_s
                case ExtendWriting():
                    assert self.post_until_s is not None
                    assert action.post_until_s > self.post_until_s
                    self.post_until_s = action.post_until_s
                case StopWriting():
                    self.is_stopped = True
                case MarkQuiesced() | MarkHandedOver():
                    assert not self.outstanding, "the source blocks are given back while a write reads them"
                    self.source_is_owned = False
                case AbortScheduling() | FailScheduling():
                    self.is_submitted = False
                case _:
                    pass
        if self.is_stopped and not self.outstanding and not self.prefill.is_terminal:
            self.feed_prefill(Drained())

    # What can happen.

    def deliver_request(self, index: int, *, keep: bool) -> None:
        if self.requests and self.prefill_stream_open:
            position = index % len(self.requests)
            message = self.requests[position] if keep else self.requests.pop(position)
            if not self.prefill_has_leases:
                assert not isinstance(message, Renewed), "a peer that knows no leases is sent a Renewed"
                # What a release that knows no leases makes of these messages.
                message = replace(message, lease_ms=0) if isinstance(message, Start | Grant) else message
            self.feed_prefill(message)

    def deliver_response(self, index: int, *, keep: bool) -> None:
        if self.responses and self.decode_stream_open:
            position = index % len(self.responses)
            self.feed_decode(self.responses[position] if keep else self.responses.pop(position))

    def lose(self, index: int) -> None:
        for queue in (self.requests, self.responses):
            if queue:
                queue.pop(index % len(queue))

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        if self.now_s >= self.stream_broke_at_s + NOTICE_S:
            self.break_stream(prefill=True)
        while self.outstanding and min(self.outstanding) <= self.now_s:
            self.land()

    def tick_decode(self) -> None:
        self.feed_decode(Tick())

    def tick_prefill(self) -> None:
        self.feed_prefill(Tick())

    def admit(self) -> None:
        if self.is_submitted and not self.is_admitted:
            self.is_admitted = True
            self.feed_prefill(Admitted(cached_tokens=4))

    def allocate(self) -> None:
        if self.is_ready and not self.is_allocated:
            self.is_allocated = True
            self.feed_decode(Allocated(from_token=0, groups=GROUPS))

    def post(self) -> None:
        """As OutgoingTransfer does it: by the clock, whatever the session has heard of by now."""
        is_free = self.post_until_s is not None and self.now_s < self.post_until_s and not self.is_stopped
        if is_free and self.num_landed + len(self.outstanding) < 2:
            self.outstanding.append(self.now_s + DRAIN_S)

    def land(self) -> None:
        if self.outstanding:
            self.outstanding.remove(min(self.outstanding))
            assert self.is_granted, "a write landed in blocks that are not granted to this handoff"
            self.num_landed += 1
            if not self.prefill.is_terminal:
                self.feed_prefill(Progressed())
            if self.has_checksums:
                field = FieldChecksums(field_id="k", first_slot=self.num_landed - 1, digests=bytes(8))
                checksums = Checksums(handoff_id=ID, part=self.num_landed - 1, fields=(field,))
                self.feed_prefill(ChecksumsTaken(checksums=checksums))
            if self.num_landed == 2 and not self.is_stopped:
                self.feed_prefill(Completed(done=replace(done(), num_checksum_parts=2 * self.has_checksums)))
            elif self.is_stopped and not self.outstanding and not self.prefill.is_terminal:
                self.feed_prefill(Drained())

    def compare(self, *, is_damaged: bool) -> None:
        if self.num_comparing:
            self.num_comparing -= 1
            self.num_compared += not is_damaged
            self.feed_decode(Verified(damage="differs" if is_damaged else ""))

    def break_stream(self, *, prefill: bool) -> None:
        """Either side may notice first; the prefill side within the notice bound."""
        self.stream_broke_at_s = min(self.stream_broke_at_s, self.now_s)
        if prefill and self.prefill_stream_open:
            self.prefill_stream_open = False
            self.feed_prefill(StreamClosed(code=1, message="broken"))
        elif not prefill and self.decode_stream_open:
            self.decode_stream_open = False
            self.feed_decode(StreamClosed(code=14, message="broken"))

    def say_something_foreign(self, index: int) -> None:
        message = FOREIGN[index % len(FOREIGN)]
        if isinstance(message, Grant | Renewed | Abort):
            if self.is_admitted:
                self.feed_prefill(message)
        else:
            self.feed_decode(message)

    def begin(self, stage: str) -> None:
        """Brings the handoff to a stage where most of what can go wrong lies ahead."""
        if stage != "start":
            self.deliver_request(0, keep=False)
            self.admit()
            self.deliver_response(0, keep=False)
        if stage in ("granted", "posted"):
            self.allocate()
            self.deliver_request(0, keep=False)
        if stage == "posted":
            self.post()

    def settle(self) -> None:
        """Nothing is said any more; time passes, and both processes run."""
        self.break_stream(prefill=False)
        self.break_stream(prefill=True)
        for _ in range(200):
            self.compare(is_damaged=False)
            self.pass_time(0.5)
            self.tick_decode()
            self.tick_prefill()


def happen(world: World, kind: str, number: int) -> None:
    match kind:
        case "request":
            world.deliver_request(number, keep=False)
        case "request again":
            world.deliver_request(number, keep=True)
        case "response":
            world.deliver_response(number, keep=False)
        case "response again":
            world.deliver_response(number, keep=True)
        case "loss":
            world.lose(number)
        case "time":
            world.pass_time(number / 33)
        case "decode tick":
            world.tick_decode()
        case "prefill tick":
            world.tick_prefill()
        case "admit":
            world.admit()
        case "allocate":
            world.allocate()
        case "post":
            world.post()
        case "land":
            world.land()
        case "compare":
            world.compare(is_damaged=number < 5)
        case "foreign":
            world.say_something_foreign(number)
        case "decode gives up":
            world.feed_decode(GaveUp(code=1, message="the client left"))
        case "prefill gives up":
            if world.is_admitted:
                world.feed_prefill(GaveUp(code=13, message="the forward pass failed"))
        case "decode stream breaks":
            world.break_stream(prefill=False)
        case "prefill stream breaks":
            world.break_stream(prefill=True)
        case _:
            raise AssertionError(kind)


ORDINARY = [
    "request",
    "response",
    "time",
    "decode tick",
    "prefill tick",
    "admit",
    "allocate",
    "post",
    "land",
    "compare",
]
FAULTS = ["request again", "response again", "loss", "foreign"]
ENDS = ["decode gives up", "prefill gives up", "decode stream breaks", "prefill stream breaks"]
NUM_STEPS = 40
HISTORIES_PER_SEED = 20


def play(random: Random) -> None:
    """One history from its beginning until both sides must have ended. A failure comes with what happened."""
    decode_has_leases, prefill_has_leases, wants_checksums = (random.random() < share for share in (0.8, 0.8, 0.5))
    world = World(
        decode_has_leases=decode_has_leases, prefill_has_leases=prefill_has_leases, wants_checksums=wants_checksums
    )
    told = [stage := random.choice(["start", "ready", "granted", "posted"])]
    try:
        world.begin(stage)
        for _ in range(NUM_STEPS):
            kind, number = random.choice(ORDINARY * 3 + FAULTS + ENDS), random.randrange(100)
            told.append(f"{kind} {number}")
            happen(world, kind, number)
        world.settle()
        assert world.decode.is_terminal
        assert world.prefill.is_terminal
        assert not world.is_granted
        assert not world.source_is_owned
        assert world.prefill.wakeup_at_s is None
        assert world.decode.wakeup_at_s is None
    except Exception as error:
        error.add_note("; ".join(told))
        raise


# Many histories per seed: drawing each step would spend the time on drawing, and what is looked for is rare.
@settings(max_examples=60)
@given(seed=st.integers(0, 2**64))
def test_whatever_the_channel_does_the_promises_hold(seed: int) -> None:
    random = Random(seed)
    for _ in range(HISTORIES_PER_SEED):
        play(random)


def test_over_a_good_channel_the_handoff_succeeds_however_long_it_computes() -> None:
    world = World(decode_has_leases=True, prefill_has_leases=True, wants_checksums=True)
    world.deliver_request(0, keep=False)
    world.admit()
    world.deliver_response(0, keep=False)
    for second in range(60):
        world.pass_time(1.0)
        world.tick_decode()
        world.tick_prefill()
        while world.responses:
            world.deliver_response(0, keep=False)
        if second == 20:
            world.allocate()
        while world.requests:
            world.deliver_request(0, keep=False)
        if second > 20:
            world.feed_prefill(Progressed())
        if second in (30, 50):
            world.post()
            world.land()
        world.compare(is_damaged=False)
    assert world.is_done

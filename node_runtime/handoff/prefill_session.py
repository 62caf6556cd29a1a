"""The session of the prefill side: Start, compute, Ready, write into the grant, Done. See `session.py` for the rules of
both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import assert_never

from node_runtime.errors import InternalError, InvalidRequest
from node_runtime.handoff.checks import check_lease
from node_runtime.handoff.events import (
    Abort,
    AbortScheduling,
    Admitted,
    Beat,
    ChecksumsTaken,
    Completed,
    Drained,
    EndWithFailure,
    ExtendWriting,
    Failed,
    FailScheduling,
    GaveUp,
    Grant,
    MarkGranted,
    MarkHandedOver,
    MarkQuiesced,
    PrefillAction,
    PrefillEvent,
    Progressed,
    Quiesced,
    Ready,
    Renewed,
    ResponseMessage,
    Send,
    Start,
    StartWriting,
    StopWriting,
    StreamClosed,
    SubmitPrompt,
    Tick,
)
from node_runtime.handoff.lease import DEFAULT_GRANT_BOUND_S, WriterLease, beat_interval_ms
from node_runtime.handoff.messages import XXH3
from node_runtime.handoff.states import PREFILL_TABLE, PREFILL_TERMINAL, PrefillState, Verdict, refuse

# How long a granted handoff may stand still, with nothing computed on the whole node and nothing landed, before the
# prefill node gives it up. Waiting for other prompts is no standstill.
STALL_BOUND_S = 30.0

RESOURCE_EXHAUSTED = 8
UNAVAILABLE = 14

_MS_PER_S = 1000


class PrefillHandoff:
    """One attempt seen from the prefill node: Start, compute, Ready, write into the grant, Done.

    Under a lease it sends Beats, and writes only while the newest one that the peer has answered is younger than the
    lease: when it is not, the handoff fails and nothing is ever written for it again.

    `check_start` and `check_grant` raise for values that this node or the peer's manifest does not allow; they run
    before the session moves, so a refused message leaves it sound.
    """

    def __init__(
        self,
        *,
        check_start: Callable[[Start], None],
        check_grant: Callable[[Start, Grant], None],
        checksum_kinds: Sequence[str] = (),
        stall_bound_s: float = STALL_BOUND_S,
        grant_bound_s: float = DEFAULT_GRANT_BOUND_S,
    ) -> None:
        """
        Args:
            checksum_kinds: Digests that this node can take beside XXH3.
            stall_bound_s: How long a granted handoff may go without Progressed.
            grant_bound_s: How long a prompt may be ready without a grant.
        """
        self._check_start = check_start
        self._check_grant = check_grant
        self._checksum_kinds = checksum_kinds
        self._stall_bound_s = stall_bound_s
        self._state = PrefillState.OPEN
        self._stream_open = True
        self._start: Start | None = None
        self._grant: Grant | None = None
        self._lease: WriterLease | None = None
        self._grant_bound_s = grant_bound_s
        self._stalls_at_s = math.inf
        self._grant_due_at_s = math.inf

    @property
    def state(self) -> PrefillState:
        return self._state

    @property
    def is_terminal(self) -> bool:
        return self._state in PREFILL_TERMINAL

    @property
    def checksum_kind(self) -> str:
        """What the checksums are digests of: the first of those that the peer offers and this node can take."""
        offered = self._opened().checksum_kinds
        return next((kind for kind in offered if kind in self._checksum_kinds), XXH3)

    @property
    def wakeup_at_s(self) -> float | None:
        """When the session wants a Tick; None: never."""
        if self._state not in (PrefillState.READY, PrefillState.GRANTED):
            return None
        beat_at_s = math.inf if self._lease is None else self._lease.next_beat_at_s
        at_s = min(beat_at_s, self._gives_up_at_s())
        return None if at_s == math.inf else at_s

    def handle(self, event: PrefillEvent, now_s: float) -> tuple[PrefillAction, ...]:
        """Moves the session. Raises InvalidRequest (the peer broke the protocol) or InternalError (we did)."""
        if self._is_foreign(event):
            return ()
        # Whatever comes now finds the fence up: a stopped process that wakes after its lease writes nothing.
        overdue = () if isinstance(event, Progressed) else self._give_up_if_overdue(now_s)
        return (*overdue, *self._handle(event, now_s))

    def _handle(self, event: PrefillEvent, now_s: float) -> tuple[PrefillAction, ...]:
        verdict = PREFILL_TABLE[self._state][type(event)]
        if isinstance(event, Start | Grant):
            self._check_repeat(event)
        if isinstance(event, StreamClosed):
            self._stream_open = False
        if isinstance(verdict, Verdict):
            refuse(verdict, event, self._state)
            return ()
        self._check_content(event)
        previous, self._state = self._state, verdict
        return self._actions(previous, event, now_s)

    def _is_foreign(self, event: PrefillEvent) -> bool:
        """Whether the message belongs to another handoff; a second Start on the stream is judged by its content."""
        if not isinstance(event, Grant | Renewed | Abort) or self._start is None:
            return False
        return event.handoff_id != self._start.handoff_id

    def _check_repeat(self, event: Start | Grant) -> None:
        known = self._start if isinstance(event, Start) else self._grant
        if known is not None and known != event:
            raise InvalidRequest(f"a second {type(event).__name__} with other content: a stream carries one handoff")

    def _check_content(self, event: PrefillEvent) -> None:
        if isinstance(event, Start):
            self._check_start(event)
            self._start = event
        elif isinstance(event, Grant):
            start = self._opened()
            check_lease(event, start)
            if self._lease is not None:
                self._lease.check(event.beat)
            self._check_grant(start, event)
            self._grant = event
        elif isinstance(event, Renewed) and self._lease is not None:
            self._lease.check(event.beat)

    def _opened(self) -> Start:
        if self._start is None:
            raise InternalError("the handoff was not started")
        return self._start

    def _actions(self, previous: PrefillState, event: PrefillEvent, now_s: float) -> tuple[PrefillAction, ...]:
        match event:
            case Start():
                return (SubmitPrompt(start=event),)
            case Admitted():
                return self._send(self._ready(event, now_s))
            case Tick():
                return self._beat(now_s)
            case Grant():
                return self._granted(event, now_s)
            case Renewed():
                return self._renewed(event, now_s)
            case Progressed():
                self._stalls_at_s = now_s + self._stall_bound_s
                return ()
            case ChecksumsTaken():
                return self._send(event.checksums)
            case Completed():
                return (*self._send(event.done), MarkHandedOver())
            case Abort():
                if previous is PrefillState.OPEN:
                    return self._send(Quiesced(handoff_id=event.handoff_id))
                return self._stop(AbortScheduling(), ())
            case GaveUp():
                return self._give_up(previous, code=event.code, message=event.message)
            case StreamClosed():
                holds_nothing_new = previous in (PrefillState.OPEN, PrefillState.DRAINING)
                return () if holds_nothing_new else self._stop(AbortScheduling(), ())
            case Drained():
                return self._quiet()
            case _:
                assert_never(event)

    # The lease.

    def _ready(self, event: Admitted, now_s: float) -> Ready:
        start = self._opened()
        self._grant_due_at_s = now_s + self._grant_bound_s
        if start.lease_ms:
            self._lease = WriterLease(lease_s=start.lease_ms / _MS_PER_S, begun_at_s=now_s)
        return Ready(
            handoff_id=start.handoff_id,
            cached_tokens=event.cached_tokens,
            beat_interval_ms=beat_interval_ms(start.lease_ms),
            checksum_kind=self.checksum_kind,
        )

    def _beat(self, now_s: float) -> tuple[PrefillAction, ...]:
        if self._lease is None or now_s < self._lease.next_beat_at_s:
            return ()
        return self._send(Beat(handoff_id=self._opened().handoff_id, number=self._lease.beat(now_s)))

    def _granted(self, grant: Grant, now_s: float) -> tuple[PrefillAction, ...]:
        if self._lease is not None and not self._lease.extend(grant.beat, now_s):
            self._state = PrefillState.CLOSED
            return self._give_up(
                PrefillState.READY, code=UNAVAILABLE, message="the grant came after its lease was over"
            )
        self._stalls_at_s = now_s + self._stall_bound_s
        return (MarkGranted(), StartWriting(grant=grant, post_until_s=self._post_until_s()))

    def _renewed(self, renewed: Renewed, now_s: float) -> tuple[PrefillAction, ...]:
        if self._lease is None or not self._lease.extend(renewed.beat, now_s):
            return ()
        return (ExtendWriting(post_until_s=self._post_until_s()),)

    def _post_until_s(self) -> float:
        until_s = None if self._lease is None else self._lease.post_until_s
        return math.inf if until_s is None else until_s

    def _gives_up_at_s(self) -> float:
        """When the handoff is over unless something happens before."""
        if self._state is PrefillState.READY:
            return self._grant_due_at_s
        if self._state is not PrefillState.GRANTED:
            return math.inf
        lease_end_s = None if self._lease is None else self._lease.end_s
        return min(self._stalls_at_s, math.inf if lease_end_s is None else lease_end_s)

    def _give_up_if_overdue(self, now_s: float) -> tuple[PrefillAction, ...]:
        if now_s < self._gives_up_at_s():
            return ()
        if self._state is PrefillState.READY:
            self._state = PrefillState.CLOSED
            message = f"the decode node had no memory for the prompt within {self._grant_bound_s:g} s"
            return self._give_up(PrefillState.READY, code=RESOURCE_EXHAUSTED, message=message)
        is_stalled = now_s >= self._stalls_at_s
        message = (
            f"the prefill node made no progress for {self._stall_bound_s:g} s"
            if is_stalled
            else "the decode node did not renew the lease of its grant"
        )
        self._state = PrefillState.DRAINING
        return self._give_up(PrefillState.GRANTED, code=UNAVAILABLE, message=message)

    # The end.

    def _give_up(self, previous: PrefillState, *, code: int, message: str) -> tuple[PrefillAction, ...]:
        failure = EndWithFailure(code=code, message=message)
        if previous is PrefillState.OPEN:
            return (failure,)
        failed = Failed(handoff_id=self._opened().handoff_id, code=code, message=message)
        return (*self._stop(FailScheduling(), self._send(failed)), failure)

    def _stop(
        self, scheduling: AbortScheduling | FailScheduling, farewell: tuple[Send[ResponseMessage], ...]
    ) -> tuple[PrefillAction, ...]:
        """Ends computing; the blocks stay owned by the transfer while a posted write may still read them."""
        if self._state is PrefillState.DRAINING:
            return (scheduling, *farewell, StopWriting())
        return (scheduling, *farewell, *self._quiet())

    def _quiet(self) -> tuple[PrefillAction, ...]:
        return (MarkQuiesced(), *self._send(Quiesced(handoff_id=self._opened().handoff_id)))

    def _send(self, message: ResponseMessage) -> tuple[Send[ResponseMessage], ...]:
        return (Send(message=message),) if self._stream_open else ()

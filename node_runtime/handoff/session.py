"""The two sans-IO sessions of a handoff: events in, actions out, one object per attempt and side.

A session owns the state of one handoff and nothing else. It knows no socket, thread, scheduler or clock: the role
packages feed it events in the order in which they happen (from one thread), carry out the returned actions in order,
and pass the time in. An event that breaks the protocol raises `InvalidRequest` and leaves the session as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from node_runtime.errors import InternalError, InvalidRequest
from node_runtime.handoff.checks import check_done, check_ready
from node_runtime.handoff.events import (
    Abort,
    AbortScheduling,
    Admitted,
    Allocated,
    Begin,
    Completed,
    DecodeAction,
    DecodeEvent,
    Done,
    Drained,
    EndWithFailure,
    Failed,
    FailScheduling,
    GaveUp,
    Grant,
    MarkDone,
    MarkGranted,
    MarkHandedOver,
    MarkQuiesced,
    MarkReady,
    PrefillAction,
    PrefillEvent,
    Quiesced,
    Ready,
    ResponseMessage,
    Send,
    Start,
    StartWriting,
    StopWriting,
    StreamClosed,
    SubmitPrompt,
    Tick,
)
from node_runtime.handoff.states import (
    DECODE_TABLE,
    DECODE_TERMINAL,
    PREFILL_TABLE,
    PREFILL_TERMINAL,
    DecodeState,
    PrefillState,
    Verdict,
)

UNAVAILABLE = 14

_RESPONSES = (Ready, Done, Failed, Quiesced)
_REQUESTS = (Start, Grant, Abort)


def _refuse(verdict: Verdict, event: object, state: DecodeState | PrefillState) -> None:
    """Raises for an event that its table calls an error."""
    name = type(event).__name__
    if verdict is Verdict.PEER_ERROR:
        raise InvalidRequest(f"{name} is not allowed while the handoff is {state.value}")
    if verdict is Verdict.LOCAL_ERROR:
        raise InternalError(f"{name} cannot happen while the handoff is {state.value}")


class DecodeHandoff:
    """One attempt seen from the decode node: Start, await Ready, grant memory, await Done.

    From the moment the grant is sent the peer may write into our blocks. When such a handoff comes to nothing it stays
    QUARANTINED until the peer confirms that it is quiet or, with the control stream gone, until the data plane's drain
    bound has passed; then the scheduler hears MarkQuiesced and the blocks are free again.
    """

    def __init__(self, start: Start, *, drain_bound_s: float, vocab_size: int) -> None:
        """`drain_bound_s`: how long a write may still land after the control stream was seen to break."""
        self._start = start
        self._vocab_size = vocab_size
        self._num_granted_blocks = 0
        self._drain_bound_s = drain_bound_s
        self._state = DecodeState.OPEN
        self._stream_open = True
        self._wakeup_at_s: float | None = None

    @property
    def state(self) -> DecodeState:
        return self._state

    @property
    def is_terminal(self) -> bool:
        return self._state in DECODE_TERMINAL

    @property
    def handoff_id(self) -> bytes:
        return self._start.handoff_id

    @property
    def wakeup_at_s(self) -> float | None:
        """When the session wants a Tick; None: never."""
        return self._wakeup_at_s

    def handle(self, event: DecodeEvent, now_s: float) -> tuple[DecodeAction, ...]:
        """Moves the session. Raises InvalidRequest (the peer broke the protocol) or InternalError (we did)."""
        if isinstance(event, _RESPONSES) and event.handoff_id != self.handoff_id:
            return ()
        verdict = DECODE_TABLE[self._state][type(event)]
        if isinstance(verdict, Verdict):
            _refuse(verdict, event, self._state)
            return ()
        if isinstance(event, Tick) and (self._wakeup_at_s is None or now_s < self._wakeup_at_s):
            return ()
        self._check_content(event)
        previous, self._state = self._state, verdict
        return self._actions(previous, event, now_s)

    def _check_content(self, event: DecodeEvent) -> None:
        """A peer's numbers are not trusted: they would reach the model and the client's usage counts."""
        if isinstance(event, Ready):
            check_ready(event, num_prompt_tokens=len(self._start.token_ids))
        elif isinstance(event, Done):
            check_done(event, vocab_size=self._vocab_size, num_granted_blocks=self._num_granted_blocks)

    def _actions(self, previous: DecodeState, event: DecodeEvent, now_s: float) -> tuple[DecodeAction, ...]:
        match event:
            case Begin():
                return (Send(message=self._start),)
            case Ready():
                return (MarkReady(cached_tokens=event.cached_tokens),)
            case Allocated():
                self._num_granted_blocks = sum(len(group.block_ids) for group in event.groups)
                return (
                    Send(message=Grant(handoff_id=self.handoff_id, from_token=event.from_token, groups=event.groups)),
                )
            case Done():
                return (MarkDone(done=event),) if self._state is DecodeState.DONE else self._quiet()
            case Quiesced() | Tick():
                return self._quiet()
            case StreamClosed():
                return self._stream_closed(previous, event, now_s)
            case Failed():
                return (*self._release(), EndWithFailure(code=event.code, message=event.message))
            case GaveUp():
                return (
                    *self._send_abort(previous, event.message),
                    *self._release(),
                    EndWithFailure(code=event.code, message=event.message),
                )
            case _:
                assert_never(event)

    def _stream_closed(self, previous: DecodeState, event: StreamClosed, now_s: float) -> tuple[DecodeAction, ...]:
        self._stream_open = False
        if self._state is DecodeState.QUARANTINED and self._wakeup_at_s is None:
            self._wakeup_at_s = now_s + self._drain_bound_s
        if previous is DecodeState.QUARANTINED:
            return ()
        failure = EndWithFailure(code=event.code or UNAVAILABLE, message=event.message)
        return (*self._release(), failure)

    def _send_abort(self, previous: DecodeState, reason: str) -> tuple[DecodeAction, ...]:
        if previous is DecodeState.OPEN or not self._stream_open:
            return ()
        return (Send(message=Abort(handoff_id=self.handoff_id, reason=reason)),)

    def _release(self) -> tuple[DecodeAction, ...]:
        """Ends the scheduling; with no grant sent, no peer can touch what the scheduler may just have allocated."""
        return (AbortScheduling(),) if self._state is DecodeState.QUARANTINED else (AbortScheduling(), MarkQuiesced())

    def _quiet(self) -> tuple[DecodeAction, ...]:
        self._wakeup_at_s = None
        return (MarkQuiesced(),)


class PrefillHandoff:
    """One attempt seen from the prefill node: Start, compute, Ready, write into the grant, Done.

    `check_start` and `check_grant` raise for values that this node or the peer's manifest does not allow; they run
    before the session moves, so a refused message leaves it sound.
    """

    def __init__(self, *, check_start: Callable[[Start], None], check_grant: Callable[[Start, Grant], None]) -> None:
        self._check_start = check_start
        self._check_grant = check_grant
        self._state = PrefillState.OPEN
        self._stream_open = True
        self._start: Start | None = None
        self._grant: Grant | None = None

    @property
    def state(self) -> PrefillState:
        return self._state

    @property
    def is_terminal(self) -> bool:
        return self._state in PREFILL_TERMINAL

    def handle(self, event: PrefillEvent) -> tuple[PrefillAction, ...]:
        """Moves the session. Raises InvalidRequest (the peer broke the protocol) or InternalError (we did)."""
        if self._is_foreign(event):
            return ()
        verdict = PREFILL_TABLE[self._state][type(event)]
        if isinstance(event, Start | Grant):
            self._check_repeat(event)
        if isinstance(event, StreamClosed):
            self._stream_open = False
        if isinstance(verdict, Verdict):
            _refuse(verdict, event, self._state)
            return ()
        self._check_content(event)
        previous, self._state = self._state, verdict
        return self._actions(previous, event)

    def _is_foreign(self, event: PrefillEvent) -> bool:
        """Whether the message belongs to another handoff; a second Start on the stream is judged by its content."""
        if not isinstance(event, Grant | Abort) or self._start is None:
            return False
        return event.handoff_id != self._start.handoff_id

    def _check_repeat(self, event: Start | Grant) -> None:
        known = self._start if isinstance(event, Start) else self._grant
        if known is not None and known != event:
            raise InvalidRequest(f"a second {type(event).__name__} with other content on one handoff")

    def _check_content(self, event: PrefillEvent) -> None:
        if isinstance(event, Start):
            self._check_start(event)
            self._start = event
        elif isinstance(event, Grant):
            self._check_grant(self._opened(), event)
            self._grant = event

    def _opened(self) -> Start:
        if self._start is None:
            raise InternalError("the handoff was not started")
        return self._start

    def _actions(self, previous: PrefillState, event: PrefillEvent) -> tuple[PrefillAction, ...]:
        match event:
            case Start():
                return (SubmitPrompt(start=event),)
            case Admitted():
                return self._send(Ready(handoff_id=self._opened().handoff_id, cached_tokens=event.cached_tokens))
            case Grant():
                return (MarkGranted(), StartWriting(grant=event))
            case Completed():
                return (*self._send(event.done), MarkHandedOver())
            case Abort():
                return self._stop(AbortScheduling(), ())
            case GaveUp():
                return self._give_up(previous, event)
            case StreamClosed():
                holds_nothing_new = previous in (PrefillState.OPEN, PrefillState.DRAINING)
                return () if holds_nothing_new else self._stop(AbortScheduling(), ())
            case Drained():
                return self._quiet()
            case _:
                assert_never(event)

    def _give_up(self, previous: PrefillState, event: GaveUp) -> tuple[PrefillAction, ...]:
        failure = EndWithFailure(code=event.code, message=event.message)
        if previous is PrefillState.OPEN:
            return (failure,)
        failed = Failed(handoff_id=self._opened().handoff_id, code=event.code, message=event.message)
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

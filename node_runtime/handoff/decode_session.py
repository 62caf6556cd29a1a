"""The session of the decode side: Start, await Ready, grant memory, await Done. `session.py` has the rules of both."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import assert_never

from node_runtime.handoff.checks import check_checksum_parts, check_done, check_ready
from node_runtime.handoff.events import (
    Abort,
    AbortScheduling,
    Allocated,
    Beat,
    Begin,
    Checksums,
    DecodeAction,
    DecodeEvent,
    Done,
    EndWithFailure,
    Failed,
    Fenced,
    GaveUp,
    Grant,
    GroupGrant,
    MarkDone,
    MarkQuiesced,
    MarkReady,
    Quiesced,
    Ready,
    Renewed,
    Send,
    Start,
    StreamClosed,
    Tick,
    Verified,
    Verify,
)
from node_runtime.handoff.lease import ReceiverLease
from node_runtime.handoff.messages import XXH3
from node_runtime.handoff.states import DECODE_TABLE, DECODE_TERMINAL, DecodeState, Verdict, refuse

UNAVAILABLE = 14
DATA_LOSS = 15

_RESPONSES = (Ready, Beat, Checksums, Done, Failed, Quiesced)
_MS_PER_S = 1000


class DecodeHandoff:
    """One attempt seen from the decode node: Start, await Ready, grant memory, await Done.

    From the moment the grant is sent the peer may write into our blocks. When such a handoff comes to nothing it stays
    QUARANTINED until the peer confirms that it is quiet, until the lease and the data plane's drain bound have passed,
    or until our data plane vouches that nothing more can land; then the scheduler hears MarkQuiesced and the blocks are
    free again. A peer that knows no leases is given the notice bound and the drain bound from the moment its stream was
    seen to break.
    """

    def __init__(
        self,
        start: Start,
        *,
        drain_bound_s: float,
        notice_bound_s: float,
        vocab_size: int,
        digests_per_block: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            drain_bound_s: How long a write may still land after its writer stopped posting or died.
            notice_bound_s: How long a writer without a lease may go on before it notices that its stream broke.
            digests_per_block: Checksums that come for a block of each group, for handoffs that ask for them.
        """
        self._start = start
        self._vocab_size = vocab_size
        self._groups: tuple[GroupGrant, ...] = ()
        self._digests_per_block = digests_per_block
        # What is known of the checksums: the parts that came, those under comparison, and the table slots that all
        # cover, by field and rank.
        self._checksum_kind = XXH3
        self._parts: set[int] = set()
        self._num_comparing = 0
        self._covered: dict[tuple[str, int], set[int]] = {}
        self._done: Done | None = None
        self._drain_bound_s = drain_bound_s
        self._notice_bound_s = notice_bound_s
        self._state = DecodeState.OPEN
        self._stream_open = True
        self._lease: ReceiverLease | None = None
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
    def checksum_kind(self) -> str:
        """What the checksums are digests of, as Ready says."""
        return self._checksum_kind

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
            refuse(verdict, event, self._state)
            return ()
        if isinstance(event, Tick) and (self._wakeup_at_s is None or now_s < self._wakeup_at_s):
            return ()
        self._check_content(event)
        previous, self._state = self._state, verdict
        actions = self._actions(previous, event, now_s)
        self._wakeup_at_s = self._next_wakeup_s(now_s)
        return actions

    def _check_content(self, event: DecodeEvent) -> None:
        """A peer's numbers are not trusted: they would reach the model and the client's usage counts."""
        if isinstance(event, Ready):
            check_ready(event, self._start)
        elif isinstance(event, Done):
            num_blocks = sum(len(group.block_ids) for group in self._groups)
            check_done(event, self._start, vocab_size=self._vocab_size, num_granted_blocks=num_blocks)
            check_checksum_parts(event, num_received=len(self._parts))

    def _actions(self, previous: DecodeState, event: DecodeEvent, now_s: float) -> tuple[DecodeAction, ...]:
        match event:
            case Begin():
                return (Send(message=self._start),)
            case Ready():
                return self._ready(event, now_s)
            case Beat():
                return self._heard(event, now_s)
            case Allocated():
                return (Send(message=self._grant(event)),)
            case Done():
                return self._landed(event)
            case Checksums():
                return self._compare(event)
            case Verified():
                return self._verified(previous, event)
            case Quiesced():
                return self._quiet(previous)
            case Fenced():
                return (MarkQuiesced(),)
            case Tick():
                return self._time_is_up(previous)
            case StreamClosed():
                return self._stream_closed(previous, event)
            case Failed():
                return self._end(code=event.code, message=event.message)
            case GaveUp():
                return self._give_up(previous, code=event.code, message=event.message)
            case _:
                assert_never(event)

    def _ready(self, event: Ready, now_s: float) -> tuple[DecodeAction, ...]:
        self._checksum_kind = event.checksum_kind
        if self._start.lease_ms and event.beat_interval_ms:
            self._lease = ReceiverLease(lease_s=self._start.lease_ms / _MS_PER_S, heard_at_s=now_s)
        return (MarkReady(cached_tokens=event.cached_tokens),)

    def _heard(self, event: Beat, now_s: float) -> tuple[DecodeAction, ...]:
        if self._lease is None or not self._lease.hear(event.number, now_s) or self._state is DecodeState.READY:
            return ()
        return (Send(message=Renewed(handoff_id=self.handoff_id, beat=event.number)),) if self._stream_open else ()

    def _grant(self, allocated: Allocated) -> Grant:
        self._groups = allocated.groups
        return Grant(
            handoff_id=self.handoff_id,
            from_token=allocated.from_token,
            groups=allocated.groups,
            lease_ms=0 if self._lease is None else self._start.lease_ms,
            beat=0 if self._lease is None else self._lease.last_beat,
        )

    # Checksums.

    def _landed(self, done: Done) -> tuple[DecodeAction, ...]:
        if self._state is not DecodeState.DONE:
            return (MarkQuiesced(),)
        if not self._start.wants_checksums or not done.num_checksum_parts:
            return (MarkDone(done=done),)
        self._state, self._done = DecodeState.VERIFYING, done
        return self._done_if_verified()

    def _compare(self, checksums: Checksums) -> tuple[DecodeAction, ...]:
        if not self._start.wants_checksums or checksums.part in self._parts:
            return ()
        self._parts.add(checksums.part)
        self._num_comparing += 1
        for item in checksums.fields:
            self._covered.setdefault((item.field_id, item.tp_rank), set()).update(range(item.first_slot, item.end_slot))
        return (Verify(groups=self._groups, checksums=checksums),)

    def _verified(self, previous: DecodeState, event: Verified) -> tuple[DecodeAction, ...]:
        self._num_comparing -= 1
        if event.damage and previous is DecodeState.GRANTED:
            # The peer is still writing.
            self._state = DecodeState.QUARANTINED
            return self._give_up(previous, code=DATA_LOSS, message=event.damage)
        return self._damaged(event.damage) if event.damage else self._done_if_verified()

    def _done_if_verified(self) -> tuple[DecodeAction, ...]:
        done = self._done
        if done is None or self._num_comparing or len(self._parts) < done.num_checksum_parts:
            return ()
        num_expected = sum(len(group.block_ids) * self._digests_per_block[group.group_id] for group in self._groups)
        num_covered = sum(len(slots) for slots in self._covered.values())
        if num_covered != num_expected:
            return self._damaged(f"checksums of {num_covered} blocks came, {num_expected} were granted")
        self._state = DecodeState.DONE
        return (MarkDone(done=done),)

    def _damaged(self, damage: str) -> tuple[DecodeAction, ...]:
        self._state = DecodeState.CLOSED
        return self._end(code=DATA_LOSS, message=damage)

    def _stream_closed(self, previous: DecodeState, event: StreamClosed) -> tuple[DecodeAction, ...]:
        self._stream_open = False
        if previous is DecodeState.QUARANTINED:
            return ()
        if previous is DecodeState.VERIFYING:
            if self._done is not None and len(self._parts) >= self._done.num_checksum_parts:
                return ()
            self._state = DecodeState.CLOSED
        return self._end(code=event.code or UNAVAILABLE, message=event.message)

    def _quiet(self, previous: DecodeState) -> tuple[DecodeAction, ...]:
        if previous is DecodeState.QUARANTINED:
            return (MarkQuiesced(),)
        return self._end(code=UNAVAILABLE, message="the prefill node ended the handoff without a result")

    def _time_is_up(self, previous: DecodeState) -> tuple[DecodeAction, ...]:
        if previous is DecodeState.QUARANTINED:
            return (MarkQuiesced(),)
        silence = f"the prefill node gave no sign of life for {self._start.lease_ms / _MS_PER_S:g} s"
        return self._give_up(previous, code=UNAVAILABLE, message=silence)

    def _give_up(self, previous: DecodeState, *, code: int, message: str) -> tuple[DecodeAction, ...]:
        if previous is DecodeState.OPEN or not self._stream_open:
            return self._end(code=code, message=message)
        abort = Send(message=Abort(handoff_id=self.handoff_id, reason=message))
        return (abort, *self._end(code=code, message=message))

    def _end(self, *, code: int, message: str) -> tuple[DecodeAction, ...]:
        """Ends the scheduling; with no grant sent, no peer can touch what the scheduler may just have allocated."""
        quiet = () if self._state is DecodeState.QUARANTINED else (MarkQuiesced(),)
        return (AbortScheduling(), *quiet, EndWithFailure(code=code, message=message))

    def _next_wakeup_s(self, now_s: float) -> float | None:
        """While the handoff lives, the end of the peer's silence; in quarantine, the end of the fence."""
        lease = self._lease
        if self._state in (DecodeState.READY, DecodeState.GRANTED):
            return None if lease is None else lease.end_s
        if self._state is not DecodeState.QUARANTINED:
            return None
        if lease is not None:
            return lease.end_s + self._drain_bound_s
        if self._stream_open or self._wakeup_at_s is not None:
            return self._wakeup_at_s
        return now_s + self._notice_bound_s + self._drain_bound_s

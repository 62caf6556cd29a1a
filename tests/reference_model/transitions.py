"""Which event takes a request where. Pure: a batch of events is judged as a whole before anything is applied."""

from __future__ import annotations

from dataclasses import dataclass, replace

from reference_model.requests import HAS_ENDED, HOLDS_NOTHING, NEVER_RAN, Phase, Request
from reference_model.values import Event, EventKind, Role


class BrokenContract(Exception):
    """An event that cannot be meant; its whole batch is refused. `words` must be in the message about it."""

    def __init__(self, event: Event, phase: Phase) -> None:
        self.words = (event.kind.value, f'"{event.request_id}"', phase.value)
        super().__init__(f"{event} in {phase.value}")


@dataclass(frozen=True, slots=True)
class View:
    """What the rules need to know of a request."""

    phase: Phase
    is_remote: bool
    num_results_out: int

    @staticmethod
    def of(request: Request) -> View:
        return View(request.phase, request.is_remote, request.num_results_out)

    def after(self, phase: Phase) -> View:
        return replace(self, phase=phase, num_results_out=0)


ROLES_OF_EVENTS = {
    EventKind.READY: (Role.DECODE,),
    EventKind.DONE: (Role.DECODE,),
    EventKind.GRANTED: (Role.PREFILL,),
    EventKind.HANDED_OVER: (Role.PREFILL,),
    EventKind.FAILED: (Role.PREFILL, Role.DECODE),
    EventKind.QUIESCED: (Role.PREFILL, Role.DECODE),
    EventKind.RETRACT: (Role.DECODE, Role.FUSED),
}


def judge(role: Role, view: View, event: Event) -> View | None:
    """The request after the event; None if the event is late or repeated and changes nothing."""
    is_refused = role not in ROLES_OF_EVENTS.get(event.kind, tuple(Role))
    phase = view.phase
    match event.kind:
        # Every row owes one result: no token before the last chunk, else one. A result nobody owes cannot be meant.
        case EventKind.RESULT if phase not in (*HAS_ENDED, Phase.RETRACTED):
            num_due = 0 if phase is Phase.PREFILLING else 1
            is_refused |= view.num_results_out == 0 or len(event.tokens) != num_due or any(t < 0 for t in event.tokens)
            after = view.after(Phase.PREFILL_DONE if phase is Phase.AWAITING_RESULT else phase)
        # The runtime ends a completion, so there must be one. On the prefill role the transfer ends a request.
        case EventKind.FINISH if phase not in HAS_ENDED:
            is_refused |= role is Role.PREFILL or phase not in (Phase.PREFILL_DONE, Phase.DECODING, Phase.RETRACTED)
            after = view.after(Phase.FINISHED)
        case EventKind.ABORT if phase not in HAS_ENDED:
            after = view.after(early_end(role, phase))
        case EventKind.READY if phase is Phase.AWAITING_READY:
            after = view.after(Phase.WAITING)
        case EventKind.GRANTED if phase not in HAS_ENDED:
            after = view
        # Before there is a grant nothing can have landed; after the landing it is a repetition.
        case EventKind.DONE if phase is Phase.REMOTE_PREFILLING:
            is_refused |= event.tokens[0] < 0
            after = view.after(Phase.PREFILL_DONE)
        case EventKind.DONE if phase in NEVER_RAN:
            is_refused, after = True, None
        # Also the answer to an abort that crossed it: the peer has everything, so it reads no more.
        case EventKind.HANDED_OVER if phase is not Phase.FINISHED:
            is_refused |= phase not in (Phase.HANDING_OVER, Phase.TRANSFER_HELD)
            after = view.after(Phase.FINISHED)
        # On the decode role a failure after the landing is late, and a prompt computed here hears of none.
        case EventKind.FAILED if phase not in HAS_ENDED:
            is_handoff = phase is Phase.REMOTE_PREFILLING or (view.is_remote and phase in NEVER_RAN)
            after = view.after(early_end(role, phase)) if role is Role.PREFILL or is_handoff else None
        case EventKind.QUIESCED if phase in (Phase.TRANSFER_HELD, Phase.QUARANTINED):
            after = view.after(Phase.FINISHED)
        # Of something that holds blocks of its own; a repetition is late.
        case EventKind.RETRACT if phase not in (*HAS_ENDED, Phase.RETRACTED):
            is_refused |= phase in (*NEVER_RAN, Phase.REMOTE_PREFILLING)
            after = view.after(Phase.RETRACTED)
        case _:
            after = None
    if is_refused:
        raise BrokenContract(event, phase)
    return after


def early_end(role: Role, phase: Phase) -> Phase:
    """Blocks that a peer may still touch are not free: on the prefill role the transfer owns the source blocks from
    the first chunk on, on the decode role the peer writes into what it was granted."""
    if phase is Phase.REMOTE_PREFILLING:
        return Phase.QUARANTINED
    if role is Role.PREFILL and phase not in HOLDS_NOTHING:
        return Phase.TRANSFER_HELD
    return Phase.FINISHED

"""Which event takes a request where. Pure: a batch of events is judged as a whole before anything is applied."""

from __future__ import annotations

from dataclasses import dataclass, replace

from reference_model.requests import HAS_ENDED, HOLDS_NOTHING, NEVER_RAN, Phase, Request
from reference_model.values import Event, EventKind, Role


class BrokenContract(Exception):
    """An event that cannot be meant; its whole batch is refused. `words` must be in the message about it."""

    words: tuple[str, ...]

    def __init__(self, event: Event, phase: Phase) -> None:
        self.words = (event.kind.value, f'"{event.request_id}"', phase.value)
        super().__init__(f"{event} in {phase.value}")


class BrokenTransfer(BrokenContract):
    """The failure of a load that cannot be meant."""

    def __init__(self, *words: str) -> None:
        self.words = words
        Exception.__init__(self, " ".join(words))


@dataclass(frozen=True, slots=True)
class View:
    """What the rules need to know of a request."""

    phase: Phase
    is_remote: bool
    results_out: tuple[int, ...]
    num_wanted_tokens: int

    @staticmethod
    def of(request: Request) -> View:
        return View(request.phase, request.is_remote, tuple(request.results_out), request.num_wanted_tokens)

    def after(self, phase: Phase) -> View:
        return replace(self, phase=phase, results_out=())

    def landed(self, num_tokens: int) -> View:
        """With a first token the prompt is done."""
        phase = Phase.PREFILL_DONE if self.phase is Phase.AWAITING_RESULT and num_tokens else self.phase
        num_wanted_tokens = self.num_wanted_tokens - num_tokens
        return replace(self, phase=phase, results_out=self.results_out[1:], num_wanted_tokens=num_wanted_tokens)

    def allows_result(self, tokens: tuple[int, ...]) -> bool:
        """Results land in the order of their rows. A row brings one token at least, unless it is a chunk before the
        last, or was planned ahead and the result before it brought all that was wanted."""
        if not self.results_out or any(token < 0 for token in tokens):
            return False
        most = self.results_out[0]
        if self.phase is Phase.DECODING:
            most = min(most, self.num_wanted_tokens)
        return min(1, most) <= len(tokens) <= most


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
    after: View | None
    match event.kind:
        # A result nobody owes cannot be meant.
        case EventKind.RESULT if phase not in (*HAS_ENDED, Phase.RETRACTED):
            is_refused |= not view.allows_result(event.tokens)
            after = view.landed(len(event.tokens))
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
            after = replace(view.after(Phase.PREFILL_DONE), num_wanted_tokens=view.num_wanted_tokens - 1)
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
        case EventKind.RESERVE if phase not in HAS_ENDED:
            is_refused |= phase is not Phase.DECODING or event.tokens[0] < 1
            after = view
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

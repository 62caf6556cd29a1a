"""Random histories for a scheduler: a shape, and moves that Hypothesis can shrink.

A move names no request. It picks one of those that it can concern when it is played, so that a later move keeps its
meaning when an earlier one is left out. A move that concerns nobody does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias

from hypothesis import strategies as st
from reference_model import Event, EventKind, Key, LoadDone, Phase, Request, Role, SchedulerShape, StoreDone, Submission
from reference_model.tiers import Tiers
from reference_model.values import Plan

from .shapes import NUMBERS, Digits, shape_of
from .side_by_side import SideBySide

GHOST = "ghost"
ENDLESS_TOKENS = 10_000  # without a full group there is no bound worth reaching
RESIDENT = (
    Phase.PREFILLING,
    Phase.AWAITING_RESULT,
    Phase.REMOTE_PREFILLING,
    Phase.PREFILL_DONE,
    Phase.DECODING,
    Phase.HANDING_OVER,
)
LIVE = (Phase.AWAITING_READY, Phase.WAITING, Phase.RETRACTED, *RESIDENT)
# Where an event of each kind is to be expected. Elsewhere it is late, repeated or a broken contract.
EXPECTED: dict[EventKind, tuple[Phase, ...]] = {
    EventKind.RESULT: (Phase.PREFILLING, Phase.AWAITING_RESULT, Phase.DECODING),
    EventKind.FINISH: (Phase.PREFILL_DONE, Phase.DECODING, Phase.RETRACTED),
    EventKind.RESERVE: (Phase.DECODING,),
    EventKind.RETRACT: (Phase.PREFILLING, Phase.AWAITING_RESULT, Phase.PREFILL_DONE, Phase.DECODING),
    EventKind.ABORT: LIVE,
    EventKind.READY: (Phase.AWAITING_READY,),
    EventKind.GRANTED: (Phase.WAITING, *RESIDENT),
    EventKind.DONE: (Phase.REMOTE_PREFILLING,),
    EventKind.HANDED_OVER: (Phase.HANDING_OVER, Phase.TRANSFER_HELD),
    EventKind.FAILED: LIVE,
    EventKind.QUIESCED: (Phase.TRANSFER_HELD, Phase.QUARANTINED),
}
COMMON_KINDS = (EventKind.RESULT, EventKind.FINISH, EventKind.ABORT)
KINDS: dict[Role, tuple[EventKind, ...]] = {
    Role.FUSED: (*COMMON_KINDS, EventKind.RESULT, EventKind.RESERVE, EventKind.RETRACT),
    Role.PREFILL: (
        EventKind.RESULT,
        EventKind.ABORT,
        EventKind.GRANTED,
        EventKind.HANDED_OVER,
        EventKind.HANDED_OVER,
        EventKind.FAILED,
        EventKind.QUIESCED,
    ),
    Role.DECODE: (
        *COMMON_KINDS,
        EventKind.RESERVE,
        EventKind.RETRACT,
        EventKind.READY,
        EventKind.READY,
        EventKind.DONE,
        EventKind.DONE,
        EventKind.FAILED,
        EventKind.QUIESCED,
    ),
}


# What a quick runtime with quick peers answers at once, by phase, and how it ends what is complete.
ANSWERS: dict[Phase, EventKind] = {
    Phase.AWAITING_READY: EventKind.READY,
    Phase.PREFILLING: EventKind.RESULT,
    Phase.AWAITING_RESULT: EventKind.RESULT,
    Phase.DECODING: EventKind.RESULT,
    Phase.REMOTE_PREFILLING: EventKind.DONE,
    Phase.TRANSFER_HELD: EventKind.QUIESCED,
    Phase.QUARANTINED: EventKind.QUIESCED,
}
GENERATED: dict[Phase, EventKind] = {
    Phase.PREFILL_DONE: EventKind.FINISH,
    Phase.DECODING: EventKind.FINISH,
    Phase.RETRACTED: EventKind.FINISH,
}
ENDS: dict[Role, dict[Phase, EventKind]] = {
    Role.FUSED: GENERATED,
    Role.DECODE: GENERATED,
    Role.PREFILL: {Phase.HANDING_OVER: EventKind.HANDED_OVER},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Prompts share tokens up to `fork_token` and, with equal stems, behind it. `flaw` makes it unacceptable."""

    num_tokens: int
    max_new_tokens: int | None = None
    stem: int = 0
    fork_token: int = 0
    extra_keys: tuple[bytes, ...] = ()
    local_prefill: bool = False
    flaw: str = ""

    def tokens(self) -> tuple[int, ...]:
        """Plain tokens are equal to their position, as most generated ones are: a later prompt can hit those too."""
        return tuple(at if at < self.fork_token else 100 * self.stem + at for at in range(self.num_tokens))


@dataclass(frozen=True, slots=True)
class Submit:
    prompts: tuple[Prompt, ...]

    def play(self, history: History) -> None:
        submissions: list[Submission] = []
        for prompt in self.prompts:
            used = [each.request_id for each in (*history.requests(), *submissions)]
            submissions.append(history.submission_of(prompt, used))
            if not prompt.flaw:
                history.prompts[prompt] = None
        history.sides.submit(submissions)


@dataclass(frozen=True, slots=True)
class MakePlan:
    def play(self, history: History) -> None:
        history.plan()


@dataclass(frozen=True, slots=True)
class Step:
    """A plan, and at once what it calls for, or while plans overlap what the plan before it called for. `ends` requests
    that are complete."""

    ends: bool
    overlaps: bool

    def play(self, history: History) -> None:
        plan = history.plan()
        ahead = plan.request_ids if self.overlaps and history.sides.shape.overlap_depth else []
        role = history.sides.shape.role
        if role is Role.PREFILL:
            history.advance([history.event(EventKind.GRANTED, request) for request in history.requests()])
        history.advance(
            [
                history.event(ANSWERS[request.phase], request)
                for request in history.requests()
                if request.phase in ANSWERS
                and (len(request.results_out) > ahead.count(request.request_id) or not history.owes(request))
            ]
        )
        if self.ends:
            complete = [each for each in history.requests() if each.phase in ENDS[role] and history.is_complete(each)]
            history.advance([history.event(ENDS[role][request.phase], request) for request in complete])


@dataclass(frozen=True, slots=True)
class Happen:
    """Events in one batch. One that is expected picks among the requests it is expected for, another among all."""

    picks: tuple[Pick, ...]

    def play(self, history: History) -> None:
        events = [pick.event(history) for pick in self.picks]
        history.advance([event for event in events if event is not None])


@dataclass(frozen=True, slots=True)
class Pick:
    kind: EventKind
    pick: int
    is_expected: bool = True
    token_shift: int = 0

    def event(self, history: History) -> Event | None:
        if not self.is_expected:
            ids = [*(request.request_id for request in history.requests()), GHOST]
            payloads = ((7,), (-1,), (), (7, 8)) if self.kind is EventKind.RESULT else ((7,), (-1,), (0,))
            return Event(self.kind, ids[self.pick % len(ids)], payloads[self.token_shift % len(payloads)])
        candidates = [request for request in history.requests() if request.phase in EXPECTED[self.kind]]
        if self.kind is EventKind.RESULT:
            candidates = [request for request in candidates if request.results_out]
        if not candidates:
            return None
        return history.event(self.kind, candidates[self.pick % len(candidates)], self.token_shift)


@dataclass(frozen=True, slots=True)
class ClearCache:
    """Of both tiers, or of the device alone."""

    has_host: bool = True

    def play(self, history: History) -> None:
        if self.has_host:
            history.sides.clear_cache()
        else:
            history.sides.clear_device_cache()


@dataclass(frozen=True, slots=True)
class EndTransfers:
    """Acknowledges stores and loads under way, those that a bit of `picks` stands for, some of them twice or late."""

    picks: int

    def play(self, history: History) -> None:
        tiers = history.tiers()
        if tiers is not None:
            under_way = [*tiers.free_stores, *tiers.pinned_stores, *tiers.loads]
            history.end_transfers([each for at, each in enumerate(under_way) if self.picks >> at & 1], self.picks)


@dataclass(frozen=True, slots=True)
class LoseStorage:
    """Something is no longer there, or is back, put there by somebody else. If it is not known to be lost, storage goes
    on to say that it has it, and cannot read it."""

    pick: int
    is_known: bool

    def play(self, history: History) -> None:
        keys = history.keys_of_storage
        if keys:
            key = keys[self.pick % len(keys)]
            changed = history.lost if self.is_known else history.torn
            changed.symmetric_difference_update([key])
            if self.is_known:
                history.sides.unregister_storage_keys([key])


@dataclass(frozen=True, slots=True)
class ComeAgain:
    """Runs on for a while, ends what is left and all copying, and clears the device or both tiers. Then some of the
    prompts that were there come again, and are planned once. After a step they may give way."""

    number: int

    def play(self, history: History) -> None:
        digits = Digits(self.number)
        num_steps, num_prompts = digits.of((4, 8, 2)), 1 + digits.below(3)
        has_host, first, ends_stores = digits.of((False, False, True)), digits.below(8), digits.below(4) != 3
        for _ in range(num_steps):
            Step(ends=True, overlaps=False).play(history)
        history.end_all(ends_stores=ends_stores)
        ClearCache(has_host=has_host).play(history)
        if has_host and digits.below(2) == 1:
            LoseStorage(digits.below(8), is_known=False).play(history)
        seen = list(history.prompts)
        if seen:
            Submit(tuple(seen[(first + at) % len(seen)] for at in range(num_prompts))).play(history)
            if history.sides.shape.role is Role.DECODE:
                history.advance([history.event(EventKind.READY, each) for each in history.in_phase(EventKind.READY)])
        history.plan()
        if history.sides.shape.role is not Role.PREFILL and digits.below(2) == 1:
            history.advance(
                [history.event(ANSWERS[each.phase], each) for each in history.requests() if each.results_out]
            )
            Step(ends=False, overlaps=False).play(history)
            history.advance([history.event(EventKind.RETRACT, each) for each in history.in_phase(EventKind.RETRACT)])


Move: TypeAlias = Submit | MakePlan | Step | Happen | ClearCache | EndTransfers | LoseStorage | ComeAgain
Drawn: TypeAlias = tuple[SchedulerShape, list[Move]]


@dataclass(slots=True)
class History:
    """`keys_of_storage`: whatever was written there; `lost`: those of them that are not there now, `torn`: those that
    are said to be there and cannot be read. `prompts`: those that can come again, in order."""

    sides: SideBySide
    keys_of_storage: list[Key] = field(default_factory=list)
    lost: set[Key] = field(default_factory=set)
    torn: set[Key] = field(default_factory=set)
    prompts: dict[Prompt, None] = field(default_factory=dict)

    def tiers(self) -> Tiers | None:
        return self.sides.model.books.coordinator.tiers

    def plan(self) -> Plan:
        """With what the runtime does for it: storage is asked before, and a load that misses fails at once if the
        rows of the plan are all that is out."""
        if self.sides.shape.enable_storage:
            self.ask_storage()
        plan = self.sides.plan()
        for load in plan.loads:
            reads = [copy.key for copy, is_read in zip(load.copies, load.reads_storage, strict=True) if is_read]
            missed = tuple(key for key in reads if key in self.lost or key in self.torn)
            if missed or load.operation_id % 5 == 0:
                self.sides.advance([LoadDone(load.operation_id, False, missed)])
        return plan

    def ask_storage(self) -> None:
        """What is asked for and is there is said to be there. Of some pools others write everything to storage too."""
        asked = set(self.sides.storage_queries())
        if self.sides.shape.num_lcm_blocks % 2 == 0:
            keys = [key for keys in self.sides.model.storage_queries() for key in keys]
            self.keys_of_storage += [key for key in dict.fromkeys(keys) if key not in self.keys_of_storage]
        there = [key for key in self.keys_of_storage if self.sides.native_key(key) in asked and key not in self.lost]
        there.sort(key=lambda key: len(key.prefix.tokens))
        if there:
            self.sides.register_storage_keys(there)

    def end_transfers(self, operation_ids: list[int], number: int = 0) -> None:
        tiers = self.tiers()
        assert tiers is not None
        for operation_id in operation_ids:
            stores = tiers.pinned_stores.get(operation_id) or tiers.free_stores.get(operation_id)
            if stores is None:
                if number % 8 == 7:  # a failure that comes too late is refused, and one may name what was not read
                    self.sides.advance([LoadDone(operation_id, False, tuple(self.keys_of_storage[:2]))])
                missed = tuple(self.keys_of_storage[:1]) if number % 4 == 2 else ()  # of no effect on a success
                self.sides.advance([LoadDone(operation_id, missed=missed)] * (1 + number % 2))
                continue
            readable = set(self.keys_of_storage) - self.lost - self.torn
            created = [store.key for store in stores if store.key not in readable]
            if self.sides.shape.enable_storage:
                self.keys_of_storage += [key for key in created if key not in self.keys_of_storage]
                self.lost.difference_update(created)
                self.torn.difference_update(created)
            self.sides.advance([StoreDone(operation_id, tuple(created))] * (1 + number % 2))

    def play(self, moves: list[Move]) -> None:
        for move in moves:
            move.play(self)

    def end_all(self, *, ends_stores: bool = True) -> None:
        """Every request, and what is copied after it, the stores only if they are to."""
        self.sides.advance([self.event(EventKind.ABORT, request) for request in self.requests()])
        if self.sides.shape.role is not Role.FUSED:
            self.sides.advance([self.event(EventKind.QUIESCED, request) for request in self.requests()])
        self.sides.plan()
        tiers = self.tiers()
        if tiers is not None:
            stores = [*tiers.free_stores, *tiers.pinned_stores]
            self.end_transfers([*(stores if ends_stores else stores[1:]), *tiers.loads])

    def come_to_rest(self) -> None:
        """Ends everything. Then each parent is empty or cached, and after a clear all are empty."""
        self.end_all()
        assert self.sides.clear_cache()
        assert self.sides.model.gauges().empty_host_lcm_blocks == self.sides.shape.num_host_lcm_blocks
        assert self.sides.model.gauges().empty_lcm_blocks == self.sides.shape.num_lcm_blocks

    def advance(self, events: list[Event]) -> None:
        if events:
            self.sides.advance(events)

    def requests(self) -> list[Request]:
        return self.sides.model.books.requests

    def in_phase(self, kind: EventKind) -> list[Request]:
        return [request for request in self.requests() if request.phase in EXPECTED[kind]]

    def event(self, kind: EventKind, request: Request, token_shift: int = 0) -> Event:
        """With what such an event has to say; a generated token is its own position unless shifted."""
        if kind is EventKind.RESERVE:
            return Event(kind, request.request_id, (1 + token_shift % 20,))
        first = len(request.tokens)
        num_tokens = self.num_tokens_to_land(request) if kind is EventKind.RESULT else int(kind is EventKind.DONE)
        return Event(kind, request.request_id, tuple(range(first + token_shift, first + token_shift + num_tokens)))

    def num_tokens_to_land(self, request: Request) -> int:
        """Of a verified row some of what it can bring, in turn."""
        most = request.results_out[0]
        if request.phase is Phase.DECODING:
            most = min(most, request.num_wanted_tokens)
        return 1 + len(request.tokens) % most if most else 0

    def owes(self, request: Request) -> bool:
        return ANSWERS[request.phase] is EventKind.RESULT

    def is_complete(self, request: Request) -> bool:
        """An undeclared completion ends somewhere, one that is generated elsewhere at once."""
        num_generated = len(request.tokens) - len(request.submission.tokens)
        is_undeclared = request.submission.max_new_tokens is None
        if self.sides.shape.role is Role.PREFILL:
            return True
        return request.num_wanted_tokens <= 0 or (is_undeclared and num_generated > ord(request.request_id[-1]) % 8)

    def submission_of(self, prompt: Prompt, used: list[str]) -> Submission:
        """Cut to what the pool holds, unless it is to be refused for its length. Ids are taken again when free."""
        tokens = prompt.tokens()
        num_new_tokens = 0 if self.sides.shape.role is Role.PREFILL else prompt.max_new_tokens or 0
        reserve_tokens = max(num_new_tokens, self.sides.shape.verify_width)
        limit_tokens = max(1, self.sides.model.max_request_tokens() - reserve_tokens)
        match prompt.flaw:
            case "empty":
                tokens = ()
            case "negative":
                tokens = (*tokens[1:], -1)
            case "too long" if limit_tokens < ENDLESS_TOKENS:
                tokens = (7,) * (limit_tokens + 1)
            case _:
                tokens = tokens[:limit_tokens]
        free_id = next(name for name in map("r{}".format, count()) if name not in used)
        return Submission(
            request_id=used[0] if prompt.flaw == "used id" and used else free_id,
            tokens=tokens,
            max_new_tokens=-1 if prompt.flaw == "max_new_tokens" else prompt.max_new_tokens,
            extra_keys=prompt.extra_keys,
            local_prefill=prompt.local_prefill,
        )


# Strategies. A move is drawn as a kind and one number, which its parts are digits of.


def prompt_of(role: Role, digits: Digits) -> Prompt:
    local_prefill = role is Role.DECODE and digits.below(2) == 1
    return Prompt(
        num_tokens=1 + digits.below(36),
        max_new_tokens=digits.of((0, 1, 2, 3, 4, 5, 6, 20, None, None, None)),
        stem=digits.below(3),
        fork_token=digits.of((0, 4, 8, 10, 16)),
        local_prefill=local_prefill,
        extra_keys=digits.of(((), (), (), (), (), (b"a",), (b"b", b""))),
        flaw=digits.of(("",) * 18 + ("empty", "negative", "used id", "max_new_tokens", "too long")),
    )


def submit_of(role: Role, number: int) -> Submit:
    """One prompt, or it and a second one with the same or a different beginning."""
    digits = Digits(number)
    num_prompts, is_same = digits.of(((1, False), (1, False), (2, True), (2, False)))
    first = prompt_of(role, digits)
    second = first if is_same else prompt_of(role, Digits(number // 7))
    return Submit((first, second)[:num_prompts])


def expected_pick(role: Role, digits: Digits) -> Pick:
    return Pick(digits.of(KINDS[role]), digits.below(8), token_shift=digits.of((0, 0, 50)))


def happen_of(role: Role, number: int) -> Happen:
    digits = Digits(number)
    num_events = 1 + digits.below(3)
    return Happen(tuple(expected_pick(role, digits) for _ in range(num_events)))


def disturb_of(role: Role, number: int) -> Happen:
    """An event that may be anything, behind one that is expected: if it is refused, the first must not be applied."""
    digits = Digits(number)
    anything = Pick(digits.of(list(EventKind)), digits.below(16), is_expected=False, token_shift=digits.below(10))
    return Happen((expected_pick(role, digits), anything))


MoveMaker: TypeAlias = Callable[[Role, int], Move]
MAKERS: tuple[MoveMaker, ...] = (
    *[lambda role, number: MakePlan()] * 3,
    *[lambda role, number: Step(ends=number % 2 == 1, overlaps=number % 4 > 1)] * 7,
    *[submit_of] * 6,
    *[happen_of] * 6,
    *[disturb_of] * 2,
    lambda role, number: ClearCache(has_host=number % 2 == 1),
    *[lambda role, number: EndTransfers(number)] * 5,
    lambda role, number: LoseStorage(number // 2, is_known=number % 2 == 1),
    *[lambda role, number: ComeAgain(number)] * 4,
)


def histories(role: Role, max_num_moves: int) -> st.SearchStrategy[Drawn]:
    """The number of moves is drawn evenly: lists of Hypothesis' own lengths would mostly be short."""
    move = st.tuples(st.sampled_from(MAKERS), NUMBERS).map(lambda drawn: drawn[0](role, drawn[1]))
    moves = st.integers(0, max_num_moves).flatmap(lambda count: st.lists(move, min_size=count, max_size=count))
    shapes = st.tuples(NUMBERS, NUMBERS).map(lambda numbers: shape_of(role, *numbers))
    return st.tuples(shapes, moves)

"""The engine loop: the one thread that owns the scheduler and the executor.

An iteration drains the inbox, asks for a plan, zeroes fresh blocks, tells about grants and handovers, runs the
forward pass, and feeds the results back. With nothing to do the thread sleeps in the inbox. It knows no gRPC, no
handoff session and no data plane: a role joins in through `StepHooks` and through the commands and updates of
`messages.py`.

Failures: what the scheduler refuses and what the executor throws fails the requests concerned, and logits that say
nothing the one request whose they are; a contract that the scheduler finds broken, or an engine that its executor calls
broken, cannot be survived and goes to `on_fatal`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol, TypeAlias, assert_never

from model_runtime.sampler import BrokenLogits
from node_runtime.clock import Clock
from node_runtime.engine.live_request import LiveRequest
from node_runtime.engine.messages import (
    AcceptFirstToken,
    Command,
    EngineGauges,
    EngineSnapshot,
    GenerationEnded,
    GrantOffered,
    HandoverOffered,
    Invoke,
    Nudge,
    PostEvents,
    RequestAdmitted,
    RequestFailed,
    RequestRetracted,
    RequestSink,
    Shutdown,
    SubmitRequest,
    TokenGenerated,
    Update,
)
from node_runtime.engine.output_forms import FORM_FIELD
from node_runtime.engine.rates import StepRates
from node_runtime.engine.scheduler import EngineBroken, EngineScheduler, RankGone
from node_runtime.errors import InternalError, InvalidRequest, NodeBroken, NodeError, NoUsableLogits, RemoteError
from node_runtime.handoff.messages import GroupGrant
from scheduler_core import (
    AbortEvent,
    DoneEvent,
    Event,
    FailedEvent,
    FinishEvent,
    HandedOverEvent,
    Plan,
    PrefixEvent,
    PrefixKeyChanges,
    ResultEvent,
    SubmitError,
)

if TYPE_CHECKING:
    from model_runtime.sampler import RowOutcome, SampledToken, SamplingParams

_log = logging.getLogger(__name__)

Delivery: TypeAlias = tuple[RequestSink, Update]
_ENDING_EVENTS = (AbortEvent, FailedEvent, FinishEvent, HandedOverEvent)


class Executor(Protocol):
    """Computes plans. Called from the engine thread only."""

    def zero_blocks(self, plan: Plan) -> None:
        """Zeroes the blocks that the plan acquired, before anybody is told about them."""
        ...

    def execute(
        self, plan: Plan, sampling: Mapping[str, SamplingParams], on_stage: Callable[[int], None] | None = None
    ) -> tuple[RowOutcome, ...]:
        """One entry per row, None where the plan wants no logits, BrokenLogits where they are of no use.

        Calls `on_stage(i)` as soon as the cache rows that stage `i` writes in this pass are in the arena.
        """
        ...


class StepHooks(Protocol):
    """What a role does on the engine thread while a plan runs."""

    def on_admitted(self, plan: Plan) -> None:
        """Before the pass: `plan.admissions` got their memory."""
        ...

    def on_stage(self, stage: int, plan: Plan) -> None:
        """During the pass: the cache rows of `stage` are in the arena."""
        ...


class NoHooks:
    """For roles that need none."""

    __slots__ = ()

    def on_admitted(self, plan: Plan) -> None:
        pass

    def on_stage(self, stage: int, plan: Plan) -> None:
        pass


class EngineLoop:
    """Owns scheduler and executor. `post`, `snapshot`, `num_pulses` and `stop` are safe from every thread, the rest is
    not public.
    """

    def __init__(
        self,
        scheduler: EngineScheduler,
        executor: Executor,
        *,
        group_ids: Sequence[str],
        clock: Clock,
        deliver: Callable[[Sequence[Delivery]], None],
        on_fatal: Callable[[BaseException], None],
        hooks: StepHooks | None = None,
        on_prefixes: Callable[[PrefixKeyChanges], None] | None = None,
        on_prefix_events: Callable[[Sequence[PrefixEvent]], None] | None = None,
    ) -> None:
        """
        Args:
            group_ids: Names of the scheduler's cache groups, in its order.
            deliver: Takes a batch of updates on the engine thread and brings each to its sink, in order, elsewhere.
            on_fatal: Called on the engine thread when the process must not go on; requests that still come are failed.
            on_prefixes: Called on the engine thread when other prefixes are cached than before. None: nobody asks.
            on_prefix_events: Likewise, and told their tokens; of prompts without extra keys only.
        """
        self._scheduler = scheduler
        self._executor = executor
        self._group_ids = tuple(group_ids)
        self._clock = clock
        self._deliver = deliver
        self._on_fatal = on_fatal
        self._hooks: StepHooks = hooks if hooks is not None else NoHooks()
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._live: dict[str, LiveRequest] = {}
        self._outbox: list[Delivery] = []
        self._on_prefixes = on_prefixes
        if on_prefixes is not None:
            scheduler.track_prefix_keys()
        self._on_prefix_events = on_prefix_events
        if on_prefix_events is not None:
            # Those who listen name no salt and no adapter, and need not hear what others asked.
            scheduler.track_prefix_events(with_extra_keys=False)
        self._rates = StepRates()
        self._num_steps = 0
        self._num_retractions = 0
        self._num_pulses = 0
        self._stopping = False
        # Whether the last iteration found something to do, so that there may be more.
        self._is_busy = False
        # What requests are told once the engine cannot go on.
        self._end: NodeError = InternalError("the engine of this node goes on")
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._gauges = self._read_gauges()

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the thread after the step it is in. Returns without it when that takes longer than `timeout_s`."""
        self.post(Shutdown())
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def post(self, command: Command) -> None:
        self._inbox.put(command)

    @property
    def snapshot(self) -> EngineSnapshot:
        """After the last iteration. Made where it is asked for: steps are many, and questions few."""
        return self._gauges.snapshot(self._group_ids)

    @property
    def num_pulses(self) -> int:
        """Grows with every command taken and every stage computed; stands still while the engine hangs or is idle."""
        return self._num_pulses

    def run_until_idle(self) -> None:
        """Works off the inbox and every plan that follows from it, on the caller's thread. For tests and simulation."""
        while self.run_once():
            continue

    def run_once(self) -> bool:
        """One iteration on the caller's thread; False when there is nothing left to do. For tests and simulation."""
        if self._stopping:
            return False
        self._iterate(wait=False)
        return self._is_busy or not (self._stopping or self._inbox.empty())

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._iterate(wait=not self._is_busy)
        except BaseException as error:
            self._break_down(error)
            while not isinstance(command := self._inbox.get(), Shutdown):
                self._refuse(command)

    def _iterate(self, *, wait: bool) -> None:
        """With nothing new, whoever had nothing to do still has not."""
        has_news = self._drain_inbox(wait=wait)
        self._is_busy = (has_news or self._is_busy) and not self._stopping and self._step()

    def _break_down(self, error: BaseException) -> None:
        """Tells everybody who waits, and whoever can end the process."""
        _log.critical("the engine cannot go on: %s", error, exc_info=error)
        self._end = _broken_down(error)
        self._fail(tuple(self._live), self._end)
        self._flush()
        self._on_fatal(error)

    def _refuse(self, command: Command) -> None:
        """Nobody must wait for an engine that will never answer while the process is on its way out."""
        if isinstance(command, SubmitRequest):
            self._deliver([(command.sink, RequestFailed(error=self._end))])

    # Commands.

    def _drain_inbox(self, *, wait: bool) -> bool:
        """Whether anything came but nudges."""
        has_news = wait and self._handle(self._inbox.get())
        while not self._inbox.empty():
            has_news = self._handle(self._inbox.get()) or has_news
        if has_news:
            self._gauges = self._read_gauges()
            self._tell_prefixes()
            self._flush()
        return has_news

    def _handle(self, command: Command) -> bool:
        """False for a nudge."""
        self._num_pulses += 1
        match command:
            case SubmitRequest():
                self._submit(command)
            case PostEvents():
                self._post_events(command.events)
            case AcceptFirstToken():
                self._accept_first_token(command)
            case Invoke():
                command.action()
                # Whoever hears that the action is done may look at once.
                self._gauges = self._read_gauges()
            case Nudge():
                return False
            case Shutdown():
                self._stopping = True
            case _:
                assert_never(command)
        return True

    def _submit(self, command: SubmitRequest) -> None:
        live = LiveRequest.of(command)
        try:
            self._scheduler.submit([live.spec])
        except SubmitError as error:
            self._outbox.append((command.sink, RequestFailed(error=InvalidRequest(str(error)))))
            return
        except EngineBroken:
            # It hears of the end like the others.
            self._live[live.spec.request_id] = live
            raise
        self._live[live.spec.request_id] = live

    def _post_events(self, events: tuple[Event, ...]) -> None:
        self._scheduler.advance(list(events))
        for event in events:
            if isinstance(event, _ENDING_EVENTS):
                self._live.pop(event.request_id, None)

    def _accept_first_token(self, command: AcceptFirstToken) -> None:
        events: list[Event] = [DoneEvent(command.request_id, command.token.token_id)]
        if self._emit_token(command.request_id, command.token, self._clock.now_s()):
            events.append(FinishEvent(command.request_id))
        self._scheduler.advance(events)

    # Steps.

    def _step(self) -> bool:
        """Carries out one plan; False when there was nothing to do."""
        plan = self._scheduler.next_plan()
        if plan.is_empty:
            return False
        if self._prepare(plan) and plan.num_rows:
            self._forward(plan)
        self._gauges = self._read_gauges()
        self._tell_prefixes()
        self._flush()
        return True

    def _prepare(self, plan: Plan) -> bool:
        """Everything before the pass. Zeroing comes first: a grant that is out may be written at once."""
        try:
            self._executor.zero_blocks(plan)
        except EngineBroken:
            raise
        except Exception as error:
            granted = [remote.request_id for remote in plan.remote_prefills]
            self._drop([*plan.request_ids, *granted], error)
            return False
        now_s = self._clock.now_s()
        for request_id in plan.retracted:
            self._num_retractions += 1
            _log.info("request %s gave its memory to another one and will go on later", request_id)
            self._emit(request_id, RequestRetracted(at_s=now_s))
        for admission in plan.admissions:
            self._emit(
                admission.request_id,
                RequestAdmitted(
                    device_hit_tokens=admission.device_hit_tokens,
                    host_hit_tokens=admission.host_hit_tokens,
                    storage_hit_tokens=admission.storage_hit_tokens,
                    at_s=now_s,
                ),
            )
        for remote in plan.remote_prefills:
            groups = tuple(
                GroupGrant(group_id=group_id, first_slot=int(first_slot), block_ids=tuple(map(int, block_ids)))
                for group_id, first_slot, block_ids in zip(
                    self._group_ids, remote.first_slots, remote.block_ids, strict=True
                )
            )
            self._emit(remote.request_id, GrantOffered(from_token=remote.from_token, groups=groups, at_s=now_s))
        for handover in plan.handovers:
            self._emit(handover.request_id, HandoverOffered(at_s=now_s))
        self._hooks.on_admitted(plan)
        self._flush()
        return True

    def _forward(self, plan: Plan) -> None:
        sampling, formless = self._sampling(plan)
        began_s = self._clock.now_s()
        try:
            sampled = self._executor.execute(plan, sampling, lambda stage: self._on_stage(stage, plan))
        except EngineBroken:
            raise
        except Exception as error:
            self._drop(plan.request_ids, error)
            return
        self._num_steps += 1
        self._rates.note_pass(
            num_prefill_rows=plan.num_prefill_rows,
            num_tokens=sum(plan.input_lengths.tolist()),
            duration_s=self._clock.now_s() - began_s,
        )
        self._scheduler.advance(self._results(plan, sampled))
        if formless:
            self._scheduler.advance([AbortEvent(request_id) for request_id in formless])

    def _sampling(self, plan: Plan) -> tuple[dict[str, SamplingParams], list[str]]:
        """How each row is sampled, and the requests whose form cannot say what may follow: they have failed, and what
        their rows sample is dropped.
        """
        sampling: dict[str, SamplingParams] = {}
        formless: list[str] = []
        for request_id, is_sampled in zip(plan.request_ids, plan.logits_wanted.tolist(), strict=True):
            live = self._live.get(request_id)
            if live is None:
                continue
            sampling[request_id] = live.sampling
            if live.matcher is not None and is_sampled:
                try:
                    sampling[request_id] = replace(live.sampling, allowed=live.matcher.allowed())
                except ValueError as error:
                    formless.append(request_id)
                    self._fail((request_id,), InvalidRequest(f"{FORM_FIELD}.{error}"))
        return sampling, formless

    def _on_stage(self, stage: int, plan: Plan) -> None:
        self._num_pulses += 1
        self._hooks.on_stage(stage, plan)

    def _results(self, plan: Plan, sampled: tuple[RowOutcome, ...]) -> list[Event]:
        """One result per row, and the ends that the new tokens bring. A row without a result ends its request, so that
        nothing of it is published.
        """
        now_s = self._clock.now_s()
        events: list[Event] = []
        for request_id, token in zip(plan.request_ids, sampled, strict=True):
            if isinstance(token, BrokenLogits):
                _log.error("request %s ends: %s", request_id, token.reason)
                self._fail((request_id,), NoUsableLogits(f"the model knows no next token: {token.reason}"))
                events.append(AbortEvent(request_id))
                continue
            events.append(ResultEvent(request_id, [] if token is None else [token.token_id]))
            if token is not None and self._emit_token(request_id, token, now_s):
                events.append(FinishEvent(request_id))
        return events

    def _drop(self, request_ids: Sequence[str], error: Exception) -> None:
        """Ends requests that a step was to advance and did not, so that nothing of them is published."""
        _log.error("a step of %d requests failed: %s", len(request_ids), error, exc_info=error)
        self._fail(request_ids, InternalError("the forward pass of this request failed; the log of the node says why"))
        self._scheduler.advance([AbortEvent(request_id) for request_id in request_ids])

    # Updates.

    def _emit(self, request_id: str, update: Update) -> None:
        live = self._live.get(request_id)
        if live is not None:
            self._outbox.append((live.sink, update))

    def _emit_token(self, request_id: str, token: SampledToken, now_s: float) -> bool:
        """Emits the token and, if it is the last, the end. True when the request ended with it."""
        live = self._live.get(request_id)
        if live is None:
            return False
        if live.matcher is not None:
            try:
                live.matcher.accept((token.token_id,))
            except ValueError as error:
                # Not of our own sampling: a prefill node of an older release knows no forms.
                broken = f"the first token of the prefill node breaks {FORM_FIELD}.{error}"
                self._fail((request_id,), RemoteError("FAILED_PRECONDITION", broken))
                return True
        reason = live.take(token.token_id)
        self._outbox.append(
            (live.sink, TokenGenerated(token=token, at_s=now_s, prompt_logprobs=live.prompt_logprobs()))
        )
        if reason is None:
            return False
        matched = token.token_id if reason.name == "STOP" else None
        self._outbox.append((live.sink, GenerationEnded(reason=reason, matched_token_id=matched, at_s=now_s)))
        del self._live[request_id]
        return True

    def _fail(self, request_ids: Sequence[str], error: NodeError) -> None:
        for request_id in request_ids:
            live = self._live.pop(request_id, None)
            if live is not None:
                self._outbox.append((live.sink, RequestFailed(error=error)))

    def _flush(self) -> None:
        if self._outbox:
            batch, self._outbox = self._outbox, []
            self._deliver(batch)

    def _tell_prefixes(self) -> None:
        if self._on_prefixes is not None:
            changes = self._scheduler.drain_prefix_keys()
            if changes:
                self._on_prefixes(changes)
        if self._on_prefix_events is not None:
            events = self._scheduler.drain_prefix_events()
            if events:
                self._on_prefix_events(events)

    def _read_gauges(self) -> EngineGauges:
        return EngineGauges(
            self._scheduler.capacity(),
            self._num_steps,
            self._num_retractions,
            self._rates.prefill_tokens_per_s,
            self._rates.decode_step_s,
        )


def _broken_down(error: BaseException) -> NodeError:
    """What the requests are told. One that breaks a node must not be tried on all the others."""
    if isinstance(error, RankGone):
        return NodeBroken(str(error))
    return InternalError("the engine of this node broke down; its log says why")

"""Bugs that people have really written, planted one at a time: what each breaks, and how it is put in."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType

import pytest

from decode_node import remote_prefill
from decode_node.fence import GrantFence
from decode_node.generation import Generation
from decode_node.receiver import IncomingHandoff
from decode_node.remote_prefill import RemotePrefill
from decode_node.verification import TransferVerifier
from node_runtime.engine.loop import EngineLoop
from node_runtime.engine.messages import PostEvents, SubmitRequest
from node_runtime.engine.ranks.leader import Followers, MirroredScheduler, _StoredByAll
from node_runtime.engine.ranks.orders import Advance
from node_runtime.engine.reporter import ComputeReporter
from node_runtime.handoff.decode_session import DecodeHandoff
from node_runtime.handoff.events import AbortScheduling, EndWithFailure, MarkQuiesced
from node_runtime.handoff.prefill_session import PrefillHandoff
from node_runtime.handoff.states import DecodeState
from node_runtime.node_updates import UpdateStream
from node_runtime.rpc.calls import CallGuard
from prefill_node import handoff as prompt_handoff
from prefill_node.outgoing import OutgoingTransfer, TransferDrained, TransferSummary
from prefill_node.sender import PrefillSender
from router_node import decode_call, request_preparation, routed_request
from router_node.answer import Answer
from router_node.decode_call import DecodeCall
from router_node.prefix_index import PrefixIndex
from router_node.request_preparation import RequestPreparer
from router_node.samples import SampledRequest
from router_node.tenants import Tenants
from scheduler_core import AbortEvent, DoneEvent, FinishEvent, QuiescedEvent

Patch = pytest.MonkeyPatch


def skip_the_fence(patch: Patch) -> None:
    """A writer that is told to stop says that it has, and writes on."""

    def stop(self: OutgoingTransfer) -> None:
        self._notify(TransferDrained())

    patch.setattr(OutgoingTransfer, "stop", stop)


def forget_what_is_in_flight(patch: Patch) -> None:
    """A stopped writer does not wait for what it has posted."""
    original = OutgoingTransfer.stop

    def stop(self: OutgoingTransfer) -> None:
        self._num_outstanding, outstanding = 0, self._num_outstanding
        original(self)
        self._num_outstanding = outstanding

    patch.setattr(OutgoingTransfer, "stop", stop)


def free_on_cancel(patch: Patch) -> None:
    """The decode node frees granted blocks at once when a handoff is given up."""

    def end(self: DecodeHandoff, *, code: int, message: str):
        return (AbortScheduling(), MarkQuiesced(), EndWithFailure(code=code, message=message))

    patch.setattr(DecodeHandoff, "_end", end)


def end_quarantine_with_the_stream(patch: Patch) -> None:
    """A broken control stream is taken for a dead writer: neither its lease nor the drain bound is waited for."""
    original = DecodeHandoff._next_wakeup_s

    def next_wakeup_s(self: DecodeHandoff, now_s: float) -> float | None:
        is_cut_off = self.state is DecodeState.QUARANTINED and not self._stream_open
        return now_s if is_cut_off else original(self, now_s)

    patch.setattr(DecodeHandoff, "_next_wakeup_s", next_wakeup_s)


def outlive_the_lease(patch: Patch) -> None:
    """A writer that slept through its lease goes on where it was."""
    original = OutgoingTransfer.__init__

    def make(self: OutgoingTransfer, *arguments, **options) -> None:
        original(self, *arguments, **options)
        self._now_s = lambda: -math.inf

    patch.setattr(OutgoingTransfer, "__init__", make)


def keep_the_permit(patch: Patch) -> None:
    """A receiver that places the bytes itself does so after it took the grant back."""
    patch.setattr(GrantFence, "close", lambda self: None)


def ignore_checksums(patch: Patch) -> None:
    """Every transfer is as it was sent."""
    patch.setattr(TransferVerifier, "find_damage", lambda self, *arguments: "")


def trust_a_stale_hit(patch: Patch) -> None:
    """Blocks of a handoff that came to nothing are published as if they had been filled."""
    original = IncomingHandoff._carry_out

    def carry_out(self: IncomingHandoff, action) -> None:
        if isinstance(action, AbortScheduling) and self._session.state is DecodeState.QUARANTINED:
            events = (DoneEvent(self._engine_id, 1), FinishEvent(self._engine_id))
            self._engine.post(PostEvents(events=events))
        else:
            original(self, action)

    patch.setattr(IncomingHandoff, "_carry_out", carry_out)


def reuse_a_handoff_id(patch: Patch) -> None:
    """All handoffs have one id, so that a late message of one is taken for another's."""
    patch.setattr(remote_prefill.secrets, "token_bytes", lambda num_bytes: bytes(num_bytes))


def take_messages_of_other_handoffs(patch: Patch) -> None:
    """The decode node does not look at the handoff id of what it hears."""
    original = DecodeHandoff.handle

    def handle(self: DecodeHandoff, event, now_s: float):
        if hasattr(event, "handoff_id"):
            event = dataclasses.replace(event, handoff_id=self.handoff_id)
        return original(self, event, now_s)

    patch.setattr(DecodeHandoff, "handle", handle)


def say_done_before_the_last_write(patch: Patch) -> None:
    """Done follows the last computation instead of the last landing."""
    original = prompt_handoff.PromptHandoff._complete_if_whole

    def complete(self) -> None:
        if self._transfer is not None and self.progress.transfer is None:
            self.progress.transfer = TransferSummary(num_bytes=0, num_runs=0, busy=())
        original(self)

    patch.setattr(prompt_handoff.PromptHandoff, "_complete_if_whole", complete)


def leak_on_abort(patch: Patch) -> None:
    """The prefill node never tells its scheduler that an aborted prompt's blocks are quiet."""
    original = PrefillHandoff._quiet
    patch.setattr(PrefillHandoff, "_quiet", lambda self: original(self)[1:])


def lose_the_last_quiesced(patch: Patch) -> None:
    """The decode node's quarantine does not end when the writer says that it is quiet."""
    patch.setattr(DecodeHandoff, "_quiet", lambda self, previous: ())


def retry_with_another_seed(patch: Patch) -> None:
    """The second attempt of a request draws its tokens anew."""
    original = RemotePrefill._begin
    seen = weakref.WeakKeyDictionary()

    def begin(self, job, peer, generation, *others):
        ids = seen.setdefault(self, set())
        if job.request_id in ids:
            job = dataclasses.replace(job, sampling=dataclasses.replace(job.sampling, seed=job.sampling.seed + 1))
        ids.add(job.request_id)
        return original(self, job, peer, generation, *others)

    patch.setattr(RemotePrefill, "_begin", begin)


def trim_the_wrong_end(patch: Patch) -> None:
    """After a prefix hit on the decode node the first blocks are sent, not the missing ones."""
    original = PrefillSender._plan

    def plan(self, delivery, fields, table, begin_slot: int, end_slot: int):
        first = delivery.grants[fields.group_index].first_slot
        num_slots = end_slot - begin_slot
        shifted, right = table[begin_slot - first : begin_slot - first + num_slots], table[begin_slot:end_slot]
        filled = table.copy()
        filled[begin_slot:end_slot] = [block or old for block, old in zip(shifted, right, strict=True)]
        return original(self, delivery, fields, filled, begin_slot, end_slot)

    patch.setattr(PrefillSender, "_plan", plan)


def send_before_it_is_computed(patch: Patch) -> None:
    """Blocks go out when their chunk is planned, before the layers have written them."""
    original = PrefillSender.on_admitted

    def on_admitted(self, plan) -> None:
        original(self, plan)
        for stage in range(len(self._stages)):
            self.on_stage(stage, plan)

    patch.setattr(PrefillSender, "on_admitted", on_admitted)


def send_no_states(patch: Patch) -> None:
    """The layers of the first stage are never sent."""
    original = PrefillSender.__init__

    def make(self, **arguments) -> None:
        original(self, **arguments)
        self._stages = ((), *self._stages[1:])

    patch.setattr(PrefillSender, "__init__", make)


def go_on_from_the_prompt(patch: Patch) -> None:
    """A stream that goes on at another node begins again there."""
    original = Answer.request

    def request(self: Answer, prefill_address: str):
        message = original(self, prefill_address)
        del message.token_ids[len(message.token_ids) - message.num_output_tokens :]
        message.num_output_tokens = 0
        return message

    patch.setattr(Answer, "request", request)


def compute_a_local_prompt_elsewhere(patch: Patch) -> None:
    """A prompt that the decode node was to compute itself waits for a peer that nobody asked."""
    original = Generation.__init__
    patch.setattr(Generation, "__init__", lambda self, **arguments: original(self, **{**arguments, "is_local": False}))


def count_what_a_retraction_left(patch: Patch) -> None:
    """What a request finds in the cache after it gave way is its own, and counted as found."""
    original = Generation._note_admission

    def note_admission(self: Generation, update) -> None:
        self.measured.admitted_at_s = None
        original(self, update)

    patch.setattr(Generation, "_note_admission", note_admission)


def mix_up_a_mixed_batch(patch: Patch) -> None:
    """Tokens of a pass with prompts and generations in it are given out in the wrong order."""
    original = EngineLoop._results

    def results(self: EngineLoop, plan, sampled):
        tokens = iter([token for token in sampled if token is not None][::-1])
        if 0 < plan.num_prefill_rows < plan.num_rows:
            sampled = tuple(None if token is None else next(tokens) for token in sampled)
        return original(self, plan, sampled)

    patch.setattr(EngineLoop, "_results", results)


def serve_the_newest_first(patch: Patch) -> None:
    """Of the requests that came during a step the last one is looked at first."""
    original = EngineLoop._drain_inbox

    def drain_inbox(self: EngineLoop, *, wait: bool) -> bool:
        commands = []
        while not self._inbox.empty():
            commands.append(self._inbox.get())
        for command in (
            *(command for command in reversed(commands) if isinstance(command, SubmitRequest)),
            *(command for command in commands if not isinstance(command, SubmitRequest)),
        ):
            self._inbox.put(command)
        return original(self, wait=wait)

    patch.setattr(EngineLoop, "_drain_inbox", drain_inbox)


def forget_to_mirror_aborts(patch: Patch) -> None:
    """The second tensor rank never hears that a request was given up."""

    def advance(self: MirroredScheduler, events) -> None:
        self._scheduler.advance(events)
        kept = tuple(event for event in events if not isinstance(event, AbortEvent))
        if kept:
            self._followers.tell(Advance(events=kept))

    patch.setattr(MirroredScheduler, "advance", advance)


def cut_off_what_runs_on_a_drain(patch: Patch) -> None:
    """A node that is to leave does not wait for what it has begun."""
    original = CallGuard.drain
    patch.setattr(CallGuard, "drain", lambda self, grace_s: original(self, 0.0))


def accept_work_while_draining(patch: Patch) -> None:
    """A node that is to leave takes what comes, and waits only for what it had before."""
    patch.setattr(CallGuard, "begin_drain", lambda self: None)


def clear_without_clearing(patch: Patch) -> None:
    """A node that is asked to drop its prefix cache says that it has."""

    async def clear_cache(self: ComputeReporter) -> bool:
        return True

    patch.setattr(ComputeReporter, "clear_cache", clear_cache)


def keep_the_hedge_that_lost(patch: Patch) -> None:
    """Of two attempts side by side the one that lost goes on."""

    async def first_to_answer(first: DecodeCall, *, after_s, make_second, on_failure) -> DecodeCall:
        runners = {asyncio.create_task(first.open()): first}
        if not (await asyncio.wait(runners, timeout=after_s))[0]:
            second = make_second()
            if second is not None:
                runners[asyncio.create_task(second.open())] = second
        return await decode_call._winner_of(runners, on_failure)

    patch.setattr(routed_request, "first_to_answer", first_to_answer)


def give_the_first_tokens_twice(patch: Patch) -> None:
    """What came while two attempts ran side by side is passed on, and again when the stream is read."""
    original = DecodeCall.events

    async def events(self: DecodeCall):
        for event in self._held:
            if event.WhichOneof("event") == "tokens":
                yield event
        async for event in original(self):
            yield event

    patch.setattr(DecodeCall, "events", events)


def bear_any_silence(patch: Patch) -> None:
    """A node whose connection lives is waited for, whatever it does."""
    original = DecodeCall.__init__

    def make(self: DecodeCall, **arguments) -> None:
        original(self, **{**arguments, "silence_timeout_s": None})

    patch.setattr(DecodeCall, "__init__", make)


def draw_all_samples_alike(patch: Patch) -> None:
    """Every sample of a request has the seed of the first one."""
    original = request_preparation._sample_of

    def sample_of(prepared, index: int):
        made = original(prepared, index)
        made.message.sampling.seed = prepared.message.sampling.seed
        return made

    patch.setattr(request_preparation, "_sample_of", sample_of)


def leave_the_other_samples(patch: Patch) -> None:
    """A request that ends before all of its samples leaves them running."""

    async def responses(self: SampledRequest):
        tasks = [asyncio.create_task(self._run(index)) for index in range(len(self._samples))]
        num_open = len(tasks)
        while num_open:
            item = await self._items.get()
            if isinstance(item, Exception):
                raise item
            num_open -= item.HasField("finish")
            yield item

    patch.setattr(SampledRequest, "responses", responses)


def believe_a_dead_process(patch: Patch) -> None:
    """What a node had cached is taken for cached by the process that comes after it."""

    def drop_keys(self: PrefixIndex, node) -> None:
        node.sequence, node.is_full = 0, False

    patch.setattr(PrefixIndex, "_drop_keys", drop_keys)


def forget_where_a_follower_was(patch: Patch) -> None:
    """A node tells what changes from now on, whatever the follower knows."""
    original = UpdateStream.__init__

    def make(self: UpdateStream, request, **arguments) -> None:
        original(self, request, **arguments)
        if self._feed is not None and request.incarnation:
            self._sequence = self._feed.sequence

    patch.setattr(UpdateStream, "__init__", make)


def expect_prefixes_for_ever(patch: Patch) -> None:
    """A prompt that was on its way to a node counts as cached there, also when nothing came of it."""
    patch.setattr(PrefixIndex, "_stop_expecting", lambda self, node, keys: None)


def keep_a_tenants_place(patch: Patch) -> None:
    """A request counts against the limit of its tenant when it is over, too."""
    original, kept = Tenants.using, []

    @contextlib.contextmanager
    def using(self: Tenants, name: str, num_samples: int = 1):
        place = original(self, name, num_samples)
        place.__enter__()
        kept.append(place)
        yield

    patch.setattr(Tenants, "using", using)


def ignore_the_limits_of_tenants(patch: Patch) -> None:
    """A tenant may have as many requests running as it likes."""
    patch.setattr(Tenants, "_check_live", lambda self, tenant, num_samples: None)


def share_caches_between_tenants(patch: Patch) -> None:
    """What was computed for one tenant is found by another."""
    original = RequestPreparer.prepare
    patch.setattr(
        RequestPreparer, "prepare", lambda self, *arguments, tenant="", **options: original(self, *arguments, **options)
    )


def forget_to_mirror_the_end_of_quarantine(patch: Patch) -> None:
    """The second tensor rank never hears that nobody writes into the blocks of a request any more."""

    def advance(self: MirroredScheduler, events) -> None:
        self._scheduler.advance(events)
        kept = tuple(event for event in events if not isinstance(event, QuiescedEvent))
        if kept:
            self._followers.tell(Advance(events=kept))

    patch.setattr(MirroredScheduler, "advance", advance)


def send_what_one_rank_has_stored(patch: Patch) -> None:
    """The rows of a stage go out when the first rank has them, whether or not the other one does."""

    def stored_here(self: _StoredByAll, stage: int) -> None:
        self._stored = stage
        self.finish()

    patch.setattr(_StoredByAll, "stored_here", stored_here)


def grant_before_every_rank_has_zeroed(patch: Patch) -> None:
    """Blocks are granted while the second tensor rank has yet to zero them."""
    patch.setattr(Followers, "wait_for_answers", lambda self: None)


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """What gives a bug away: a kind of finding, and a seed that is known to show it, where a search begins."""

    kind: str
    hint: int


PLANTED: Mapping[Callable[[Patch], None], Trace] = MappingProxyType(
    {
        skip_the_fence: Trace("stray write", 0),
        forget_what_is_in_flight: Trace("stray write", 0),
        outlive_the_lease: Trace("stray write", 812),
        keep_the_permit: Trace("stray write", 37),
        free_on_cancel: Trace("stray write", 0),
        end_quarantine_with_the_stream: Trace("stray write", 58),
        trust_a_stale_hit: Trace("early done", 0),
        reuse_a_handoff_id: Trace("status", 0),
        take_messages_of_other_handoffs: Trace("status", 309),
        say_done_before_the_last_write: Trace("early done", 0),
        ignore_checksums: Trace("wrong text", 341),
        leak_on_abort: Trace("leak", 0),
        lose_the_last_quiesced: Trace("leak", 0),
        retry_with_another_seed: Trace("wrong text", 5),
        trim_the_wrong_end: Trace("wrong text", 0),
        send_before_it_is_computed: Trace("wrong text", 0),
        send_no_states: Trace("early done", 0),
        go_on_from_the_prompt: Trace("wrong text", 62),
        compute_a_local_prompt_elsewhere: Trace("no recovery", 17),
        count_what_a_retraction_left: Trace("usage", 104),
        mix_up_a_mixed_batch: Trace("wrong text", 14),
        serve_the_newest_first: Trace("overtaken", 0),
        forget_to_mirror_aborts: Trace("fatal", 3),
        cut_off_what_runs_on_a_drain: Trace("cut off", 78),
        accept_work_while_draining: Trace("cut off", 457),
        clear_without_clearing: Trace("clear", 14),
        keep_the_hedge_that_lost: Trace("left open", 38),
        give_the_first_tokens_twice: Trace("wrong text", 4),
        bear_any_silence: Trace("not placed anew", 665),
        draw_all_samples_alike: Trace("wrong text", 10),
        leave_the_other_samples: Trace("left open", 10),
        believe_a_dead_process: Trace("misbelief", 22),
        forget_where_a_follower_was: Trace("misbelief", 41),
        expect_prefixes_for_ever: Trace("misbelief", 22),
        keep_a_tenants_place: Trace("tenant", 4),
        ignore_the_limits_of_tenants: Trace("tenant", 19),
        share_caches_between_tenants: Trace("usage", 433),
        forget_to_mirror_the_end_of_quarantine: Trace("fatal", 36),
        send_what_one_rank_has_stored: Trace("wrong text", 330),
        grant_before_every_rank_has_zeroed: Trace("wrong text", 158),
    }
)

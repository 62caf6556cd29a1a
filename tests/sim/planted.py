"""Bugs that people have really written, planted one at a time: what each breaks, and how it is put in."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType

import pytest

from decode_node import remote_prefill
from decode_node.fence import GrantFence
from decode_node.receiver import IncomingHandoff
from decode_node.remote_prefill import RemotePrefill
from decode_node.verification import TransferVerifier
from node_runtime.engine.messages import PostEvents
from node_runtime.handoff.decode_session import DecodeHandoff
from node_runtime.handoff.events import AbortScheduling, EndWithFailure, MarkQuiesced
from node_runtime.handoff.prefill_session import PrefillHandoff
from node_runtime.handoff.states import DecodeState
from prefill_node import handoff as prompt_handoff
from prefill_node.outgoing import OutgoingTransfer, TransferDrained, TransferSummary
from prefill_node.sender import PrefillSender
from scheduler_core import DoneEvent, FinishEvent

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
    patch.setattr(TransferVerifier, "find_damage", lambda self, groups, checksums: "")


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
        for row in self._rows:
            row.prompt.num_computed_tokens = [row.end_token for _ in row.prompt.num_computed_tokens]
            if row.prompt.delivery is not None:
                self._push(row.prompt, range(len(self._stages)))

    patch.setattr(PrefillSender, "on_admitted", on_admitted)


def send_no_states(patch: Patch) -> None:
    """The layers of the first stage are never sent."""
    original = PrefillSender.__init__

    def make(self, **arguments) -> None:
        original(self, **arguments)
        self._stages = ((), *self._stages[1:])

    patch.setattr(PrefillSender, "__init__", make)


PLANTED: Mapping[Callable[[Patch], None], int] = MappingProxyType(
    {
        skip_the_fence: 0,
        forget_what_is_in_flight: 0,
        outlive_the_lease: 16,
        keep_the_permit: 11,
        free_on_cancel: 0,
        end_quarantine_with_the_stream: 58,
        trust_a_stale_hit: 0,
        reuse_a_handoff_id: 0,
        take_messages_of_other_handoffs: 5,
        say_done_before_the_last_write: 0,
        ignore_checksums: 80,
        leak_on_abort: 1,
        lose_the_last_quiesced: 0,
        retry_with_another_seed: 2,
        trim_the_wrong_end: 0,
        send_before_it_is_computed: 0,
        send_no_states: 0,
    }
)
"""Each bug with a seed that is known to find it: where a search begins."""

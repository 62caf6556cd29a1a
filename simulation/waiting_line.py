"""Whether a node takes requests in the order in which they came.

A younger one may pass an older one only while that finds no memory, and at most `MAX_OVERTAKES` times
(docs/design/scheduler.md). What memory a request needs is the scheduler's secret; but one that is no larger, in its
prompt and in what it may generate, needs no more than one that was admitted with nothing cached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from typing_extensions import override

from node_runtime.engine.messages import Command, SubmitRequest
from scheduler_core import AbortEvent, Capacity, Event, FailedEvent, Plan, ReadyEvent, RequestSpec
from simulation.watched import SchedulerWatch

MAX_OVERTAKES = 64


@dataclass(slots=True)
class _Waiting:
    num_prompt_tokens: int
    max_new_tokens: int
    is_local: bool
    is_ready: bool
    is_submitted: bool = False
    num_overtakes: int = 0


class WaitingLine(SchedulerWatch):
    """The line of one scheduler. `find` is told what is unfair."""

    def __init__(self, *, needs_ready: bool, find: Callable[[str], None]) -> None:
        """`needs_ready`: requests of which a peer computes the prompt stand in line from their Ready on."""
        self._needs_ready = needs_ready
        self._find = find
        # In the order in which they came.
        self._waiting: dict[str, _Waiting] = {}

    def on_posted(self, command: Command) -> None:
        """A command came; before the engine looks at it."""
        if isinstance(command, SubmitRequest):
            spec = command.spec
            self._waiting[spec.request_id] = _Waiting(
                num_prompt_tokens=len(spec.tokens),
                max_new_tokens=spec.max_new_tokens or 0,
                is_local=spec.local_prefill,
                is_ready=spec.local_prefill or not self._needs_ready,
            )

    @override
    def on_submit(self, requests: Sequence[RequestSpec]) -> None:
        for request in requests:
            if (waiting := self._waiting.get(request.request_id)) is not None:
                waiting.is_submitted = True

    @override
    def on_events(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, ReadyEvent) and (waiting := self._waiting.get(event.request_id)) is not None:
                waiting.is_ready = True
            elif isinstance(event, AbortEvent | FailedEvent):
                self._waiting.pop(event.request_id, None)

    @override
    def on_plan(self, plan: Plan, capacity: Capacity) -> None:
        admissions = plan.admissions
        if not admissions:
            return
        names = {admission.request_id for admission in admissions}
        for admission in admissions:
            admitted = self._waiting.get(admission.request_id)
            if admitted is not None:
                cached = admission.device_hit_tokens + admission.host_hit_tokens + admission.storage_hit_tokens
                self._pass(admission.request_id, admitted, cached, names)
        for name in names:
            self._waiting.pop(name, None)

    def _pass(self, name: str, admitted: _Waiting, num_cached_tokens: int, names: set[str]) -> None:
        for older_name, older in self._waiting.items():
            if older_name == name:
                return
            is_in_line = older.is_submitted and older.is_ready and older.is_local is admitted.is_local
            if older_name in names or not is_in_line:
                continue
            older.num_overtakes += 1
            if older.num_overtakes > MAX_OVERTAKES:
                self._find(f"{older_name} was overtaken more than {MAX_OVERTAKES} times, now by {name}")
            elif (
                older.num_prompt_tokens <= admitted.num_prompt_tokens - num_cached_tokens
                and older.max_new_tokens <= admitted.max_new_tokens
            ):
                self._find(f"{name} was admitted before {older_name}, which came first and is no larger")

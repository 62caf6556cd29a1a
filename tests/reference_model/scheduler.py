"""The model's face: submit, plan, advance, as the native scheduler has them, and views of everything it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from reference_model import contents
from reference_model.books import Books
from reference_model.group_policies import GroupPolicy, policy_of
from reference_model.groups import INDEX, Group, Key
from reference_model.pool import Block
from reference_model.requests import HAS_ENDED, HOLDS_NOTHING, Phase, Request
from reference_model.retraction import Resolution, give_blocks_back, has_anything_out, resolve_blocked
from reference_model.rounds import Round
from reference_model.transitions import BrokenTransfer, View, early_end, judge
from reference_model.values import (
    Event,
    EventKind,
    Gauges,
    GroupShape,
    LoadDone,
    Occupancy,
    Plan,
    Role,
    SchedulerShape,
    StoreDone,
    Submission,
)

AnyEvent: TypeAlias = Event | StoreDone | LoadDone
CAN_BE_GIVEN_UP = (Phase.PREFILLING, Phase.AWAITING_RESULT, Phase.PREFILL_DONE, Phase.DECODING)


class RefusedSubmission(Exception):
    """None of a batch is accepted. `words` must be in the message about it."""

    def __init__(self, *words: str) -> None:
        self.words = words
        super().__init__(" ".join(words))


class ReferenceScheduler:
    def __init__(self, shape: SchedulerShape) -> None:
        self.shape = shape
        self.books = self.make_books([self.make_policy(group) for group in shape.groups])
        self.was_local_prefill = False  # decode role: the last round was one
        self.yielding: Request | None = None  # the next to give its blocks back
        self.first_in_line: Request | None = None  # decode role: others gave theirs back for it
        self.num_stalled_plans = 0
        self.loading_plan: list[tuple[int, list[Request]]] = []  # of the newest plan its load, and whose rows it has

    def make_policy(self, group: GroupShape) -> GroupPolicy:
        return policy_of(self.shape, group)

    def make_books(self, policies: Sequence[GroupPolicy]) -> Books:
        return Books(self.shape, policies)

    # Submissions.

    def submit(self, submissions: Sequence[Submission]) -> None:
        used = [request.request_id for request in self.books.requests]
        for submission in submissions:
            self.check(submission, used)
            used.append(submission.request_id)
        for submission in submissions:
            limit_tokens = self.books.limit_tokens(submission)
            self.books.requests.append(Request.of(submission, self.shape.role, limit_tokens))

    def check(self, submission: Submission, used: list[str]) -> None:
        """A request that could not run in an empty pool is refused; its id must be nobody's."""
        request_id = submission.request_id
        if request_id in used:
            raise RefusedSubmission(request_id, "request_id")
        if not submission.tokens:
            raise RefusedSubmission(request_id, "tokens must not be empty")
        if min(submission.tokens) < 0:
            raise RefusedSubmission(request_id, "tokens[")
        if (submission.max_new_tokens or 0) < 0:
            raise RefusedSubmission(request_id, "max_new_tokens must not be negative")
        limit = self.books.max_request_tokens
        if self.books.tokens_to_check(submission) > limit:
            raise RefusedSubmission(request_id, f"the limit is {limit}")

    # Events.

    def advance(self, events: Sequence[AnyEvent]) -> None:
        """Judges all events on views of the requests before the first is applied, so a bad one leaves no trace. Those
        of unknown requests change nothing."""
        views = {request.request_id: View.of(request) for request in self.books.requests}
        to_apply: list[AnyEvent] = []
        for event in events:
            if not isinstance(event, Event):
                if isinstance(event, LoadDone) and not event.is_success:
                    to_apply += self.judge_failed_load(event, views)
                to_apply.append(event)
            elif event.request_id in views:
                after = judge(self.shape.role, views[event.request_id], event)
                if after is not None:
                    views[event.request_id] = after
                    to_apply.append(event)
        for event in to_apply:
            if isinstance(event, Event):
                self.apply(self.request(event.request_id), event)
            else:
                self.complete(event)

    def judge_failed_load(self, failed: LoadDone, views: dict[str, View]) -> list[AnyEvent]:
        """Nothing of its plan ran, so whoever has a row there starts over. It must be told before the next plan, and
        when no results but those of that plan are out."""
        tiers = self.books.coordinator.tiers
        if tiers is None or failed.operation_id not in tiers.loads:
            return []
        words = ("load_done", f"operation {failed.operation_id}")
        rows = [rows for operation_id, rows in self.loading_plan if operation_id == failed.operation_id]
        if not rows:
            raise BrokenTransfer(*words, "before the next plan")
        given_up: list[AnyEvent] = []
        for request in rows[0]:
            view = views.get(request.request_id)
            if request not in self.books.requests or view is None or view.phase not in CAN_BE_GIVEN_UP:
                continue
            if len(view.results_out) != 1:
                raise BrokenTransfer(*words, f'"{request.request_id}"')
            views[request.request_id] = view.after(Phase.RETRACTED)
            given_up.append(Event(EventKind.RETRACT, request.request_id))
        return given_up

    def complete(self, done: StoreDone | LoadDone) -> None:
        """Of a transfer that is not under way it changes nothing."""
        coordinator = self.books.coordinator
        if coordinator.tiers is None:
            return
        if isinstance(done, StoreDone):
            coordinator.tiers.complete_store(coordinator.pool, done.operation_id, done.created)
        else:
            coordinator.tiers.complete_load(
                coordinator.pool, done.operation_id, done.missed, is_success=done.is_success
            )

    def request(self, request_id: str) -> Request:
        return next(request for request in self.books.requests if request.request_id == request_id)

    def apply(self, request: Request, event: Event) -> None:
        match event.kind:
            case EventKind.RESULT | EventKind.DONE:
                self.land(request, event.tokens)
            case EventKind.READY:
                request.phase = Phase.WAITING
            case EventKind.RESERVE:
                request.reserve_tokens = event.tokens[0]
            case EventKind.GRANTED:
                request.is_granted = True
            case EventKind.FINISH:
                if request.is_resident:
                    self.books.publish_at_end(request)
                self.end(request)
            case EventKind.RETRACT:
                give_blocks_back(self.books, request)
            case EventKind.HANDED_OVER | EventKind.QUIESCED:
                self.end(request)
            case EventKind.ABORT | EventKind.FAILED:
                self.end_early(request)

    def land(self, request: Request, tokens: tuple[int, ...]) -> None:
        """In decoding, all tokens but the last are computed: it is the next row's input. The first of the completion
        came with the prompt."""
        is_first = len(request.tokens) == request.num_prompt_tokens
        request.tokens += tokens
        if request.phase is Phase.REMOTE_PREFILLING:
            contents.land_prompt(self.books.policies, request)
        else:
            request.results_out.pop(0)
        if request.phase is Phase.DECODING:
            if not is_first:
                contents.land_step(self.books.policies, request, len(tokens))
            request.num_computed_tokens = len(request.tokens) - 1
        elif tokens:
            request.phase = Phase.PREFILL_DONE

    def end_early(self, request: Request) -> None:
        """Publishes nothing. What a peer may still touch stays taken; the slot returns at once."""
        phase = early_end(self.shape.role, request.phase)
        if phase is Phase.FINISHED:
            self.end(request)
            return
        if phase is Phase.QUARANTINED:
            self.books.release_hits(request)
        self.books.hold_back(request)
        request.phase, request.slot, request.results_out = phase, 0, []

    def end(self, request: Request) -> None:
        """The id stays in use until the next plan has named it."""
        self.books.release_all(request)
        request.phase, request.results_out = Phase.FINISHED, []

    # Plans.

    def next_plan(self) -> Plan:
        current = Round(self.books, self.yielding, self.first_in_line)
        current.plan.finished = [request.request_id for request in self.books.in_phase(Phase.FINISHED)]
        self.books.requests = [request for request in self.books.requests if request.phase is not Phase.FINISHED]
        match self.shape.role:
            case Role.PREFILL:
                current.plan_prefill_role()
            case Role.DECODE:
                self.was_local_prefill = current.plan_decode_role(was_local_prefill=self.was_local_prefill)
            case Role.FUSED:
                current.plan_fused_role()
        if self.shape.role is not Role.PREFILL:
            outcome = self.resolve_blocked(current)
            self.yielding = outcome.yielding
            self.was_local_prefill = self.was_local_prefill or outcome.was_local_prefill
        self.first_in_line = current.first_in_line
        plan = current.build()
        rows = [row.request for row in current.prefill_rows + current.decode_rows]
        self.loading_plan = [(load.operation_id, rows) for load in plan.loads]
        self.count_stall(plan)
        return plan

    def resolve_blocked(self, current: Round) -> Resolution:
        return resolve_blocked(current)

    def count_stall(self, plan: Plan) -> None:
        """Plans in a row without anything in them while requests live and nobody owes an answer."""
        tiers = self.books.coordinator.tiers
        is_out = has_anything_out(self.books) or (tiers is not None and not tiers.is_idle())
        is_stalled = plan.is_empty and bool(self.books.requests) and not is_out
        self.num_stalled_plans = self.num_stalled_plans + 1 if is_stalled else 0
        if self.num_stalled_plans in [1024 << doubling for doubling in range(20)]:
            plan.num_stalled_plans = self.num_stalled_plans

    # The cache.

    def can_clear(self) -> bool:
        """Not while a request lives or a transfer is under way."""
        tiers = self.books.coordinator.tiers
        is_idle = tiers is None or tiers.is_idle()
        return is_idle and all(request.phase is Phase.FINISHED for request in self.books.requests)

    def clear_device_cache(self) -> bool:
        if not self.can_clear():
            return False
        self.books.coordinator.clear()
        return True

    def clear_cache(self) -> bool:
        """Both tiers, and what is known of storage."""
        if not self.clear_device_cache():
            return False
        if self.books.coordinator.tiers is not None:
            self.books.coordinator.tiers.clear()
        return True

    def storage_queries(self) -> list[list[Key]]:
        """What storage may be asked for, by local prompt that waits."""
        waiting = [*self.books.in_phase(Phase.WAITING), *self.books.in_phase(Phase.RETRACTED)]
        return [self.books.storage_keys(request) for request in waiting if not request.is_remote]

    def register_storage_keys(self, keys: Sequence[Key]) -> None:
        tiers = self.books.coordinator.tiers
        if tiers is not None and tiers.shadow is not None:
            tiers.shadow.register(keys)

    def unregister_storage_keys(self, keys: Sequence[Key]) -> None:
        tiers = self.books.coordinator.tiers
        if tiers is not None and tiers.shadow is not None:
            tiers.shadow.forget(keys)

    # Views.

    def max_request_tokens(self) -> int:
        return self.books.max_request_tokens

    def block_tables(self, request_id: str) -> list[list[int]]:
        tables = [table.block_ids() for table in self.request(request_id).tables]
        return tables or [[] for _ in self.shape.groups]

    def gauges(self) -> Gauges:
        quarantined = set(self.quarantined_blocks())
        places = [self.place_of(children, quarantined) for children in self.books.coordinator.pool.children().values()]
        live = [request for request in self.books.requests if request.phase is not Phase.FINISHED]
        return Gauges(
            total_lcm_blocks=self.shape.num_lcm_blocks,
            empty_lcm_blocks=places.count("empty"),
            active_lcm_blocks=places.count("active"),
            cached_lcm_blocks=places.count("cached"),
            quarantined_lcm_blocks=places.count("quarantined"),
            num_waiting=sum(request.phase in HOLDS_NOTHING for request in live),
            num_running=sum(request.phase not in HOLDS_NOTHING + HAS_ENDED for request in live),
            num_live_requests=len(live),
            groups=[self.occupancy(group) for group in range(len(self.shape.groups))],
            **self.host_gauges(),
        )

    def occupancy(self, group: int) -> Occupancy:
        blocks = self.books.coordinator.pool.of_group(group)
        in_use = {block.lcm_block for block in blocks if block.owners != [INDEX]}
        bound = {block.lcm_block for block in blocks}
        return Occupancy(lcm_blocks=len(bound), cached_lcm_blocks=len(bound - in_use), taken_blocks=len(blocks))

    def host_gauges(self) -> dict[str, int]:
        tiers = self.books.coordinator.tiers
        parents = [] if tiers is None else tiers.pool.children().values()
        empty = sum(not children for children in parents)
        cached = sum(bool(children) and all(each.owners == [INDEX] for each in children) for children in parents)
        return {
            "total_host_lcm_blocks": len(parents),
            "empty_host_lcm_blocks": empty,
            "active_host_lcm_blocks": len(parents) - empty - cached,
            "cached_host_lcm_blocks": cached,
        }

    def quarantined_blocks(self) -> list[Block]:
        tables = [table for request in self.books.in_phase(Phase.QUARANTINED) for table in request.tables]
        return [block for table in tables for block in table.slots if block is not None]

    def place_of(self, children: list[Block], quarantined: set[Block]) -> str:
        """A parent with a quarantined child counts as quarantined; cached is one that the index alone holds."""
        if not children:
            return "empty"
        if any(child in quarantined for child in children):
            return "quarantined"
        return "cached" if all(child.owners == [INDEX] for child in children) else "active"

    def describe(self, gauges: Gauges) -> str:
        """The dump, line for line as the native one. `gauges` are those of now."""
        lines = [
            f"role {self.shape.role.value} prefix_granularity {self.shape.prefix_granularity}",
            f"lcm_blocks total={gauges.total_lcm_blocks} empty={gauges.empty_lcm_blocks}"
            f" active={gauges.active_lcm_blocks} cached={gauges.cached_lcm_blocks}"
            f" quarantined={gauges.quarantined_lcm_blocks}",
        ]
        tiers = self.books.coordinator.tiers
        if tiers is not None:
            lines.append(
                f"host_lcm_blocks total={gauges.total_host_lcm_blocks} empty={gauges.empty_host_lcm_blocks}"
                f" active={gauges.active_host_lcm_blocks} cached={gauges.cached_host_lcm_blocks}"
            )
        if tiers is not None and tiers.shadow is not None:
            lines.append(f"storage keys={len(tiers.shadow.known)} unreadable={len(tiers.shadow.unreadable)}")
        lines += self.books.coordinator.eviction.describe()
        lines += [self.line_of(group) for group in self.books.coordinator.groups]
        for request in self.books.requests:
            lines += self.lines_of(request)
        return "\n".join(lines) + "\n"

    def line_of(self, group: Group) -> str:
        coordinator = self.books.coordinator
        line = f"group {group.shape.group_id} free_slots={coordinator.pool.num_free_slots(group.position)}"
        line += f" entries={len(group.entries)} evictable={len(group.evictable())}"
        if coordinator.tiers is not None:
            line += f" host_entries={len(coordinator.tiers.groups[group.position].entries)}"
        if not group.policy.is_closed:
            line += f" promised={coordinator.promises.num_promised(group)}"
            line += f" kept={len(coordinator.promises.kept[group.position])}"
        return line

    def lines_of(self, request: Request) -> list[str]:
        num_generated = len(request.tokens) - request.num_prompt_tokens
        head = f"request {request.request_id} {request.phase.value} tokens={request.num_prompt_tokens}+{num_generated}"
        head += f" retractions={request.num_retractions}" if request.num_retractions else ""
        if request.is_resident:
            head += f" slot={request.slot} hit={request.num_hit_tokens} computed={request.num_computed_tokens}"
            head += f" published_grains={request.num_published_grains}"
            head += "" if request.is_secured else " unsecured"
            head += f" promotion={request.promotion_tokens}" if request.promotion_tokens else ""
        lines = [head + (f" results_out={len(request.results_out)}" if request.results_out else "")]
        for group, table in zip(self.shape.groups, request.tables, strict=False):
            ids = "".join(f" {block_id or '-'}" for block_id in table.block_ids())
            num_room_tokens = len(table.slots) * group.block_granularity - request.num_covered_tokens
            lines.append(f"  {group.group_id}:{ids} | room {num_room_tokens}")
        return lines

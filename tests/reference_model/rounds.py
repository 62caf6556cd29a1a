"""One plan: which requests it serves."""

from __future__ import annotations

from reference_model import contents
from reference_model.books import Books, Outcome
from reference_model.chunking import chunk_end, least_budget, replay_tokens
from reference_model.layout import Row, lay_out
from reference_model.requests import NEVER_RAN, Phase, Request
from reference_model.values import Admission, Handover, Plan, RemotePrefill, Role

MAX_OVERTAKES = 64


class AdmissionLine:
    """The new prompts of one round, oldest first. Younger ones pass one that does not fit, but only so often."""

    def __init__(self) -> None:
        self.passed: list[Request] = []

    def goes_on_behind(self, request: Request) -> bool:
        self.passed.append(request)
        return request.num_overtakes < MAX_OVERTAKES

    def note_admitted(self) -> None:
        for request in self.passed:
            request.num_overtakes += 1


class Round:
    def __init__(self, books: Books, yielding: Request | None = None, first_in_line: Request | None = None) -> None:
        """`yielding` gets no decode row: it is the next to give its blocks back. Others gave theirs back for
        `first_in_line`, which could not join the round that it did not fit in."""
        self.books = books
        self.yielding = yielding
        self.first_in_line = first_in_line
        self.blocked: Request | None = None  # the first that found no memory
        self.has_later_chunk = False
        self.holds_stores_back = False  # somebody waits for what a pinned store holds
        self.plan = Plan(zero_blocks=[[] for _ in books.shape.groups])
        self.prefill_rows: list[Row] = []
        self.decode_rows: list[Row] = []
        self.num_budget_tokens = books.shape.token_budget

    def num_free_rows(self) -> int:
        return self.books.shape.max_batch_size - len(self.prefill_rows) - len(self.decode_rows)

    def has_room(self) -> bool:
        return self.num_free_rows() > 0 and self.num_budget_tokens > 0

    # The roles.

    def plan_prefill_role(self) -> None:
        """Hand over what landed, then resident chunks, then new prompts."""
        self.plan_handovers()
        if self.plan_resident_chunks():
            self.plan_new_prompts()

    def plan_fused_role(self) -> None:
        """Decodes first, then chunks within what is left of the budget, so a long prompt cannot starve the streams.
        What a prompt needs to get anywhere is left to it; what it does not use goes to further decodes."""
        spared_tokens = self.spared_tokens()
        self.plan_decodes(spared_tokens)
        if self.plan_resident_chunks() and self.plan_readmission() and self.next_readmission() is None:
            self.plan_new_prompts()
        if spared_tokens:
            self.plan_decodes()

    def spared_tokens(self) -> int:
        """While a prompt is there to be computed. One that stays incomplete keeps others from starting."""
        resident = self.books.in_phase(Phase.PREFILLING)
        if resident:
            is_pending = self.can_take_row(resident[0])
        else:
            waiting = [request for request in self.waiting_line() if not request.is_complete]
            has_any = bool(waiting) or self.next_readmission() is not None
            is_pending = has_any and bool(self.books.free_slots())
        return least_budget(self.books.shape) if is_pending else 0

    def plan_decode_role(self, *, was_local_prefill: bool) -> bool:
        """All decodes, and beside them remote admissions, which cost no budget and no rows. A local prefill has the
        round to itself and takes turns with them: after one, it runs again only if they have nothing to do.
        Returns whether this round was one."""
        if not was_local_prefill and self.plan_one_local_prefill():
            return True
        self.plan_decodes()
        if self.next_readmission() is None:
            self.plan_remote_admissions()
        return was_local_prefill and not self.has_work() and self.plan_one_local_prefill()

    def has_work(self) -> bool:
        return bool(self.prefill_rows or self.decode_rows or self.plan.remote_prefills)

    def is_sealed(self) -> bool:
        """Somebody who runs found no memory: nobody new may take any."""
        return self.blocked is not None and self.blocked.is_resident

    def note_blocked(self, request: Request) -> None:
        self.blocked = self.blocked or request

    # Their phases.

    def plan_handovers(self) -> None:
        """Once, when the first token has landed. The request has no row any more, so its slot returns."""
        for request in self.books.in_phase(Phase.PREFILL_DONE):
            self.books.publish_pending(request, self.books.scope_of_prompt())
            self.plan.handovers.append(Handover(request.request_id, request.tokens[-1]))
            request.phase, request.slot = Phase.HANDING_OVER, 0

    def can_take_row(self, request: Request) -> bool:
        """Only so many results of earlier plans may be out, and a plan has one row of it."""
        has_row = request in [row.request for row in self.prefill_rows + self.decode_rows]
        return len(request.results_out) <= self.books.shape.overlap_depth and not has_row

    def plan_decodes(self, spared_tokens: int = 0) -> None:
        """One that finds no memory does not stop the others."""
        for request in self.books.requests:
            if self.has_place_for_decode(spared_tokens) and self.wants_decode_row(request):
                self.plan_decode_row(request)

    def cost_of_decode(self) -> int:
        """Beside the prompts of the decode role, which run elsewhere or alone, decodes cost nothing."""
        return self.books.shape.verify_width if self.books.shape.role is Role.FUSED else 0

    def has_place_for_decode(self, spared_tokens: int = 0) -> bool:
        return self.num_free_rows() > 0 and self.num_budget_tokens - spared_tokens >= self.cost_of_decode()

    def wants_decode_row(self, request: Request) -> bool:
        width = request.decode_width(self.books.shape.verify_width)
        return self.can_take_row(request) and width > 0 and request is not self.yielding

    def plan_decode_row(self, request: Request) -> bool:
        """False if there is no memory for it."""
        num_input_tokens = request.decode_width(self.books.shape.verify_width)
        fresh = self.books.make_step(request, num_input_tokens)
        if fresh is None:
            self.note_blocked(request)
            return False
        self.note_fresh(*fresh)
        num_results_out = len(request.results_out)
        begin = len(request.tokens) - 1 + num_results_out
        self.decode_rows.append(Row(request, begin, num_input_tokens, num_results_out, is_prefill=False))
        request.phase = Phase.DECODING
        request.results_out.append(num_input_tokens)
        self.num_budget_tokens -= self.cost_of_decode()
        return True

    def plan_resident_chunks(self) -> bool:
        """False if a prompt stays incomplete or has a result out: nothing younger is prefilled before it."""
        for request in self.books.in_phase(Phase.PREFILLING):
            if not self.can_take_row(request) or not self.has_room():
                return False
            if self.plan_chunk(request) is not Outcome.ADMITTED or request.phase is Phase.PREFILLING:
                return False
        return True

    def plan_new_prompts(self) -> None:
        if self.is_sealed():
            return
        line = AdmissionLine()
        for request in self.waiting_line():
            if not self.has_room() or not self.books.free_slots() or not self.may_start():
                return
            if request.is_complete:
                continue
            outcome = self.start_prompt(request)
            if outcome is Outcome.NO_BUDGET:
                return
            if outcome is Outcome.ADMITTED:
                line.note_admitted()
                if request.phase is Phase.PREFILLING:
                    return
            elif not line.goes_on_behind(request):
                return

    def waiting_line(self) -> list[Request]:
        """A retracted request that does not come first stands among the new ones, in the place of its submission."""
        if not self.books.shape.readmits_first:
            return self.books.in_phase(Phase.WAITING, Phase.RETRACTED)
        return self.books.in_phase(Phase.WAITING)

    def next_readmission(self) -> Request | None:
        """Those with output first, then the one that was retracted first."""
        if not self.books.shape.readmits_first:
            return None
        waiting = [request for request in self.books.in_phase(Phase.RETRACTED) if not request.is_complete]
        return min(waiting, key=lambda each: (not each.has_output, each.retraction_epoch), default=None)

    def plan_readmission(self) -> bool:
        """One at most. False if it leaves its prompt incomplete."""
        readmission = self.next_readmission()
        if readmission is None or not self.has_room() or not self.books.free_slots():
            return True
        return self.start_prompt(readmission) is not Outcome.ADMITTED or readmission.phase is not Phase.PREFILLING

    def may_start(self) -> bool:
        """The prefill role computes ahead of grants, but only so many prompts."""
        shape = self.books.shape
        return shape.role is not Role.PREFILL or self.books.num_started_ungranted() < shape.max_ready_ungranted

    def plan_one_local_prefill(self) -> bool:
        """The oldest resident one, else who others gave way to, else who gave way, else a new one. Remote prompts that
        did not fit stand in the same line."""
        for request in self.books.in_phase(Phase.PREFILLING):
            return self.can_take_row(request) and self.plan_chunk(request) is Outcome.ADMITTED
        if not self.books.free_slots():
            return False
        first, self.first_in_line = self.first_in_line, None
        if first is None or first.phase is not Phase.WAITING:
            first = self.next_readmission()
        if first is not None:
            return self.start_prompt(first) is Outcome.ADMITTED
        if self.is_sealed():
            return False
        line = AdmissionLine()
        for request in self.books.in_phase(Phase.WAITING):
            if not request.is_remote and self.start_prompt(request) is Outcome.ADMITTED:
                line.note_admitted()
                return True
            if request.did_not_fit and not line.goes_on_behind(request):
                return False
        return False

    def plan_remote_admissions(self) -> None:
        """The mirror image: local prompts that did not fit stand in the line of remote ones."""
        if self.is_sealed():
            return
        line = AdmissionLine()
        for request in self.books.in_phase(Phase.WAITING):
            if not self.books.free_slots():
                return
            if request.is_remote and self.start_remote_prompt(request) is Outcome.ADMITTED:
                line.note_admitted()
            elif request.did_not_fit and not line.goes_on_behind(request):
                return

    # One request.

    def note_fresh(self, *parts: list[list[int]]) -> None:
        """Fresh blocks are zeroed, a reserve included. Each part by group."""
        for block_ids in parts:
            for zeroed, fresh in zip(self.plan.zero_blocks, block_ids, strict=True):
                zeroed += fresh

    def admit(self, request: Request, budget_tokens: int | None) -> Outcome:
        """On the prefill role a prompt that reads from storage does not run beside a later chunk of another."""
        may_read_storage = self.books.shape.role is not Role.PREFILL or not self.has_later_chunk
        outcome = self.books.admit(request, budget_tokens, may_read_storage=may_read_storage)
        if outcome is Outcome.ADMITTED:
            num_hit_slots = [policy.num_hit_slots(request.num_hit_tokens) for policy in self.books.policies]
            tables = [table.slots[num:] for num, table in zip(num_hit_slots, request.tables, strict=True)]
            self.note_fresh([[block.block_id for block in slots if block is not None] for slots in tables])
            self.plan.admissions.append(Admission(request.request_id, *request.hits))
        elif outcome is Outcome.DOES_NOT_FIT and self.may_ask(request):
            self.note_blocked(request)
        return outcome

    def may_ask(self, request: Request) -> bool:
        """For others to give way: not who gave way itself, nor who comes back before new ones."""
        is_new = request.phase in NEVER_RAN or not self.books.shape.readmits_first
        return is_new and request.num_retractions == 0

    def start_remote_prompt(self, request: Request) -> Outcome:
        outcome = self.admit(request, budget_tokens=None)
        if outcome is Outcome.ADMITTED:
            self.grant(request)
            request.phase = Phase.REMOTE_PREFILLING
        return outcome

    def grant(self, request: Request) -> None:
        """What the peer fills, up to the end of the prompt; the reserve is not granted."""
        grant = RemotePrefill(request.request_id, request.num_hit_tokens, [], [])
        for policy, table in zip(self.books.policies, request.tables, strict=True):
            num_expired_slots = policy.num_expired_slots(request.num_prompt_tokens)
            first_slot = max(policy.num_hit_slots(request.num_hit_tokens), num_expired_slots)
            grant.first_slots.append(first_slot)
            grant.block_ids.append(table.block_ids()[first_slot : policy.blocks_for(request.num_prompt_tokens)])
        self.plan.remote_prefills.append(grant)

    def start_prompt(self, request: Request) -> Outcome:
        outcome = self.admit(request, self.num_budget_tokens)
        if outcome is Outcome.ADMITTED:
            replay = replay_tokens(self.books.shape, request.num_hit_tokens)
            self.send_chunk(request, request.num_hit_tokens - replay, replay)
        return outcome

    def plan_chunk(self, request: Request) -> Outcome:
        begin, shape = request.num_computed_tokens, self.books.shape
        end = chunk_end(shape, request.num_prompt_tokens, begin, self.num_budget_tokens, request.promotion_tokens)
        if end == begin:
            return Outcome.NO_BUDGET
        fresh = self.books.compute_chunk(request, end)
        if fresh is None:
            self.note_blocked(request)
            return Outcome.DOES_NOT_FIT
        self.note_fresh(*fresh)
        self.has_later_chunk = True
        self.send_chunk(request, begin)
        return Outcome.ADMITTED

    def send_chunk(self, request: Request, begin: int, num_replay_tokens: int = 0) -> None:
        end = request.num_computed_tokens
        row = Row(request, begin, end - begin, len(request.results_out), is_prefill=True)
        row.num_replay_tokens = num_replay_tokens
        self.prefill_rows.append(row)
        self.num_budget_tokens -= end - begin
        is_last = end == request.num_prompt_tokens
        request.phase = Phase.AWAITING_RESULT if is_last else Phase.PREFILLING
        request.results_out.append(1 if is_last else 0)

    def build(self) -> Plan:
        plan = self.plan
        lay_out(self.books.shape, plan, self.prefill_rows, self.decode_rows)
        tiers = self.books.coordinator.tiers
        if tiers is not None:
            plan.stores, plan.loads = tiers.start(holds_stores_back=self.holds_stores_back)
        contents.compute(self.books.shape, self.books.policies, self.prefill_rows)
        lists = (
            plan.request_ids,
            plan.remote_prefills,
            plan.handovers,
            plan.admissions,
            plan.retracted,
            plan.finished,
            plan.stores,
            plan.loads,
        )
        plan.is_empty = not any(lists)
        return plan

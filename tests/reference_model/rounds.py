"""One plan: which requests it serves, and how they are laid out."""

from __future__ import annotations

from dataclasses import dataclass

from reference_model.books import Books
from reference_model.requests import Phase, Request
from reference_model.values import Admission, Handover, Plan, RemotePrefill, Role

MAX_OVERTAKES = 64


@dataclass(slots=True)
class Row:
    request: Request
    begin: int
    num_tokens: int
    is_prefill: bool


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
    def __init__(self, books: Books) -> None:
        self.books = books
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
        """Decodes first, then chunks within what is left of the budget, so a long prompt cannot starve the streams."""
        self.plan_decodes(cost_tokens=self.books.shape.verify_width)
        if self.plan_resident_chunks():
            self.plan_new_prompts()

    def plan_decode_role(self, *, was_local_prefill: bool) -> bool:
        """All decodes, and beside them remote admissions, which cost no budget and no rows. A local prefill has the
        round to itself and takes turns with them: after one, it runs again only if they have nothing to do.
        Returns whether this round was one."""
        if not was_local_prefill and self.plan_one_local_prefill():
            return True
        self.plan_decodes(cost_tokens=0)
        self.plan_remote_admissions()
        has_work = bool(self.decode_rows or self.plan.remote_prefills)
        return was_local_prefill and not has_work and self.plan_one_local_prefill()

    # Their phases.

    def plan_handovers(self) -> None:
        """Once, when the first token has landed. The request has no row any more, so its slot returns."""
        for request in self.books.in_phase(Phase.PREFILL_DONE):
            self.books.publish_pending(request)
            self.plan.handovers.append(Handover(request.request_id, request.tokens[-1]))
            request.phase, request.slot = Phase.HANDING_OVER, 0

    def plan_decodes(self, cost_tokens: int) -> None:
        for request in self.books.requests:
            has_place = self.num_free_rows() > 0 and self.num_budget_tokens >= cost_tokens
            if request.can_decode and has_place:
                request.phase, request.num_results_out = Phase.DECODING, 1
                self.books.publish_pending(request)
                self.books.consume_reserve(request, self.books.shape.verify_width)
                self.decode_rows.append(Row(request, len(request.tokens) - 1, 1, is_prefill=False))
                self.num_budget_tokens -= cost_tokens

    def plan_resident_chunks(self) -> bool:
        """False if a prompt stays incomplete or has a result out: nothing younger is prefilled before it."""
        for request in self.books.in_phase(Phase.PREFILLING):
            if request.num_results_out or not self.has_room():
                return False
            self.plan_chunk(request)
            if request.phase is Phase.PREFILLING:
                return False
        return True

    def plan_new_prompts(self) -> None:
        line = AdmissionLine()
        for request in self.books.in_phase(Phase.WAITING):
            if not self.has_room() or not self.books.free_slots() or not self.may_start():
                return
            if self.start_prompt(request):
                line.note_admitted()
                if request.phase is Phase.PREFILLING:
                    return
            elif not line.goes_on_behind(request):
                return

    def may_start(self) -> bool:
        """The prefill role computes ahead of grants, but only so many prompts."""
        shape = self.books.shape
        return shape.role is not Role.PREFILL or self.books.num_started_ungranted() < shape.max_ready_ungranted

    def plan_one_local_prefill(self) -> bool:
        """The oldest resident one, else a new one. Remote prompts that did not fit stand in the same line."""
        for request in self.books.in_phase(Phase.PREFILLING):
            if request.num_results_out:
                return False
            self.plan_chunk(request)
            return True
        line = AdmissionLine()
        for request in self.books.in_phase(Phase.WAITING):
            if not self.books.free_slots():
                return False
            if not request.is_remote and self.start_prompt(request):
                line.note_admitted()
                return True
            if request.did_not_fit and not line.goes_on_behind(request):
                return False
        return False

    def plan_remote_admissions(self) -> None:
        """The mirror image: local prompts that did not fit stand in the line of remote ones."""
        line = AdmissionLine()
        for request in self.books.in_phase(Phase.WAITING):
            if not self.books.free_slots():
                return
            if request.is_remote and self.admit(request, budget_tokens=None):
                line.note_admitted()
                self.grant(request)
                request.phase = Phase.REMOTE_PREFILLING
            elif request.did_not_fit and not line.goes_on_behind(request):
                return

    # One request.

    def admit(self, request: Request, budget_tokens: int | None) -> bool:
        """Fresh blocks are zeroed, the reserve included."""
        if not self.books.admit(request, budget_tokens):
            return False
        for shape, table, zeroed in zip(self.books.shape.groups, request.tables, self.plan.zero_blocks, strict=True):
            num_hit_slots = request.num_hit_tokens // shape.block_granularity
            zeroed += table.block_ids()[num_hit_slots:]
        self.plan.admissions.append(Admission(request.request_id, request.num_hit_tokens))
        return True

    def grant(self, request: Request) -> None:
        """From the hit to the end of the prompt; the reserve is not granted."""
        first_slots, block_ids = [], []
        for shape, table in zip(self.books.shape.groups, request.tables, strict=True):
            first_slot = request.num_hit_tokens // shape.block_granularity
            end_slot = -(-request.num_prompt_tokens // shape.block_granularity)
            first_slots.append(first_slot)
            block_ids.append(table.block_ids()[first_slot:end_slot])
        grant = RemotePrefill(request.request_id, request.num_hit_tokens, first_slots, block_ids)
        self.plan.remote_prefills.append(grant)

    def start_prompt(self, request: Request) -> bool:
        if not self.admit(request, self.num_budget_tokens):
            return False
        self.send_chunk(request, request.num_hit_tokens, request.num_computed_tokens)
        return True

    def plan_chunk(self, request: Request) -> None:
        """What the chunk before computed is published in the same transaction."""
        self.books.publish_pending(request)
        begin = request.num_computed_tokens
        end = min(request.num_prompt_tokens, begin + self.num_budget_tokens)
        self.books.consume_reserve(request, end - begin)
        request.num_computed_tokens = end
        self.send_chunk(request, begin, end)

    def send_chunk(self, request: Request, begin: int, end: int) -> None:
        self.prefill_rows.append(Row(request, begin, end - begin, is_prefill=True))
        self.num_budget_tokens -= end - begin
        is_last = end == request.num_prompt_tokens
        request.phase = Phase.AWAITING_RESULT if is_last else Phase.PREFILLING
        request.num_results_out = 1

    # Layout.

    def build(self) -> Plan:
        """Prefill rows, then decode rows. Tables are padded with -1 to the longest of the plan, group by group."""
        plan = self.plan
        rows = self.prefill_rows + self.decode_rows
        plan.num_rows, plan.num_prefill_rows = len(rows), len(self.prefill_rows)
        for row in rows:
            end = row.begin + row.num_tokens
            plan.request_ids.append(row.request.request_id)
            plan.request_slots.append(row.request.slot)
            plan.input_lengths.append(row.num_tokens)
            plan.replay_lengths.append(0)
            plan.checkpoint_tokens.append(0)
            plan.begins.append(row.begin)
            plan.num_results_out.append(0)
            plan.prefill_lengths.append(row.request.num_prompt_tokens if row.is_prefill else 0)
            plan.logits_wanted.append(int(not row.is_prefill or end == row.request.num_prompt_tokens))
            plan.token_ids += row.request.tokens[row.begin : end]
        for group in range(len(self.books.shape.groups)):
            plan.state_input_slots.append([])
            plan.state_output_slots.append([])
            tables = [row.request.tables[group].block_ids() for row in rows]
            width = max(map(len, tables), default=0)
            plan.block_tables.append([table + [-1] * (width - len(table)) for table in tables])
        plan.is_empty = not (rows or plan.remote_prefills or plan.handovers or plan.admissions or plan.finished)
        return plan

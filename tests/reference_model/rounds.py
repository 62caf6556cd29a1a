"""One plan: which requests it serves, and how they are laid out."""

from __future__ import annotations

from dataclasses import dataclass

from reference_model.books import Books
from reference_model.requests import NEVER_RAN, Phase, Request
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
    def __init__(self, books: Books, yielding: Request | None = None, first_in_line: Request | None = None) -> None:
        """`yielding` gets no decode row: it is the next to give its blocks back. Others gave theirs back for
        `first_in_line`, which could not join the round that it did not fit in."""
        self.books = books
        self.yielding = yielding
        self.first_in_line = first_in_line
        self.blocked: Request | None = None  # the first that found no memory
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
        self.plan_decodes()
        if self.plan_resident_chunks():
            self.plan_new_prompts()

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

    # Their phases.

    def plan_handovers(self) -> None:
        """Once, when the first token has landed. The request has no row any more, so its slot returns."""
        for request in self.books.in_phase(Phase.PREFILL_DONE):
            self.books.publish_pending(request)
            self.plan.handovers.append(Handover(request.request_id, request.tokens[-1]))
            request.phase, request.slot = Phase.HANDING_OVER, 0

    def plan_decodes(self) -> None:
        for request in self.books.requests:
            if request.can_decode and request is not self.yielding and self.has_place_for_decode():
                self.plan_decode_row(request)

    def cost_of_decode(self) -> int:
        """On the decode role decodes cost nothing."""
        return self.books.shape.verify_width if self.books.shape.role is Role.FUSED else 0

    def has_place_for_decode(self) -> bool:
        return self.num_free_rows() > 0 and self.num_budget_tokens >= self.cost_of_decode()

    def plan_decode_row(self, request: Request) -> bool:
        """False if there is no memory for it."""
        if not self.grow(request, self.books.shape.verify_width, 0):
            return False
        request.phase, request.num_results_out = Phase.DECODING, 1
        self.decode_rows.append(Row(request, len(request.tokens) - 1, 1, is_prefill=False))
        self.num_budget_tokens -= self.cost_of_decode()
        return True

    def grow(self, request: Request, extent_tokens: int, reserve_tokens: int) -> bool:
        """A later admission. What was computed before is published in the same transaction."""
        fresh_ids = self.books.coordinator.grow(request.tables, extent_tokens, reserve_tokens)
        if fresh_ids is None:
            self.blocked = self.blocked or request
            return False
        for zeroed, ids in zip(self.plan.zero_blocks, fresh_ids, strict=True):
            zeroed += ids
        self.books.publish_pending(request)
        return True

    def plan_resident_chunks(self) -> bool:
        """False if a prompt stays incomplete or has a result out: nothing younger is prefilled before it."""
        for request in self.books.in_phase(Phase.PREFILLING):
            if request.num_results_out or not self.has_room():
                return False
            if not self.plan_chunk(request) or request.phase is Phase.PREFILLING:
                return False
        return True

    def plan_new_prompts(self) -> None:
        """On the fused role a retracted request stands among them, in the place of its submission."""
        if self.is_sealed():
            return
        line = AdmissionLine()
        for request in self.waiting_line():
            if not self.has_room() or not self.books.free_slots() or not self.may_start():
                return
            if request.is_complete:
                continue
            if self.start_prompt(request):
                line.note_admitted()
                if request.phase is Phase.PREFILLING:
                    return
            elif not line.goes_on_behind(request):
                return

    def waiting_line(self) -> list[Request]:
        if self.books.shape.role is Role.FUSED:
            return self.books.in_phase(Phase.WAITING, Phase.RETRACTED)
        return self.books.in_phase(Phase.WAITING)

    def next_readmission(self) -> Request | None:
        """Decode role: those with output first, then the one that was retracted first."""
        if self.books.shape.role is Role.FUSED:
            return None
        waiting = [request for request in self.books.in_phase(Phase.RETRACTED) if not request.is_complete]
        return min(waiting, key=lambda each: (not each.has_output, each.retraction_epoch), default=None)

    def may_start(self) -> bool:
        """The prefill role computes ahead of grants, but only so many prompts."""
        shape = self.books.shape
        return shape.role is not Role.PREFILL or self.books.num_started_ungranted() < shape.max_ready_ungranted

    def plan_one_local_prefill(self) -> bool:
        """The oldest resident one, else a new one. Remote prompts that did not fit stand in the same line."""
        for request in self.books.in_phase(Phase.PREFILLING):
            return not request.num_results_out and self.plan_chunk(request)
        if not self.books.free_slots():
            return False
        first, self.first_in_line = self.first_in_line, None
        if first is not None and first.phase is Phase.WAITING:
            return self.start_prompt(first)
        readmission = self.next_readmission()
        if readmission is not None:
            return self.start_prompt(readmission)
        if self.is_sealed():
            return False
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
        if self.is_sealed():
            return
        line = AdmissionLine()
        for request in self.books.in_phase(Phase.WAITING):
            if not self.books.free_slots():
                return
            if request.is_remote and self.start_remote_prompt(request):
                line.note_admitted()
            elif request.did_not_fit and not line.goes_on_behind(request):
                return

    # One request.

    def admit(self, request: Request, budget_tokens: int | None) -> bool:
        """Fresh blocks are zeroed, the reserve included."""
        if not self.books.admit(request, budget_tokens):
            if request.num_retractions == 0 and (request.phase in NEVER_RAN or self.books.shape.role is Role.FUSED):
                self.blocked = self.blocked or request
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

    def start_remote_prompt(self, request: Request) -> bool:
        if not self.admit(request, budget_tokens=None):
            return False
        self.grant(request)
        request.phase = Phase.REMOTE_PREFILLING
        return True

    def start_prompt(self, request: Request) -> bool:
        if not self.admit(request, self.num_budget_tokens):
            return False
        self.send_chunk(request, request.num_hit_tokens, request.num_computed_tokens)
        return True

    def plan_chunk(self, request: Request) -> bool:
        """The last one holds a step behind the prompt, for which there may be no memory."""
        begin = request.num_computed_tokens
        end = min(request.num_prompt_tokens, begin + self.num_budget_tokens)
        step_tokens = self.books.step_tokens(request) if end == request.num_prompt_tokens else 0
        if not self.grow(request, end - begin, step_tokens):
            return False
        request.num_computed_tokens = end
        self.send_chunk(request, begin, end)
        return True

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
        plan.is_empty = plan.is_empty and not plan.retracted
        return plan

"""The live requests and the cache they share: who holds what, and how it is taken, published and returned."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import replace
from enum import Enum

from reference_model.chunking import chunk_end, replay_tokens
from reference_model.coordinator import Admitted, Coordinator, Hit, Publication, StoreScope
from reference_model.group_policies import Boundary, Completed, GroupPolicy, Span
from reference_model.groups import Key, Prefix
from reference_model.requests import Phase, Request
from reference_model.values import Role, SchedulerShape, Submission

LONGEST_REQUEST_TOKENS = 2**31 - 2


class Outcome(Enum):
    ADMITTED = "admitted"
    DOES_NOT_FIT = "does not fit"
    NO_BUDGET = "no budget"  # the round has too little left for a chunk


class Books:
    def __init__(self, shape: SchedulerShape, policies: Sequence[GroupPolicy]) -> None:
        self.shape = shape
        self.policies = policies
        self.coordinator = Coordinator(shape, policies)
        self.max_request_tokens = self.longest_request()
        self.requests: list[Request] = []  # in the order of submission
        self.num_retractions = 0

    def in_phase(self, *phases: Phase) -> list[Request]:
        return [request for request in self.requests if request.phase in phases]

    # What a request needs.

    def tokens_to_check(self, submission: Submission) -> int:
        """What must fit an empty pool. The completion is generated elsewhere on the prefill role; wherever it is
        generated, there is room for one verify step at least."""
        num_new = 0 if self.shape.role is Role.PREFILL else submission.max_new_tokens or 0
        return len(submission.tokens) + max(num_new, self.shape.verify_width)

    def step_tokens(self, request: Request) -> int:
        """Behind the end of a prompt, whatever else is secured. Near the longest request there is less left."""
        return min(self.shape.verify_width, self.max_request_tokens - request.num_prompt_tokens)

    def headroom_tokens(self, request: Request) -> int:
        """What an admission secures behind the prompt: of a completion that has an end a step at least, and 4096
        tokens more with every retraction; of another one a step once it has been retracted."""
        if self.shape.role is Role.PREFILL:
            return self.shape.verify_width
        if request.submission.max_new_tokens is None:
            return self.step_tokens(request) if request.num_retractions else 0
        headroom = min(request.limit_tokens - request.num_prompt_tokens, 4096 * (1 + request.num_retractions))
        return max(headroom, self.step_tokens(request))

    def covers_all(self, request: Request) -> bool:
        """Whether the headroom is all that the request may still generate. Elsewhere nothing is generated here."""
        if self.shape.role is Role.PREFILL:
            return True
        num_wanted_tokens = request.limit_tokens - request.num_prompt_tokens
        is_declared = request.submission.max_new_tokens is not None
        return is_declared and self.headroom_tokens(request) >= num_wanted_tokens

    def limit_tokens(self, submission: Submission) -> int:
        """Undeclared is as much as there can be."""
        if submission.max_new_tokens is None:
            return self.max_request_tokens
        return min(self.max_request_tokens, len(submission.tokens) + submission.max_new_tokens)

    def longest_request(self) -> int:
        """That an empty pool holds. Without a full group there may be no end to it."""
        lengths = range(1, LONGEST_REQUEST_TOKENS + 1)
        return bisect_right(lengths, self.shape.num_lcm_blocks, key=self.num_lcm_blocks_for)

    def num_lcm_blocks_for(self, num_tokens: int) -> int:
        """Of all these tokens but one step at most were the prompt."""
        num_prompt_tokens = max(0, num_tokens - self.shape.verify_width)
        num_lcm_blocks = 0
        for group, policy in zip(self.shape.groups, self.policies, strict=True):
            ways = (True, False) if self.shape.role is Role.DECODE else (True,)
            num_blocks = max(policy.held_at_most(num_prompt_tokens, num_tokens, is_local=way) for way in ways)
            num_lcm_blocks += -(-num_blocks // group.cache_blocks_per_lcm_block)
        return num_lcm_blocks

    def free_slots(self) -> list[int]:
        """Slot 0 is reserved. A role that transfers has twice as many slots as rows."""
        num_slots = self.shape.max_batch_size * (1 if self.shape.role is Role.FUSED else 2)
        used = [request.slot for request in self.requests]
        return [slot for slot in range(1, num_slots + 1) if slot not in used]

    def num_started_ungranted(self) -> int:
        return sum(request.is_resident and not request.is_granted for request in self.requests)

    # The first admission.

    def admit(self, request: Request, budget_tokens: int | None, *, may_read_storage: bool = True) -> Outcome:
        """Everything or nothing. A local prompt computes at once what the budget allows, a remote one (no budget) is
        filled whole. If it does not fit behind its hits, which may be scattered over more parents than a compact table
        takes, it is tried without them. Only of one that fits does it matter whether there is budget for a chunk."""
        request.did_not_fit = False
        hits = self.hits_to_try(request)
        if hits[0].reads_storage() and not may_read_storage:
            return Outcome.NO_BUDGET
        for hit in hits:
            span = self.first_span(request, hit, budget_tokens)
            while self.coordinator.fits(hit, span):
                if span.begin == span.end:
                    return Outcome.NO_BUDGET
                admitted = self.coordinator.admit(f"table of {request.request_id}", hit, span)
                if isinstance(admitted, Admitted):
                    self.note_admitted(request, hit, span, admitted)
                    return Outcome.ADMITTED
                hit = self.shorter(hit, admitted)
                span = self.first_span(request, hit, budget_tokens)
                if span.begin == span.end:
                    return Outcome.NO_BUDGET
        request.did_not_fit = True
        return Outcome.DOES_NOT_FIT

    def shorter(self, hit: Hit, tokens: int) -> Hit:
        """Matched again up to there. The closed groups back what they did behind the longer hit."""
        again = self.coordinator.probe_device(hit.prefixes)
        again = self.coordinator.extend(again, tokens // self.shape.prefix_granularity)
        return replace(again, closed_tokens=hit.closed_tokens if hit.closed_tokens > hit.tokens else again.tokens)

    def hits_to_try(self, request: Request) -> list[Hit]:
        """The last prompt token is never taken from the cache: computing it gives the first logits."""
        num_grains = (request.num_prompt_tokens - 1) // self.shape.prefix_granularity
        has_snapshot = self.coordinator.tiers is not None and request.num_retractions > 0
        prefixes = self.prefixes(request, num_grains, is_kept=has_snapshot)
        hit = self.coordinator.probe(prefixes, is_state_sent=request.is_remote)
        return [hit] if hit.tokens == 0 else [hit, self.coordinator.probe([])]

    def storage_keys(self, request: Request) -> list[Key]:
        """Of what no tier has of a prompt behind the device's hit, front first."""
        num_grains = (request.num_prompt_tokens - 1) // self.shape.prefix_granularity
        has_snapshot = self.coordinator.tiers is not None and request.num_retractions > 0
        return self.coordinator.storage_keys(self.prefixes(request, num_grains, is_kept=has_snapshot))

    def first_span(self, request: Request, hit: Hit, budget_tokens: int | None) -> Span:
        if budget_tokens is None:
            return self.span(request, hit.tokens, request.num_prompt_tokens)
        replay = replay_tokens(self.shape, hit.tokens)
        budget = budget_tokens - replay
        end = chunk_end(self.shape, request.num_prompt_tokens, hit.tokens, budget, hit.closed_tokens)
        return self.span(request, hit.tokens, end, replay)

    def span(self, request: Request, begin: int, end: int, replay: int = 0) -> Span:
        step_end = request.num_prompt_tokens + self.step_tokens(request)
        is_generated_here = self.shape.role is not Role.PREFILL
        return Span(
            begin=begin,
            end=end,
            num_prompt_tokens=request.num_prompt_tokens,
            num_secured_tokens=self.tokens_to_hold(request, end),
            num_limit_tokens=max(step_end, request.limit_tokens if is_generated_here else 0),
            step_tokens=self.step_tokens(request),
            is_local=not request.is_remote,
            replay_tokens=replay,
        )

    def tokens_to_hold(self, request: Request, end: int) -> int:
        """In full groups, once the prompt is computed up to `end`: the prompt and its headroom, with what is planned
        ahead of it; where the prompt ends a step in any case."""
        headroom = self.headroom_tokens(request)
        num_tokens = request.num_prompt_tokens + headroom + (self.shape.overlap_tokens if headroom else 0)
        is_last = end == request.num_prompt_tokens
        return max(num_tokens, request.num_prompt_tokens + self.step_tokens(request)) if is_last else num_tokens

    def note_admitted(self, request: Request, hit: Hit, span: Span, admitted: Admitted) -> None:
        request.tables, request.epoch, request.uses = admitted.tables, admitted.epoch, admitted.uses
        request.slot = self.free_slots()[0]
        request.num_hit_tokens = hit.tokens
        below_tokens = hit.tokens - hit.device_tokens
        storage_tokens = admitted.storage_hit_tokens
        request.hits = (hit.device_tokens, below_tokens - storage_tokens, storage_tokens)
        request.num_published_grains = hit.tokens // self.shape.prefix_granularity
        has_stop = not request.is_remote and hit.closed_tokens > hit.tokens
        request.promotion_tokens = hit.closed_tokens if has_stop else 0
        request.is_secured = self.covers_all(request)
        self.note_computed(request, span)

    def note_computed(self, request: Request, span: Span) -> None:
        """The prompt is computed up to the end of `span`, or will be when it has landed. A chunk leaves a snapshot on
        the last grain boundary that it passed; a peer sends the final state alone."""
        grain = self.shape.prefix_granularity
        boundary = span.end // grain * grain
        is_recorded = span.begin < boundary if span.is_local else boundary == span.end
        request.checkpoint_tokens = boundary if is_recorded else 0
        request.boundary_tokens = boundary
        request.boundary = Boundary.CHUNK
        if boundary == span.num_prompt_tokens // grain * grain:
            request.boundary = Boundary.ENDPOINT
        if span.end == request.promotion_tokens:
            request.boundary = Boundary.PROMOTED
        if span.end >= request.promotion_tokens:
            request.promotion_tokens = 0
        request.num_computed_tokens = request.num_covered_tokens = span.end

    # Later ones.

    def compute_chunk(self, request: Request, end: int) -> list[list[list[int]]] | None:
        """What the chunk before computed is published in the same transaction, then what nobody sees any more makes
        room. None, with nothing changed, if a full group cannot have the room: only the last chunk wants more than the
        prompt. Gives the ids of fresh blocks by group, of one group after the other."""
        span = self.span(request, request.num_computed_tokens, end)
        secured = self.coordinator.secure(request.tables, span.begin, span.num_secured_tokens)
        if secured is None:
            return None
        self.publish_pending(request, self.scope_of_prompt())
        self.coordinator.slide(request.tables, span.begin)
        fresh = self.coordinator.grow(request.tables, span)
        self.note_computed(request, span)
        return [secured, fresh]

    def make_step(self, request: Request, num_input_tokens: int) -> list[list[list[int]]] | None:
        """One decode row; likewise. It may begin as late as the results that are out can move it, and must fit then.
        None, with nothing changed, while a full group cannot have the room. Gives the ids of fresh blocks by group, of
        one group after the other."""
        end = len(request.tokens) - 1 + sum(request.results_out) + num_input_tokens
        num_covered_tokens = max(end, request.num_covered_tokens)
        num_tokens = self.tokens_to_secure(request, num_covered_tokens)
        secured = self.coordinator.secure(request.tables, request.num_computed_tokens, num_tokens)
        if secured is None:
            return None
        is_first = request.phase is not Phase.DECODING
        request.reserve_tokens = 0
        self.publish_pending(request, self.scope_of_prompt() if is_first else self.scope_of_completion())
        self.coordinator.slide(request.tables, request.num_computed_tokens)
        request.num_covered_tokens = num_covered_tokens
        fresh = self.coordinator.cover(request.tables, num_covered_tokens)
        if is_first:
            self.coordinator.lower_to_decoding(request.tables)
        return [secured, fresh]

    def tokens_to_secure(self, request: Request, num_covered_tokens: int) -> int:
        """A reservation replaces what the step takes by itself, unless that is more. It reaches no further than the
        longest request does."""
        reserved = request.num_covered_tokens + request.reserve_tokens
        return max(num_covered_tokens, min(reserved, self.max_request_tokens + self.shape.overlap_tokens))

    def demand_of(self, blocked: Request, gone: Collection[str]) -> list[int]:
        """Blocks by group that it must acquire at least to get on, if these owners of tables were gone."""
        if not blocked.is_resident:
            hit = self.hits_to_try(blocked)[0]
            end = blocked.num_prompt_tokens if blocked.is_remote else hit.tokens
            return self.coordinator.demand_without(self.span(blocked, hit.tokens, end), hit.tokens, gone)
        if blocked.phase is Phase.PREFILLING:
            num_tokens = blocked.num_prompt_tokens + self.step_tokens(blocked)
        else:
            width = blocked.decode_width(self.shape.verify_width)
            end = len(blocked.tokens) - 1 + sum(blocked.results_out) + width
            num_tokens = self.tokens_to_secure(blocked, max(end, blocked.num_covered_tokens))
        return self.coordinator.demand_to_secure(blocked.tables, num_tokens)

    # Publishing.

    def prefixes(self, request: Request, num_grains: int, *, is_kept: bool = False) -> list[Prefix]:
        is_kept = is_kept or self.shape.enable_prefix_cache
        return request.prefixes(self.shape.prefix_granularity, num_grains if is_kept else 0)

    def scope_of_prompt(self) -> StoreScope:
        """The decode role has its prompts from a peer and copies what a retraction would lose, nothing else."""
        return StoreScope.NOTHING if self.shape.role is Role.DECODE else StoreScope.EVERYTHING

    def scope_of_completion(self) -> StoreScope:
        return StoreScope.NOTHING if self.shape.role is Role.DECODE else StoreScope.WINDOWS

    def publish_pending(
        self, request: Request, stored: StoreScope = StoreScope.NOTHING, *, is_kept: bool = False
    ) -> None:
        """Publishes the full grains whose results have landed since the last time. On the prefill role a transfer may
        still read a block that turns out to be a duplicate."""
        grain = self.shape.prefix_granularity
        num_grains = request.num_computed_tokens // grain
        prefixes = self.prefixes(request, num_grains, is_kept=is_kept)
        if len(prefixes) <= request.num_published_grains:
            return
        is_boundary_of_prompt = num_grains * grain == request.boundary_tokens
        completed = Completed(
            begin=request.num_published_grains * grain,
            end=num_grains * grain,
            boundary=request.boundary if is_boundary_of_prompt else Boundary.CHUNK,
            checkpoint=request.checkpoint_tokens,
        )
        publication = Publication(
            prefixes=prefixes,
            completed=completed,
            epoch=request.epoch,
            uses=request.uses,
            keeps_duplicates=self.shape.role is Role.PREFILL,
            stored=stored,
        )
        self.coordinator.publish(request.tables, publication)
        request.num_published_grains = num_grains

    def publish_snapshot(self, request: Request) -> None:
        """What a retracted request would want to find again: full grains, and of an incomplete prefill the newest state
        that it left, whatever boundary that was."""
        if request.phase is Phase.PREFILLING:
            request.boundary = max(request.boundary, Boundary.ENDPOINT)
        tiers = self.coordinator.tiers
        self.publish_pending(request, is_kept=tiers is not None)
        if tiers is not None:
            for key in self.keys_of_snapshot(request):
                tiers.store_ahead(key)

    def publish_at_end(self, request: Request) -> None:
        self.publish_pending(request)
        if self.coordinator.tiers is not None and self.shape.role is not Role.DECODE:
            for key in self.keys_of_snapshot(request):
                self.coordinator.tiers.queue_store(key)

    def keys_of_snapshot(self, request: Request) -> list[Key]:
        prefixes = self.prefixes(request, request.num_published_grains, is_kept=True)
        return self.coordinator.keys_of_snapshot(prefixes)

    # Returning.

    def release_hits(self, request: Request) -> None:
        """Claimed hits of a remote prompt return at once: nobody writes there."""
        for policy, table in zip(self.policies, request.tables, strict=True):
            self.coordinator.pool.release_front(table, policy.num_hit_slots(request.num_hit_tokens))

    def hold_back(self, request: Request) -> None:
        """The request has ended, but a peer may still touch its blocks."""
        if request.tables:
            self.coordinator.lower_to_held(request.tables)

    def release_all(self, request: Request) -> None:
        self.coordinator.release(request.tables)
        request.tables, request.slot = [], 0

"""The live requests and the cache they share: who holds what, and how it is taken, published and returned."""

from __future__ import annotations

from collections.abc import Sequence

from reference_model.coordinator import Coordinator, Hit, Prefix
from reference_model.group_policies import GroupPolicy
from reference_model.requests import Phase, Request
from reference_model.values import Role, SchedulerShape, Submission


class Books:
    def __init__(self, shape: SchedulerShape, policies: Sequence[GroupPolicy]) -> None:
        self.shape = shape
        self.coordinator = Coordinator(shape, policies)
        self.requests: list[Request] = []  # in the order of submission
        self.num_retractions = 0

    def in_phase(self, *phases: Phase) -> list[Request]:
        return [request for request in self.requests if request.phase in phases]

    def tokens_to_check(self, submission: Submission) -> int:
        """What must fit an empty pool. The completion is generated elsewhere on the prefill role; wherever it is
        generated, there is room for one verify step at least."""
        if self.shape.role is Role.PREFILL:
            return len(submission.tokens) + self.shape.verify_width
        return len(submission.tokens) + max(submission.max_new_tokens or 0, self.shape.verify_width)

    def step_tokens(self, request: Request) -> int:
        """Behind the end of a prompt, whatever is secured. Near the longest request there is less left."""
        return min(self.shape.verify_width, self.max_request_tokens() - request.num_prompt_tokens)

    def headroom_tokens(self, request: Request) -> int:
        """What an admission secures behind the prompt: of a completion that has an end a step at least, and 4096
        tokens more with every retraction."""
        if self.shape.role is Role.PREFILL:
            return self.shape.verify_width
        if request.submission.max_new_tokens is None:
            return 0
        headroom = min(request.num_wanted_tokens, 4096 * (1 + request.num_retractions))
        return max(headroom, self.step_tokens(request))

    def max_request_tokens(self) -> int:
        """The longest request that an empty pool holds."""
        num_tokens = 0
        while self.num_lcm_blocks_for(num_tokens + 1) <= self.shape.num_lcm_blocks:
            num_tokens += 1
        return num_tokens

    def num_lcm_blocks_for(self, num_tokens: int) -> int:
        num_lcm_blocks = 0
        for group in self.shape.groups:
            num_blocks = -(-num_tokens // group.block_granularity)
            num_lcm_blocks += -(-num_blocks // group.cache_blocks_per_lcm_block)
        return num_lcm_blocks

    def free_slots(self) -> list[int]:
        """Slot 0 is reserved. A role that transfers has twice as many slots as rows."""
        num_slots = self.shape.max_batch_size * (1 if self.shape.role is Role.FUSED else 2)
        used = [request.slot for request in self.requests]
        return [slot for slot in range(1, num_slots + 1) if slot not in used]

    def num_started_ungranted(self) -> int:
        return sum(request.is_resident and not request.is_granted for request in self.requests)

    def admit(self, request: Request, budget_tokens: int | None) -> bool:
        """The first admission: everything or nothing. A local prompt computes at once what the budget allows, a remote
        one (no budget) is filled whole. If it does not fit behind its hits, which may be scattered over more parents
        than a compact table takes, it is tried without them."""
        for hit in self.hits_to_try(request):
            left = request.num_prompt_tokens - hit.tokens
            extent = left if budget_tokens is None else min(left, budget_tokens)
            reserve = left - extent + self.headroom_tokens(request)
            if extent == left:
                reserve = max(reserve, self.step_tokens(request))
            tables = self.coordinator.admit(f"table of {request.request_id}", hit, extent, reserve)
            if tables is not None:
                request.tables = tables
                request.slot = self.free_slots()[0]
                request.epoch = self.coordinator.last_epoch
                request.num_hit_tokens = hit.tokens
                request.num_computed_tokens = hit.tokens + extent
                request.num_published_grains = hit.tokens // self.shape.prefix_granularity
                request.did_not_fit = False
                request.is_secured = self.shape.role is Role.PREFILL or (
                    request.submission.max_new_tokens is not None
                    and self.headroom_tokens(request) >= request.num_wanted_tokens
                )
                return True
        request.did_not_fit = True
        return False

    def hits_to_try(self, request: Request) -> list[Hit]:
        """The last prompt token is never taken from the cache: computing it gives the first logits."""
        num_grains = (request.num_prompt_tokens - 1) // self.shape.prefix_granularity
        hit = self.coordinator.probe(self.prefixes(request, num_grains))
        return [hit] if hit.tokens == 0 else [hit, self.coordinator.probe([])]

    def prefixes(self, request: Request, num_grains: int) -> list[Prefix]:
        return request.prefixes(self.shape.prefix_granularity, num_grains if self.shape.enable_prefix_cache else 0)

    def publish_pending(self, request: Request) -> None:
        """Publishes the full grains whose results have landed since the last time. On the prefill role a transfer may
        still read a block that turns out to be a duplicate."""
        num_grains = request.num_computed_tokens // self.shape.prefix_granularity
        prefixes = self.prefixes(request, num_grains)
        if len(prefixes) > request.num_published_grains:
            keeps = self.shape.role is Role.PREFILL
            first_grain = request.num_published_grains
            self.coordinator.publish(request.tables, prefixes, first_grain, request.epoch, keeps_duplicates=keeps)
            request.num_published_grains = num_grains

    def release_hits(self, request: Request) -> None:
        """Claimed hits of a remote prompt return at once: nobody writes there."""
        for group, table in zip(self.shape.groups, request.tables, strict=True):
            self.coordinator.pool.release_front(table, request.num_hit_tokens // group.block_granularity)

    def release_all(self, request: Request) -> None:
        for table in request.tables:
            self.coordinator.pool.release_table(table)
        request.tables, request.slot = [], 0

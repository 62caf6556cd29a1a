"""An executor and a fused scheduler that work through requests together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

import scheduler_core
from cache_runtime.scheduler_bridge import pool_to_cache_groups
from model_runtime.executor import ModelExecutor
from model_runtime.sampler import BrokenLogits, SampledToken, SamplingParams

NO_ADAPTERS: Mapping[str, str] = MappingProxyType({})


class FusedRun:
    """Drives an executor by a fused scheduler until every request has its tokens."""

    def __init__(self, executor: ModelExecutor, *, token_budget: int = 16) -> None:
        contract = executor.arena.contract
        self._executor = executor
        self._config = scheduler_core.SchedulerConfig(
            role=scheduler_core.Role.FUSED,
            prefix_granularity=contract.prefix_granularity,
            num_lcm_blocks=contract.num_lcm_blocks,
            max_batch_size=8,
            token_budget=token_budget,
            cache_groups=pool_to_cache_groups(contract),
        )
        self._scheduler = scheduler_core.Scheduler(self._config)
        self.tokens: dict[str, list[SampledToken]] = {}
        # Requests that ended because their logits said nothing, and why.
        self.broken: dict[str, str] = {}
        self.hit_tokens: dict[str, int] = {}
        self.num_mixed_batches = 0
        self.num_holes = 0
        self.num_retractions = 0
        self.num_checkpoints = 0
        self._params: dict[str, SamplingParams] = {}
        self._num_tokens = 0

    def generate(
        self,
        prompts: Mapping[str, list[int]],
        num_tokens: int,
        sampling: SamplingParams | None = None,
        *,
        adapters: Mapping[str, str] = NO_ADAPTERS,
    ) -> dict[str, list[int]]:
        self.start(prompts, num_tokens, sampling, adapters=adapters)
        return self.finish(prompts)

    def finish(self, prompts: Iterable[str]) -> dict[str, list[int]]:
        """Steps until all of these have their tokens, or know no further one."""
        while any(self._is_running(request_id) for request_id in prompts):
            self.step()
        return {request_id: [token.token_id for token in self.tokens[request_id]] for request_id in prompts}

    def _is_running(self, request_id: str) -> bool:
        return request_id not in self.broken and len(self.tokens[request_id]) < self._num_tokens

    def start(
        self,
        prompts: Mapping[str, list[int]],
        num_tokens: int,
        sampling: SamplingParams | None = None,
        *,
        declares_length: bool = True,
        adapters: Mapping[str, str] = NO_ADAPTERS,
    ) -> None:
        """Without a declared length nothing is kept free for a completion, so that requests must give way.

        `adapters` by request.
        """
        self._params = {
            request_id: replace(sampling or SamplingParams(), adapter=adapters.get(request_id))
            for request_id in prompts
        }
        self._num_tokens = num_tokens
        self._scheduler.submit(
            [
                scheduler_core.RequestSpec(
                    request_id=request_id,
                    tokens=np.array(prompt, dtype=np.int32),
                    max_new_tokens=num_tokens if declares_length else None,
                    extra_keys=[adapters[request_id].encode()] if request_id in adapters else [],
                )
                for request_id, prompt in prompts.items()
            ]
        )
        self.tokens |= {request_id: [] for request_id in prompts}

    def abort(self, *request_ids: str) -> None:
        self._scheduler.advance([scheduler_core.AbortEvent(request_id) for request_id in request_ids])

    def assert_all_blocks_return(self) -> None:
        assert self._scheduler.clear_cache()
        capacity = self._scheduler.capacity()
        assert capacity.empty_lcm_blocks == capacity.total_lcm_blocks

    def parents_of(self, num_requests: int, request_tokens: int) -> int:
        """LCM blocks that so many requests of so many tokens hold at most."""
        return scheduler_core.CapacityModel(self._config).lcm_blocks_for_concurrency(
            num_requests=num_requests, num_tokens=num_requests * request_tokens, context_tokens=request_tokens
        )

    def step(self) -> None:
        plan = self._scheduler.next_plan()
        assert not plan.is_empty
        self.num_mixed_batches += 0 < plan.num_prefill_rows < plan.num_rows
        self.hit_tokens |= {admission.request_id: admission.device_hit_tokens for admission in plan.admissions}
        self.num_retractions += len(plan.retracted)
        self.num_checkpoints += int((plan.checkpoint_tokens > 0).sum())
        self._executor.zero_blocks(plan)
        self.num_holes += sum(int((table == 0).sum()) for table in plan.block_tables)
        sampled = self._executor.execute(plan, self._params)
        events: list[scheduler_core.Event] = []
        for request_id, token in zip(plan.request_ids, sampled, strict=True):
            if isinstance(token, BrokenLogits):
                self.broken[request_id] = token.reason
                events.append(scheduler_core.AbortEvent(request_id))
                continue
            events.append(scheduler_core.ResultEvent(request_id, [] if token is None else [token.token_id]))
            if token is not None:
                self.tokens[request_id].append(token)
                if len(self.tokens[request_id]) == self._num_tokens:
                    events.append(scheduler_core.FinishEvent(request_id))
        self._scheduler.advance(events)

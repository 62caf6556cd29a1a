"""pdmesh in one process, without RPC: scheduler and executor of a fused node. Arguments: MODEL NUM_THREADS WEIGHTS."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from protocol import prompt, serve

from cache_runtime.scheduler_bridge import pool_to_cache_groups
from model_runtime.checkpoint import open_checkpoint
from model_runtime.executor import ModelExecutor
from model_runtime.sampler import BrokenLogits, SampledToken, SamplingParams
from model_runtime.weight_choice import WeightChoice
from scheduler_core import AbortEvent, RequestSpec, ResultEvent, Role, Scheduler, SchedulerConfig

MEMORY_BYTES = 3 << 30
PREFIX_GRANULARITY = 64
TOKEN_BUDGET = 512
FLOAT32_BYTES = 4
GREEDY = SamplingParams()


class PdmeshEngine:
    def __init__(self, model: Path, num_threads: int, others: list[str]) -> None:
        (weights,) = others
        checkpoint = open_checkpoint(model)
        self._executor = ModelExecutor(
            checkpoint,
            memory_bytes=MEMORY_BYTES,
            prefix_granularity=PREFIX_GRANULARITY,
            num_threads=num_threads,
            weights=WeightChoice(weights),
        )
        contract = self._executor.arena.contract
        self._scheduler = Scheduler(
            SchedulerConfig(
                role=Role.FUSED,
                prefix_granularity=contract.prefix_granularity,
                num_lcm_blocks=contract.num_lcm_blocks,
                max_batch_size=64,
                token_budget=TOKEN_BUDGET,
                cache_groups=pool_to_cache_groups(contract),
                enable_prefix_cache=False,
            )
        )
        self._num_requests = 0
        config, facts = checkpoint.config, self._executor.weights
        head = config.vocab_size * config.hidden_size
        num_weights = facts.float32_bytes / FLOAT32_BYTES - (0 if config.tie_word_embeddings else head)
        self.facts: Mapping[str, float] = {
            "weight_bytes": facts.num_bytes,
            "cache_bytes_per_token": self._executor.arena.num_bytes / self._executor.token_capacity,
            "weights_per_token": num_weights,
            "weights_per_prompt_token": num_weights - head,
        }

    def prefill(self, num_tokens: int) -> float:
        (name,) = names = self._submit(1, num_tokens, max_new_tokens=1)
        began = time.perf_counter()
        while not self._step(names)[name]:
            pass
        seconds = time.perf_counter() - began
        self._scheduler.advance([AbortEvent(name)])
        return seconds

    def decode(self, batch_size: int, context_tokens: int, num_steps: int) -> float:
        # Those that come first generate while the others' prompts are computed.
        num_chunks = math.ceil(batch_size * context_tokens / TOKEN_BUDGET) + batch_size
        names = self._submit(batch_size, context_tokens, max_new_tokens=num_chunks + num_steps)
        waiting = set(names)
        while waiting:
            waiting -= {name for name, has_token in self._step(names).items() if has_token}
        began = time.perf_counter()
        for _ in range(num_steps):
            self._step(names)
        seconds = (time.perf_counter() - began) / num_steps
        self._scheduler.advance([AbortEvent(name) for name in names])
        return seconds

    def score(self, tokens: list[int]) -> float:
        (name,) = self._submit_prompts([tokens[:1]], max_new_tokens=len(tokens))
        total = 0.0
        for token in tokens[1:]:
            plan = self._scheduler.next_plan()
            self._executor.zero_blocks(plan)
            (row,) = self._executor.logits(plan).astype(np.float64)
            total += float(np.logaddexp.reduce(row) - row[token])
            self._scheduler.advance([ResultEvent(name, [token])])
        self._scheduler.advance([AbortEvent(name)])
        return total / (len(tokens) - 1)

    def _submit(self, count: int, num_tokens: int, max_new_tokens: int) -> list[str]:
        first = self._num_requests + 1
        prompts = [prompt(number, num_tokens) for number in range(first, first + count)]
        return self._submit_prompts(prompts, max_new_tokens)

    def _submit_prompts(self, prompts: list[list[int]], max_new_tokens: int) -> list[str]:
        specs = []
        for tokens in prompts:
            self._num_requests += 1
            specs.append(RequestSpec(request_id=f"r{self._num_requests}", tokens=tokens, max_new_tokens=max_new_tokens))
        self._scheduler.submit(specs)
        return [spec.request_id for spec in specs]

    def _step(self, names: list[str]) -> dict[str, bool]:
        """One plan; which of its requests got a token."""
        plan = self._scheduler.next_plan()
        self._executor.zero_blocks(plan)
        sampled = self._executor.execute(plan, dict.fromkeys(names, GREEDY))
        results: dict[str, SampledToken | None] = {}
        for name, outcome in zip(plan.request_ids, sampled, strict=True):
            if isinstance(outcome, BrokenLogits):
                raise RuntimeError(outcome.reason)
            results[name] = outcome
        self._scheduler.advance(
            [ResultEvent(name, [] if token is None else [token.token_id]) for name, token in results.items()]
        )
        return {name: token is not None for name, token in results.items()}


if __name__ == "__main__":
    serve(PdmeshEngine)

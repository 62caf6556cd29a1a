"""Every family under the real scheduler: shared batches, prefix hits, eviction, retraction, blocks that all return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import PreTrainedModel
from unit.model_runtime.fused_run import FusedRun
from unit.model_runtime.reference_models import assert_greedy, random_prompt, save
from unit.model_runtime.tiny_models import EVERY_FAMILY, TINY_MODELS

from cache_runtime.recipes.spec import CacheFamily
from model_runtime.checkpoint import Checkpoint, open_checkpoint
from model_runtime.executor import ModelExecutor
from model_runtime.family import CacheBudget
from model_runtime.registry import find_family

GRAIN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A reference model and the same weights here."""

    reference: PreTrainedModel
    checkpoint: Checkpoint

    def executor(self, num_lcm_blocks: int | None = None) -> ModelExecutor:
        """With so many parents, by default as many as nobody here can fill."""
        memory_bytes = 16 << 20 if num_lcm_blocks is None else self.bytes_of(num_lcm_blocks)
        return ModelExecutor(
            self.checkpoint, memory_bytes=memory_bytes, prefix_granularity=GRAIN, kernel_page_size=4, num_threads=1
        )

    def bytes_of(self, num_lcm_blocks: int) -> int:
        budget = CacheBudget(memory_bytes=16 << 20, prefix_granularity=GRAIN, dtype="float32")
        family = find_family(self.checkpoint.config.architecture)
        layout = family.cache_recipe(self.checkpoint.config, budget).setup().plan.layout
        return layout.num_arena_bytes(num_lcm_blocks)

    def executor_for(self, num_requests: int, request_tokens: int) -> ModelExecutor:
        """With just the parents that these hold at most."""
        return self.executor(FusedRun(self.executor()).parents_of(num_requests, request_tokens))

    def prompt(self, num_tokens: int, seed: int) -> list[int]:
        return random_prompt(num_tokens, seed, self.checkpoint.config.vocab_size)

    def assert_exact(
        self, prompts: Mapping[str, list[int]], generated: Mapping[str, list[int]], num_tokens: int
    ) -> None:
        for request_id, prompt in prompts.items():
            assert_greedy(self.reference, prompt, generated[request_id], num_tokens)

    @property
    def has_states(self) -> bool:
        return any(group.family is CacheFamily.STATE for group in self.executor().plan.groups)


def make_pair(reference: PreTrainedModel, folder: Path) -> Pair:
    return Pair(reference=reference, checkpoint=open_checkpoint(save(reference, folder)))


@pytest.fixture(scope="module", params=TINY_MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(TINY_MODELS[request.param](), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("token_budget", [GRAIN + 1, 24])
def test_exact_requests_that_share_batches(pair: Pair, token_budget: int) -> None:
    prompts = {f"{num} tokens": pair.prompt(num, seed=num) for num in (1, GRAIN, 37, 50)}
    run = FusedRun(pair.executor(), token_budget=token_budget)
    generated = run.generate(prompts, 20)
    assert run.num_mixed_batches > 0
    pair.assert_exact(prompts, generated, 20)
    run.assert_all_blocks_return()


def test_exact_after_a_prefix_hit(pair: Pair) -> None:
    shared = pair.prompt(5 * GRAIN, seed=50)
    run = FusedRun(pair.executor())
    run.generate({"first": [*shared, 5]}, 4)
    prompts = {"second": [*shared, 9, 8, 7]}
    pair.assert_exact(prompts, run.generate(prompts, 20), 20)
    assert run.hit_tokens == {"first": 0, "second": 5 * GRAIN}


def test_exact_with_a_checkpoint_inside_the_last_chunk(pair: Pair) -> None:
    """The chunk crosses the last grain boundary, and whoever shares the prompt up to there goes on from it."""
    prompt = pair.prompt(2 * GRAIN + 3, seed=51)
    run = FusedRun(pair.executor(), token_budget=64)
    first = run.generate({"first": prompt}, 12)
    assert run.num_checkpoints == (1 if pair.has_states else 0)
    prompts = {"again": [*prompt[: 2 * GRAIN], 9, 8]}
    again = run.generate(prompts, 12)
    assert run.hit_tokens["again"] == 2 * GRAIN
    pair.assert_exact({"first": prompt, **prompts}, first | again, 12)


def test_exact_in_an_arena_that_must_evict(pair: Pair) -> None:
    run = FusedRun(pair.executor_for(3, 42))
    for seed in range(4):
        prompts = {f"{seed} {index}": pair.prompt(30, seed=10 * seed + index) for index in range(3)}
        pair.assert_exact(prompts, run.generate(prompts, 12), 12)
    run.assert_all_blocks_return()


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_exact_though_requests_give_way_and_come_back(family: str, tmp_path: Path) -> None:
    """In the largest arena that holds three while they are short, and not together once they have grown."""
    pair = make_pair(EVERY_FAMILY[family](), tmp_path)
    prompts = {f"{index}": pair.prompt(20, seed=index) for index in range(3)}
    sizes = FusedRun(pair.executor())
    for num_lcm_blocks in range(sizes.parents_of(3, 28), sizes.parents_of(1, 68) - 1, -1):
        run = FusedRun(pair.executor(num_lcm_blocks))
        run.start(prompts, 48, declares_length=False)
        generated = run.finish(prompts)
        pair.assert_exact(prompts, generated, 48)
        run.assert_all_blocks_return()
        if run.num_retractions > 0:
            return
    pytest.fail("nobody gave way")


def test_requests_that_are_given_up_leave_no_block_behind(pair: Pair) -> None:
    run = FusedRun(pair.executor(), token_budget=GRAIN + 1)
    run.start({"long": pair.prompt(60, seed=1), "short": pair.prompt(5, seed=2)}, 40)
    for _ in range(6):
        run.step()
    run.abort("long", "short")
    run.assert_all_blocks_return()

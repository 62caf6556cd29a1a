"""Gemma 3 under the real scheduler: sliding tables with holes, prefix reuse from a window, blocks that all return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from transformers import Gemma3ForCausalLM
from unit.model_runtime import tiny_gemma3
from unit.model_runtime.fused_run import FusedRun
from unit.model_runtime.reference_models import assert_greedy

from cache_runtime.arena import CacheArena
from cache_runtime.errors import CacheConfigError
from cache_runtime.recipes.sliding_full import SlidingFullCacheRecipe
from model_runtime import executor as executor_module
from model_runtime.checkpoint import Checkpoint, open_checkpoint
from model_runtime.executor import ModelExecutor
from model_runtime.registry import find_family

GRAIN = 8


@pytest.fixture(scope="module")
def reference() -> Gemma3ForCausalLM:
    return tiny_gemma3.make_reference()


@pytest.fixture(scope="module")
def checkpoint(reference: Gemma3ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(tiny_gemma3.save(reference, tmp_path_factory.mktemp("model")))


def make_executor(checkpoint: Checkpoint, memory_bytes: int = 4 << 20) -> ModelExecutor:
    return ModelExecutor(
        checkpoint, memory_bytes=memory_bytes, prefix_granularity=GRAIN, kernel_page_size=4, num_threads=1
    )


def assert_exact(
    reference: Gemma3ForCausalLM, prompts: Mapping[str, list[int]], generated: Mapping[str, list[int]], num_tokens: int
) -> None:
    for request_id, prompt in prompts.items():
        assert_greedy(reference, prompt, generated[request_id], num_tokens)


@pytest.mark.parametrize("token_budget", [3, 16])
def test_exact_gemma3_requests_that_share_batches_and_slide_past_the_window(
    reference: Gemma3ForCausalLM, checkpoint: Checkpoint, token_budget: int
) -> None:
    prompts = {f"{num} tokens": tiny_gemma3.random_prompt(num, seed=num) for num in (1, GRAIN, 37)}
    run = FusedRun(make_executor(checkpoint), token_budget=token_budget)
    generated = run.generate(prompts, 2 * tiny_gemma3.WINDOW_TOKENS)
    assert run.num_mixed_batches > 0
    assert run.num_holes > 0, "no window slid"
    assert_exact(reference, prompts, generated, 2 * tiny_gemma3.WINDOW_TOKENS)


def test_exact_gemma3_after_a_prefix_hit_that_resumes_from_a_window(
    reference: Gemma3ForCausalLM, checkpoint: Checkpoint
) -> None:
    shared = tiny_gemma3.random_prompt(5 * GRAIN, seed=50)
    run = FusedRun(make_executor(checkpoint))
    run.generate({"first": [*shared, 5]}, 4)
    prompts = {"second": [*shared, 9, 8, 7]}
    assert_exact(reference, prompts, run.generate(prompts, 20), 20)
    assert run.hit_tokens == {"first": 0, "second": 5 * GRAIN}


def test_exact_gemma3_in_an_arena_that_must_evict_and_that_returns_every_block(
    reference: Gemma3ForCausalLM, checkpoint: Checkpoint
) -> None:
    executor = make_executor(checkpoint, memory_bytes=400_000)
    run = FusedRun(executor)
    for seed in range(4):
        prompts = {f"{seed} {index}": tiny_gemma3.random_prompt(30, seed=10 * seed + index) for index in range(3)}
        assert_exact(reference, prompts, run.generate(prompts, 12), 12)
    run.assert_all_blocks_return()


def test_gemma3_requests_that_are_given_up_leave_no_block_behind(checkpoint: Checkpoint) -> None:
    run = FusedRun(make_executor(checkpoint), token_budget=8)
    run.start({"long": tiny_gemma3.random_prompt(60, seed=1), "short": tiny_gemma3.random_prompt(5, seed=2)}, 40)
    for _ in range(6):
        run.step()
    run.abort("long", "short")
    run.assert_all_blocks_return()


def test_a_layer_that_sees_more_than_its_group_retains_is_refused_before_the_arena_exists(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = find_family(checkpoint.config.architecture)

    def forgetful(config, budget):
        recipe = family.cache_recipe(config, budget)
        assert isinstance(recipe, SlidingFullCacheRecipe)
        return replace(recipe, sliding_window_tokens=tiny_gemma3.WINDOW_TOKENS - 1)

    def allocate(*_: object) -> CacheArena:
        raise AssertionError("memory was allocated")

    monkeypatch.setattr(
        executor_module,
        "find_family",
        lambda _: replace(family, cache_recipe=forgetful),
    )
    monkeypatch.setattr(executor_module, "CacheArena", allocate)
    with pytest.raises(
        CacheConfigError, match=r'layer 0: sees 11 tokens .*, but group "sliding" retains sliding_window_tokens 10'
    ):
        make_executor(checkpoint)

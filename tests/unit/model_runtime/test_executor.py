"""The executor under the real scheduler: exact tokens, prefix reuse, sampling and refusals."""

from __future__ import annotations

import gc
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM
from unit.model_runtime import tiny_llama
from unit.model_runtime.fused_run import FusedRun
from unit.model_runtime.paged_batches import BlockLedger, HandPlan, Row

from cache_runtime.errors import BatchContractError, CacheConfigError
from model_runtime.checkpoint import Checkpoint, open_checkpoint
from model_runtime.errors import UnsupportedDtypeError
from model_runtime.executor import ModelExecutor
from model_runtime.sampler import SamplingParams

GRAIN = 8


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    return tiny_llama.make_reference()


@pytest.fixture(scope="module")
def checkpoint(reference: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(tiny_llama.save(reference, tmp_path_factory.mktemp("model")))


def make_executor(checkpoint: Checkpoint, *, kernel_page_size: int | None = 4, num_threads: int = 1) -> ModelExecutor:
    return ModelExecutor(
        checkpoint,
        memory_bytes=1 << 20,
        prefix_granularity=GRAIN,
        kernel_page_size=kernel_page_size,
        num_threads=num_threads,
    )


def test_llama_requests_under_the_scheduler_get_the_exact_greedy_tokens(reference, checkpoint) -> None:
    lengths = (1, GRAIN - 1, GRAIN, GRAIN + 1, 37)
    prompts = {f"{num} tokens": tiny_llama.random_prompt(num, seed=num) for num in lengths}
    run = FusedRun(make_executor(checkpoint))
    generated = run.generate(prompts, 20)
    assert run.num_mixed_batches > 0
    for request_id, prompt in prompts.items():
        assert generated[request_id] == tiny_llama.reference_greedy(reference, prompt, 20), request_id


def test_logits_are_those_that_tokens_are_sampled_from(checkpoint) -> None:
    prompts = [tiny_llama.random_prompt(num, seed=num) for num in (5, 11, 3)]
    rows = [Row(request_id=str(num), tokens=prompt, wants_logits=num != 1) for num, prompt in enumerate(prompts)]
    sampler, scorer = (make_executor(checkpoint) for _ in range(2))
    sampled = sampler.execute(
        BlockLedger(sampler.arena.contract).plan(rows), {row.request_id: SamplingParams(num_logprobs=1) for row in rows}
    )
    logits = scorer.logits(BlockLedger(scorer.arena.contract).plan(rows))
    wanted = [token for token in sampled if token is not None]
    assert logits.shape == (len(wanted), checkpoint.config.vocab_size) == (2, checkpoint.config.vocab_size)
    logprobs = torch.log_softmax(torch.from_numpy(logits).double(), -1)
    for token, row in zip(wanted, logprobs, strict=True):
        assert token.token_id == int(row.argmax())
        assert token.logprob == pytest.approx(float(row[token.token_id]))


def test_llama_tokens_after_a_prefix_hit_are_exact(reference, checkpoint) -> None:
    shared = tiny_llama.random_prompt(3 * GRAIN, seed=50)
    run = FusedRun(make_executor(checkpoint))
    run.generate({"first": [*shared, 5, 6]}, 4)
    second = [*shared, 9, 8, 7]
    assert run.generate({"second": second}, 12)["second"] == tiny_llama.reference_greedy(reference, second, 12)
    assert run.hit_tokens == {"first": 0, "second": 3 * GRAIN}


def test_sampled_tokens_do_not_depend_on_the_batch(checkpoint) -> None:
    sampling = SamplingParams(temperature=1.5, top_k=40, top_p=0.95, seed=77)
    prompts = {str(seed): tiny_llama.random_prompt(9, seed=seed) for seed in range(4)}
    together = FusedRun(make_executor(checkpoint)).generate(prompts, 16, sampling)
    for request_id, prompt in prompts.items():
        alone = FusedRun(make_executor(checkpoint)).generate({request_id: prompt}, 16, sampling)
        assert alone[request_id] == together[request_id]
    greedy = FusedRun(make_executor(checkpoint)).generate(prompts, 16)
    assert greedy != together


def test_logprobs_are_those_of_the_reference(reference, checkpoint) -> None:
    prompt = tiny_llama.random_prompt(11, seed=3)
    run = FusedRun(make_executor(checkpoint))
    run.generate({"a": prompt}, 1, SamplingParams(num_logprobs=5))
    expected = tiny_llama.reference_logits(reference, prompt)[-1].log_softmax(-1)
    (token,) = run.tokens["a"]
    assert token.logprob == pytest.approx(float(expected.max()), abs=1e-4)
    values, ids = expected.topk(5)
    assert [token_id for token_id, _ in token.top_logprobs] == ids.tolist()
    assert [value for _, value in token.top_logprobs] == pytest.approx(values.tolist(), abs=1e-4)


def test_stages_name_the_fields_that_on_stage_reports(checkpoint) -> None:
    executor = make_executor(checkpoint)
    assert executor.stages == (("layers.0.k", "layers.0.v"), ("layers.1.k", "layers.1.v"))
    reported: list[tuple[int, bool]] = []

    def on_stage(stage: int) -> None:
        reported.append((stage, all(bool(executor.arena.field(field).any()) for field in executor.stages[stage])))

    executor.execute(one_row_plan(executor), {"a": SamplingParams()}, on_stage)
    assert reported == [(0, True), (1, True)]


def test_zero_blocks_clears_the_plans_blocks_and_no_others(checkpoint) -> None:
    executor = make_executor(checkpoint)
    field = executor.arena.field("layers.1.v")
    field.fill_(1.0)
    executor.zero_blocks(replace(one_row_plan(executor), zero_blocks=[np.array([2, 5], np.int32)]))
    cleared = [block for block in range(field.shape[0]) if not bool(field[block].any())]
    assert cleared == [2, 5]


def test_rows_that_want_no_logits_get_none(checkpoint) -> None:
    executor = make_executor(checkpoint)
    assert executor.execute(one_row_plan(executor, wants_logits=False), {}) == (None,)


def test_a_row_without_sampling_parameters_is_refused_before_the_arena_is_touched(checkpoint) -> None:
    executor = make_executor(checkpoint)
    with pytest.raises(ValueError, match='request "a" has a row that wants logits'):
        executor.execute(one_row_plan(executor), {})
    assert not bool(executor.arena.field("layers.0.k").any())


def test_a_plan_that_contradicts_the_contract_is_refused_before_the_arena_is_touched(checkpoint) -> None:
    executor = make_executor(checkpoint)
    plan = replace(one_row_plan(executor), block_tables=[np.array([[10_000]], np.int32)])
    with pytest.raises(BatchContractError, match="10000"):
        executor.execute(plan, {"a": SamplingParams()})
    plan = replace(one_row_plan(executor), token_ids=np.array([1, 2], np.int32))
    with pytest.raises(ValueError, match=r"token_ids has shape \(2,\)"):
        executor.execute(plan, {"a": SamplingParams()})
    assert not bool(executor.arena.field("layers.0.k").any())


def test_torch_gets_one_thread_and_the_native_kernels_as_many_as_asked(checkpoint) -> None:
    def names_of_threads() -> list[str]:
        return os.listdir("/proc/self/task")

    gc.collect()  # executors of other tests take their threads with them
    before = len(names_of_threads())
    executor = make_executor(checkpoint, num_threads=5)
    assert len(names_of_threads()) == before + 4, "the calling thread is the fifth"
    assert torch.get_num_threads() == 1
    del executor


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dtype": "float8"}, UnsupportedDtypeError, r'"float8" has no CPU kernels \(supported: float32\)'),
        ({"kernel_page_size": 3}, CacheConfigError, "kernel_page_size 3 .* must divide block_granularity 8"),
        ({"memory_bytes": 1000}, CacheConfigError, "memory_bytes 1000 is too small"),
        ({"num_threads": 0}, ValueError, "num_threads must be at least 1, got 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    checkpoint, changes: dict[str, object], error: type[Exception], message: str
) -> None:
    settings = {"memory_bytes": 1 << 20, "prefix_granularity": GRAIN, "kernel_page_size": 4, "num_threads": 1}
    with pytest.raises(error, match=message):
        ModelExecutor(checkpoint, **(settings | changes))


def one_row_plan(executor: ModelExecutor, *, wants_logits: bool = True) -> HandPlan:
    ledger = BlockLedger(executor.arena.contract)
    return ledger.plan([Row(request_id="a", tokens=[3, 4, 5], wants_logits=wants_logits)])

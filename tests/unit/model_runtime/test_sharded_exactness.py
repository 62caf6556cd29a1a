"""Models whose blocks lie on several context ranks, each with a part of the memory: the tokens of the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from unit.model_runtime import tiny_gemma3, tiny_llama
from unit.model_runtime.fused_run import FusedRun
from unit.model_runtime.paged_batches import BlockLedger, Row
from unit.model_runtime.reference_models import assert_greedy, random_prompt, save
from unit.model_runtime.thread_ranks import run_ranks
from unit.model_runtime.tiny_models import TINY_MODELS

from cache_runtime.errors import BlockIdError
from cache_runtime.recipes.spec import CacheFamily, CacheGroupSpec, CacheRetention
from model_runtime.checkpoint import Checkpoint, open_checkpoint
from model_runtime.errors import RankGroupError
from model_runtime.executor import ModelExecutor
from model_runtime.rank_group import RankGroup
from model_runtime.sampler import SampledToken, SamplingParams

GRAIN = 8
MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {
    "llama": tiny_llama.make_reference,
    "gemma3": tiny_gemma3.make_reference,
    # An indexer chooses among all rows of a history, so that family refuses to be shared (test_dsa_exactness.py).
    **{name: make for name, make in TINY_MODELS.items() if name != "dsa"},
}
GREEDY = {"a": SamplingParams(), "b": SamplingParams()}


def executor(checkpoint: Checkpoint, ranks: RankGroup | None = None, memory_bytes: int = 2 << 20) -> ModelExecutor:
    return ModelExecutor(
        checkpoint,
        memory_bytes=memory_bytes,
        prefix_granularity=GRAIN,
        kernel_page_size=4,
        num_threads=1,
        context_ranks=ranks,
    )


def keeps_all_rows(group: CacheGroupSpec) -> bool:
    return group.family is CacheFamily.HISTORY and group.retention is CacheRetention.FULL_HISTORY


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A reference model and the same weights here."""

    reference: PreTrainedModel
    checkpoint: Checkpoint

    def prompt(self, num_tokens: int, seed: int) -> list[int]:
        return random_prompt(num_tokens, seed, self.checkpoint.config.vocab_size)

    def assert_greedy(
        self, by_rank: Sequence[Mapping[str, list[int]]], prompts: Mapping[str, list[int]], num_tokens: int
    ) -> None:
        """Every rank has the reference's tokens."""
        answers = by_rank[0]
        assert all(others == answers for others in by_rank)
        assert answers.keys() == prompts.keys()
        for name, prompt in prompts.items():
            assert_greedy(self.reference, prompt, answers[name], num_tokens)


def make_pair(name: str, directory: Path) -> Pair:
    reference = MODELS[name]()
    return Pair(reference=reference, checkpoint=open_checkpoint(save(reference, directory)))


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sharded_requests_that_share_batches_and_are_cut_into_chunks_are_exact(pair: Pair, num_ranks: int) -> None:
    prompts = {f"{num} tokens": pair.prompt(num, seed=num) for num in (1, GRAIN, 37, 50)}

    def work(ranks: RankGroup) -> dict[str, list[int]]:
        mine = executor(pair.checkpoint, ranks)
        assert [group.shard_count for group in mine.plan.groups if keeps_all_rows(group)] == [num_ranks]
        run = FusedRun(mine, token_budget=GRAIN + 1)
        generated = run.generate(prompts, 20)
        assert run.num_mixed_batches > 0
        run.assert_all_blocks_return()
        return generated

    by_rank = run_ranks(num_ranks, work)
    assert len({token for tokens in by_rank[0].values() for token in tokens}) > 8
    pair.assert_greedy(by_rank, prompts, 20)


def test_sharded_prefix_hit_is_exact(pair: Pair) -> None:
    shared = pair.prompt(5 * GRAIN, seed=50)
    prompts = {"second": [*shared, 9, 8, 7]}

    def work(ranks: RankGroup) -> dict[str, list[int]]:
        run = FusedRun(executor(pair.checkpoint, ranks))
        run.generate({"first": [*shared, 5]}, 4)
        generated = run.generate(prompts, 20)
        assert run.hit_tokens == {"first": 0, "second": 5 * GRAIN}
        return generated

    pair.assert_greedy(run_ranks(2, work), prompts, 20)


def test_sharded_llama_in_arenas_that_must_evict_and_retract_is_exact(llama: Pair) -> None:
    prompts = {f"{index}": llama.prompt(20, seed=index) for index in range(3)}
    layout = executor(llama.checkpoint).plan.layout

    def work(ranks: RankGroup) -> dict[str, list[int]]:
        run = FusedRun(executor(llama.checkpoint, ranks, memory_bytes=layout.num_arena_bytes(8)))
        run.start(prompts, 48, declares_length=False)
        generated = run.finish(prompts)
        assert run.num_retractions > 0
        run.assert_all_blocks_return()
        return generated

    llama.assert_greedy(run_ranks(2, work), prompts, 48)


def test_every_llama_rank_has_the_same_logits_to_the_bit(llama: Pair) -> None:
    prompts = {"a": llama.prompt(40, seed=1), "b": llama.prompt(11, seed=2)}

    def work(ranks: RankGroup) -> dict[str, list[SampledToken]]:
        run = FusedRun(executor(llama.checkpoint, ranks))
        run.generate(prompts, 12, SamplingParams(temperature=0.9, seed=5, num_logprobs=3))
        return run.tokens

    first, second = run_ranks(2, work)
    assert first == second
    assert all(token.logprob is not None for tokens in first.values() for token in tokens)


def test_two_llama_ranks_with_half_of_the_memory_hold_the_same_tokens(llama: Pair) -> None:
    """The whole prompt fits two arenas of half the size, and neither of them alone; what is lost is a null block."""
    half = executor(llama.checkpoint).plan.layout.num_arena_bytes(7)
    assert executor(llama.checkpoint, memory_bytes=half).token_capacity == 7 * GRAIN
    assert executor(llama.checkpoint, memory_bytes=2 * half).token_capacity == 15 * GRAIN
    prompts = {"long": llama.prompt(14 * GRAIN - 8, seed=3)}

    def work(ranks: RankGroup) -> tuple[int, int, dict[str, list[int]]]:
        mine = executor(llama.checkpoint, ranks, memory_bytes=half)
        return mine.arena.num_bytes, mine.token_capacity, FusedRun(mine).generate(prompts, 8)

    by_rank = run_ranks(2, work)
    assert [sizes for *sizes, _ in by_rank] == [[half, 14 * GRAIN]] * 2
    llama.assert_greedy([answers for _, _, answers in by_rank], prompts, 8)


def test_a_llama_rank_writes_the_rows_of_its_own_blocks_and_nothing_else(llama: Pair) -> None:
    """Poisoned arenas: after a forward only the rows of the tokens whose blocks a rank holds have changed."""
    tokens = llama.prompt(29, seed=4)

    def work(ranks: RankGroup) -> tuple[set[int], set[int]]:
        mine = executor(llama.checkpoint, ranks)
        for field in mine.plan.fields:
            mine.arena.field(field.field_id).fill_(float("nan"))
        plan = BlockLedger(mine.arena.contract).plan([Row(request_id="a", tokens=tokens)])
        mine.execute(plan, GREEDY)
        table = plan.block_tables[0][0].tolist()
        held = {slot: (block - 1) // 2 + 1 for slot, block in enumerate(table) if (block - 1) % 2 == ranks.rank}
        expected = {
            block * GRAIN + offset
            for slot, block in held.items()
            for offset in range(min(GRAIN, len(tokens) - slot * GRAIN))
        }
        for field in mine.plan.fields:
            rows = mine.arena.field(field.field_id).flatten(0, 1).flatten(1)  # [num_blocks * GRAIN, width]
            written = torch.isfinite(rows).all(dim=1)
            assert set(written.nonzero().flatten().tolist()) == expected
            assert bool(torch.isnan(rows[~written]).all())
        return set(held), set(held.values())

    slots = [slots for slots, _ in run_ranks(2, work)]
    assert sorted([*slots[0], *slots[1]]) == [0, 1, 2, 3]
    assert all(slots)


def test_a_llama_rank_clears_its_own_blocks_and_nothing_else(llama: Pair) -> None:
    def work(ranks: RankGroup) -> set[int]:
        mine = executor(llama.checkpoint, ranks)
        mine.arena.field("layers.1.v").fill_(1.0)
        plan = BlockLedger(mine.arena.contract).plan([Row(request_id="a", tokens=[3, 4, 5])])
        mine.zero_blocks(replace(plan, zero_blocks=[np.array([3, 4, 6, 0], dtype=np.int32)]))
        is_clear = (mine.arena.field("layers.1.v") == 0.0).flatten(1).all(dim=1)
        return set(is_clear.nonzero().flatten().tolist())

    assert run_ranks(2, work) == [{2}, {2, 3}]


def test_nothing_is_cleared_when_any_id_of_a_plan_is_no_block(llama: Pair) -> None:
    def work(ranks: RankGroup) -> None:
        mine = executor(llama.checkpoint, ranks)
        mine.arena.field("layers.0.k").fill_(1.0)
        plan = BlockLedger(mine.arena.contract).plan([Row(request_id="a", tokens=[3, 4, 5])])
        bad_id = mine.arena.contract.groups[0].num_virtual_blocks
        with pytest.raises(BlockIdError, match=f"block id {bad_id} is outside"):
            mine.zero_blocks(replace(plan, zero_blocks=[np.array([3, 4, bad_id], dtype=np.int32)]))
        assert bool((mine.arena.field("layers.0.k") == 1.0).all())

    run_ranks(2, work)


def test_ranks_with_different_plans_are_stopped_before_they_touch_the_arena(llama: Pair) -> None:
    def work(ranks: RankGroup) -> None:
        mine = executor(llama.checkpoint, ranks)
        plan = BlockLedger(mine.arena.contract).plan([Row(request_id="a", tokens=[3, 4, 5 + ranks.rank])])
        mine.arena.field("layers.0.k").fill_(7.0)
        with pytest.raises(RankGroupError, match=f"rank {ranks.rank} of 2: plans differ"):
            mine.execute(plan, GREEDY)
        assert bool((mine.arena.field("layers.0.k") == 7.0).all())

    run_ranks(2, work)

"""Models whose heads are shared by tensor ranks: the bits of one rank, from a part of the weights and of the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import PreTrainedModel
from unit.model_runtime import tiny_gemma3, tiny_gguf, tiny_kimi_linear, tiny_llama, tiny_qwen3_next
from unit.model_runtime.fused_run import FusedRun
from unit.model_runtime.paged_batches import BlockLedger, Row
from unit.model_runtime.reference_models import random_prompt, save
from unit.model_runtime.thread_ranks import run_ranks
from unit.model_runtime.tiny_models import TINY_MODELS

from cache_runtime.errors import CacheConfigError
from model_runtime.checkpoint import Checkpoint, open_checkpoint
from model_runtime.errors import RankGroupError, UnsupportedRanksError
from model_runtime.executor import ModelExecutor
from model_runtime.rank_group import RankGroup
from model_runtime.safetensors_source import SafetensorsSource
from model_runtime.sampler import SampledToken, SamplingParams

GRAIN = 8
MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {
    "llama": tiny_llama.make_reference,
    "llama, one kv head": lambda: tiny_llama.make_reference(num_kv_heads=1),
    "gemma3": tiny_gemma3.make_reference,
    **TINY_MODELS,
    "kimi": lambda: tiny_kimi_linear.make_reference(linear_num_heads=4),
    "qwen3_next, one key head": lambda: tiny_qwen3_next.make_reference(linear_num_key_heads=1),
}


def executor(checkpoint: Checkpoint, ranks: RankGroup | None = None) -> ModelExecutor:
    return ModelExecutor(
        checkpoint,
        memory_bytes=2 << 20,
        prefix_granularity=GRAIN,
        kernel_page_size=4,
        num_threads=1,
        tensor_ranks=ranks,
    )


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(save(MODELS[request.param](), tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(save(tiny_llama.make_reference(), tmp_path_factory.mktemp("llama")))


def generate(mine: ModelExecutor, prompts: Mapping[str, list[int]]) -> dict[str, list[SampledToken]]:
    """In chunks and mixed batches, with log-probabilities, which show every bit of the logits."""
    run = FusedRun(mine, token_budget=GRAIN + 1)
    run.generate(prompts, 10, SamplingParams(num_logprobs=3))
    run.assert_all_blocks_return()
    assert run.num_mixed_batches > 0
    return run.tokens


def test_two_tensor_ranks_have_the_bits_of_one(checkpoint: Checkpoint) -> None:
    prompts = {str(num): random_prompt(num, num, checkpoint.config.vocab_size) for num in (3, GRAIN, 37)}
    alone = generate(executor(checkpoint), prompts)
    assert len({token.token_id for tokens in alone.values() for token in tokens}) > 5
    assert run_ranks(2, lambda ranks: generate(executor(checkpoint, ranks), prompts)) == [alone, alone]


def test_two_ranks_of_a_quantised_file_have_the_bits_of_one(tmp_path: Path) -> None:
    """Heads are cut from matrices whose rows a file interleaves, and from three kinds of blocks."""
    kinds = {
        "attn_q": GGMLQuantizationType.Q4_1,
        "attn_k": GGMLQuantizationType.Q8_0,
        "attn_v": GGMLQuantizationType.Q5_0,
        "attn_output": GGMLQuantizationType.Q8_0,
    }
    reference = tiny_llama.make_reference(hidden_size=64, intermediate_size=96)
    quantised = open_checkpoint(tiny_gguf.write_gguf(tmp_path / "model.gguf", reference, quantized=kinds))
    prompts = {str(num): random_prompt(num, num, quantised.config.vocab_size) for num in (3, 19)}
    alone = generate(executor(quantised), prompts)
    assert run_ranks(2, lambda ranks: generate(executor(quantised, ranks), prompts)) == [alone, alone]


def test_a_rank_reads_and_keeps_half_of_the_weights_of_its_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of little but attention. What is read is counted where the files are."""
    reference = tiny_llama.make_reference(num_heads=12, num_kv_heads=12, hidden_size=192, intermediate_size=32)
    heavy = open_checkpoint(save(reference, tmp_path))
    num_read: dict[str, int] = {}
    read_into = SafetensorsSource.read_into

    def count(source: SafetensorsSource, name: str, destination: torch.Tensor, first_row: int = 0) -> None:
        num_read[name] = num_read.get(name, 0) + destination.shape[0]
        read_into(source, name, destination, first_row)

    whole = executor(heavy).weights.num_bytes
    monkeypatch.setattr(SafetensorsSource, "read_into", count)
    parts = run_ranks(2, lambda ranks: executor(heavy, ranks).weights.num_bytes)
    # Matrices [192, 192] four times in each of two layers, of which a rank has half.
    assert [whole - part for part in parts] == [4 * 2 * 192 * 192 * 4 // 2] * 2
    for name in "qkvo":
        assert num_read[f"model.layers.0.self_attn.{name}_proj.weight"] == 192  # half on each of the two


def test_the_rows_and_states_of_the_ranks_are_the_parts_of_those_of_one_rank(checkpoint: Checkpoint) -> None:
    """What a handoff between unequal nodes relies on, to the bit."""
    rows = [Row(request_id="a", tokens=random_prompt(21, 3, checkpoint.config.vocab_size))]

    def fields_of(mine: ModelExecutor) -> dict[str, torch.Tensor]:
        plan = BlockLedger(mine.arena.contract).plan(rows)
        mine.zero_blocks(plan)
        mine.execute(plan, {"a": SamplingParams()})
        written = dict(zip(mine.arena.contract.group_ids, plan.block_tables, strict=True))
        return {
            field.field_id: mine.arena.field(field.field_id)[_blocks(written[field.group_id])].clone()
            for field in mine.plan.fields
        }

    one = executor(checkpoint)
    whole = fields_of(one)
    parts = run_ranks(2, lambda ranks: fields_of(executor(checkpoint, ranks)))
    for field in one.plan.fields:
        is_repeated = field.partition_axis is None or (
            checkpoint.config.num_kv_heads == 1 and field.field_id.endswith((".k", ".v"))
        )
        assert (parts[0][field.field_id].shape == whole[field.field_id].shape) == is_repeated
        for rank, part in enumerate(parts):
            expected = whole[field.field_id]
            if field.partition_axis is not None:
                axis = field.partition_axis + 1
                indices = _indices(one, field.field_id, rank)
                expected = expected.index_select(axis, torch.tensor(indices))
            assert torch.equal(part[field.field_id], expected), field.field_id


def _blocks(table: np.ndarray) -> torch.Tensor:
    ids = torch.from_numpy(np.asarray(table, dtype=np.int64)).flatten()
    return ids[ids > 0]


def _indices(one: ModelExecutor, field_id: str, rank: int) -> list[int]:
    """Elements of the partitioned axis that a rank of two has, section by section."""
    specs = {field.field_id: field for group in one.plan.layout.groups for field in group.fields}
    indices: list[int] = []
    begin = 0
    for section in specs[field_id].partition_sections:
        half = section.num_heads // 2
        heads: Sequence[int] = [0] if section.num_heads == 1 else range(rank * half, (rank + 1) * half)
        for head in heads:
            indices += range(begin + head * section.head_width, begin + (head + 1) * section.head_width)
        begin += section.extent
    return indices


def test_ranks_with_different_plans_are_stopped(llama: Checkpoint) -> None:
    def work(ranks: RankGroup) -> None:
        mine = executor(llama, ranks)
        plan = BlockLedger(mine.arena.contract).plan([Row(request_id="a", tokens=[3, 4, 5 + ranks.rank])])
        with pytest.raises(RankGroupError, match=f"rank {ranks.rank} of 2: plans differ"):
            mine.execute(plan, {"a": SamplingParams()})

    run_ranks(2, work)


@pytest.mark.parametrize(
    ("make", "num_ranks", "message"),
    [
        (lambda: tiny_llama.make_reference(num_heads=3, num_kv_heads=3), 2, "num_heads 3 is no multiple of the 2"),
        (lambda: tiny_llama.make_reference(num_heads=6, num_kv_heads=3), 2, "3 heads can neither be split over 2"),
    ],
    ids=["heads", "kv heads"],
)
def test_heads_that_do_not_share_out_are_refused_before_anything_is_read(
    make: Callable[[], PreTrainedModel], num_ranks: int, message: str, tmp_path: Path
) -> None:
    broken = open_checkpoint(save(make(), tmp_path))

    def work(ranks: RankGroup) -> None:
        with pytest.raises((UnsupportedRanksError, CacheConfigError), match=message):
            executor(broken, ranks)

    run_ranks(num_ranks, work)


def test_tensor_and_context_ranks_together_are_refused(llama: Checkpoint) -> None:
    def work(ranks: RankGroup) -> None:
        with pytest.raises(UnsupportedRanksError, match="tensor ranks 2 and context ranks 2"):
            ModelExecutor(
                llama, memory_bytes=1 << 20, prefix_granularity=GRAIN, tensor_ranks=ranks, context_ranks=ranks
            )

    run_ranks(2, work)

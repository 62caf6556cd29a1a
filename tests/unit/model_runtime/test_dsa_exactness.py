"""The sparse indexer: that its choice matters, what checkpoints may differ in, and the settings that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from unit.model_runtime.model_bench import ModelBench
from unit.model_runtime.reference_models import random_prompt, reference_logits, save
from unit.model_runtime.tiny_deepseek import NUM_SELECTED, VOCAB_SIZE, make_sparse

from cache_runtime.errors import CacheConfigError
from model_runtime.checkpoint import open_checkpoint
from model_runtime.errors import CheckpointError
from model_runtime.family import CacheBudget
from model_runtime.registry import find_family

VARIANTS: dict[str, dict[str, object]] = {
    "plain rotary": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    "one row": {"index_topk": 1},
    "more rows than there are": {"index_topk": 200},
    "index heads that turn whole": {"index_head_dim": 8},
    "no experts at all": {"first_k_dense_replace": 3, "mlp_layer_types": ["dense"] * 3},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_exact_dsa_logits_of_every_variant(tmp_path: Path, changes: dict[str, object]) -> None:
    reference = make_sparse(**changes)
    bench = ModelBench(open_checkpoint(save(reference, tmp_path)))
    prompt = random_prompt(60, seed=1, vocab_size=VOCAB_SIZE)
    ours, theirs = bench.prefill("a", prompt, 23), reference_logits(reference, prompt)[-1]
    assert float((ours - theirs).abs().max()) < 1e-4
    assert float(theirs.std()) > 0.1


def test_rows_that_are_not_chosen_are_not_attended_to(tmp_path: Path) -> None:
    """While a prompt has no more rows than may be chosen the indexer changes nothing, behind that it does."""
    sparse = ModelBench(open_checkpoint(save(make_sparse(), tmp_path / "sparse")))
    whole = ModelBench(open_checkpoint(save(make_sparse(index_topk=200), tmp_path / "whole")))
    prompt = random_prompt(50, seed=2, vocab_size=VOCAB_SIZE)
    short = prompt[:NUM_SELECTED]
    assert torch.allclose(sparse.prefill("short", short, 50), whole.prefill("short", short, 50), atol=1e-5)
    assert float((sparse.prefill("long", prompt, 50) - whole.prefill("long", prompt, 50)).abs().max()) > 0.1


def test_index_keys_are_a_group_of_their_own(tmp_path: Path) -> None:
    plan = ModelBench(open_checkpoint(save(make_sparse(), tmp_path))).arena.plan
    by_group = {
        spec.group_id: [field.field_id for field in plan.fields if field.group_id == spec.group_id]
        for spec in plan.groups
    }
    assert by_group == {
        "full": [f"layers.{layer}.latent" for layer in range(3)],
        "index": [f"layers.{layer}.index_key" for layer in range(3)],
    }


def test_rows_behind_an_indexer_cannot_be_shared_by_context_ranks(tmp_path: Path) -> None:
    config = open_checkpoint(save(make_sparse(), tmp_path)).config
    budget = CacheBudget(memory_bytes=1 << 20, prefix_granularity=8, dtype="float32", shard_count=2)
    with pytest.raises(CacheConfigError, match="cannot be shared by 2 context ranks"):
        find_family(config.architecture).cache_recipe(config, budget)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_topk": 0}, "sparse_index.num_selected must be at least 1, got 0"),
        ({"index_n_heads": 0}, "sparse_index.num_heads must be at least 1, got 0"),
        ({"index_head_dim": 4}, "index_head_dim 4 is less than the 8 dimensions that turn"),
        ({"q_lora_rank": None}, 'key "q_lora_rank" must be an integer, is None'),
        ({"rope_interleave": False}, 'key "rope_interleave" is False, supported is True'),
        ({"mlp_layer_types": ["sparse"] * 3}, 'key "mlp_layer_types" is'),
        ({"index_n_heads": 16}, r'indexer.wq_b.weight" has shape \[640, 28\], expected \[320, 28\]'),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    save(make_sparse(), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)

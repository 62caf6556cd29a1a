"""What DeepSeek checkpoints may differ in, each against the reference; and the settings that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from unit.model_runtime.model_bench import ModelBench
from unit.model_runtime.reference_models import random_prompt, reference_logits, save
from unit.model_runtime.tiny_deepseek import VOCAB_SIZE, YARN, make_v2, make_v3

from model_runtime.checkpoint import open_checkpoint
from model_runtime.errors import CheckpointError

PLAIN_ROPE = {"rope_type": "default", "rope_theta": 100.0}
VARIANTS: dict[str, Callable[[], PreTrainedModel]] = {
    "half-split rotary": lambda: make_v3(rope_interleave=False),
    "queries that are not compressed": lambda: make_v3(q_lora_rank=None),
    "plain rotary": lambda: make_v3(rope_parameters=PLAIN_ROPE),
    "scaling without mscale": lambda: make_v3(
        rope_parameters={k: v for k, v in YARN.items() if not k.startswith("mscale")}
    ),
    "scaling of a given magnitude": lambda: make_v3(rope_parameters=YARN | {"attention_factor": 1.3}),
    "dimensions that are not rounded": lambda: make_v3(rope_parameters=YARN | {"truncate": False}),
    "one group of experts": lambda: make_v3(n_group=1, topk_group=1),
    "weights as they are": lambda: make_v3(norm_topk_prob=False),
    "no experts at all": lambda: make_v3(first_k_dense_replace=3),
    "tied head": lambda: make_v3(tie_word_embeddings=True),
    "greedy choice": lambda: make_v2(topk_method="greedy"),
    "compressed queries in V2": lambda: make_v2(q_lora_rank=28),
    "scaling in V2": lambda: make_v2(rope_parameters=YARN),
}


@pytest.mark.parametrize("make", VARIANTS.values(), ids=VARIANTS.keys())
def test_exact_deepseek_logits_of_every_variant(tmp_path: Path, make: Callable[[], PreTrainedModel]) -> None:
    reference = make()
    bench = ModelBench(open_checkpoint(save(reference, tmp_path)))
    prompt = random_prompt(60, seed=1, vocab_size=VOCAB_SIZE)
    ours, theirs = bench.prefill("a", prompt, 23), reference_logits(reference, prompt)[-1]
    assert float((ours - theirs).abs().max()) < 1e-4
    assert float(theirs.std()) > 0.1


def test_the_cache_holds_one_compressed_row_per_token_and_layer(tmp_path: Path) -> None:
    bench = ModelBench(open_checkpoint(save(make_v3(), tmp_path)))
    assert [field.field_id for field in bench.arena.plan.fields] == [f"layers.{layer}.latent" for layer in range(3)]
    assert bench.arena.field("layers.0.latent").shape[1:] == (8, 20 + 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, 'key "attention_bias" is True, supported is False'),
        ({"hidden_act": "gelu"}, "key \"hidden_act\" is 'gelu', supported is 'silu'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, 'rope type "longrope" is not supported'),
        ({"kv_lora_rank": 0}, "latent_attention.rank must be at least 1, got 0"),
        ({"n_group": 3}, "experts.num_groups 3 must divide num_experts 8"),
        ({"topk_group": 5}, "experts.num_groups_per_token 5 is above num_groups 4"),
        ({"num_experts_per_tok": 5}, "experts.num_experts_per_token 5 is above the 4 experts of the groups"),
        ({"n_group": 8, "num_experts_per_tok": 2}, "experts.num_groups 8 leaves groups of 1, two are needed"),
        ({"moe_layer_freq": 2}, 'key "moe_layer_freq" is 2, supported is 1'),
        ({"rope_parameters": YARN | {"beta_fast": 0.5}}, "rope_scaling.beta_fast 0.5 must be at least beta_slow 1.0"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    save(make_v3(), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    reference = make_v3()
    save(reference, tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"n_routed_experts": 12, "n_group": 4}
    path.write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r'"model.layers.1.mlp.gate.weight" has shape \[8, 48\], expected \[12, 48\]'
    ):
        open_checkpoint(tmp_path)


def test_experts_add_up_in_an_order_that_no_other_row_changes(tmp_path: Path) -> None:
    bench = ModelBench(open_checkpoint(save(make_v3(n_group=1, topk_group=1, num_experts_per_tok=6), tmp_path)))
    prompt = random_prompt(40, seed=2, vocab_size=VOCAB_SIZE)
    assert torch.equal(bench.prefill("a", prompt, 40), bench.prefill("b", prompt, 1))

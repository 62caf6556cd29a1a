"""What Kimi Linear checkpoints may differ in, each against the reference; and the settings that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from unit.model_runtime.model_bench import ModelBench
from unit.model_runtime.reference_models import random_prompt, reference_logits, save
from unit.model_runtime.tiny_kimi_linear import VOCAB_SIZE, make_reference

from cache_runtime.recipes.spec import CacheFamily
from model_runtime.checkpoint import open_checkpoint
from model_runtime.errors import CheckpointError

VARIANTS: dict[str, dict[str, object]] = {
    "queries that are compressed": {"q_lora_rank": 28},
    "latent attention first": {
        "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    },
    "wider convolution": {"linear_conv_kernel_dim": 6},
    "weights as they are": {"moe_renormalize": False},
    "experts everywhere": {"mlp_layer_types": ["sparse"] * 4},
    "heads wider than a vector": {"linear_head_dim": 40},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_exact_kimi_logits_of_every_variant(tmp_path: Path, changes: dict[str, object]) -> None:
    reference = make_reference(**changes)
    bench = ModelBench(open_checkpoint(save(reference, tmp_path)))
    prompt = random_prompt(60, seed=1, vocab_size=VOCAB_SIZE)
    ours, theirs = bench.prefill("a", prompt, 23), reference_logits(reference, prompt)[-1]
    assert float((ours - theirs).abs().max()) < 1e-4
    assert float(theirs.std()) > 0.1


def test_states_and_latent_rows_are_groups_of_one_plan(tmp_path: Path) -> None:
    plan = ModelBench(open_checkpoint(save(make_reference(), tmp_path))).arena.plan
    kinds = {(field.field_id.split(".")[2], plan.group_layout(field.group_id).spec.family) for field in plan.fields}
    assert kinds == {
        ("conv_state", CacheFamily.STATE),
        ("recurrent_state", CacheFamily.STATE),
        ("latent", CacheFamily.HISTORY),
    }


def test_exact_kimi_from_a_file_in_the_published_form(tmp_path: Path) -> None:
    """Layers without experts are named `mlp`, and recurrent layers are counted from one."""
    reference = make_reference()
    save(reference, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    published = {
        name.replace("layers.0.block_sparse_moe.", "layers.0.mlp."): tensor for name, tensor in weights.items()
    }
    save_file(published, tmp_path / "model.safetensors")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for key in ("layer_types", "mlp_layer_types", "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"):
        del config[key]
    config |= {
        "first_k_dense_replace": 1,
        "linear_attn_config": {"kda_layers": [1, 2, 4], "num_heads": 3, "head_dim": 12, "short_conv_kernel_size": 4},
    }
    path.write_text(json.dumps(config))
    prompt = random_prompt(30, seed=2, vocab_size=VOCAB_SIZE)
    ours = ModelBench(open_checkpoint(tmp_path)).prefill("a", prompt, 30)
    assert torch.allclose(ours, reference_logits(reference, prompt)[-1], atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mla_use_nope": False}, 'key "mla_use_nope" is False, supported is True'),
        ({"moe_router_activation_func": "softmax"}, "key \"moe_router_activation_func\" is 'softmax'"),
        ({"layer_types": ["linear_attention"] * 3}, 'key "layer_types" names 3 layers, num_hidden_layers is 4'),
        ({"layer_types": ["mamba"] * 4}, 'key "layer_types" names "mamba", supported are full_attention'),
        ({"layer_types": ["linear_attention"] * 4}, "must name layers of both kinds, names 4 recurrent ones of 4"),
        ({"linear_conv_kernel_dim": 1}, "delta_net.conv_width must be at least 2, got 1"),
        (
            {"linear_head_dim": 16},
            r'"model.layers.0.self_attn.q_proj.weight" has shape \[36, 48\], expected \[48, 48\]',
        ),
        ({"moe_intermediate_size": 25}, r'"model.layers.1.block_sparse_moe.experts.0.w1.weight" has shape \[24, 48\]'),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    save(make_reference(), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_a_tensor_that_is_there_under_both_names_is_refused(tmp_path: Path) -> None:
    save(make_reference(), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.block_sparse_moe.up_proj.weight"
    save_file(
        weights | {name.replace("block_sparse_moe", "mlp"): weights[name].clone()}, tmp_path / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match="are the same one"):
        open_checkpoint(tmp_path)

"""What Qwen3-Next checkpoints may differ in, each against the reference; and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from unit.model_runtime.model_bench import ModelBench
from unit.model_runtime.paged_batches import Row
from unit.model_runtime.reference_models import random_prompt, reference_logits, save
from unit.model_runtime.tiny_qwen3_next import SHAPE, VOCAB_SIZE, make_reference

from model_runtime.checkpoint import open_checkpoint
from model_runtime.errors import CheckpointError

BLOCK = 8
VARIANTS: dict[str, dict[str, object]] = {
    "one value head per key head": {"linear_num_key_heads": 4},
    "one key head": {"linear_num_key_heads": 1},
    "states wider than they are high": {"linear_key_head_dim": 5, "linear_value_head_dim": 70},
    "convolution over two tokens": {"linear_conv_kernel_dim": 2},
    "convolution over more tokens than most chunks have": {"linear_conv_kernel_dim": 9},
    "attention of one key head": {"num_key_value_heads": 1},
    "heads that turn as a whole": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0}
    },
    "tied head": {"tie_word_embeddings": True},
    "weights of experts as they are": {"norm_topk_prob": False},
    "every expert": {"num_experts_per_tok": 6},
    "experts behind every second layer": {"decoder_sparse_step": 2, "mlp_only_layers": []},
    "no experts at all": {"mlp_only_layers": [0, 1, 2, 3, 4]},
    "recurrent layers last": {"layer_types": ["full_attention", *["linear_attention"] * 4]},
}


def change_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_exact_qwen3_next_logits_of_every_variant(tmp_path: Path, changes: dict[str, object]) -> None:
    reference = make_reference(**changes)
    bench = ModelBench(open_checkpoint(save(reference, tmp_path)))
    prompt = random_prompt(60, seed=1, vocab_size=VOCAB_SIZE)
    ours, theirs = bench.prefill("a", prompt, 23), reference_logits(reference, prompt)[-1]
    assert float((ours - theirs).abs().max()) < 1e-4
    assert float(theirs.std()) > 0.1


def test_exact_qwen3_next_where_the_config_says_only_how_often_a_layer_attends(tmp_path: Path) -> None:
    """As the first published configs did, with the rotary settings beside everything else."""
    # Three recurrent layers on end: wide weights would amplify the rounding of either side beyond the tolerance.
    reference = make_reference(layer_types=None, initializer_range=0.15)
    save(reference, tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["layer_types"], config["rope_parameters"]
    path.write_text(
        json.dumps(config | {"full_attention_interval": 4, "rope_theta": 100.0, "partial_rotary_factor": 0.5})
    )
    bench = ModelBench(open_checkpoint(tmp_path))
    prompt = random_prompt(30, seed=2, vocab_size=VOCAB_SIZE)
    ours, theirs = bench.prefill("a", prompt, 30), reference_logits(reference, prompt)[-1]
    assert float((ours - theirs).abs().max()) < 1e-4


def test_exact_qwen3_next_states_remember_what_no_attention_layer_sees(tmp_path: Path) -> None:
    """Without its states the model answers something else: a chunk that forgot them would not go unnoticed."""
    bench = ModelBench(open_checkpoint(save(make_reference(), tmp_path)), block_granularity=BLOCK)
    prompt = random_prompt(BLOCK + 1, seed=3, vocab_size=VOCAB_SIZE)
    remembered = bench.prefill("a", prompt, BLOCK)
    bench.prefill("b", prompt[:BLOCK], BLOCK)
    for field in bench.arena.plan.fields:
        if "state" in field.field_id:
            bench.arena.field(field.field_id).zero_()
    forgotten = bench.logits(Row(request_id="b", tokens=prompt[BLOCK:]))[0]
    assert float((remembered - forgotten).abs().max()) > 0.1


def test_a_checkpoint_inside_a_chunk_is_the_state_of_a_chunk_that_ends_there(tmp_path: Path) -> None:
    bench = ModelBench(open_checkpoint(save(make_reference(), tmp_path)), block_granularity=BLOCK)
    prompt = random_prompt(2 * BLOCK + 3, seed=4, vocab_size=VOCAB_SIZE)
    bench.logits(Row(request_id="a", tokens=prompt, checkpoint_length=2 * BLOCK))
    bench.logits(Row(request_id="b", tokens=prompt[: 2 * BLOCK]))
    for field in bench.arena.plan.fields:
        if "state" not in field.field_id:
            continue
        states = bench.arena.field(field.field_id).flatten(1)
        uses = Counter(tuple(state.tolist()) for state in states if bool(state.any()))
        assert sorted(uses.values())[-2:] == [1, 2], "the checkpoint and the other row's end, and nothing else"


def test_the_cache_holds_rows_of_attention_layers_and_two_states_of_recurrent_ones(tmp_path: Path) -> None:
    plan = ModelBench(open_checkpoint(save(make_reference(), tmp_path)), block_granularity=BLOCK).arena.plan
    groups = {field.field_id: field.group_id for field in plan.fields}
    assert groups == {
        **{f"layers.{layer}.{name}_state": "state" for layer in (0, 2, 3) for name in ("conv", "recurrent")},
        **{f"layers.{layer}.{name}": "full" for layer in (1, 4) for name in "kv"},
    }
    arena = ModelBench(open_checkpoint(tmp_path), block_granularity=BLOCK).arena
    assert arena.field("layers.0.recurrent_state").shape[1:] == (4, 12, 10)
    assert arena.field("layers.0.conv_state").shape[1:] == (3, 2 * 2 * 12 + 4 * 10)
    assert plan.group_layout("state").spec.checkpoint_granularity == BLOCK


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, 'key "attention_bias" is True, supported is False'),
        ({"hidden_act": "gelu"}, "key \"hidden_act\" is 'gelu', supported is 'silu'"),
        ({"quantization_config": {}}, 'key "quantization_config" is {}, supported is None'),
        ({"rope_parameters": {"rope_type": "yarn"}}, 'rope type "yarn" is not supported'),
        ({"rope_parameters": {"partial_rotary_factor": 0.2}}, r"rotary_dim must be even and within head_dim 16, got 3"),
        (
            {"rope_parameters": {"partial_rotary_factor": 2.0}},
            r"rotary_dim must be even and within head_dim 16, got 32",
        ),
        ({"layer_types": ["sliding_attention"] * 5}, 'key "layer_types" names "sliding_attention"'),
        ({"layer_types": ["linear_attention"] * 5}, "must name layers of both kinds, names 5 recurrent ones of 5"),
        ({"layer_types": ["full_attention"] * 5}, "must name layers of both kinds, names 0 recurrent ones of 5"),
        ({"layer_types": SHAPE["layer_types"][:4]}, "delta_net.is_recurrent names 4 layers, num_layers is 5"),  # type: ignore[index]
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval must be at least 1, got 0"),
        ({"linear_num_value_heads": 3}, "delta_net.num_heads 3 is no multiple of num_key_heads 2"),
        ({"linear_conv_kernel_dim": 1}, "delta_net.conv_width must be at least 2, got 1"),
        ({"linear_key_head_dim": 0}, "delta_net.key_head_dim must be at least 1, got 0"),
        ({"linear_value_head_dim": "ten"}, 'key "linear_value_head_dim" must be an integer'),
        ({"mlp_only_layers": "1"}, 'key "mlp_only_layers" must be an array of integers'),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be at least 1, got 0"),
        ({"num_experts_per_tok": 7}, "experts.num_experts_per_token 7 is above the 6 experts"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    save(make_reference(), tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.linear_attn.A_log",
        "model.layers.2.linear_attn.in_proj_ba.weight",
        "model.layers.1.self_attn.q_norm.weight",
        "model.layers.0.mlp.shared_expert_gate.weight",
        "model.layers.4.mlp.experts.5.down_proj.weight",
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    save(make_reference(), tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f'"{name}" is missing, expected shape'):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_conv_kernel_dim": 5}, r'conv1d.weight" has shape \[88, 1, 4\], expected \[88, 1, 5\]'),
        ({"linear_value_head_dim": 11}, r'in_proj_qkvz.weight" has shape \[128, 48\], expected \[136, 48\]'),
        ({"head_dim": 8}, r'q_proj.weight" has shape \[128, 48\], expected \[64, 48\]'),
        ({"num_experts": 7}, r'gate.weight" has shape \[6, 48\], expected \[7, 48\]'),
    ],
)
def test_tensors_of_another_shape_than_the_config_says_are_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    save(make_reference(), tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_layers_that_guess_further_tokens_are_left_where_they_are(tmp_path: Path) -> None:
    save(make_reference(), tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.update({"mtp.fc.weight": torch.zeros(48, 96)}))
    assert not any(name.startswith("mtp.") for name in open_checkpoint(tmp_path).source.shapes)

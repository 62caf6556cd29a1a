"""A GGUF file and a safetensors directory of one Gemma 3 give one model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import Gemma3ForCausalLM
from unit.model_runtime import tiny_gemma3
from unit.model_runtime.model_bench import ModelBench

from model_runtime.checkpoint import open_checkpoint
from model_runtime.config import RopeFrequencyDivisors
from model_runtime.errors import CheckpointError

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
MODEL_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}


def stored_tensor(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Under the file's name; norms as the factor they multiply by."""
    stem = name.removesuffix(".weight")
    values = tensor + 1.0 if stem.endswith("norm") else tensor
    if stem in MODEL_NAMES:
        return f"{MODEL_NAMES[stem]}.weight", values
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[rest]}.weight", values


def write_gguf(path: Path, reference: Gemma3ForCausalLM, extra: Mapping[str, int | float | str] | None = None) -> Path:
    config = reference.config
    writer = GGUFWriter(path, "gemma3")
    integers = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.sliding_window": config.sliding_window,
    }
    for key, value in integers.items():
        writer.add_uint32(f"gemma3.{key}", value)
    writer.add_float32("gemma3.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32("gemma3.rope.freq_base", config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_uint32("tokenizer.ggml.bos_token_id", 1)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    for key, value in (extra or {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"gemma3.{key}", value)
    for name, tensor in reference.state_dict().items():
        if name != "lm_head.weight":
            stored, values = stored_tensor(name, tensor)
            writer.add_tensor(stored, np.ascontiguousarray(values.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def reference() -> Gemma3ForCausalLM:
    return tiny_gemma3.make_reference(query_pre_attn_scalar=16)


def test_a_gguf_gemma3_has_the_exact_weights_and_logits_of_its_safetensors_twin(
    tmp_path: Path, reference: Gemma3ForCausalLM
) -> None:
    from_directory = open_checkpoint(tiny_gemma3.save(reference, tmp_path / "directory"))
    from_gguf = open_checkpoint(write_gguf(tmp_path / "model.gguf", reference))
    assert from_gguf.source.shapes == from_directory.source.shapes
    for name in from_directory.source.shapes:
        # One more and one less leaves norms a rounding away.
        assert torch.allclose(from_gguf.load(name), from_directory.load(name), rtol=0.0, atol=1e-6), name
    ours, theirs = from_gguf.config, from_directory.config
    assert ours == replace(theirs, rms_norm_eps=ours.rms_norm_eps, attention_scale=None)
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps)
    prompt = tiny_gemma3.random_prompt(40, seed=1)
    logits = ModelBench(from_gguf).prefill("a", prompt, 7)
    assert float((logits - tiny_gemma3.reference_logits(reference, prompt)[-1]).abs().max()) < 1e-4


def test_keys_that_newer_files_have_are_read(tmp_path: Path, reference: Gemma3ForCausalLM) -> None:
    extra: dict[str, int | float | str] = {
        "attention.sliding_window_pattern": 3,
        "rope.freq_base_swa": 500.0,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    }
    config = open_checkpoint(write_gguf(tmp_path / "m.gguf", reference, extra)).config
    assert config.sliding is not None
    assert config.sliding.is_sliding == (True, True, False, True, True, False, True)
    assert config.sliding.rope_theta == 500.0
    assert config.rope_scaling == RopeFrequencyDivisors(divisors=(8.0,) * 8)


def test_a_scaling_that_is_not_known_is_refused_by_key(tmp_path: Path, reference: Gemma3ForCausalLM) -> None:
    path = write_gguf(tmp_path / "m.gguf", reference, {"rope.scaling.type": "yarn"})
    with pytest.raises(CheckpointError, match=r'key "gemma3\.rope\.scaling\.type" is "yarn"'):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("final_logit_softcapping", 30.0, 'key "final_logit_softcapping" is 30.0, supported is None'),
        ("use_bidirectional_attention", True, 'key "use_bidirectional_attention" is True'),
        ("layer_types", ["full_attention", "chunked_attention"], 'key "layer_types" names "chunked_attention"'),
        ("layer_types", ["full_attention"], "names 1 layers, num_layers is 7"),
        ("sliding_window", 0, "sliding.window_tokens must be positive"),
        ("sliding_window", None, 'key "sliding_window" must be an integer'),
    ],
)
def test_a_config_that_would_compute_something_else_is_refused_by_key(
    tmp_path: Path, reference: Gemma3ForCausalLM, key: str, value: object, message: str
) -> None:
    path = tiny_gemma3.save(reference, tmp_path) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_the_spelling_of_older_config_files_gives_the_same_model(tmp_path: Path, reference: Gemma3ForCausalLM) -> None:
    path = tiny_gemma3.save(reference, tmp_path) / "config.json"
    new = open_checkpoint(tmp_path).config
    values = json.loads(path.read_text())
    for key in ("rope_parameters", "layer_types", "tie_word_embeddings", "_sliding_window_pattern"):
        del values[key]
    values |= {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6}
    path.write_text(json.dumps(values))
    assert open_checkpoint(tmp_path).config == new

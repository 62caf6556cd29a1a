"""Writes a tiny llama-architecture GGUF twin of a reference model, with the format's own row order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from transformers import LlamaForCausalLM

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
MODEL_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_tensors(reference: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """Tensors under the file's names; query and key rows interleaved, as llama.cpp's converter stores them."""
    config = reference.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in reference.state_dict().items():
        stem = name.removesuffix(".weight")
        if stem in MODEL_NAMES:
            if stem != "lm_head" or not config.tie_word_embeddings:
                tensors[f"{MODEL_NAMES[stem]}.weight"] = tensor
            continue
        _, _, layer, rest = stem.split(".", 3)
        stored = LAYER_NAMES[rest]
        if stored in heads:
            rows, columns = tensor.shape
            halves = tensor.view(heads[stored], 2, rows // heads[stored] // 2, columns)
            tensor = halves.swapaxes(1, 2).reshape(rows, columns)
        tensors[f"blk.{layer}.{stored}.weight"] = tensor
    return tensors


def write_gguf(
    path: Path,
    reference: LlamaForCausalLM,
    *,
    quantized: Mapping[str, GGMLQuantizationType] | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
    architecture: str = "llama",
    extra_integers: Mapping[str, int] | None = None,
) -> Path:
    """Everything in float32 but the tensors whose layer name (`attn_q`) is in `quantized`."""
    config = reference.config
    writer = GGUFWriter(path, architecture)
    writer.add_uint32("llama.block_count", config.num_hidden_layers)
    writer.add_uint32("llama.context_length", config.max_position_embeddings)
    writer.add_uint32("llama.embedding_length", config.hidden_size)
    writer.add_uint32("llama.feed_forward_length", config.intermediate_size)
    writer.add_uint32("llama.attention.head_count", config.num_attention_heads)
    writer.add_uint32("llama.attention.head_count_kv", config.num_key_value_heads)
    writer.add_uint32("llama.attention.key_length", config.head_dim)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32("llama.rope.freq_base", config.rope_parameters["rope_theta"])
    writer.add_array("tokenizer.ggml.tokens", [f"token {index}" for index in range(config.vocab_size)])
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    for key, value in (extra_integers or {}).items():
        writer.add_uint32(key, value)
    for name, tensor in (gguf_tensors(reference) if tensors is None else tensors).items():
        array = np.ascontiguousarray(tensor.float().numpy())
        kind = (quantized or {}).get(name.split(".")[-2], GGMLQuantizationType.F32)
        writer.add_tensor(name, quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

"""A random Llama of a few thousand weights with a tokenizer of one token per byte: what a whole mesh needs to run fast.

Written without torch and transformers, and the same bytes every time.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from model_runtime.text.vocabulary import BYTE_LEVEL_ALPHABET

VOCAB_SIZE = 257
END_TOKEN = 256
CONTEXT_TOKENS = 4096
_HIDDEN, _INTERMEDIATE, _HEADS, _KV_HEADS, _HEAD_DIM, _LAYERS = 48, 80, 4, 2, 16, 2


def write_tiny_checkpoint(folder: Path) -> Path:
    """Returns `folder`, which is made and filled."""
    folder.mkdir(parents=True)
    save_file(_weights(), str(folder / "model.safetensors"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": END_TOKEN,
    }
    (folder / "config.json").write_text(json.dumps(config))
    _tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def _weights() -> dict[str, np.ndarray]:
    """Wide enough that the most likely token is not the same one everywhere."""
    random = np.random.default_rng(20)

    def matrix(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) * 0.15).astype(np.float32)

    def norm() -> np.ndarray:
        return random.uniform(0.5, 1.5, _HIDDEN).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(VOCAB_SIZE, _HIDDEN), "model.norm.weight": norm()}
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": norm(),
            prefix + "post_attention_layernorm.weight": norm(),
            prefix + "self_attn.q_proj.weight": matrix(_HEADS * _HEAD_DIM, _HIDDEN),
            prefix + "self_attn.k_proj.weight": matrix(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            prefix + "self_attn.v_proj.weight": matrix(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            prefix + "self_attn.o_proj.weight": matrix(_HIDDEN, _HEADS * _HEAD_DIM),
            prefix + "mlp.gate_proj.weight": matrix(_INTERMEDIATE, _HIDDEN),
            prefix + "mlp.up_proj.weight": matrix(_INTERMEDIATE, _HIDDEN),
            prefix + "mlp.down_proj.weight": matrix(_HIDDEN, _INTERMEDIATE),
        }
    return weights


def _tokenizer() -> Tokenizer:
    backend = Tokenizer(models.BPE(vocab=dict(BYTE_LEVEL_ALPHABET), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    return backend

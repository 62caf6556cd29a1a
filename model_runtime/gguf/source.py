"""A GGUF file of the llama architecture as a TensorSource: its configuration, names and row order.

Source: `convert_hf_to_gguf.py` and `constants.py` of llama.cpp, for the keys, the tensor names, and the interleaving of
query and key rows that this module undoes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType

from model_runtime.config import ModelConfig, RopeFrequencyDivisors
from model_runtime.errors import CheckpointError
from model_runtime.gguf.dequantize import dequantize
from model_runtime.gguf.reader import GgufDirectory, GgufTensor, read_gguf_directory
from model_runtime.weights import Shape

_ARCHITECTURES: Mapping[str, str] = MappingProxyType({"llama": "LlamaForCausalLM"})
_PLAIN_KINDS = frozenset(
    {
        GGMLQuantizationType.F64,
        GGMLQuantizationType.F32,
        GGMLQuantizationType.F16,
        GGMLQuantizationType.BF16,
    }
)
_DEFAULT_ROPE_THETA = 10000.0
_EMBEDDING = "token_embd.weight"
_OUTPUT = "output.weight"
_ROPE_DIVISORS = "rope_freqs.weight"
_CANONICAL_NAMES: Mapping[str, str] = MappingProxyType(
    {
        _EMBEDDING: "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        _OUTPUT: "lm_head.weight",
    }
)
_CANONICAL_LAYER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
_STORED_NAMES = MappingProxyType({canonical: stored for stored, canonical in _CANONICAL_NAMES.items()})
_STORED_LAYER_NAMES = MappingProxyType({canonical: stored for stored, canonical in _CANONICAL_LAYER_NAMES.items()})
_STORED_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_CANONICAL_LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.([\w.]+)\.weight")


class GgufSource:
    """Opens the file and reads its directory. Raises CheckpointError naming the key or tensor and both values."""

    def __init__(self, path: Path) -> None:
        self._directory = read_gguf_directory(path)
        self._config = _read_config(self._directory)
        self._tensors = {
            _canonical_name(name): tensor
            for name, tensor in self._directory.tensors.items()
            if name != _ROPE_DIVISORS  # part of the configuration
        }

    @property
    def path(self) -> Path:
        return self._directory.path

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def content_files(self) -> tuple[Path, ...]:
        return (self.path,)

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def stored_name(self, name: str) -> str:
        match = _CANONICAL_LAYER_TENSOR.fullmatch(name)
        if match is not None and match[2] in _STORED_LAYER_NAMES:
            return f"blk.{match[1]}.{_STORED_LAYER_NAMES[match[2]]}.weight"
        return _STORED_NAMES.get(name, name)

    def read_into(self, name: str, destination: torch.Tensor) -> None:
        destination.copy_(self._in_canonical_order(name, _read_tensor(self.path, self._tensors[name])))

    def quantization(self, name: str) -> str | None:
        kind = self._tensors[name].quantization
        return None if kind in _PLAIN_KINDS else kind.name

    def read_blocks(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        blocks = torch.from_numpy(_map_bytes(self.path, tensor)).view(tensor.shape[0], -1)
        return self._in_canonical_order(name, blocks)

    def _in_canonical_order(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        if name.endswith("self_attn.q_proj.weight"):
            return _uninterleave_rows(rows, self._config.num_heads)
        if name.endswith("self_attn.k_proj.weight"):
            return _uninterleave_rows(rows, self._config.num_kv_heads)
        return rows


def _uninterleave_rows(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[num_heads * head_dim, columns] with rotary pairs (2i, 2i + 1) -> pairs (i, i + head_dim / 2)."""
    num_rows, num_columns = rows.shape
    pairs = rows.view(num_heads, num_rows // num_heads // 2, 2, num_columns)
    return pairs.transpose(1, 2).reshape(num_rows, num_columns)


def _canonical_name(stored: str) -> str:
    match = _STORED_LAYER_TENSOR.fullmatch(stored)
    if match is not None and match[2] in _CANONICAL_LAYER_NAMES:
        return f"model.layers.{match[1]}.{_CANONICAL_LAYER_NAMES[match[2]]}.weight"
    return _CANONICAL_NAMES.get(stored, stored)


def _map_bytes(path: Path, tensor: GgufTensor) -> npt.NDArray[np.uint8]:
    # Copy-on-write, because torch refuses read-only memory; nothing writes to it.
    return np.memmap(path, dtype=np.uint8, mode="c", offset=tensor.begin_bytes, shape=(tensor.num_bytes,))


def _read_tensor(path: Path, tensor: GgufTensor) -> torch.Tensor:
    try:
        return dequantize(_map_bytes(path, tensor), tensor.quantization, tensor.shape)
    except NotImplementedError as error:
        raise CheckpointError(
            f'{path}: tensor "{tensor.name}" has the type {tensor.quantization.name}, which cannot be read'
        ) from error


def _read_config(directory: GgufDirectory) -> ModelConfig:
    stored = directory.find_string("general.architecture")
    if stored is None or stored not in _ARCHITECTURES:
        raise CheckpointError(
            f'{directory.path}: architecture "{stored}" is not supported (supported: {", ".join(_ARCHITECTURES)})'
        )
    _refuse_unsupported(directory)
    num_heads = directory.integer("llama.attention.head_count")
    num_kv_heads = directory.find_integer("llama.attention.head_count_kv")
    rope_theta = directory.find_number("llama.rope.freq_base")
    eos_keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    eos_token_ids = [directory.find_integer(key) for key in eos_keys]
    try:
        return ModelConfig(
            architecture=_ARCHITECTURES[stored],
            num_layers=directory.integer("llama.block_count"),
            hidden_size=directory.integer("llama.embedding_length"),
            intermediate_size=directory.integer("llama.feed_forward_length"),
            num_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            head_dim=_head_dim(directory),
            vocab_size=_vocab_size(directory),
            max_position_tokens=directory.integer("llama.context_length"),
            rope_theta=_DEFAULT_ROPE_THETA if rope_theta is None else rope_theta,
            rms_norm_eps=directory.number("llama.attention.layer_norm_rms_epsilon"),
            tie_word_embeddings=_OUTPUT not in directory.tensors,
            rope_scaling=_rope_divisors(directory),
            eos_token_ids=tuple(dict.fromkeys(token for token in eos_token_ids if token is not None)),
            bos_token_id=directory.find_integer("tokenizer.ggml.bos_token_id"),
        )
    except ValueError as error:
        raise CheckpointError(f"{directory.path}: {error}") from error


def _head_dim(directory: GgufDirectory) -> int:
    stated = directory.find_integer("llama.attention.key_length")
    if stated is not None:
        return stated
    num_heads = directory.integer("llama.attention.head_count")
    if num_heads < 1:
        raise CheckpointError(f'{directory.path}: key "llama.attention.head_count" must be positive, is {num_heads}')
    return directory.integer("llama.embedding_length") // num_heads


def _vocab_size(directory: GgufDirectory) -> int:
    stated = directory.find_integer("llama.vocab_size")
    if stated is not None:
        return stated
    if _EMBEDDING not in directory.tensors:
        raise CheckpointError(f'{directory.path}: tensor "{_EMBEDDING}" is missing')
    return directory.tensors[_EMBEDDING].shape[0]


def _rope_divisors(directory: GgufDirectory) -> RopeFrequencyDivisors | None:
    tensor = directory.tensors.get(_ROPE_DIVISORS)
    if tensor is None:
        return None
    return RopeFrequencyDivisors(divisors=tuple(_read_tensor(directory.path, tensor).flatten().tolist()))


def _refuse_unsupported(directory: GgufDirectory) -> None:
    """Keys that would change the computation. Raises CheckpointError naming key and value."""
    head_dim = _head_dim(directory)
    for key, accepted in (
        ("llama.rope.dimension_count", head_dim),
        ("llama.attention.value_length", head_dim),
        ("llama.expert_count", 0),
        ("llama.attention.sliding_window", 0),
    ):
        value = directory.find_integer(key)
        if value is not None and value != accepted:
            raise CheckpointError(f'{directory.path}: key "{key}" is {value}, supported is {accepted}')
    scaling = directory.find_string("llama.rope.scaling.type")
    if scaling not in (None, "none"):
        raise CheckpointError(f'{directory.path}: key "llama.rope.scaling.type" is "{scaling}", supported is "none"')

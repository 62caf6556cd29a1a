"""A GGUF file as a TensorSource: the names its architecture gives to tensors, and what it stores otherwise than they
are computed with.

Source: `convert_hf_to_gguf.py` and `constants.py` of llama.cpp, for the tensor names, the interleaving of query and key
rows of llama, and the one added to the norm weights of gemma3, all of which this module undoes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType

from model_runtime.config import ModelConfig
from model_runtime.gguf.model_config import (
    ROPE_DIVISORS,
    expand_gguf_bytes,
    map_gguf_bytes,
    read_gguf_config,
    read_gguf_tensor,
)
from model_runtime.gguf.reader import read_gguf_directory
from model_runtime.weights import Shape

_PLAIN_KINDS = frozenset(
    {
        GGMLQuantizationType.F64,
        GGMLQuantizationType.F32,
        GGMLQuantizationType.F16,
        GGMLQuantizationType.BF16,
    }
)
_EMBEDDING = "token_embd.weight"
_OUTPUT = "output.weight"
_CANONICAL_NAMES: Mapping[str, str] = MappingProxyType(
    {
        _EMBEDDING: "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        _OUTPUT: "lm_head.weight",
    }
)
_STORED_NAMES = MappingProxyType({canonical: stored for stored, canonical in _CANONICAL_NAMES.items()})
_STORED_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_CANONICAL_LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.([\w.]+)\.weight")
_ATTENTION_AND_MLP: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dialect:
    """What one architecture calls its layers' tensors, and how it stores them.

    `interleaves_rotary`: rotary pairs of query and key rows are (2i, 2i + 1). `adds_one_to_norms`: norm weights are
    stored as the factor, not as its distance from one.
    """

    canonical_layer_names: Mapping[str, str]
    interleaves_rotary: bool
    adds_one_to_norms: bool

    def stored_layer_name(self, canonical: str) -> str | None:
        return next((stored for stored, name in self.canonical_layer_names.items() if name == canonical), None)


_DIALECTS: Mapping[str, _Dialect] = MappingProxyType(
    {
        "LlamaForCausalLM": _Dialect(
            canonical_layer_names=MappingProxyType({**_ATTENTION_AND_MLP, "ffn_norm": "post_attention_layernorm"}),
            interleaves_rotary=True,
            adds_one_to_norms=False,
        ),
        "Gemma3ForCausalLM": _Dialect(
            canonical_layer_names=MappingProxyType(
                {
                    **_ATTENTION_AND_MLP,
                    "attn_q_norm": "self_attn.q_norm",
                    "attn_k_norm": "self_attn.k_norm",
                    "post_attention_norm": "post_attention_layernorm",
                    "ffn_norm": "pre_feedforward_layernorm",
                    "post_ffw_norm": "post_feedforward_layernorm",
                }
            ),
            interleaves_rotary=False,
            adds_one_to_norms=True,
        ),
    }
)


class GgufSource:
    """Opens the file and reads its directory. Raises CheckpointError naming the key or tensor and both values."""

    def __init__(self, path: Path) -> None:
        self._directory = read_gguf_directory(path)
        self._config = read_gguf_config(self._directory)
        self._dialect = _DIALECTS[self._config.architecture]
        self._tensors = {
            self._canonical_name(name): tensor
            for name, tensor in self._directory.tensors.items()
            if name != ROPE_DIVISORS  # part of the configuration
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
        stored = None if match is None else self._dialect.stored_layer_name(match[2])
        if match is not None and stored is not None:
            return f"blk.{match[1]}.{stored}.weight"
        return _STORED_NAMES.get(name, name)

    def read_into(self, name: str, destination: torch.Tensor, first_row: int = 0) -> None:
        tensor = self._tensors[name]
        if len(tensor.shape) == 1:  # a single row of elements
            values = read_gguf_tensor(self.path, tensor)[first_row : first_row + destination.shape[0]]
        else:
            raw = self._stored_rows(name, first_row, destination.shape[0])
            values = expand_gguf_bytes(self.path, tensor, raw, tuple(destination.shape))
        if self._dialect.adds_one_to_norms and name.endswith("norm.weight"):
            values = values - 1.0
        destination.copy_(values)

    def quantization(self, name: str) -> str | None:
        kind = self._tensors[name].quantization
        return None if kind in _PLAIN_KINDS else kind.name

    def read_blocks(self, name: str, first_row: int = 0, num_rows: int | None = None) -> torch.Tensor:
        num_rest = self._tensors[name].shape[0] - first_row
        return torch.from_numpy(self._stored_rows(name, first_row, num_rest if num_rows is None else num_rows))

    def _stored_rows(self, name: str, first_row: int, num_rows: int) -> npt.NDArray[np.uint8]:
        """uint8[num_rows, bytes of a row] as the file has them, in canonical order."""
        tensor = self._tensors[name]
        stored = map_gguf_bytes(self.path, tensor).reshape(tensor.shape[0], -1)
        num_heads = self._interleaved_heads(name)
        if num_heads is None:
            return stored[first_row : first_row + num_rows]
        return stored[_uninterleaved_rows(tensor.shape[0], num_heads)[first_row : first_row + num_rows]]

    def _interleaved_heads(self, name: str) -> int | None:
        """Heads of a matrix whose rows are stored in pairs that turn together; None for every other."""
        if self._dialect.interleaves_rotary and name.endswith("self_attn.q_proj.weight"):
            return self._config.num_heads
        if self._dialect.interleaves_rotary and name.endswith("self_attn.k_proj.weight"):
            return self._config.num_kv_heads
        return None

    def _canonical_name(self, stored: str) -> str:
        match = _STORED_LAYER_TENSOR.fullmatch(stored)
        canonical = None if match is None else self._dialect.canonical_layer_names.get(match[2])
        if match is not None and canonical is not None:
            return f"model.layers.{match[1]}.{canonical}.weight"
        return _CANONICAL_NAMES.get(stored, stored)


def _uninterleaved_rows(num_rows: int, num_heads: int) -> npt.NDArray[np.int64]:
    """Where the rows of [num_heads * head_dim, columns] with rotary pairs (i, i + head_dim / 2) are stored, in pairs
    (2i, 2i + 1)."""
    pairs = np.arange(num_rows, dtype=np.int64).reshape(num_heads, num_rows // num_heads // 2, 2)
    return pairs.transpose(0, 2, 1).reshape(num_rows)

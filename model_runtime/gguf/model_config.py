"""The configuration of a model from the keys of a GGUF file, one function per architecture.

Anything that would change the computation in a way no model here implements is refused, naming the key.
Source: `convert_hf_to_gguf.py` and `constants.py` of llama.cpp, for the keys; its `llama-model.cpp` for what gemma3
files leave out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from model_runtime.config import (
    ModelConfig,
    RopeFrequencyDivisors,
    SlidingLayers,
    check_num_layers,
    every_nth_layer_full,
)
from model_runtime.errors import CheckpointError
from model_runtime.gguf.dequantize import dequantize
from model_runtime.gguf.reader import GgufDirectory, GgufTensor

ROPE_DIVISORS = "rope_freqs.weight"
"""A tensor that is part of the configuration."""

_EMBEDDING = "token_embd.weight"
_OUTPUT = "output.weight"
_DEFAULT_ROPE_THETA = 10000.0
_GEMMA3_LAYERS_PER_FULL = 6
_GEMMA3_SLIDING_ROPE_THETA = 10000.0
# The one published depth whose scores are scaled by the width per head of its embedding; files do not say so.
_GEMMA3_LAYERS_SCALED_BY_WIDTH = 62


def read_gguf_config(directory: GgufDirectory) -> ModelConfig:
    """Raises CheckpointError naming the key and its value."""
    stored = directory.find_string("general.architecture")
    if stored is None or stored not in _READERS:
        raise CheckpointError(
            f'{directory.path}: architecture "{stored}" is not supported (supported: {", ".join(_READERS)})'
        )
    try:
        keys = _Keys(directory=directory, architecture=stored)
        check_num_layers(keys.integer("block_count"))
        return _READERS[stored](keys)
    except ValueError as error:
        raise CheckpointError(f"{directory.path}: {error}") from error


def map_gguf_bytes(path: Path, tensor: GgufTensor) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor as the file holds them."""
    # Copy-on-write, because torch refuses read-only memory; nothing writes to it.
    return np.memmap(path, dtype=np.uint8, mode="c", offset=tensor.begin_bytes, shape=(tensor.num_bytes,))


def read_gguf_tensor(path: Path, tensor: GgufTensor) -> torch.Tensor:
    """float32 values of a tensor. Raises CheckpointError for a type that cannot be read."""
    return expand_gguf_bytes(path, tensor, map_gguf_bytes(path, tensor), tensor.shape)


def expand_gguf_bytes(
    path: Path, tensor: GgufTensor, raw: npt.NDArray[np.uint8], shape: tuple[int, ...]
) -> torch.Tensor:
    """float32 values of `shape` from bytes of the tensor. Raises CheckpointError for a type that cannot be read."""
    try:
        return dequantize(raw, tensor.quantization, shape)
    except NotImplementedError as error:
        raise CheckpointError(
            f'{path}: tensor "{tensor.name}" has the type {tensor.quantization.name}, which cannot be read'
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Keys:
    """The keys of one architecture, without its name in front, and what all architectures derive from them."""

    directory: GgufDirectory
    architecture: str

    def name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def integer(self, key: str) -> int:
        return self.directory.integer(self.name(key))

    def integer_or(self, key: str, default: int) -> int:
        value = self.directory.find_integer(self.name(key))
        return default if value is None else value

    def number(self, key: str) -> float:
        return self.directory.number(self.name(key))

    def number_or(self, key: str, default: float) -> float:
        value = self.directory.find_number(self.name(key))
        return default if value is None else value

    @property
    def head_dim(self) -> int:
        stated = self.directory.find_integer(self.name("attention.key_length"))
        if stated is not None:
            return stated
        num_heads = self.integer("attention.head_count")
        if num_heads < 1:
            raise self._wrong("attention.head_count", f"must be positive, is {num_heads}")
        return self.integer("embedding_length") // num_heads

    @property
    def vocab_size(self) -> int:
        stated = self.directory.find_integer(self.name("vocab_size"))
        if stated is not None:
            return stated
        if _EMBEDDING not in self.directory.tensors:
            raise CheckpointError(f'{self.directory.path}: tensor "{_EMBEDDING}" is missing')
        return self.directory.tensors[_EMBEDDING].shape[0]

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        found = [self.directory.find_integer(key) for key in keys]
        return tuple(dict.fromkeys(token for token in found if token is not None))

    @property
    def bos_token_id(self) -> int | None:
        return self.directory.find_integer("tokenizer.ggml.bos_token_id")

    @property
    def has_tied_head(self) -> bool:
        return _OUTPUT not in self.directory.tensors

    def refuse_other_integers(self, accepted_by_key: Mapping[str, int]) -> None:
        """Raises for a key that is there with another value."""
        for key, accepted in accepted_by_key.items():
            value = self.directory.find_integer(self.name(key))
            if value is not None and value != accepted:
                raise self._wrong(key, f"is {value}, supported is {accepted}")

    def refuse_rope_scaling(self, supported: tuple[str, ...] = ("none",)) -> str:
        """The kind of scaling, "none" when the file names none. Raises for one that is not supported."""
        kind = self.directory.find_string(self.name("rope.scaling.type")) or "none"
        if kind not in supported:
            raise self._wrong("rope.scaling.type", f'is "{kind}", supported is "{supported[0]}"')
        return kind

    def _wrong(self, key: str, reason: str) -> CheckpointError:
        return CheckpointError(f'{self.directory.path}: key "{self.name(key)}" {reason}')


def _read_llama(keys: _Keys) -> ModelConfig:
    head_dim = keys.head_dim
    keys.refuse_other_integers(
        {
            "rope.dimension_count": head_dim,
            "attention.value_length": head_dim,
            "expert_count": 0,
            "attention.sliding_window": 0,
        }
    )
    keys.refuse_rope_scaling()
    num_heads = keys.integer("attention.head_count")
    return ModelConfig(
        architecture="LlamaForCausalLM",
        num_layers=keys.integer("block_count"),
        hidden_size=keys.integer("embedding_length"),
        intermediate_size=keys.integer("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=keys.integer_or("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=keys.vocab_size,
        max_position_tokens=keys.integer("context_length"),
        rope_theta=keys.number_or("rope.freq_base", _DEFAULT_ROPE_THETA),
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        tie_word_embeddings=keys.has_tied_head,
        rope_scaling=_rope_divisors(keys.directory),
        eos_token_ids=keys.eos_token_ids,
        bos_token_id=keys.bos_token_id,
    )


def _read_gemma3(keys: _Keys) -> ModelConfig:
    head_dim = keys.head_dim
    keys.refuse_other_integers({"rope.dimension_count": head_dim, "attention.value_length": head_dim})
    is_scaled = keys.refuse_rope_scaling(("none", "linear")) == "linear"
    num_layers = keys.integer("block_count")
    num_heads = keys.integer("attention.head_count")
    return ModelConfig(
        architecture="Gemma3ForCausalLM",
        num_layers=num_layers,
        hidden_size=keys.integer("embedding_length"),
        intermediate_size=keys.integer("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=keys.integer_or("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=keys.vocab_size,
        max_position_tokens=keys.integer("context_length"),
        rope_theta=keys.number_or("rope.freq_base", 1_000_000.0),
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        tie_word_embeddings=keys.has_tied_head,
        rope_scaling=RopeFrequencyDivisors(divisors=(keys.number("rope.scaling.factor"),) * (head_dim // 2))
        if is_scaled
        else None,
        attention_scale=(keys.integer("embedding_length") / num_heads) ** -0.5
        if num_layers == _GEMMA3_LAYERS_SCALED_BY_WIDTH
        else None,
        sliding=SlidingLayers(
            is_sliding=every_nth_layer_full(
                num_layers, keys.integer_or("attention.sliding_window_pattern", _GEMMA3_LAYERS_PER_FULL)
            ),
            window_tokens=keys.integer("attention.sliding_window"),
            rope_theta=keys.number_or("rope.freq_base_swa", _GEMMA3_SLIDING_ROPE_THETA),
        ),
        eos_token_ids=keys.eos_token_ids,
        bos_token_id=keys.bos_token_id,
    )


def _rope_divisors(directory: GgufDirectory) -> RopeFrequencyDivisors | None:
    tensor = directory.tensors.get(ROPE_DIVISORS)
    if tensor is None:
        return None
    return RopeFrequencyDivisors(divisors=tuple(read_gguf_tensor(directory.path, tensor).flatten().tolist()))


_READERS: Mapping[str, Callable[[_Keys], ModelConfig]] = MappingProxyType(
    {"llama": _read_llama, "gemma3": _read_gemma3}
)

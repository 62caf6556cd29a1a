"""config.json and generation_config.json of a `transformers` checkpoint to a ModelConfig.

Reads both spellings of the rotary settings: `rope_parameters` (5.x) and `rope_theta` with `rope_scaling` (before).
Anything that would change the computation in a way no model here implements is refused, naming the key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from model_runtime.config import (
    Llama3RopeScaling,
    ModelConfig,
    RopeFrequencyDivisors,
    RopeScaling,
    SlidingLayers,
    every_nth_layer_full,
)
from model_runtime.errors import CheckpointError
from model_runtime.hf_keys import JsonKeys, eos_token_ids, read_json_object

_DEFAULT_ROPE_THETA = 10000.0
_GEMMA3_ROPE_THETA = 1_000_000.0
_GEMMA3_SLIDING_ROPE_THETA = 10000.0
_GEMMA3_LAYERS_PER_FULL = 6  # where a file does not say which layers see everything


def read_hf_config(directory: Path) -> ModelConfig:
    """Raises CheckpointError naming the key and its value for an unknown architecture or an unsupported setting."""
    path = directory / "config.json"
    keys = JsonKeys(path=path, values=read_json_object(path))
    architectures = keys.values.get("architectures")
    match architectures:
        case [str(architecture)] if architecture in _READERS:
            read = _READERS[architecture]
        case _:
            raise CheckpointError(
                f"{path}: architectures {architectures!r} is not supported (supported: {', '.join(_READERS)})"
            )
    try:
        return read(directory, keys)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _read_llama(directory: Path, keys: JsonKeys) -> ModelConfig:
    keys.refuse_others(
        {
            "hidden_act": ("silu",),
            "attention_bias": (False, None),
            "mlp_bias": (False, None),
            "quantization_config": (None,),
        }
    )
    num_heads = keys.integer("num_attention_heads")
    hidden_size = keys.integer("hidden_size")
    rope = keys.nested("rope_parameters") or keys.nested("rope_scaling")
    return ModelConfig(
        architecture="LlamaForCausalLM",
        num_layers=keys.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=keys.integer("num_key_value_heads", num_heads),
        head_dim=keys.integer("head_dim", hidden_size // max(num_heads, 1)),
        vocab_size=keys.integer("vocab_size"),
        max_position_tokens=keys.integer("max_position_embeddings"),
        rope_theta=_rope_theta(keys, rope, _DEFAULT_ROPE_THETA),
        rms_norm_eps=keys.number("rms_norm_eps"),
        tie_word_embeddings=keys.flag("tie_word_embeddings"),
        rope_scaling=None if rope is None else _llama_rope_scaling(rope),
        eos_token_ids=eos_token_ids(directory, keys),
        bos_token_id=keys.find_integer("bos_token_id"),
    )


def _read_gemma3(directory: Path, keys: JsonKeys) -> ModelConfig:
    keys.refuse_others(
        {
            "hidden_activation": ("gelu_pytorch_tanh",),
            "attention_bias": (False, None),
            "attn_logit_softcapping": (None,),
            "final_logit_softcapping": (None,),
            "use_bidirectional_attention": (False, None),
            "quantization_config": (None,),
        }
    )
    rope = keys.nested("rope_parameters")
    full = keys.nested("rope_scaling") if rope is None else rope.nested("full_attention")
    head_dim = keys.integer("head_dim")
    num_layers = keys.integer("num_hidden_layers")
    return ModelConfig(
        architecture="Gemma3ForCausalLM",
        num_layers=num_layers,
        hidden_size=keys.integer("hidden_size"),
        intermediate_size=keys.integer("intermediate_size"),
        num_heads=keys.integer("num_attention_heads"),
        num_kv_heads=keys.integer("num_key_value_heads"),
        head_dim=head_dim,
        vocab_size=keys.integer("vocab_size"),
        max_position_tokens=keys.integer("max_position_embeddings"),
        rope_theta=_rope_theta(keys, full, _GEMMA3_ROPE_THETA),
        rms_norm_eps=keys.number("rms_norm_eps"),
        tie_word_embeddings=keys.flag("tie_word_embeddings", default=True),
        rope_scaling=None if full is None else _linear_rope_scaling(full, head_dim),
        attention_scale=keys.number("query_pre_attn_scalar") ** -0.5,
        sliding=SlidingLayers(
            is_sliding=_sliding_layers(keys, num_layers),
            window_tokens=keys.integer("sliding_window"),
            rope_theta=_sliding_rope_theta(keys, rope),
        ),
        eos_token_ids=eos_token_ids(directory, keys),
        bos_token_id=keys.find_integer("bos_token_id"),
    )


def _sliding_layers(keys: JsonKeys, num_layers: int) -> tuple[bool, ...]:
    labels = keys.strings("layer_types")
    if labels is None:
        period = keys.integer("sliding_window_pattern", _GEMMA3_LAYERS_PER_FULL)
        return every_nth_layer_full(num_layers, period)
    known = ("full_attention", "sliding_attention")
    for label in labels:
        if label not in known:
            raise CheckpointError(f'{keys.path}: key "layer_types" names "{label}", supported are {", ".join(known)}')
    return tuple(label == "sliding_attention" for label in labels)


def _sliding_rope_theta(keys: JsonKeys, rope: JsonKeys | None) -> float:
    if rope is None:
        return _number_or(keys, "rope_local_base_freq", _GEMMA3_SLIDING_ROPE_THETA)
    sliding = rope.nested("sliding_attention")
    if sliding is None:
        return _GEMMA3_SLIDING_ROPE_THETA
    if _rope_kind(sliding) != "default":
        raise _unsupported_rope(sliding, ("default",))
    return _number_or(sliding, "rope_theta", _GEMMA3_SLIDING_ROPE_THETA)


def _number_or(keys: JsonKeys, key: str, default: float) -> float:
    return default if keys.values.get(key) is None else keys.number(key)


def _rope_theta(keys: JsonKeys, rope: JsonKeys | None, default: float) -> float:
    for place in (rope, keys):
        if place is not None and place.values.get("rope_theta") is not None:
            return place.number("rope_theta")
    return default


def _rope_kind(rope: JsonKeys) -> object:
    return rope.values.get("rope_type", rope.values.get("type", "default"))


def _llama_rope_scaling(rope: JsonKeys) -> RopeScaling | None:
    kind = _rope_kind(rope)
    if kind == "default":
        return None
    if kind != "llama3":
        raise _unsupported_rope(rope, ("default", "llama3"))
    return Llama3RopeScaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_tokens=rope.integer("original_max_position_embeddings"),
    )


def _linear_rope_scaling(rope: JsonKeys, head_dim: int) -> RopeScaling | None:
    kind = _rope_kind(rope)
    if kind == "default":
        return None
    if kind != "linear":
        raise _unsupported_rope(rope, ("default", "linear"))
    return RopeFrequencyDivisors(divisors=(rope.number("factor"),) * (head_dim // 2))


def _unsupported_rope(rope: JsonKeys, supported: tuple[str, ...]) -> CheckpointError:
    return CheckpointError(
        f'{rope.path}: rope type "{_rope_kind(rope)}" is not supported (supported: {", ".join(supported)})'
    )


_READERS: Mapping[str, Callable[[Path, JsonKeys], ModelConfig]] = MappingProxyType(
    {"LlamaForCausalLM": _read_llama, "Gemma3ForCausalLM": _read_gemma3}
)

"""config.json and generation_config.json of a `transformers` checkpoint to a ModelConfig.

Reads both spellings of the rotary settings: `rope_parameters` (5.x) and `rope_theta` with `rope_scaling` (before).
Anything that would change the computation in a way no model here implements is refused, naming the key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from model_runtime.config import Llama3RopeScaling, ModelConfig, RopeScaling
from model_runtime.errors import CheckpointError

_ARCHITECTURES = ("LlamaForCausalLM",)
_DEFAULT_ROPE_THETA = 10000.0


def read_json_object(path: Path) -> Mapping[str, object]:
    """Raises CheckpointError when the file is missing or holds no JSON object."""
    try:
        content: object = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is missing") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, holds {type(content).__name__}")
    return content


def read_hf_config(directory: Path) -> ModelConfig:
    """Raises CheckpointError naming the key and its value for an unknown architecture or an unsupported setting."""
    path = directory / "config.json"
    keys = _Keys(path=path, values=read_json_object(path))
    architectures = keys.values.get("architectures")
    match architectures:
        case [str(architecture)] if architecture in _ARCHITECTURES:
            pass
        case _:
            raise CheckpointError(
                f"{path}: architectures {architectures!r} is not supported (supported: {', '.join(_ARCHITECTURES)})"
            )
    _refuse_unsupported(keys)
    num_heads = keys.integer("num_attention_heads")
    hidden_size = keys.integer("hidden_size")
    rope = keys.nested("rope_parameters") or keys.nested("rope_scaling")
    try:
        return ModelConfig(
            architecture=architecture,
            num_layers=keys.integer("num_hidden_layers"),
            hidden_size=hidden_size,
            intermediate_size=keys.integer("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=keys.integer("num_key_value_heads", num_heads),
            head_dim=keys.integer("head_dim", hidden_size // max(num_heads, 1)),
            vocab_size=keys.integer("vocab_size"),
            max_position_tokens=keys.integer("max_position_embeddings"),
            rope_theta=_rope_theta(keys, rope),
            rms_norm_eps=keys.number("rms_norm_eps"),
            tie_word_embeddings=keys.flag("tie_word_embeddings"),
            rope_scaling=None if rope is None else _rope_scaling(rope),
            eos_token_ids=_eos_token_ids(directory, keys),
            bos_token_id=keys.find_integer("bos_token_id"),
        )
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Keys:
    """Typed access to one JSON object; every accessor raises CheckpointError naming the key and the value found."""

    path: Path
    values: Mapping[str, object]

    def find_integer(self, key: str) -> int | None:
        value = self.values.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self._wrong(key, "an integer")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.find_integer(key)
        if value is not None:
            return value
        if default is None:
            raise self._wrong(key, "an integer")
        return default

    def number(self, key: str) -> float:
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def nested(self, key: str) -> _Keys | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, "an object")
        return _Keys(path=self.path, values=value)

    def _wrong(self, key: str, wanted: str) -> CheckpointError:
        return CheckpointError(f'{self.path}: key "{key}" must be {wanted}, is {self.values.get(key)!r}')


def _refuse_unsupported(keys: _Keys) -> None:
    for key, accepted in (
        ("hidden_act", ("silu",)),
        ("attention_bias", (False, None)),
        ("mlp_bias", (False, None)),
        ("quantization_config", (None,)),
    ):
        value = keys.values.get(key, accepted[0])
        if value not in accepted:
            raise CheckpointError(f'{keys.path}: key "{key}" is {value!r}, supported is {accepted[0]!r}')


def _rope_theta(keys: _Keys, rope: _Keys | None) -> float:
    for place in (rope, keys):
        if place is not None and place.values.get("rope_theta") is not None:
            return place.number("rope_theta")
    return _DEFAULT_ROPE_THETA


def _rope_scaling(rope: _Keys) -> RopeScaling | None:
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise CheckpointError(f'{rope.path}: rope type "{kind}" is not supported (supported: default, llama3)')
    return Llama3RopeScaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_tokens=rope.integer("original_max_position_embeddings"),
    )


def _eos_token_ids(directory: Path, keys: _Keys) -> tuple[int, ...]:
    """generation_config.json lists the ends of a chat turn, which config.json may lack; it wins where it is there."""
    generation_path = directory / "generation_config.json"
    for path, values in (
        (generation_path, read_json_object(generation_path) if generation_path.is_file() else {}),
        (keys.path, keys.values),
    ):
        match values.get("eos_token_id"):
            case None:
                continue
            case int(token_id):
                return (token_id,)
            case [*token_ids] if all(isinstance(token_id, int) for token_id in token_ids):
                return tuple(int(str(token_id)) for token_id in token_ids)
            case other:
                raise CheckpointError(f'{path}: key "eos_token_id" must be token ids, is {other!r}')
    return ()

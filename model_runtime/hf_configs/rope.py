"""What all architectures' rotary settings have in common: both spellings, `rope_parameters` (5.x) and before it."""

from __future__ import annotations

import math

from model_runtime.config import YarnRopeScaling
from model_runtime.errors import CheckpointError
from model_runtime.hf_keys import JsonKeys

DEFAULT_ROPE_THETA = 10000.0


def number_or(keys: JsonKeys, key: str, default: float) -> float:
    """The key's number, the default where it is absent or null."""
    return default if keys.values.get(key) is None else keys.number(key)


def rope_theta(keys: JsonKeys, rope: JsonKeys | None, default: float) -> float:
    """The rotary base, from the rotary settings or from the config itself."""
    for place in (rope, keys):
        if place is not None and place.values.get("rope_theta") is not None:
            return place.number("rope_theta")
    return default


def rope_kind(rope: JsonKeys) -> object:
    """The name of a frequency scaling, "default" for none."""
    return rope.values.get("rope_type", rope.values.get("type", "default"))


def unsupported_rope(rope: JsonKeys, supported: tuple[str, ...]) -> CheckpointError:
    """The error for a scaling outside `supported`."""
    return CheckpointError(
        f'{rope.path}: rope type "{rope_kind(rope)}" is not supported (supported: {", ".join(supported)})'
    )


def yarn_rope_scaling(rope: JsonKeys, max_position_tokens: int) -> YarnRopeScaling | None:
    """The scaling of rotary settings that are plain or YaRN; None for plain ones."""
    kind = rope_kind(rope)
    if kind == "default":
        return None
    if kind != "yarn":
        raise unsupported_rope(rope, ("default", "yarn"))
    original_tokens = rope.integer("original_max_position_embeddings")
    stretched = max_position_tokens / original_tokens
    factor = number_or(rope, "factor", stretched)
    return YarnRopeScaling(
        factor=factor,
        original_max_position_tokens=original_tokens,
        beta_fast=number_or(rope, "beta_fast", 32.0),
        beta_slow=number_or(rope, "beta_slow", 1.0),
        is_truncated=rope.flag("truncate", default=True),
        magnitude=number_or(rope, "attention_factor", _yarn_magnitude(rope, factor)),
    )


def yarn_attention_scale(rope: JsonKeys, scaling: YarnRopeScaling) -> float:
    """What latent attention multiplies its scores by beside the head's own scale."""
    return _yarn_growth(scaling.factor, number_or(rope, "mscale_all_dim", 0.0)) ** 2


def _yarn_magnitude(rope: JsonKeys, factor: float) -> float:
    partial, whole = number_or(rope, "mscale", 0.0), number_or(rope, "mscale_all_dim", 0.0)
    if partial and whole:
        return _yarn_growth(factor, partial) / _yarn_growth(factor, whole)
    return _yarn_growth(factor, 1.0)


def _yarn_growth(factor: float, weight: float) -> float:
    """Source: Peng et al. 2023, "YaRN", equation 22, with a weight."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

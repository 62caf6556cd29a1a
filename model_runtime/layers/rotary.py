"""Rotary position embedding in the half-split layout: dimension i turns with dimension i + rotary_dim / 2.

Source: Su et al. 2021, "RoFormer"; the layout of transformers' Llama.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from model_runtime.config import Llama3RopeScaling, ModelConfig, RopeFrequencyDivisors, YarnRopeScaling
from model_runtime.kernels.interface import Kernels


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Angles:
    """How far each token's heads turn: float32[num_tokens, head_dim / 2] each."""

    cosines: torch.Tensor
    sines: torch.Tensor


class RotaryTable:
    """Turns positions into the cosines and sines of heads. Holds the frequencies[head_dim / 2] and no table.

    Cosines and sines are multiplied by `magnitude`.
    """

    def __init__(self, frequencies: torch.Tensor, magnitude: float = 1.0) -> None:
        self._frequencies = frequencies  # [head_dim / 2]
        self._magnitude = magnitude

    @classmethod
    def of(cls, config: ModelConfig) -> RotaryTable:
        """That of the layers that see everything, scaling applied."""
        scaling = config.rope_scaling
        return cls(rotary_frequencies(config), scaling.magnitude if isinstance(scaling, YarnRopeScaling) else 1.0)

    def at(self, positions: torch.Tensor) -> Angles:
        """Angles of int64[num_tokens] positions."""
        angles = positions.float().unsqueeze(-1) * self._frequencies  # [tokens, head_dim / 2]
        if self._magnitude == 1.0:
            return Angles(cosines=angles.cos(), sines=angles.sin())
        return Angles(cosines=angles.cos().mul_(self._magnitude), sines=angles.sin().mul_(self._magnitude))


def base_frequencies(theta: float, head_dim: int) -> torch.Tensor:
    """float32[head_dim / 2] radians per position of an unscaled embedding."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return 1.0 / theta**exponents


def rotary_frequencies(config: ModelConfig) -> torch.Tensor:
    """float32[head_dim / 2] radians per position of the layers that see everything, scaling applied."""
    frequencies = base_frequencies(config.rope_theta, config.num_turning_dims)
    match config.rope_scaling:
        case None:
            return frequencies
        case RopeFrequencyDivisors(divisors=divisors):
            return frequencies / torch.tensor(divisors)
        case Llama3RopeScaling() as scaling:
            return _stretch_low_frequencies(frequencies, scaling)
        case YarnRopeScaling() as scaling:
            return _interpolate_by_dimension(frequencies, config.rope_theta, scaling)


def rotate(heads: torch.Tensor, angles: Angles, kernels: Kernels) -> torch.Tensor:
    """[tokens, num_heads, head_dim] turned by the angles; the heads of a token are contiguous.

    Where there are fewer angles than head_dim / 2, the dimensions behind those stay as they are.
    """
    rotary_dim = 2 * angles.cosines.shape[1]
    if rotary_dim < heads.shape[2]:
        turned = rotate(heads[..., :rotary_dim], angles, kernels)
        return torch.cat((turned, heads[..., rotary_dim:]), dim=2)
    turned = torch.empty_like(heads, memory_format=torch.contiguous_format)
    kernels.rotate(heads.flatten(1), angles.cosines, angles.sines, turned.flatten(1))
    return turned


def _stretch_low_frequencies(frequencies: torch.Tensor, scaling: Llama3RopeScaling) -> torch.Tensor:
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position_tokens / wavelengths  # full turns within the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)  # 0 for long wavelengths, 1 for short ones
    return frequencies * (kept + (1.0 - kept) / scaling.factor)


def _interpolate_by_dimension(frequencies: torch.Tensor, theta: float, scaling: YarnRopeScaling) -> torch.Tensor:
    num_frequencies = frequencies.shape[0]
    first = _dimension_of_turns(scaling.beta_fast, num_frequencies, theta, scaling.original_max_position_tokens)
    last = _dimension_of_turns(scaling.beta_slow, num_frequencies, theta, scaling.original_max_position_tokens)
    if scaling.is_truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_frequencies - 1)
    width = last - first if last != first else 0.001  # a step instead of a ramp
    divided = ((torch.arange(num_frequencies).float() - first) / width).clamp(0.0, 1.0)
    return frequencies / scaling.factor * divided + frequencies * (1.0 - divided)


def _dimension_of_turns(num_turns: float, num_frequencies: int, theta: float, num_tokens: int) -> float:
    """Where on the line of frequencies one turns so many times within `num_tokens`."""
    return num_frequencies * math.log(num_tokens / (num_turns * 2 * math.pi)) / math.log(theta)

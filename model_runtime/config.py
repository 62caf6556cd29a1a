"""ModelConfig: the shape of one decoder-only model, whatever file it came from.

Pure data: knows no file format, no tensor and no device. Readers of a format fill it in; models read it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from model_runtime.layer_configs.delta_net import DeltaNetConfig
from model_runtime.layer_configs.experts import ExpertsConfig
from model_runtime.layer_configs.latent_attention import LatentAttentionConfig
from model_runtime.layer_configs.mamba2 import Mamba2Config
from model_runtime.layer_configs.sparse_index import SparseIndexConfig

MAX_LAYERS = 4096
"""More than any model has, and few enough that a wrong number costs no time."""
_MAX_EXPERTS = 1 << 18
_MAX_SIZE = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3RopeScaling:
    """Stretching of the low rotary frequencies. Raises ValueError naming the field.

    Source: Llama 3.1 model card and the `llama3` rope type of config.json: wavelengths beyond
    `original_max_position_tokens / low_freq_factor` are divided by `factor`, those below
    `original_max_position_tokens / high_freq_factor` are kept, and the rest is interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_tokens: int

    def __post_init__(self) -> None:
        _require_positive("rope_scaling.factor", self.factor)
        _require_positive("rope_scaling.low_freq_factor", self.low_freq_factor)
        _require_positive("rope_scaling.original_max_position_tokens", self.original_max_position_tokens)
        if not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(
                f"rope_scaling.high_freq_factor {self.high_freq_factor} must be greater than "
                f"low_freq_factor {self.low_freq_factor}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeFrequencyDivisors:
    """One divisor per rotary frequency, lowest dimension first: how a GGUF file stores any frequency scaling."""

    divisors: tuple[float, ...]

    def __post_init__(self) -> None:
        for index, divisor in enumerate(self.divisors):
            _require_positive(f"rope_scaling.divisors[{index}]", divisor)


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnRopeScaling:
    """Low rotary frequencies are divided by `factor`, high ones kept, the rest interpolated by dimension.

    Kept is what turns at least `beta_fast` times within the original context, divided what turns `beta_slow` times or
    less; `is_truncated` rounds the dimensions where that is outwards. Cosines and sines are multiplied by `magnitude`.
    Raises ValueError naming the field. Source: Peng et al. 2023, "YaRN".
    """

    factor: float
    original_max_position_tokens: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_truncated: bool = True
    magnitude: float = 1.0

    def __post_init__(self) -> None:
        _require_positive("rope_scaling.factor", self.factor)
        _require_positive("rope_scaling.original_max_position_tokens", self.original_max_position_tokens)
        _require_positive("rope_scaling.beta_slow", self.beta_slow)
        _require_positive("rope_scaling.magnitude", self.magnitude)
        if not self.beta_fast >= self.beta_slow:
            raise ValueError(f"rope_scaling.beta_fast {self.beta_fast} must be at least beta_slow {self.beta_slow}")


RopeScaling = Llama3RopeScaling | RopeFrequencyDivisors | YarnRopeScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingLayers:
    """Which layers see a window only: the last `window_tokens` tokens, a token's own included.

    They turn by a rotary base of their own, unscaled. Raises ValueError naming the field.
    """

    is_sliding: tuple[bool, ...]
    window_tokens: int
    rope_theta: float

    def __post_init__(self) -> None:
        _require_positive("sliding.window_tokens", self.window_tokens)
        _require_positive("sliding.rope_theta", self.rope_theta)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a model; `architecture` is a key of the registry.

    `attention_scale` is what scores are multiplied by, head_dim ** -0.5 where it is None. `rotary_dim` is how many of a
    head's first dimensions turn with the position, all of them where it is None. `sliding` None: every layer sees
    everything. The others are None where a model has no layers of the kind. Raises ValueError naming the field and its
    value.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_tokens: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope_scaling: RopeScaling | None = None
    attention_scale: float | None = None
    rotary_dim: int | None = None
    sliding: SlidingLayers | None = None
    experts: ExpertsConfig | None = None
    latent_attention: LatentAttentionConfig | None = None
    sparse_index: SparseIndexConfig | None = None
    mamba2: Mamba2Config | None = None
    delta_net: DeltaNetConfig | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        for name, value in (
            ("num_layers", self.num_layers),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_heads", self.num_heads),
            ("num_kv_heads", self.num_kv_heads),
            ("head_dim", self.head_dim),
            ("vocab_size", self.vocab_size),
            ("max_position_tokens", self.max_position_tokens),
            ("rope_theta", self.rope_theta),
            ("rms_norm_eps", self.rms_norm_eps),
        ):
            _require_positive(name, value)
        check_num_layers(self.num_layers)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        if self.experts is not None and self.num_layers * self.experts.num_experts > _MAX_EXPERTS:
            raise ValueError(
                f"experts.num_experts {self.experts.num_experts} in each of {self.num_layers} layers are more than "
                f"{_MAX_EXPERTS}"
            )
        self._check_rotary_dim()
        self._check_rope_scaling()
        if self.attention_scale is not None:
            _require_positive("attention_scale", self.attention_scale)
        self._check_layer_flags()
        for token_id in (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,))):
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(f"special token {token_id} is outside the vocabulary of {self.vocab_size}")

    @property
    def num_turning_dims(self) -> int:
        """Dimensions of a head that turn with the position."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    def window_left_tokens(self, layer: int) -> int | None:
        """Tokens before its own that a token of the layer sees; None for all of them."""
        if self.sliding is None or not self.sliding.is_sliding[layer]:
            return None
        return self.sliding.window_tokens - 1

    def _check_layer_flags(self) -> None:
        """Every kind of layer names all layers."""
        for name, flags in (
            ("sliding.is_sliding", None if self.sliding is None else self.sliding.is_sliding),
            ("experts.is_sparse", None if self.experts is None else self.experts.is_sparse),
            ("mamba2.is_recurrent", None if self.mamba2 is None else self.mamba2.is_recurrent),
            ("delta_net.is_recurrent", None if self.delta_net is None else self.delta_net.is_recurrent),
        ):
            if flags is not None and len(flags) != self.num_layers:
                raise ValueError(f"{name} names {len(flags)} layers, num_layers is {self.num_layers}")

    def _check_rotary_dim(self) -> None:
        if self.rotary_dim is None and self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if self.rotary_dim is not None and (self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim):
            raise ValueError(f"rotary_dim must be even and within head_dim {self.head_dim}, got {self.rotary_dim}")

    def _check_rope_scaling(self) -> None:
        scaling, num_frequencies = self.rope_scaling, self.num_turning_dims // 2
        if isinstance(scaling, RopeFrequencyDivisors) and len(scaling.divisors) != num_frequencies:
            raise ValueError(
                f"rope_scaling has {len(scaling.divisors)} divisors, {self.num_turning_dims} turning dimensions have "
                f"{num_frequencies} frequencies"
            )


def every_nth_layer_full(num_layers: int, period: int) -> tuple[bool, ...]:
    """Which layers slide when the last of every `period` sees everything. Raises ValueError for a period below 1."""
    if period < 1:
        raise ValueError(f"sliding_window_pattern must be at least 1, got {period}")
    return tuple((layer + 1) % period != 0 for layer in range(num_layers))


def check_num_layers(num_layers: int) -> None:
    """For readers, before they make anything per layer. Raises ValueError above MAX_LAYERS."""
    if num_layers > MAX_LAYERS:
        raise ValueError(f"num_layers must be at most {MAX_LAYERS}, got {num_layers}")


def _require_positive(name: str, value: float) -> None:
    if isinstance(value, int) and value > _MAX_SIZE:
        raise ValueError(f"{name} must be at most {_MAX_SIZE}, got {value}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be positive and finite, got {value}")

"""The feed-forward half of a block: one dense network, or routed experts beside one that all tokens go through.

Tensor names are those of DeepSeek-V3 in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from model_runtime.config import ModelConfig
from model_runtime.layer_builder import LayerBuilder
from model_runtime.layer_configs.experts import ExpertsConfig
from model_runtime.layers.experts import Experts, Router, expert_shapes
from model_runtime.layers.mlp import GatedMlp, gated_mlp_shapes
from model_runtime.weights import Shape


class SharedExperts:
    """Routed experts, and a network that every token goes through if there is one."""

    def __init__(self, prefix: str, builder: LayerBuilder, config: ExpertsConfig) -> None:
        bias_name = prefix + "gate.e_score_correction_bias" if config.has_choice_bias else None
        self._router = Router(prefix + "gate.weight", bias_name, builder, config)
        self._experts = Experts(prefix + "experts.", builder, config)
        is_shared = config.shared_intermediate_size > 0
        self._shared = GatedMlp(prefix + "shared_experts.", builder) if is_shared else None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        routed = self._experts(hidden, *self._router(hidden))  # [T, hidden]
        return routed if self._shared is None else routed.add_(self._shared(hidden))


def build_feed_forward(prefix: str, layer: int, builder: LayerBuilder) -> GatedMlp | SharedExperts:
    """What the config says of the layer."""
    experts = _experts_of_layer(layer, builder.config)
    return GatedMlp(prefix, builder) if experts is None else SharedExperts(prefix, builder, experts)


def feed_forward_shapes(prefix: str, layer: int, config: ModelConfig) -> Mapping[str, Shape]:
    """Shapes of the tensors of one layer's half."""
    experts, hidden = _experts_of_layer(layer, config), config.hidden_size
    if experts is None:
        return gated_mlp_shapes(prefix, hidden, config.intermediate_size)
    shapes: dict[str, Shape] = {prefix + "gate.weight": (experts.num_experts, hidden)}
    if experts.has_choice_bias:
        shapes[prefix + "gate.e_score_correction_bias"] = (experts.num_experts,)
    shapes |= expert_shapes(prefix + "experts.", hidden, experts)
    if experts.shared_intermediate_size:
        shapes |= gated_mlp_shapes(prefix + "shared_experts.", hidden, experts.shared_intermediate_size)
    return shapes


def _experts_of_layer(layer: int, config: ModelConfig) -> ExpertsConfig | None:
    return config.experts if config.experts is not None and config.experts.is_sparse[layer] else None

"""Mixture of experts: a router chooses some small networks for each token, and their outputs are added up.

A row's experts are added in ascending order, so its bits depend on nothing but itself. Source: Shazeer et al. 2017,
"Outrageously large neural networks"; groups and the bias of the choice: DeepSeek-AI 2024, "DeepSeek-V3".
"""

from __future__ import annotations

import torch

from model_runtime.kernels.interface import Kernels
from model_runtime.layer_builder import LayerBuilder
from model_runtime.layer_configs.experts import ExpertsConfig, ExpertScore, GroupScore
from model_runtime.layers.mlp import GatedMlp, gated_mlp_shapes

_SMALLEST_SUM = 1e-20


class Router:
    """Chooses each token's experts and their weights. `bias` takes part in the choice only."""

    def __init__(self, name: str, bias_name: str | None, builder: LayerBuilder, config: ExpertsConfig) -> None:
        self._config = config
        self._kernels = builder.kernels
        self._gate = builder.linear(name)  # [num_experts, hidden]
        self._bias = None if bias_name is None else builder.tensor(bias_name)  # [num_experts]

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, hidden] -> expert ids int64[T, num_experts_per_token] and their weights float32."""
        config = self._config
        scores = self._scores(self._gate(hidden))  # [T, num_experts]
        choice = scores if self._bias is None else scores + self._bias
        if config.num_groups > 1:
            choice = self._keep_best_groups(choice)
        ids = torch.topk(choice, config.num_experts_per_token, dim=-1).indices
        weights = scores.gather(1, ids)
        if config.normalizes_weights:
            weights = weights / (weights.sum(-1, keepdim=True) + _SMALLEST_SUM)
        return ids, weights * config.weight_scale

    def _scores(self, logits: torch.Tensor) -> torch.Tensor:
        if self._config.score is ExpertScore.SOFTMAX:
            return torch.softmax(logits, -1)
        return sigmoid(logits, self._kernels)

    def _keep_best_groups(self, choice: torch.Tensor) -> torch.Tensor:
        """The scores of the groups that a token may use; -inf for the others."""
        config = self._config
        groups = choice.view(choice.shape[0], config.num_groups, -1)  # [T, groups, experts of one]
        num_counted = 1 if config.group_score is GroupScore.BEST else 2
        worth = groups.topk(num_counted, dim=-1).values.sum(-1)  # [T, groups]
        best = worth.topk(config.num_groups_per_token, dim=-1).indices
        is_out = torch.ones_like(worth, dtype=torch.bool).scatter_(1, best, False)
        return groups.masked_fill(is_out.unsqueeze(-1), float("-inf")).flatten(1)


class Experts:
    """The networks `{prefix}{i}.`."""

    def __init__(self, prefix: str, builder: LayerBuilder, config: ExpertsConfig) -> None:
        builder = builder.without_adapters()
        self._experts = tuple(GatedMlp(f"{prefix}{expert}.", builder) for expert in range(config.num_experts))

    def __call__(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[T, hidden] through the experts `ids` int64[T, k] with `weights` float32[T, k] -> [T, hidden]."""
        output = torch.zeros_like(hidden)
        for expert in sorted(set(ids.flatten().tolist())):
            tokens, places = (ids == expert).nonzero(as_tuple=True)
            answers = self._experts[expert](hidden[tokens])  # [tokens of the expert, hidden]
            output[tokens] += answers * weights[tokens, places].unsqueeze(1)
        return output


def sigmoid(logits: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """float32[T, width]. Not torch's, which computes the last elements of a tensor another way than the others."""
    output = torch.empty_like(logits)
    kernels.sigmoid_multiply(torch.cat((logits, torch.ones_like(logits)), dim=1), output)
    return output


def expert_shapes(prefix: str, hidden: int, config: ExpertsConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of all experts of a layer."""
    shapes: dict[str, tuple[int, ...]] = {}
    for expert in range(config.num_experts):
        shapes |= gated_mlp_shapes(f"{prefix}{expert}.", hidden, config.intermediate_size)
    return shapes

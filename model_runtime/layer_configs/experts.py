"""What layers of many small feed-forward networks add to a model: each token goes through a few of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ExpertScore(StrEnum):
    """What a router's logits become before the best are taken."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class GroupScore(StrEnum):
    """What a group of experts is worth to a token: its best expert, or the sum of its best two."""

    BEST = "best"
    BEST_TWO = "best_two"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """`is_sparse[i]`: layer i has experts, the others one dense network.

    A token takes the `num_experts_per_token` best of the `num_groups_per_token` best groups, weighted by their scores
    times `weight_scale`, which add up to one before that where `normalizes_weights`. `has_choice_bias`: a stored bias
    takes part in the choice and in nothing else. `shared_intermediate_size` 0: no network that every token goes
    through. Raises ValueError naming the field and its value.
    """

    is_sparse: tuple[bool, ...]
    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int
    score: ExpertScore
    normalizes_weights: bool
    weight_scale: float = 1.0
    has_choice_bias: bool = False
    num_groups: int = 1
    num_groups_per_token: int = 1
    group_score: GroupScore = GroupScore.BEST

    def __post_init__(self) -> None:
        for name, value in (
            ("num_experts", self.num_experts),
            ("num_experts_per_token", self.num_experts_per_token),
            ("intermediate_size", self.intermediate_size),
            ("num_groups", self.num_groups),
            ("num_groups_per_token", self.num_groups_per_token),
        ):
            if value < 1:
                raise ValueError(f"experts.{name} must be at least 1, got {value}")
        if self.shared_intermediate_size < 0:
            raise ValueError(
                f"experts.shared_intermediate_size must not be negative, got {self.shared_intermediate_size}"
            )
        if self.num_experts % self.num_groups:
            raise ValueError(f"experts.num_groups {self.num_groups} must divide num_experts {self.num_experts}")
        if self.num_groups_per_token > self.num_groups:
            raise ValueError(
                f"experts.num_groups_per_token {self.num_groups_per_token} is above num_groups {self.num_groups}"
            )
        self._check_choice()

    def _check_choice(self) -> None:
        group_size = self.num_experts // self.num_groups
        num_eligible = group_size * self.num_groups_per_token
        if self.num_experts_per_token > num_eligible:
            raise ValueError(
                f"experts.num_experts_per_token {self.num_experts_per_token} is above the {num_eligible} experts of "
                "the groups that a token may use"
            )
        if self.group_score is GroupScore.BEST_TWO and self.num_groups > 1 and group_size < 2:
            raise ValueError(f"experts.num_groups {self.num_groups} leaves groups of {group_size}, two are needed")

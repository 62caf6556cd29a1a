"""What a sparse indexer adds to attention: small heads that choose which rows of its history a token attends to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseIndexConfig:
    """A token attends to the `num_selected` rows that `num_heads` heads of `head_dim` find worth most.

    Raises ValueError naming the field and its value.
    """

    num_heads: int
    head_dim: int
    num_selected: int

    def __post_init__(self) -> None:
        for name, value in (
            ("num_heads", self.num_heads),
            ("head_dim", self.head_dim),
            ("num_selected", self.num_selected),
        ):
            if value < 1:
                raise ValueError(f"sparse_index.{name} must be at least 1, got {value}")

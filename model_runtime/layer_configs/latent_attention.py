"""What multi-head latent attention adds to a model: keys and values are expanded from one compressed row per token."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionConfig:
    """A cache row is `rank` numbers that all heads share, then `rope_head_dim` that carry the position.

    A head's query and key have `nope_head_dim` + `rope_head_dim` dimensions, its value `value_head_dim`. `query_rank`
    None: queries are not compressed. `is_interleaved`: weights have the two dimensions that turn together side by side.
    `is_rotary` False: nothing turns, the last dimensions are as the others. Raises ValueError naming the field and its
    value.
    """

    rank: int
    query_rank: int | None
    nope_head_dim: int
    rope_head_dim: int
    value_head_dim: int
    is_interleaved: bool = True
    is_rotary: bool = True

    def __post_init__(self) -> None:
        for name, value in (
            ("rank", self.rank),
            ("query_rank", 1 if self.query_rank is None else self.query_rank),
            ("nope_head_dim", self.nope_head_dim),
            ("rope_head_dim", self.rope_head_dim),
            ("value_head_dim", self.value_head_dim),
        ):
            if value < 1:
                raise ValueError(f"latent_attention.{name} must be at least 1, got {value}")

    @property
    def query_head_dim(self) -> int:
        return self.nope_head_dim + self.rope_head_dim

    @property
    def row_width(self) -> int:
        """Numbers of one token in the cache."""
        return self.rank + self.rope_head_dim

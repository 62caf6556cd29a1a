"""What layers of the gated delta rule add to a model: a short convolution, and a matrix of state per head."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetConfig:
    """`is_recurrent[i]`: layer i keeps a state, the others attend over rows.

    Value head h goes with key head h * num_key_heads // num_heads; a state is [num_heads, key_head_dim,
    value_head_dim]. `conv_width` is in tokens, a token's own included. Raises ValueError naming the field and its
    value.
    """

    is_recurrent: tuple[bool, ...]
    num_heads: int
    num_key_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int

    def __post_init__(self) -> None:
        for name, value, minimum in (
            ("num_heads", self.num_heads, 1),
            ("num_key_heads", self.num_key_heads, 1),
            ("key_head_dim", self.key_head_dim, 1),
            ("value_head_dim", self.value_head_dim, 1),
            ("conv_width", self.conv_width, 2),
        ):
            if value < minimum:
                raise ValueError(f"delta_net.{name} must be at least {minimum}, got {value}")
        if self.num_heads % self.num_key_heads:
            raise ValueError(
                f"delta_net.num_heads {self.num_heads} is no multiple of num_key_heads {self.num_key_heads}"
            )
        if not any(self.is_recurrent) or all(self.is_recurrent):
            raise ValueError(
                f"delta_net.is_recurrent must name layers of both kinds, names {sum(self.is_recurrent)} recurrent "
                f"ones of {len(self.is_recurrent)}"
            )

    @property
    def key_width(self) -> int:
        """Numbers of all key heads of a token; queries have as many."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Numbers of all value heads of a token."""
        return self.num_heads * self.value_head_dim

    @property
    def num_conv_channels(self) -> int:
        """Queries, keys and values go through the convolution side by side."""
        return 2 * self.key_width + self.value_width

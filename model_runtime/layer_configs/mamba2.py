"""What selective state spaces (Mamba-2) add to a model: layers whose memory is one state per head."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config:
    """`is_recurrent[i]`: layer i is a state space, the others attend.

    A head's state is [state_dim, head_dim]; `num_groups` groups of heads share what is written under and read with.
    Steps are clamped to [min_step, max_step]. Raises ValueError naming the field and its value.
    """

    is_recurrent: tuple[bool, ...]
    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    conv_width: int
    has_conv_bias: bool
    min_step: float
    max_step: float

    def __post_init__(self) -> None:
        for name, value in (
            ("num_heads", self.num_heads),
            ("head_dim", self.head_dim),
            ("num_groups", self.num_groups),
            ("state_dim", self.state_dim),
        ):
            if value < 1:
                raise ValueError(f"mamba2.{name} must be at least 1, got {value}")
        if self.conv_width < 2:
            raise ValueError(f"mamba2.conv_width must be at least 2, got {self.conv_width}")
        if self.num_heads % self.num_groups:
            raise ValueError(f"mamba2.num_heads {self.num_heads} is no multiple of num_groups {self.num_groups}")
        if not 0.0 <= self.min_step <= self.max_step:
            raise ValueError(f"mamba2.min_step {self.min_step} must be in [0, max_step {self.max_step}]")

    @property
    def inner_size(self) -> int:
        """Numbers of one token that go through the state space."""
        return self.num_heads * self.head_dim

    @property
    def num_conv_channels(self) -> int:
        """What goes through the convolution: values, and keys and queries of every group."""
        return self.inner_size + 2 * self.num_groups * self.state_dim

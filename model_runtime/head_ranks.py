"""Whether the layers of a model share out over tensor ranks; what of the cache does is for the recipes to say."""

from __future__ import annotations

from model_runtime.config import ModelConfig
from model_runtime.errors import UnsupportedRanksError


def check_head_ranks(config: ModelConfig, *, num_tensor_ranks: int, num_context_ranks: int = 1) -> None:
    """Raises UnsupportedRanksError naming the field and both values.

    Heads that queries or states belong to are split and never repeated: ranks would compute the same twice. The rows of
    the matrix behind them are split too.
    """
    if num_tensor_ranks > 1 and num_context_ranks > 1:
        raise UnsupportedRanksError(
            f"tensor ranks {num_tensor_ranks} and context ranks {num_context_ranks}: one of them must be 1"
        )
    counts = {"num_heads": config.num_heads, "hidden_size": config.hidden_size}
    if config.delta_net is not None:
        counts["delta_net.num_heads"] = config.delta_net.num_heads
    if config.mamba2 is not None:
        counts["mamba2.num_heads"] = config.mamba2.num_heads
    for name, count in counts.items():
        if count % num_tensor_ranks:
            raise UnsupportedRanksError(
                f"{config.architecture}: {name} {count} is no multiple of the {num_tensor_ranks} tensor ranks"
            )

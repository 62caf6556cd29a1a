"""One tiny random reference model per family, by the word that its tests carry. A new family adds its own here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from transformers import PreTrainedModel
from unit.model_runtime import tiny_bamba, tiny_deepseek, tiny_gemma3, tiny_kimi_linear, tiny_llama, tiny_qwen3_next

TINY_MODELS: Mapping[str, Callable[[], PreTrainedModel]] = MappingProxyType(
    {
        "kimi": tiny_kimi_linear.make_reference,
        "mamba": tiny_bamba.make_reference,
        "deepseek_v2": tiny_deepseek.make_v2,
        "deepseek_v3": tiny_deepseek.make_v3,
        "dsa": tiny_deepseek.make_sparse,
        "qwen3_next": tiny_qwen3_next.make_reference,
    }
)

# The first two have files of their own for most of what the others share.
EVERY_FAMILY: Mapping[str, Callable[[], PreTrainedModel]] = MappingProxyType(
    {"llama": tiny_llama.make_reference, "gemma3": tiny_gemma3.make_reference, **TINY_MODELS}
)

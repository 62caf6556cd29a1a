"""config.json and generation_config.json of a `transformers` checkpoint to a ModelConfig.

One reader per architecture. Anything that would change the computation in a way no model here implements is refused,
naming the key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from model_runtime.config import ModelConfig, check_num_layers
from model_runtime.errors import CheckpointError
from model_runtime.hf_configs.bamba import read_bamba
from model_runtime.hf_configs.deepseek import read_deepseek_v2, read_deepseek_v3, read_deepseek_v32
from model_runtime.hf_configs.gemma3 import read_gemma3
from model_runtime.hf_configs.kimi_linear import read_kimi_linear
from model_runtime.hf_configs.llama import read_llama
from model_runtime.hf_configs.qwen3_next import read_qwen3_next
from model_runtime.hf_keys import JsonKeys, read_json_object


def read_hf_config(directory: Path) -> ModelConfig:
    """Raises CheckpointError naming the key and its value for an unknown architecture or an unsupported setting."""
    path = directory / "config.json"
    keys = JsonKeys(path=path, values=read_json_object(path))
    architectures = keys.values.get("architectures")
    match architectures:
        case [str(architecture)] if architecture in _READERS:
            read = _READERS[architecture]
        case _:
            raise CheckpointError(
                f"{path}: architectures {architectures!r} is not supported (supported: {', '.join(_READERS)})"
            )
    try:
        check_num_layers(keys.integer("num_hidden_layers"))
        return read(directory, keys)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


_READERS: Mapping[str, Callable[[Path, JsonKeys], ModelConfig]] = MappingProxyType(
    {
        "LlamaForCausalLM": read_llama,
        "Gemma3ForCausalLM": read_gemma3,
        "DeepseekV2ForCausalLM": read_deepseek_v2,
        "DeepseekV3ForCausalLM": read_deepseek_v3,
        "DeepseekV32ForCausalLM": read_deepseek_v32,
        "BambaForCausalLM": read_bamba,
        "KimiLinearForCausalLM": read_kimi_linear,
        "Qwen3NextForCausalLM": read_qwen3_next,
    }
)

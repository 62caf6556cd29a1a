"""Random LoRA adapters as PEFT writes them, and the reference with one merged into its matrices."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
# What can be adapted of each family.
TARGETS: Mapping[str, tuple[str, ...]] = {
    "llama": (*ATTENTION, *MLP),
    "gemma3": (*ATTENTION, *MLP),
    "mamba": (*ATTENTION, *MLP, "in_proj", "out_proj"),
    "kimi": (*ATTENTION, *MLP, "kv_a_proj_with_mqa"),
    "deepseek_v2": ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", *MLP),
    "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", *MLP),
    "dsa": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "wk", "wq_b", "o_proj", *MLP),
    "qwen3_next": (*ATTENTION, *MLP, "in_proj_qkvz", "in_proj_ba", "out_proj"),
}


def linear_modules(reference: PreTrainedModel, targets: Sequence[str]) -> dict[str, torch.nn.Linear]:
    """By name, those whose name ends so."""
    return {
        name: module
        for name, module in reference.named_modules()
        if isinstance(module, torch.nn.Linear) and name.rsplit(".", 1)[-1] in targets
    }


def write_adapter(
    folder: Path,
    reference: PreTrainedModel,
    targets: Sequence[str],
    *,
    seed: int = 1,
    rank: int = 3,
    alpha: float = 6.0,
    strength: float = 0.2,
    settings: Mapping[str, object] | None = None,
    change: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None,
) -> Path:
    """Strong enough that the answer is another one. `settings` go into the configuration; `change` edits tensors."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in linear_modules(reference, targets).items():
        shapes = {"A": (rank, module.in_features), "B": (module.out_features, rank)}
        for side, shape in shapes.items():
            values = torch.randn(shape, generator=generator) * strength
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = values
    assert tensors
    change(tensors)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "somewhere/else",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.05,
        "target_modules": sorted({name.rsplit(".", 1)[-1] for name in linear_modules(reference, targets)}),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps({**config, **(settings or {})}))
    return folder


@torch.no_grad()
def merged(reference: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """A copy of the reference whose matrices are what the adapter makes of them."""
    config = json.loads((folder / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config["use_rslora"] else config["r"])
    tensors = load_file(folder / "adapter_model.safetensors")
    adapted = copy.deepcopy(reference)
    for name, module in linear_modules(adapted, config["target_modules"]).items():
        down, up = (tensors[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
        module.weight += scale * (up @ down)
    return adapted

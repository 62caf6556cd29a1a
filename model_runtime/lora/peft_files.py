"""A LoRA adapter as PEFT writes it: a directory with adapter_config.json and adapter_model.safetensors.

Knows the format, and of the model the names and shapes of its matrices. What the files ask for beyond low-rank changes
of matrices is refused by name: computing without it would be wrong.

Source: Hu et al. 2021, "LoRA"; Kalajdzievski 2023, "A rank stabilization scaling factor for fine-tuning with LoRA";
the file layout of PEFT.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from model_runtime.errors import AdapterError, CheckpointError
from model_runtime.hf_keys import JsonKeys, read_json_object
from model_runtime.hf_names import canonical_name
from model_runtime.weights import TensorSource

_CONFIG_FILE = "adapter_config.json"
_TENSOR_FILE = "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
# The first value is what a missing key stands for. Some ways to initialise change the model's own matrices as well.
_ACCEPTED: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "peft_type": ("LORA",),
        "bias": ("none", None),
        "modules_to_save": (None, []),
        "rank_pattern": ({}, None),
        "alpha_pattern": ({}, None),
        "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
    }
)
# What changes nothing of what a finished adapter computes, or is said by its tensors.
_IRRELEVANT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_alpha",
        "lora_dropout",
        "megatron_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "r",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "use_rslora",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LowRankChange:
    """What is added to a matrix[columns, depth]: `up` times `down`. The adapter's scale is in `up`.

    `down`: float32[rank, depth]. `up`: float32[columns, rank].
    """

    down: torch.Tensor
    up: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoraAdapter:
    """`changes` by the canonical name of the matrix. `digest`: SHA-256, equal for files that change a model alike."""

    name: str
    path: Path
    digest: bytes
    changes: Mapping[str, LowRankChange]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """What the configuration says. `targets` are ends of module names; None where they are one expression."""

    rank: int
    scale: float
    targets: tuple[str, ...] | None


def open_adapter(name: str, path: Path, model: TensorSource) -> LoraAdapter:
    """Reads the adapter and checks it against the model that it is for. Raises AdapterError."""
    try:
        settings = _read_settings(path / _CONFIG_FILE)
        content = _read_content(path / _TENSOR_FILE)
        changes = _changes(path / _TENSOR_FILE, settings, _tensors_in(path / _TENSOR_FILE, content), model)
    except (AdapterError, CheckpointError, OSError) as error:
        raise AdapterError(f'adapter "{name}": {error}') from error
    digest = hashlib.sha256(f"{settings.scale!r} ".encode() + hashlib.sha256(content).digest())
    return LoraAdapter(name=name, path=path, digest=digest.digest(), changes=changes)


def _read_settings(path: Path) -> _Settings:
    keys = JsonKeys(path=path, values=read_json_object(path))
    keys.refuse_others(_ACCEPTED)
    for key, value in keys.values.items():
        if value and key not in _ACCEPTED and key not in _IRRELEVANT:
            raise AdapterError(f'{path}: key "{key}" is {value!r}, which is not supported')
    rank, alpha = keys.integer("r"), keys.number("lora_alpha")
    if rank < 1:
        raise AdapterError(f'{path}: key "r" is {rank}, at least 1 required')
    scale = alpha / (math.sqrt(rank) if keys.flag("use_rslora") else rank)
    if not math.isfinite(scale):
        raise AdapterError(f'{path}: key "lora_alpha" is {alpha!r}, a finite number required')
    is_expression = isinstance(keys.values.get("target_modules"), str)
    return _Settings(rank=rank, scale=scale, targets=None if is_expression else keys.strings("target_modules"))


def _read_content(path: Path) -> bytes:
    """Once: what is computed with and what the digest tells must be the same bytes, even where files are replaced."""
    if not path.is_file():
        raise AdapterError(f"{path}: is missing")
    return path.read_bytes()


def _tensors_in(path: Path, content: bytes) -> dict[str, torch.Tensor]:
    try:
        return load(content)
    except SafetensorError as error:
        raise AdapterError(f"{path}: cannot be read: {error}") from error


def _changes(
    path: Path, settings: _Settings, stored: Mapping[str, torch.Tensor], model: TensorSource
) -> Mapping[str, LowRankChange]:
    sides: dict[str, dict[str, torch.Tensor]] = {}
    for stored_name, tensor in stored.items():
        match = _TENSOR.fullmatch(stored_name)
        if match is None:
            raise AdapterError(f'{path}: tensor "{stored_name}" is no lora_A or lora_B of a linear layer')
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise AdapterError(f'{path}: tensor "{stored_name}" of {tensor.dtype} does not hold finite numbers only')
        sides.setdefault(match["module"], {})[match["side"]] = tensor
    if not sides:
        raise AdapterError(f"{path}: holds no tensor")
    for target in settings.targets or ():
        if not any(f".{module}".endswith(f".{target}") for module in sides):
            raise AdapterError(f'{path}: holds nothing of "{target}", which target_modules names')
    architecture = model.config.architecture
    return {
        canonical_name(architecture, f"{module}.weight"): _change(path, module, pair, settings, model)
        for module, pair in sorted(sides.items())
    }


def _change(
    path: Path, module: str, pair: Mapping[str, torch.Tensor], settings: _Settings, model: TensorSource
) -> LowRankChange:
    shape = model.shapes.get(canonical_name(model.config.architecture, f"{module}.weight"))
    if shape is None or len(shape) != 2:
        raise AdapterError(f'{path}: "{module}" is no linear layer of the {model.config.architecture} at {model.path}')
    columns, depth = shape
    for side, expected in (("A", (settings.rank, depth)), ("B", (columns, settings.rank))):
        found = pair.get(side)
        if found is None or tuple(found.shape) != expected:
            said = "is missing" if found is None else f"has shape {list(found.shape)}"
            raise AdapterError(f'{path}: lora_{side} of "{module}" {said}, expected {list(expected)}')
    return LowRankChange(down=pair["A"].float(), up=pair["B"].float() * settings.scale)

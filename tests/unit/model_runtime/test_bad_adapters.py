"""Adapters that cannot be computed as their files ask are refused by name when a node starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import save_file
from support.tiny_adapters import TARGETS, write_adapter
from unit.model_runtime import tiny_deepseek, tiny_llama
from unit.model_runtime.reference_models import save

from model_runtime.checkpoint import Checkpoint, open_checkpoint
from model_runtime.errors import AdapterError
from model_runtime.executor import ModelExecutor
from model_runtime.lora.peft_files import open_adapter
from model_runtime.weights import Shape, TensorSource

Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(save(tiny_llama.make_reference(), tmp_path_factory.mktemp("llama")))


def refusal(folder: Path, checkpoint: Checkpoint) -> str:
    with pytest.raises(AdapterError) as caught:
        open_adapter("mine", folder, checkpoint.source)
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "key \"peft_type\" is 'IA3', supported is 'LORA'"),
        ({"use_dora": True}, 'key "use_dora" is True, which is not supported'),
        ({"bias": "lora_only"}, "key \"bias\" is 'lora_only', supported is 'none'"),
        ({"modules_to_save": ["lm_head"]}, "key \"modules_to_save\" is ['lm_head'], supported is None"),
        ({"rank_pattern": {"q_proj": 4}}, "key \"rank_pattern\" is {'q_proj': 4}, supported is {}"),
        ({"alpha_pattern": {"q_proj": 4}}, "key \"alpha_pattern\" is {'q_proj': 4}, supported is {}"),
        ({"fan_in_fan_out": True}, 'key "fan_in_fan_out" is True, which is not supported'),
        ({"init_lora_weights": "pissa"}, "key \"init_lora_weights\" is 'pissa', supported is True"),
        ({"target_parameters": ["experts.gate_up_proj"]}, 'key "target_parameters" is'),
        ({"some_future_key": 1}, 'key "some_future_key" is 1, which is not supported'),
        ({"r": 0}, 'key "r" is 0, at least 1 required'),
        ({"r": "3"}, "key \"r\" must be an integer, is '3'"),
        ({"r": 4}, f'lora_A of "{Q_PROJ.removeprefix("base_model.model.")}" has shape [3, 48], expected [4, 48]'),
        ({"lora_alpha": None}, 'key "lora_alpha" must be a number, is None'),
        ({"lora_alpha": 10**400}, 'key "lora_alpha" is inf, a finite number required'),
        ({"use_rslora": "yes"}, "key \"use_rslora\" must be true or false, is 'yes'"),
        ({"target_modules": ["q_proj", "x_proj"]}, 'holds nothing of "x_proj", which target_modules names'),
    ],
)
def test_each_setting_that_is_not_honoured_is_named(
    settings: dict[str, object], message: str, llama: Checkpoint, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "adapter", tiny_llama.make_reference(), ["q_proj"], settings=settings)
    said = refusal(folder, llama)
    assert said.startswith(f'adapter "mine": {folder}')
    assert message in said


def rename(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def put(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rename("layers.1.", "layers.7."), '"model.layers.7.self_attn.q_proj" is no linear layer of the Llama'),
        (rename("layers.1.self_attn.q_proj", "layers.1.input_layernorm"), '"model.layers.1.input_layernorm" is no'),
        (rename("q_proj.lora_B", "q_proj.lora_C"), 'lora_C.weight" is no lora_A or lora_B of a linear layer'),
        (lambda tensors: tensors.pop(f"{Q_PROJ}.lora_B.weight"), "lora_B of"),
        (put(f"{Q_PROJ}.lora_magnitude_vector", torch.ones(3)), "lora_magnitude_vector"),
        (put("base_model.model.lm_head.weight", torch.ones(3, 3)), 'tensor "base_model.model.lm_head.weight" is no'),
        (put(f"{Q_PROJ}.lora_B.weight", torch.ones(64, 5)), "has shape [64, 5], expected [64, 3]"),
        (put(f"{Q_PROJ}.lora_A.weight", torch.ones(3, 47)), "has shape [3, 47], expected [3, 48]"),
        (put(f"{Q_PROJ}.lora_A.weight", torch.full((3, 48), torch.nan)), "does not hold finite numbers only"),
        (put(f"{Q_PROJ}.lora_A.weight", torch.ones(3, 48, dtype=torch.int32)), "torch.int32 does not hold finite"),
        (dict.clear, "holds no tensor"),
    ],
)
def test_each_tensor_that_does_not_belong_is_named(
    change: Callable[[dict[str, torch.Tensor]], None], message: str, llama: Checkpoint, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "adapter", tiny_llama.make_reference(), ["q_proj"], change=change)
    assert message in refusal(folder, llama)


def test_files_that_are_missing_or_cut_short_are_named(llama: Checkpoint, tmp_path: Path) -> None:
    assert "adapter_config.json: is missing" in refusal(tmp_path / "nowhere", llama)
    folder = write_adapter(tmp_path / "adapter", tiny_llama.make_reference(), ["q_proj"])
    tensors = folder / "adapter_model.safetensors"
    content = tensors.read_bytes()
    tensors.write_bytes(content[:-8])
    assert "adapter_model.safetensors: cannot be read" in refusal(folder, llama)
    tensors.unlink()
    assert "adapter_model.safetensors: is missing" in refusal(folder, llama)
    tensors.write_bytes(content)
    (folder / "adapter_config.json").write_text("[]")
    assert "must hold a JSON object" in refusal(folder, llama)


@pytest.mark.parametrize(
    "matrix",
    [
        "model.embed_tokens",
        "model.layers.1.self_attn.kv_b_proj",
        "model.layers.1.mlp.experts.0.up_proj",
        "lm_head",
    ],
)
def test_a_layer_that_cannot_be_adapted_is_named_before_the_node_serves(matrix: str, tmp_path: Path) -> None:
    reference = tiny_deepseek.make_v3()
    checkpoint = open_checkpoint(save(reference, tmp_path / "model"))
    columns, depth = checkpoint.source.shapes[f"{matrix}.weight"]
    folder = write_adapter(tmp_path / "adapter", reference, ["o_proj"])
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": "all-linear"})
    )
    name = f"base_model.model.{matrix}"
    tensors = {f"{name}.lora_A.weight": torch.ones(2, depth), f"{name}.lora_B.weight": torch.ones(columns, 2)}
    save_file(tensors, folder / "adapter_model.safetensors")
    adapter = open_adapter("mine", folder, checkpoint.source)
    with pytest.raises(AdapterError, match=rf'adapter "mine": .*: "{matrix}" cannot be changed by an adapter'):
        ModelExecutor(checkpoint, memory_bytes=2 << 20, prefix_granularity=16, num_threads=1, adapters=(adapter,))


def test_the_digest_tells_what_is_computed_and_not_where_it_lies(llama: Checkpoint, tmp_path: Path) -> None:
    reference = tiny_llama.make_reference()

    def digest(name: str, **fields: object) -> bytes:
        folder = write_adapter(tmp_path / name, reference, TARGETS["llama"], **fields)
        return open_adapter(name, folder, llama.source).digest

    first = digest("first")
    assert len(first) == 32
    assert digest("second", settings={"base_model_name_or_path": "moved"}) == first
    assert len({first, digest("other alpha", alpha=7.0), digest("other seed", seed=9), digest("rank", rank=2)}) == 4


class Exchanging:
    """What is asked of the model is answered; meanwhile somebody puts another adapter in the place of one."""

    def __init__(self, model: TensorSource, placed: Path, other: Path) -> None:
        self.path, self.config = model.path, model.config
        self._model, self._placed, self._other = model, placed, other

    @property
    def shapes(self) -> Mapping[str, Shape]:
        if self._other.exists():
            self._other.replace(self._placed)
        return self._model.shapes


def test_the_digest_is_that_of_the_bytes_that_were_read_though_others_take_their_place(
    llama: Checkpoint, tmp_path: Path
) -> None:
    reference = tiny_llama.make_reference()
    first, second = (write_adapter(tmp_path / str(seed), reference, ["q_proj"], seed=seed) for seed in (1, 2))
    opened = open_adapter("mine", first, llama.source)
    file = "adapter_model.safetensors"
    meanwhile = open_adapter("mine", first, cast("TensorSource", Exchanging(llama.source, first / file, second / file)))
    for matrix, change in opened.changes.items():
        assert torch.equal(meanwhile.changes[matrix].down, change.down)
    assert meanwhile.digest == opened.digest != open_adapter("mine", first, llama.source).digest

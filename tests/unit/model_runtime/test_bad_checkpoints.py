"""Model files that cannot be used are refused at opening, naming the culprit and both values."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from unit.model_runtime import tiny_gguf, tiny_llama

from model_runtime.checkpoint import CheckpointError, open_checkpoint
from model_runtime.hf_config import read_hf_config

O_PROJ = "model.layers.1.self_attn.o_proj.weight"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tiny_llama.save(tiny_llama.make_reference(), tmp_path / "model")


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    return tiny_gguf.write_gguf(tmp_path / "model.gguf", tiny_llama.make_reference())


def change_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


# ---- safetensors directories ----


def test_a_missing_tensor_is_named_with_its_shape(directory: Path) -> None:
    change_tensors(directory, lambda tensors: tensors.pop(O_PROJ))
    with pytest.raises(CheckpointError, match=rf'"{O_PROJ}" is missing, expected shape \[48, 64\]'):
        open_checkpoint(directory)


def test_a_wrong_shape_is_named_with_both_shapes(directory: Path) -> None:
    change_tensors(directory, lambda tensors: tensors.update({O_PROJ: torch.zeros(48, 63)}))
    with pytest.raises(CheckpointError, match=rf'"{O_PROJ}" has shape \[48, 63\], expected \[48, 64\]'):
        open_checkpoint(directory)


def test_a_tensor_the_model_would_ignore_is_refused(directory: Path) -> None:
    change_tensors(directory, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    with pytest.raises(CheckpointError, match=r'"model.layers.0.self_attn.q_proj.bias" of shape \[64\] is not part'):
        open_checkpoint(directory)


def test_a_stored_copy_of_a_tied_head_and_old_rotary_buffers_are_harmless(directory: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    change_tensors(directory, add)
    assert "lm_head.weight" not in open_checkpoint(directory).source.shapes


@pytest.mark.parametrize(("dtype", "name"), [(torch.int64, "I64"), (torch.float8_e4m3fn, "F8_E4M3")])
def test_a_dtype_that_is_no_plain_number_is_named_with_the_supported_ones(
    directory: Path, dtype: torch.dtype, name: str
) -> None:
    change_tensors(directory, lambda tensors: tensors.update({O_PROJ: tensors[O_PROJ].to(dtype)}))
    with pytest.raises(CheckpointError, match=rf'"{O_PROJ}" has dtype {name}, supported are F64, F32, F16, BF16'):
        open_checkpoint(directory)


@pytest.mark.parametrize("num_kept_bytes", [0, 4, 100])
def test_a_safetensors_file_cut_in_its_header_is_refused(directory: Path, num_kept_bytes: int) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_kept_bytes])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_checkpoint(directory)


def test_a_safetensors_file_cut_in_its_data_names_a_tensor_and_both_sizes(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r'tensor ".*" of shape .* ends at data byte \d+, the file has \d+'):
        open_checkpoint(directory)


def test_a_safetensors_header_of_nonsense_is_refused(directory: Path) -> None:
    path = directory / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:8] + b"x" * 50 + content[58:])
    with pytest.raises(CheckpointError, match="header is not JSON"):
        open_checkpoint(directory)


def test_offsets_that_contradict_the_shape_are_refused(directory: Path) -> None:
    header = json.dumps({O_PROJ: {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 12]}}).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(12))
    with pytest.raises(CheckpointError, match=r"needs 16 bytes, has \[0, 12\)"):
        open_checkpoint(directory)


def test_a_sharded_checkpoint_opens_and_equals_the_single_file(tmp_path: Path, directory: Path) -> None:
    sharded = tiny_llama.save(tiny_llama.make_reference(), tmp_path / "sharded", max_shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    checkpoint, single = open_checkpoint(sharded), open_checkpoint(directory)
    assert checkpoint.source.shapes == single.source.shapes
    for name in single.source.shapes:
        assert torch.equal(checkpoint.load(name), single.load(name))


def test_a_missing_shard_is_named_with_a_tensor_it_should_hold(tmp_path: Path) -> None:
    sharded = tiny_llama.save(tiny_llama.make_reference(), tmp_path / "sharded", max_shard_size="40KB")
    gone = sorted(sharded.glob("*.safetensors"))[0]
    gone.unlink()
    with pytest.raises(CheckpointError, match=f'tensor ".*" should be in {gone.name}, which is missing'):
        open_checkpoint(sharded)


def test_an_index_that_reaches_outside_the_directory_is_refused(tmp_path: Path) -> None:
    sharded = tiny_llama.save(tiny_llama.make_reference(), tmp_path / "sharded", max_shard_size="40KB")
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {O_PROJ: "../model.safetensors"}}))
    with pytest.raises(CheckpointError, match="no file name"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, r"\['MambaForCausalLM'\] is not supported"),
        ({"architectures": None}, "architectures None is not supported"),
        ({"hidden_act": "gelu"}, "\"hidden_act\" is 'gelu', supported is 'silu'"),
        ({"attention_bias": True}, '"attention_bias" is True'),
        ({"quantization_config": {"bits": 4}}, '"quantization_config" is'),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, 'rope type "yarn" is not supported'),
        ({"num_attention_heads": "four"}, "\"num_attention_heads\" must be an integer, is 'four'"),
        ({"num_attention_heads": 5}, "num_heads 5 is no multiple of num_kv_heads 2"),
        ({"num_hidden_layers": 10**9}, "num_layers must be at most 4096, got 1000000000"),
        ({"max_position_embeddings": 10**30}, "max_position_tokens must be at most 2147483647, got 1000000"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 10**400}},
            "rope_theta must be positive and finite",
        ),
        ({"num_hidden_layers": 0}, "num_layers must be positive and finite, got 0"),
        ({"rms_norm_eps": None}, '"rms_norm_eps" must be a number, is None'),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"eos_token_id": 131}, "special token 131 is outside the vocabulary of 131"),
        ({"vocab_size": 132}, r'"model.embed_tokens.weight" has shape \[131, 48\], expected \[132, 48\]'),
    ],
)
def test_a_config_that_no_model_here_implements_is_refused(
    directory: Path, changes: dict[str, object], message: str
) -> None:
    (directory / "generation_config.json").unlink()
    change_config(directory, **changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(directory)


def test_the_old_spelling_of_rotary_settings_means_the_same(tmp_path: Path) -> None:
    reference = tiny_llama.make_reference(rope_parameters=tiny_llama.LLAMA3_ROPE)
    directory = tiny_llama.save(reference, tmp_path / "model")
    new = read_hf_config(directory)
    scaling = {key: value for key, value in tiny_llama.LLAMA3_ROPE.items() if key != "rope_theta"}
    change_config(directory, rope_parameters=None, rope_theta=10000.0, rope_scaling=scaling)
    assert read_hf_config(directory) == new
    assert new.rope_scaling is not None


def test_the_ends_of_a_chat_turn_come_from_the_generation_config(directory: Path) -> None:
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert open_checkpoint(directory).config.eos_token_ids == (2, 7)


# ---- GGUF files ----


@pytest.mark.parametrize("num_kept_bytes", [0, 10, 24, 200, 900])
def test_a_gguf_file_cut_in_its_directory_is_refused(gguf_file: Path, num_kept_bytes: int) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes()[:num_kept_bytes])
    with pytest.raises(CheckpointError, match=r"model\.gguf.*(too short|cut short)"):
        open_checkpoint(gguf_file)


def test_a_gguf_file_cut_in_its_data_names_a_tensor_and_both_sizes(gguf_file: Path) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes()[:-4096])
    with pytest.raises(CheckpointError, match=r'tensor ".*" of shape .* ends at byte \d+, the file has \d+'):
        open_checkpoint(gguf_file)


def test_no_single_corrupt_byte_of_a_gguf_directory_escapes_as_another_error(gguf_file: Path) -> None:
    content = gguf_file.read_bytes()
    num_refused = 0
    for offset in range(0, 6000, 7):
        corrupt = bytearray(content)
        corrupt[offset] ^= 0xFF
        gguf_file.write_bytes(corrupt)
        try:
            open_checkpoint(gguf_file)
        except CheckpointError:
            num_refused += 1
    assert num_refused > 100


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError, match="not a GGUF file, it begins with b'PK"):
        open_checkpoint(path)


def test_a_gguf_of_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", tiny_llama.make_reference(), architecture="rwkv9")
    with pytest.raises(CheckpointError, match=r'architecture "rwkv9" is not supported \(supported: llama, gemma3\)'):
        open_checkpoint(path)


def test_a_gguf_of_absurdly_many_layers_is_refused_at_once(tmp_path: Path) -> None:
    keys = {"llama.block_count": 2**31}
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", tiny_llama.make_reference(), extra_integers=keys)
    with pytest.raises(CheckpointError, match="num_layers must be at most 4096, got 2147483648"):
        open_checkpoint(path)


def test_a_missing_gguf_tensor_is_named_as_the_file_would_name_it(tmp_path: Path) -> None:
    reference = tiny_llama.make_reference()
    tensors = tiny_gguf.gguf_tensors(reference)
    del tensors["blk.1.attn_output.weight"]
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", reference, tensors=tensors)
    with pytest.raises(CheckpointError, match=r'"blk.1.attn_output.weight" is missing, expected shape \[48, 64\]'):
        open_checkpoint(path)


def test_a_wrongly_shaped_gguf_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    reference = tiny_llama.make_reference()
    tensors = tiny_gguf.gguf_tensors(reference) | {"blk.1.ffn_up.weight": torch.zeros(79, 48)}
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", reference, tensors=tensors)
    with pytest.raises(CheckpointError, match=r'"blk.1.ffn_up.weight" has shape \[79, 48\], expected \[80, 48\]'):
        open_checkpoint(path)


def test_a_gguf_bias_that_would_be_ignored_is_refused(tmp_path: Path) -> None:
    reference = tiny_llama.make_reference()
    tensors = tiny_gguf.gguf_tensors(reference) | {"blk.0.attn_q.bias": torch.zeros(64)}
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", reference, tensors=tensors)
    with pytest.raises(CheckpointError, match=r'"blk.0.attn_q.bias" of shape \[64\] is not part'):
        open_checkpoint(path)


@pytest.mark.parametrize("key", ["llama.rope.dimension_count", "llama.expert_count", "llama.attention.sliding_window"])
def test_a_gguf_key_that_would_change_the_computation_is_refused(tmp_path: Path, key: str) -> None:
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", tiny_llama.make_reference(), extra_integers={key: 8})
    with pytest.raises(CheckpointError, match=f'"{key}" is 8, supported is'):
        open_checkpoint(path)


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or directory"):
        open_checkpoint(tmp_path / "absent")


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: is missing"):
        open_checkpoint(tmp_path)

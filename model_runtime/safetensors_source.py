"""A directory of safetensors files with a config.json, as `transformers` writes it, as a TensorSource.

Source: safetensors format (8-byte little-endian header length, JSON header, data) and the sharded
`model.safetensors.index.json`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open

from model_runtime.config import ModelConfig
from model_runtime.errors import CheckpointError
from model_runtime.hf_config import read_hf_config
from model_runtime.hf_keys import read_json_object
from model_runtime.hf_names import canonical_name
from model_runtime.weights import Shape

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_HEADER_LENGTH_BYTES = 8
_DTYPE_BYTES: Mapping[str, int] = MappingProxyType({"F64": 8, "F32": 4, "F16": 2, "BF16": 2})
_COMPUTED_SUFFIX = "rotary_emb.inv_freq"  # buffers that old checkpoints carry and nobody needs
_AHEAD_PREFIX = "mtp."  # layers that guess further tokens and take no part in the next one


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredTensor:
    file: Path
    name: str
    shape: Shape


class SafetensorsSource:
    """Opens the directory and reads every header. Raises CheckpointError naming the file or tensor and both values."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._config = read_hf_config(path)
        self._files = _find_files(path)
        stored: dict[str, _StoredTensor] = {}
        for file in self._files:
            stored.update(_read_header(file))
        _check_index(path, stored)
        self._tensors = _by_canonical_name(path, self._config.architecture, stored)
        if self._config.tie_word_embeddings:
            # A stored copy of a tied head is legal and redundant.
            self._tensors.pop("lm_head.weight", None)

    @property
    def path(self) -> Path:
        return self._path

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def content_files(self) -> tuple[Path, ...]:
        return (self._path / "config.json", *self._files)

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def stored_name(self, name: str) -> str:
        return self._tensors[name].name if name in self._tensors else name

    def quantization(self, name: str) -> str | None:
        return None

    def read_blocks(self, name: str, first_row: int = 0, num_rows: int | None = None) -> torch.Tensor:
        raise CheckpointError(f'{self._path}: tensor "{name}" is not quantised')

    def read_into(self, name: str, destination: torch.Tensor, first_row: int = 0) -> None:
        stored = self._tensors[name]
        try:
            with safe_open(stored.file, framework="pt") as opened:
                rows = opened.get_slice(stored.name)[first_row : first_row + destination.shape[0]]
                destination.copy_(rows)
        except SafetensorError as error:
            raise CheckpointError(f'{stored.file}: tensor "{stored.name}" cannot be read: {error}') from error


def _by_canonical_name(path: Path, architecture: str, stored: Mapping[str, _StoredTensor]) -> dict[str, _StoredTensor]:
    tensors: dict[str, _StoredTensor] = {}
    for tensor in stored.values():
        name = canonical_name(architecture, tensor.name)
        if name in tensors:
            raise CheckpointError(f'{path}: tensors "{tensors[name].name}" and "{tensor.name}" are the same one')
        tensors[name] = tensor
    return tensors


def _find_files(path: Path) -> tuple[Path, ...]:
    if not (path / _INDEX_FILE).is_file():
        if not (path / _SINGLE_FILE).is_file():
            raise CheckpointError(f"{path}: neither {_SINGLE_FILE} nor {_INDEX_FILE} is there")
        return (path / _SINGLE_FILE,)
    for name, file_name in sorted(_read_index(path).items()):
        if not (path / file_name).is_file():
            raise CheckpointError(f'{path}: tensor "{name}" should be in {file_name}, which is missing')
    return tuple(path / file_name for file_name in sorted(set(_read_index(path).values())))


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json_object(path / _INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f'{path / _INDEX_FILE}: "weight_map" must be an object, is {type(weight_map).__name__}')
    for name, file_name in weight_map.items():
        # A name with a folder in it could reach outside the checkpoint.
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise CheckpointError(f'{path / _INDEX_FILE}: tensor "{name}" is mapped to {file_name!r}, no file name')
    return weight_map


def _check_index(path: Path, tensors: Mapping[str, _StoredTensor]) -> None:
    if not (path / _INDEX_FILE).is_file():
        return
    for name, file_name in _read_index(path).items():
        if name not in tensors and not _is_needless(name):
            raise CheckpointError(f'{path}: tensor "{name}" should be in {file_name}, which does not hold it')


def _read_header(file: Path) -> dict[str, _StoredTensor]:
    num_file_bytes = file.stat().st_size
    with file.open("rb") as opened:
        num_header_bytes = int.from_bytes(opened.read(_HEADER_LENGTH_BYTES), "little")
        data_begin_bytes = _HEADER_LENGTH_BYTES + num_header_bytes
        if data_begin_bytes > num_file_bytes:
            raise CheckpointError(
                f"{file}: header ends at byte {data_begin_bytes}, the file has {num_file_bytes}: "
                "it is cut short or corrupt"
            )
        try:
            header = json.loads(opened.read(num_header_bytes))
        except ValueError as error:
            raise CheckpointError(f"{file}: header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: header must be an object, is {type(header).__name__}")
    return {
        name: _checked_tensor(file, name, entry, num_file_bytes - data_begin_bytes)
        for name, entry in header.items()
        if name != "__metadata__" and not _is_needless(name)
    }


def _is_needless(name: str) -> bool:
    return name.endswith(_COMPUTED_SUFFIX) or name.startswith(_AHEAD_PREFIX)


def _checked_tensor(file: Path, name: str, entry: object, num_data_bytes: int) -> _StoredTensor:
    match entry:
        case {"dtype": str(dtype), "shape": [*dims], "data_offsets": [int(begin), int(end)]} if all(
            isinstance(dim, int) and dim >= 0 for dim in dims
        ):
            shape = tuple(int(dim) for dim in dims)
        case _:
            raise CheckpointError(f'{file}: tensor "{name}" has the malformed header entry {entry!r}')
    if dtype not in _DTYPE_BYTES:
        raise CheckpointError(f'{file}: tensor "{name}" has dtype {dtype}, supported are {", ".join(_DTYPE_BYTES)}')
    num_bytes = math.prod(shape) * _DTYPE_BYTES[dtype]
    if begin < 0 or end - begin != num_bytes:
        raise CheckpointError(
            f'{file}: tensor "{name}" of shape {list(shape)} and dtype {dtype} needs {num_bytes} bytes, '
            f"has [{begin}, {end})"
        )
    if end > num_data_bytes:
        raise CheckpointError(
            f'{file}: tensor "{name}" of shape {list(shape)} ends at data byte {end}, the file has {num_data_bytes}: '
            "it is cut short or corrupt"
        )
    return _StoredTensor(file=file, name=name, shape=shape)

"""Checkpoint: one model on disk, opened, identified and known to be complete.

The single entry to both file formats. Reads weights only when asked; until then it holds headers.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path

import torch

from model_runtime.config import ModelConfig
from model_runtime.errors import CheckpointError
from model_runtime.gguf.source import GgufSource
from model_runtime.registry import find_family
from model_runtime.safetensors_source import SafetensorsSource
from model_runtime.weights import TensorSource, check_tensors

__all__ = ["Checkpoint", "CheckpointError", "open_checkpoint"]


class Checkpoint:
    """A source whose tensors have been checked against what its architecture needs."""

    def __init__(self, source: TensorSource) -> None:
        check_tensors(source, find_family(source.config.architecture).tensor_shapes(source.config))
        self.source = source

    @property
    def path(self) -> Path:
        return self.source.path

    @property
    def config(self) -> ModelConfig:
        return self.source.config

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the content, 64 hexadecimal digits; reads every byte once.

        Two checkpoints with one fingerprint hold the same weights and configuration, wherever they lie.
        """
        digest = hashlib.sha256()
        for file in self.source.content_files:
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
        return digest.hexdigest()

    def load(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The tensor of a canonical name. Raises CheckpointError for a name the model does not have."""
        if name not in self.source.shapes:
            raise CheckpointError(f'{self.path}: tensor "{name}" is missing')
        tensor = torch.empty(self.source.shapes[name], dtype=dtype)
        self.source.read_into(name, tensor)
        return tensor


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Opens a GGUF file or a safetensors directory.

    Raises CheckpointError, before any weight is read, for a path that is neither, a corrupt or truncated file, an
    unknown architecture, and a missing, superfluous or wrongly shaped tensor.
    """
    path = Path(path)
    try:
        if path.is_dir():
            return Checkpoint(SafetensorsSource(path))
        if path.is_file():
            return Checkpoint(GgufSource(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    raise CheckpointError(f"{path}: no such file or directory")

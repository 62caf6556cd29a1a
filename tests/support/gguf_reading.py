"""The reference implementation reads a GGUF file again for every part of a model, and takes many seconds over it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import gguf
import numpy as np
from transformers import modeling_gguf_pytorch_utils as reading

_load = reading.load_gguf_checkpoint


class _Reader(gguf.GGUFReader):
    """Every word of a vocabulary is a slice of `data`, and a slice of a plain array is made faster."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value.view(np.ndarray) if isinstance(value, np.memmap) else value)


_read_file = functools.cache(_Reader)


@functools.cache
def _metadata(path: str) -> dict[str, object]:
    return _load(path)


def _load_once(path, return_tensors: bool = False, **options: object) -> dict[str, object]:
    if return_tensors:
        return _load(path, return_tensors=True, **options)
    return copy.deepcopy(_metadata(str(path)))


@contextmanager
def read_once() -> Iterator[None]:
    """Inside the block, and in later ones of this process, it reads a file once and remembers what it made of it."""
    with (
        mock.patch.object(gguf, "GGUFReader", lambda path: _read_file(str(path))),
        mock.patch.object(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
        mock.patch.object(reading, "load_gguf_checkpoint", _load_once),
    ):
        yield

"""Quantised GGUF blocks to float32 rows.

The common types are expanded by vectorised torch operations in the reference order of roundings, so the result equals
the `gguf` package's bit for bit at a fraction of its time; that package does the others.
Source: block layouts of ggml, `ggml-common.h` (block_q4_0, block_q4_1, block_q8_0).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as dequantize_reference

_NIBBLES_PER_BLOCK = 32


def dequantize(raw: npt.NDArray[np.uint8], quantization: GGMLQuantizationType, shape: tuple[int, ...]) -> torch.Tensor:
    """float32 tensor of `shape` from a tensor's bytes. Raises NotImplementedError for a type that nobody reads."""
    expand = _EXPANDERS.get(quantization)
    if expand is None:
        _, block_bytes = GGML_QUANT_SIZES[quantization]
        expanded = dequantize_reference(raw.reshape(-1, block_bytes), quantization)
        return torch.from_numpy(np.ascontiguousarray(expanded, dtype=np.float32)).reshape(shape)
    blocks = torch.from_numpy(raw).view(-1, GGML_QUANT_SIZES[quantization][1])
    return expand(blocks).reshape(shape)


def _expand_q4_0(blocks: torch.Tensor) -> torch.Tensor:
    nibbles = _split_nibbles(blocks[:, 2:18])
    return nibbles.sub_(8.0).mul_(_half(blocks, 0))


def _expand_q4_1(blocks: torch.Tensor) -> torch.Tensor:
    nibbles = _split_nibbles(blocks[:, 4:20])
    return nibbles.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _expand_q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _expand_float32(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.view(torch.float32).clone()


def _expand_float16(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.view(torch.float16).float()


def _expand_bfloat16(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.view(torch.bfloat16).float()


def _split_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8[blocks, 16] -> float32[blocks, 32]: the low halves of the bytes first, then the high ones."""
    num_low = _NIBBLES_PER_BLOCK // 2
    nibbles = torch.empty((packed.shape[0], _NIBBLES_PER_BLOCK), dtype=torch.float32)
    nibbles[:, :num_low] = packed & 0x0F
    nibbles[:, num_low:] = packed >> 4
    return nibbles


def _half(blocks: torch.Tensor, begin_bytes: int) -> torch.Tensor:
    """The float16 at a byte offset of every block, as float32[blocks, 1]."""
    return blocks[:, begin_bytes : begin_bytes + 2].contiguous().view(torch.float16).float()


_EXPANDERS: Mapping[GGMLQuantizationType, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        GGMLQuantizationType.F32: _expand_float32,
        GGMLQuantizationType.F16: _expand_float16,
        GGMLQuantizationType.BF16: _expand_bfloat16,
        GGMLQuantizationType.Q4_0: _expand_q4_0,
        GGMLQuantizationType.Q4_1: _expand_q4_1,
        GGMLQuantizationType.Q8_0: _expand_q8_0,
    }
)

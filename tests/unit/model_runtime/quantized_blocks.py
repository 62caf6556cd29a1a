"""Random quantised matrices of every kind the kernels pack, and the float32 numbers they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

# Where a block's float16 factors lie, in bytes; everything else in a block is free.
SCALE_OFFSETS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}
)
SMALLEST_HALF = 2.0**-24


def random_blocks(quantization: str, num_rows: int, depth: int) -> torch.Tensor:
    """uint8[num_rows, bytes]. Scales of both signs and, now and then, below the smallest normal float16."""
    weights_per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[quantization]]
    random = np.random.default_rng(5)
    blocks = random.integers(0, 256, (num_rows * depth // weights_per_block, block_bytes), dtype=np.uint8)
    for offset in SCALE_OFFSETS[quantization]:
        scales = random.normal(scale=0.02, size=(blocks.shape[0], 1))
        scales[::7] = random.integers(-900, 900, scales[::7].shape) * SMALLEST_HALF
        blocks[:, offset : offset + 2] = scales.astype(np.float16).view(np.uint8)
    return torch.from_numpy(blocks.reshape(num_rows, -1))


def plain(blocks: torch.Tensor, quantization: str) -> torch.Tensor:
    """float32[num_rows, depth], as the gguf package reads the blocks."""
    return torch.from_numpy(dequantize(blocks.numpy(), GGMLQuantizationType[quantization])).contiguous()

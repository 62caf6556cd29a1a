"""Everything in this folder needs a CUDA device."""

from __future__ import annotations

import pytest
import torch

from cache_runtime.device import CudaDevice


@pytest.fixture
def device() -> CudaDevice:
    if not torch.cuda.is_available():
        pytest.skip(f"needs a CUDA device; torch {torch.__version__} finds none")
    return CudaDevice(0)

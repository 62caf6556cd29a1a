"""Opening a device by name. What a CUDA device does is tested in tests/gpu."""

from __future__ import annotations

import pytest
import torch

from cache_runtime.device import CpuDevice, open_device
from cache_runtime.errors import UnknownDeviceError


def test_the_cpu_is_opened_by_its_name() -> None:
    device = open_device("cpu")
    assert isinstance(device, CpuDevice)
    with device.as_default():
        assert torch.empty(1).device == device.torch_device


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:x", "cuda:1:2", "cpu:0"])
def test_a_name_that_is_no_device_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(UnknownDeviceError, match=rf'"{name}" is unknown \(known: cpu, cuda, cuda:INDEX\)'):
        open_device(name)


@pytest.mark.parametrize("name", ["cuda", "cuda:7"])
def test_a_cuda_device_that_is_not_there_is_refused_with_the_reason(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UnknownDeviceError, match=r"is not there: torch .* is built without CUDA"):
        open_device(name)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(UnknownDeviceError, match="finds 0 CUDA devices"):
        open_device(name)

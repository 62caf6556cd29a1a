"""The CUDA twin of the device seam: memory, uploads, and the order of streams."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cache_runtime.device import CudaDevice
from cache_runtime.errors import ArenaAllocationError, UnknownDeviceError
from model_runtime.stage_fences import StageFences

BUSY_CYCLES = 200_000_000
"""About a tenth of a second of one stream."""


@pytest.mark.parametrize("alignment_bytes", [256, 4096, 1 << 20])
def test_memory_is_zeroed_aligned_and_on_the_device(device: CudaDevice, alignment_bytes: int) -> None:
    memory = device.alloc(1000, alignment_bytes)
    assert memory.device == device.torch_device
    assert (memory.numel(), memory.data_ptr() % alignment_bytes) == (1000, 0)
    assert not bool(memory.any())


def test_more_than_there_is_is_refused_with_both_sizes(device: CudaDevice) -> None:
    wanted_bytes = 1 << 50
    with pytest.raises(ArenaAllocationError, match=f"{wanted_bytes} bytes does not fit: .* bytes are free on cuda:0"):
        device.alloc(wanted_bytes, 256)


def test_an_index_beyond_the_last_device_is_refused(device: CudaDevice) -> None:
    with pytest.raises(UnknownDeviceError, match=f"finds {torch.cuda.device_count()} CUDA devices"):
        CudaDevice(torch.cuda.device_count())


def test_an_upload_has_the_values_of_the_array_at_the_call(device: CudaDevice) -> None:
    array = np.arange(1 << 16)
    torch.cuda._sleep(BUSY_CYCLES)
    uploaded = device.upload(array)
    array[:] = 0
    assert uploaded.device == device.torch_device
    assert torch.equal(uploaded.cpu(), torch.arange(1 << 16))


def test_pinned_memory_is_on_the_host(device: CudaDevice) -> None:
    memory = device.alloc_pinned(4096)
    assert memory.is_pinned()
    assert memory.device == torch.device("cpu")


def test_an_event_is_done_only_after_the_work_before_it(device: CudaDevice) -> None:
    stream = device.new_stream()
    with stream.activate():
        torch.cuda._sleep(BUSY_CYCLES)
        event = stream.record_event()
    assert not event.is_done()
    event.synchronize()
    assert event.is_done()


def test_a_stream_that_waits_for_an_event_reads_what_was_written_before_it(device: CudaDevice) -> None:
    writer, reader = device.new_stream(), device.new_stream()
    value = device.alloc(1 << 20, 256)
    with writer.activate():
        torch.cuda._sleep(BUSY_CYCLES)
        value.fill_(7)
        written = writer.record_event()
    reader.wait_event(written)
    with reader.activate():
        copy = value.clone()
        read = reader.record_event()
    assert not read.is_done(), "the caller did not wait"
    read.synchronize()
    assert bool((copy == 7).all())


def test_a_stage_is_passed_on_only_once_its_rows_are_in_memory(device: CudaDevice) -> None:
    rows = device.alloc(3, 256)
    seen: list[tuple[int, int]] = []
    copies = device.new_stream()

    def note(stage: int) -> None:
        with copies.activate():  # which no work of the forward holds up
            seen.append((stage, int(rows[stage])))

    fences = StageFences(device, note)
    for stage in range(3):
        torch.cuda._sleep(BUSY_CYCLES)
        rows[stage] = stage + 1
        fences.stored(stage)
    fences.finish()
    assert seen == [(0, 1), (1, 2), (2, 3)]

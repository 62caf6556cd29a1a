"""The probe slots of bootstrap."""

from __future__ import annotations

import asyncio

import pytest

from node_runtime.handoff.probe import NONCE_BYTES, ProbeBuffer


async def test_a_slot_is_zeroed_lies_in_the_buffer_and_is_read_from_memory() -> None:
    buffer = ProbeBuffer(num_slots=1)
    async with buffer.slot() as slot:
        assert buffer.base_address <= slot.address <= buffer.base_address + buffer.num_bytes - NONCE_BYTES
        assert slot.read() == bytes(NONCE_BYTES)
        slot.fill(b"n" * NONCE_BYTES)
        assert slot.read() == b"n" * NONCE_BYTES
    async with buffer.slot() as slot:
        assert slot.read() == bytes(NONCE_BYTES)


async def test_concurrent_bootstraps_have_slots_of_their_own_and_wait_when_there_is_none() -> None:
    buffer = ProbeBuffer(num_slots=2)
    async with buffer.slot() as first, buffer.slot() as second:
        assert abs(first.address - second.address) >= NONCE_BYTES
        third = asyncio.ensure_future(buffer.slot().__aenter__())
        await asyncio.sleep(0)
        assert not third.done()
    assert (await third).address in (first.address, second.address)


async def test_a_nonce_of_another_length_is_refused() -> None:
    async with ProbeBuffer(num_slots=1).slot() as slot:
        with pytest.raises(ValueError, match="5 bytes given, 32 required"):
            slot.fill(b"short")

"""The AES-16 digest by its definition, slowly, without instructions for AES.

Source: FIPS 197, sections 5.1.1 to 5.1.4, for the round; cache_runtime/transfer/csrc/aes_digest.cpp for the rest.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

NUM_LANES = 16
LANE_BYTES = 16
STRIPE_BYTES = NUM_LANES * LANE_BYTES
NUM_FINAL_ROUNDS = 3

Bytes = npt.NDArray[np.uint8]


def _times_two(byte: int) -> int:
    """In GF(2^8) modulo x^8 + x^4 + x^3 + x + 1."""
    return (byte << 1) ^ (0x11B if byte & 0x80 else 0)


def _product(left: int, right: int) -> int:
    result = 0
    while right:
        result ^= left if right & 1 else 0
        left, right = _times_two(left), right >> 1
    return result


def _substituted(byte: int) -> int:
    inverse = next((other for other in range(256) if _product(byte, other) == 1), 0)
    rotations = ((inverse << shift | inverse >> (8 - shift)) & 0xFF for shift in range(5))
    result = 0x63
    for rotated in rotations:
        result ^= rotated
    return result


SUBSTITUTED = np.array([_substituted(byte) for byte in range(256)], dtype=np.uint8)
DOUBLED = np.array([_times_two(byte) for byte in range(256)], dtype=np.uint8)
# Byte `row + 4 * column` comes from `row` columns further on.
SHIFTED = np.array([row + 4 * ((column + row) % 4) for column in range(4) for row in range(4)])


def aes_round(state: Bytes, key: Bytes) -> Bytes:
    """uint8[..., 16] each."""
    columns = SUBSTITUTED[state][..., SHIFTED].reshape(*state.shape[:-1], 4, 4)
    following = np.roll(columns, -1, axis=-1)
    rest = np.roll(columns, -2, axis=-1) ^ np.roll(columns, -3, axis=-1)
    mixed: Bytes = DOUBLED[columns] ^ DOUBLED[following] ^ following ^ rest
    return mixed.reshape(state.shape) ^ key


def _word(index: int) -> int:
    return (index + 1) * 0x9E3779B97F4A7C15 % (1 << 64)


def _bytes_of(*words: int) -> Bytes:
    return np.frombuffer(b"".join(word.to_bytes(8, "little") for word in words), dtype=np.uint8)


def aes16(data: bytes) -> bytes:
    """8 bytes."""
    padded = data + bytes(-len(data) % STRIPE_BYTES)
    first = _bytes_of(*(_word(index) for index in range(2 * NUM_LANES))).reshape(NUM_LANES, LANE_BYTES)
    lanes = first
    for stripe in (
        *np.frombuffer(padded, dtype=np.uint8).reshape(-1, NUM_LANES, LANE_BYTES),
        *[first] * NUM_FINAL_ROUNDS,
    ):
        lanes = aes_round(lanes, stripe)
    state = _bytes_of(len(data), _word(2 * NUM_LANES))
    for lane in lanes:
        state = aes_round(state, lane)
    for _ in range(NUM_FINAL_ROUNDS):
        state = aes_round(state, _bytes_of(_word(2 * NUM_LANES + 1), _word(2 * NUM_LANES + 2)))
    return (state[:8] ^ state[8:]).tobytes()

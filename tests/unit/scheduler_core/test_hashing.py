"""The identity of prefixes, against the standard library's SHA-256."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

import scheduler_core as sc


def _reference_chain(tokens: Sequence[int], prefix_granularity: int, extra_keys: Sequence[bytes]) -> list[bytes]:
    digests: list[bytes] = []
    previous = b""
    for begin in range(0, len(tokens) - prefix_granularity + 1, prefix_granularity):
        grain = tokens[begin : begin + prefix_granularity]
        message = struct.pack("<I", len(previous)) + previous
        message += struct.pack(f"<I{len(grain)}I", len(grain), *grain)
        if extra_keys:
            message += struct.pack("<I", len(extra_keys))
            message += b"".join(struct.pack("<I", len(key)) + key for key in extra_keys)
        previous = hashlib.sha256(message).digest()
        digests.append(previous)
    return digests


@pytest.mark.behaviour("D1", "D4")
@given(
    tokens=st.lists(st.integers(0, 2**31 - 1), max_size=700),
    prefix_granularity=st.sampled_from([1, 2, 16, 64, 300]),
    extra_keys=st.lists(st.binary(max_size=9), max_size=3),
)
def test_digests_follow_the_layout(tokens: list[int], prefix_granularity: int, extra_keys: list[bytes]) -> None:
    assert sc.hash_grains(tokens, prefix_granularity, extra_keys) == _reference_chain(
        tokens, prefix_granularity, extra_keys
    )


def test_an_extra_key_with_zero_bytes_is_kept_whole() -> None:
    assert sc.hash_grains([1], 1, [b"a\0b"]) != sc.hash_grains([1], 1, [b"a"])
    assert sc.hash_grains([1], 1, [b"a\0b"]) == _reference_chain([1], 1, [b"a\0b"])


@pytest.mark.behaviour("D3")
def test_no_extra_keys_are_the_same_as_none_given_and_keys_count_in_every_grain() -> None:
    tokens = list(range(8))
    plain = sc.hash_grains(tokens, 4)
    assert sc.hash_grains(tokens, 4, []) == plain
    assert not set(plain) & set(sc.hash_grains(tokens, 4, [b"adapter"]))


@pytest.mark.behaviour("D4", "D6")
def test_a_digest_is_32_raw_bytes_and_only_full_grains_have_one() -> None:
    digests = sc.hash_grains(range(11), 4)
    assert [len(digest) for digest in digests] == [32, 32]
    assert all(isinstance(digest, bytes) for digest in digests)

"""The prefixes of one prompt, as nodes name those that they have cached. Knows no node."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from scheduler_core import prefix_keys


class PromptPrefixes:
    """Keys of the full grains of a prompt, made when first asked for. Salt and adapter of the request are in them."""

    def __init__(self, token_ids: Sequence[int], extra_keys: Sequence[bytes]) -> None:
        """`token_ids` must not change afterwards."""
        self._token_ids = token_ids
        self._extra_keys = list(extra_keys)
        self._tokens: npt.NDArray[np.int32] | None = None
        self._keys: dict[int, list[int]] = {}

    def keys(self, prefix_granularity: int) -> list[int]:
        """Front first, one for each grain that can be hit: the last token of a prompt is always computed."""
        keys = self._keys.get(prefix_granularity)
        if keys is None:
            if self._tokens is None:
                # Protobuf hands its numbers over as they lie in memory.
                self._tokens = np.asarray(self._token_ids, dtype=np.int32)
            keys = prefix_keys(self._tokens[:-1], prefix_granularity, self._extra_keys)
            self._keys[prefix_granularity] = keys
        return keys

    def beginning(self, prefix_granularity: int) -> bytes:
        """Names the beginning of the prompt: its first grain, or all of it where it has none."""
        keys = self.keys(prefix_granularity)
        if keys:
            return keys[0].to_bytes(8, "little")
        digest = hashlib.blake2b(digest_size=8)
        for part in (*self._extra_keys, b",".join(b"%d" % token for token in self._token_ids)):
            digest.update(len(part).to_bytes(4, "little") + part)
        return digest.digest()

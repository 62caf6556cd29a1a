"""Which tokens of a forward go through which adapter. Knows no layer and no file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from cache_runtime.device import Device

NO_ADAPTERS: Mapping[str, str] = MappingProxyType({})
"""No request has one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenGroup:
    """`tokens`: int64[num_grouped], ascending, among all tokens of the forward; None for all of them."""

    adapter: str
    tokens: torch.Tensor | None


class RunningGroups:
    """The groups of the forward that runs now: set by whoever runs it, read by the layers. For one thread."""

    def __init__(self) -> None:
        self.groups: tuple[TokenGroup, ...] = ()
        self.num_tokens = 0

    @contextmanager
    def of(self, groups: tuple[TokenGroup, ...], num_tokens: int) -> Iterator[None]:
        """Inside the block a forward of so many tokens runs."""
        self.groups, self.num_tokens = groups, num_tokens
        try:
            yield
        finally:
            self.groups, self.num_tokens = (), 0


def group_tokens(
    request_ids: Sequence[str], lengths: npt.NDArray[np.int32], adapters: Mapping[str, str], device: Device
) -> tuple[TokenGroup, ...]:
    """One group for each adapter of a batch; empty where no request has one.

    `lengths`: int32[num_rows], tokens of each row. `adapters`: names by request id.
    """
    names = [adapters.get(request_id) for request_id in request_ids] if adapters else []
    used = tuple(dict.fromkeys(name for name in names if name is not None))
    if len(used) == 1 and None not in names:
        return (TokenGroup(adapter=used[0], tokens=None),)
    return tuple(
        TokenGroup(
            adapter=name,
            tokens=device.upload(np.flatnonzero(np.repeat([name == other for other in names], lengths))),
        )
        for name in used
    )

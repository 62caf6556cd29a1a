"""CacheArena: one contiguous device allocation, and the sole owner of its plan, contract and field views.

Receives physical block ids only; knows no request, no scheduler and no context rank. Not thread-safe: the thread that
runs the model owns it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from cache_runtime.contract import CacheRuntimeContract
from cache_runtime.device import TORCH_DTYPES, Device
from cache_runtime.errors import BlockIdError, UnknownFieldError
from cache_runtime.recipes.plan import CacheFieldLayout, CacheMemoryPlan


class CacheArena:
    """The bytes of a CacheMemoryPlan on a device.

    Raises ArenaAllocationError when the device cannot hold the plan. The memory lives as long as any view of it.
    """

    def __init__(self, plan: CacheMemoryPlan, device: Device) -> None:
        self._plan = plan
        self._device = device
        self._contract = CacheRuntimeContract.from_plan(plan)
        self._buffer = device.alloc(plan.num_arena_bytes, plan.layout.alignment_bytes)
        self._fields = {field.field_id: _field_view(self._buffer, field) for field in plan.fields}
        self._fields_by_group = {
            spec.group_id: tuple(self._fields[f.field_id] for f in plan.fields if f.group_id == spec.group_id)
            for spec in plan.groups
        }

    @property
    def plan(self) -> CacheMemoryPlan:
        return self._plan

    @property
    def contract(self) -> CacheRuntimeContract:
        return self._contract

    @property
    def device(self) -> Device:
        return self._device

    @property
    def base_address(self) -> int:
        """Address of the first byte in this process or on the device; what a data plane registers."""
        return self._buffer.data_ptr()

    @property
    def num_bytes(self) -> int:
        return self._buffer.numel()

    @property
    def shared_descriptor(self) -> int | None:
        """Of the file that holds the arena from its first byte on; None when no other process can map it."""
        return self._device.shared_descriptor(self.base_address)

    def field(self, field_id: str) -> torch.Tensor:
        """[num_blocks, *block_shape] view of a field, block 0 the null block. Raises UnknownFieldError."""
        try:
            return self._fields[field_id]
        except KeyError:
            raise UnknownFieldError(f'field "{field_id}" is not in the arena\'s plan') from None

    def rows(self, field_id: str) -> torch.Tensor:
        """[num_rows, *row_shape] view of a history field as one array of rows.

        Block b holds the rows from b * block_stride_rows on. Rows between blocks belong to other fields of the group:
        only write locations and pages that the mapping made may be used as indices. Raises UnknownFieldError.
        """
        view = self.field(field_id)
        field = self._plan.field(field_id)
        stride_rows = self._plan.layout.block_stride_rows(self._plan.group_layout(field.group_id))
        num_rows = (field.num_blocks - 1) * stride_rows + field.block_shape[0]
        return view.as_strided((num_rows, *view.shape[2:]), view.stride()[1:])

    def zero_blocks(self, group_id: str, block_ids: npt.ArrayLike) -> None:
        """Clear all fields of the given physical blocks, in the order of the current stream.

        Block 0 and repeated ids are legal. Raises BlockIdError before any byte changes when an id is outside the group,
        UnknownGroupError for a group the plan lacks.
        """
        num_blocks = self._contract.group(group_id).num_blocks
        ids = _checked_block_ids(group_id, np.asarray(block_ids), num_blocks)
        for begin, end in _contiguous_runs(ids):
            for view in self._fields_by_group[group_id]:
                view[begin:end].zero_()


def _field_view(buffer: torch.Tensor, field: CacheFieldLayout) -> torch.Tensor:
    num_bytes = (field.num_blocks - 1) * field.block_stride_bytes + field.block_bytes
    flat = buffer[field.offset_bytes : field.offset_bytes + num_bytes].view(TORCH_DTYPES[field.dtype])
    block_strides = torch.empty(field.block_shape, device="meta").stride()
    return flat.as_strided(
        (field.num_blocks, *field.block_shape), (field.block_stride_bytes // flat.element_size(), *block_strides)
    )


def _checked_block_ids(group_id: str, block_ids: npt.NDArray[np.generic], num_blocks: int) -> npt.NDArray[np.int64]:
    if block_ids.size == 0:
        return np.empty(0, dtype=np.int64)
    if not np.issubdtype(block_ids.dtype, np.integer):
        raise BlockIdError(f'group "{group_id}": block ids must be integers, got {block_ids.dtype}')
    ids = np.unique(block_ids.astype(np.int64))
    for bad in (ids[0], ids[-1]):
        if not 0 <= bad < num_blocks:
            raise BlockIdError(f'group "{group_id}": block id {bad} is outside [0, {num_blocks})')
    return ids


def _contiguous_runs(sorted_ids: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """[begin, end) of each maximal run of consecutive ids, so that a run is one fill per field."""
    if sorted_ids.size == 0:
        return []
    breaks = np.flatnonzero(np.diff(sorted_ids) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(sorted_ids, breaks)]

"""CacheGroupRouter: the one logical-to-physical mapping point.

Learns each claimed group's block_granularity and kernel_page_size once; per forward it turns the scheduler's block
tables into page tables and write locations, and the plan's state slots into blocks. Behind it attention kernels see
pages only; nothing before it sees them at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from cache_runtime.contract import CacheGroupContract, CacheRuntimeContract
from cache_runtime.device import CpuDevice, Device
from cache_runtime.errors import BatchContractError, CacheConfigError, UnknownGroupError
from cache_runtime.mapping.batch_metadata import CacheBatchMetadata, Int32Array
from cache_runtime.mapping.block_placement import BlockPlacement, place_blocks
from cache_runtime.mapping.group_tables import CacheGroupGeometry, expand_block_table, mark_absent_pages
from cache_runtime.mapping.page_table import SKIP_LOCATION
from cache_runtime.mapping.state_blocks import resolve_state_blocks
from cache_runtime.mapping.write_locations import fail_closed_write_locations, span_write_locations
from cache_runtime.recipes.spec import CacheFamily


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutedGroup:
    """One group's kernel view of a forward."""

    geometry: CacheGroupGeometry
    page_table: torch.Tensor
    write_locations: torch.Tensor
    held_tokens: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateBlocks:
    """One state group's view of a forward: physical block ids, all int32[num_rows].

    Row r continues from `input_blocks[r]` (-1: from zeros), leaves the state after `checkpoint_lengths[r]` of its
    tokens in `checkpoint_blocks[r]` (-1, and 0 tokens: nowhere) and the one after all of them in `output_blocks[r]`,
    which may be its input.
    """

    input_blocks: torch.Tensor
    output_blocks: torch.Tensor
    checkpoint_blocks: torch.Tensor
    checkpoint_lengths: torch.Tensor


class RoutedBatch:
    """The kernel view of one forward, by group id. Tensors are on the router's device and read-only by convention."""

    def __init__(self, groups: Mapping[str, RoutedGroup], states: Mapping[str, StateBlocks]) -> None:
        self._groups = groups
        self._states = states

    def page_table(self, group_id: str) -> torch.Tensor:
        """int32[num_rows, max_pages] page ids, 0 (the dummy page) for holes and padding. Raises UnknownGroupError.

        Of a sharded group -1 (absent) for these and for pages of blocks that other ranks hold.
        """
        return self._group(group_id).page_table

    def write_locations(self, group_id: str) -> torch.Tensor:
        """int64[num_tokens] row indices into the group's flattened row buffers. Raises UnknownGroupError.

        Of a sharded group SKIP_LOCATION for tokens whose rows other ranks hold.
        """
        return self._group(group_id).write_locations

    def held_tokens(self, group_id: str) -> torch.Tensor | None:
        """int64[n], ascending: the forward's tokens whose rows this rank holds; None: the group is not sharded.

        Raises UnknownGroupError.
        """
        return self._group(group_id).held_tokens

    def kernel_page_size(self, group_id: str) -> int:
        """Tokens per page of the group's page table. Raises UnknownGroupError."""
        return self._group(group_id).geometry.kernel_page_size

    def state_blocks(self, group_id: str) -> StateBlocks:
        """The snapshots of a state group. Raises UnknownGroupError."""
        try:
            return self._states[group_id]
        except KeyError:
            raise UnknownGroupError(f'group "{group_id}" is no state group of the router\'s contract') from None

    def _group(self, group_id: str) -> RoutedGroup:
        try:
            return self._groups[group_id]
        except KeyError:
            raise UnknownGroupError(f'group "{group_id}" is not claimed by the router') from None


class CacheGroupRouter:
    """Routes the history groups named in `kernel_page_sizes`, and every state group; others ride through untouched.

    `placements` say which blocks are here, None that nobody else has any. Raises UnknownGroupError for a group the
    contract lacks, CacheConfigError for a page size that does not divide its block, a group without rows, or a sharded
    group that is not shared with anybody.
    """

    def __init__(
        self,
        contract: CacheRuntimeContract,
        kernel_page_sizes: Mapping[str, int],
        device: Device | None = None,
        *,
        placements: Mapping[str, BlockPlacement] | None = None,
    ) -> None:
        self._contract = contract
        self._placements = (
            place_blocks(contract, context_rank=0, num_context_ranks=1) if placements is None else placements
        )
        self._device: Device = CpuDevice() if device is None else device
        self._geometries = tuple(
            _learn_geometry(contract, group_id, kernel_page_size)
            for group_id, kernel_page_size in kernel_page_sizes.items()
        )
        self._state_groups = tuple(group for group in contract.groups if group.spec.family is CacheFamily.STATE)

    def route(self, metadata: CacheBatchMetadata) -> RoutedBatch:
        """One expansion and one address computation per claimed group.

        Raises BatchContractError when `metadata` was checked against another contract, or a state has no block.
        """
        if metadata.contract is not self._contract and metadata.contract != self._contract:
            raise BatchContractError("batch metadata belongs to another runtime contract than the router's")
        return RoutedBatch(
            {geometry.group_id: self._route_group(geometry, metadata) for geometry in self._geometries},
            {group.group_id: self._route_states(group, metadata) for group in self._state_groups},
        )

    def _route_group(self, geometry: CacheGroupGeometry, metadata: CacheBatchMetadata) -> RoutedGroup:
        placement = self._placements[geometry.group_id]
        table = placement.physical_table(metadata.block_tables[geometry.group_id])
        pages = expand_block_table(table, geometry.pages_per_block, geometry.block_stride_pages)
        if placement.is_sharded:
            return self._route_held(geometry, table, mark_absent_pages(pages), metadata)
        locations = span_write_locations(table, metadata.begins, metadata.input_lengths, geometry)
        return RoutedGroup(
            geometry=geometry,
            page_table=self._device.upload(pages),
            write_locations=self._device.upload(locations),
            held_tokens=None,
        )

    def _route_held(
        self, geometry: CacheGroupGeometry, table: Int32Array, pages: Int32Array, metadata: CacheBatchMetadata
    ) -> RoutedGroup:
        locations = fail_closed_write_locations(table, metadata.begins, metadata.input_lengths, geometry)
        return RoutedGroup(
            geometry=geometry,
            page_table=self._device.upload(pages),
            write_locations=self._device.upload(locations),
            held_tokens=self._device.upload(np.flatnonzero(locations != SKIP_LOCATION)),
        )

    def _route_states(self, group: CacheGroupContract, metadata: CacheBatchMetadata) -> StateBlocks:
        ids = resolve_state_blocks(group, metadata)
        return StateBlocks(
            input_blocks=self._device.upload(ids.input_blocks),
            output_blocks=self._device.upload(ids.output_blocks),
            checkpoint_blocks=self._device.upload(ids.checkpoint_blocks),
            checkpoint_lengths=self._device.upload(ids.checkpoint_lengths),
        )


def _learn_geometry(contract: CacheRuntimeContract, group_id: str, kernel_page_size: int) -> CacheGroupGeometry:
    group = contract.group(group_id)
    if group.spec.family is not CacheFamily.HISTORY:
        raise CacheConfigError(f'group "{group_id}": a {group.spec.family} group has no pages to route')
    return CacheGroupGeometry.of(group, kernel_page_size)

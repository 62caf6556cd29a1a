"""A model without arithmetic: cache bytes are hashes of everything they depend on, and a token of every byte it reads.

A row is made from its layer, token, position and the row before it; a state from its layer, token, position and the
state before it; the next token from the request's seed and all rows and states that attention would read, read back
from the arena. So a block that is stale, missing, misplaced or incomplete changes the text, and `expected_tokens` says
what the text should have been. It knows plans and an arena, no node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, unique
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from cache_runtime.contract import CacheRuntimeContract
from cache_runtime.recipes.base import CacheLayerType, CacheRecipe
from cache_runtime.recipes.dense import DenseCacheRecipe
from cache_runtime.recipes.hybrid import HybridCacheRecipe, StateField
from cache_runtime.recipes.plan import CacheLayout, CacheMemoryPlan
from cache_runtime.recipes.rows import key_value_fields
from cache_runtime.recipes.sliding_full import SlidingFullCacheRecipe
from cache_runtime.recipes.spec import CacheFamily, layer_field_id
from cache_runtime.scheduler_bridge import pool_to_cache_groups
from cache_runtime.transfer.manifest_builder import describe_cache
from cache_runtime.transfer.schema import LogicalManifest
from model_runtime.sampler import SampledToken
from scheduler_core import CacheGroupConfig, Plan

if TYPE_CHECKING:
    from model_runtime.sampler import SamplingParams

VOCAB_SIZE = 997
CONTEXT_TOKENS = 128
PREFIX_GRANULARITY = 4
_HALF_ROW_BYTES = 16
_STATE_BYTES = 32
_FLOAT_BYTES = 4


@unique
class ModelKind(Enum):
    """Which cache groups the model has."""

    DENSE = "dense"
    SLIDING = "sliding"
    STATE = "state"


_LAYERS = {
    ModelKind.DENSE: (CacheLayerType.FULL, CacheLayerType.FULL),
    ModelKind.SLIDING: (CacheLayerType.FULL, CacheLayerType.SLIDING),
    ModelKind.STATE: (CacheLayerType.STATE, CacheLayerType.FULL),
}
_WINDOW_TOKENS = 6


def _recipe(kind: ModelKind) -> CacheRecipe:
    layers = _LAYERS[kind]
    rows = key_value_fields(1, _HALF_ROW_BYTES // _FLOAT_BYTES)
    match kind:
        case ModelKind.DENSE:
            return DenseCacheRecipe(
                prefix_granularity=PREFIX_GRANULARITY,
                memory_bytes=1 << 30,
                num_layers=len(layers),
                row_fields=rows,
                dtype="float32",
            )
        case ModelKind.SLIDING:
            return SlidingFullCacheRecipe(
                prefix_granularity=PREFIX_GRANULARITY,
                memory_bytes=1 << 30,
                num_layers=len(layers),
                row_fields=rows,
                dtype="float32",
                is_sliding=tuple(layer is CacheLayerType.SLIDING for layer in layers),
                sliding_window_tokens=_WINDOW_TOKENS,
            )
        case ModelKind.STATE:
            return HybridCacheRecipe(
                prefix_granularity=PREFIX_GRANULARITY,
                memory_bytes=1 << 30,
                num_layers=len(layers),
                row_fields=rows,
                dtype="float32",
                layer_kinds=layers,
                state_fields=(StateField(name="s", block_shape=(_STATE_BYTES // _FLOAT_BYTES,)),),
            )


@lru_cache(maxsize=8)
def _layout(kind: ModelKind) -> CacheLayout:
    return _recipe(kind).setup().plan.layout


def _advance(layer: int, token: int, position: int, previous: bytes) -> bytes:
    """32 bytes: a row (key, then value) or a state."""
    return blake2b(b"%d|%d|%d|%b" % (layer, token, position, previous), digest_size=_STATE_BYTES).digest()


def _pick(reading: bytes, seed: int) -> int:
    digest = blake2b(reading, digest_size=8, key=seed.to_bytes(8, "big")).digest()
    return int.from_bytes(digest, "big") % VOCAB_SIZE


def _first_read(kind: CacheLayerType, num_tokens: int) -> int:
    """The first position that attention reads when `num_tokens` are in the cache."""
    return max(0, num_tokens - _WINDOW_TOKENS) if kind is CacheLayerType.SLIDING else 0


def expected_tokens(kind: ModelKind, prompt: Sequence[int], num_tokens: int, seed: int) -> list[int]:
    """What a node generates whose cache is right."""
    layers = _LAYERS[kind]
    # Per layer: the newest row or state, and the bytes of all keys and of all values.
    newest, keys, values = [b""] * len(layers), [bytearray() for _ in layers], [bytearray() for _ in layers]
    position = 0

    def append(token: int) -> None:
        nonlocal position
        for layer, previous in enumerate(newest):
            row = newest[layer] = _advance(layer, token, position, previous)
            keys[layer] += row[:_HALF_ROW_BYTES]
            values[layer] += row[_HALF_ROW_BYTES:]
        position += 1

    for token in prompt:
        append(token)
    generated: list[int] = []
    while len(generated) < num_tokens:
        parts: list[bytes | bytearray] = []
        for index, layer in enumerate(layers):
            if layer is CacheLayerType.STATE:
                parts.append(newest[index])
            else:
                begin = _first_read(layer, position) * _HALF_ROW_BYTES
                parts += (keys[index][begin:], values[index][begin:])
        generated.append(_pick(b"".join(parts), seed))
        append(generated[-1])
    return generated


@dataclass(frozen=True, slots=True)
class _Column:
    """Where one field of one layer lies: block b begins at `offset + b * stride`."""

    offset: int
    stride: int


@dataclass(frozen=True, slots=True)
class _Layer:
    index: int
    kind: CacheLayerType
    group: int
    block_granularity: int
    columns: tuple[_Column, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheShape:
    """The cache of a model with some number of parents, and what follows from that; made once for all nodes that have
    it.
    """

    plan: CacheMemoryPlan
    group_ids: tuple[str, ...]
    cache_groups: tuple[CacheGroupConfig, ...]
    logical: LogicalManifest
    layers: tuple[_Layer, ...]
    # Per group: offset, stride and bytes of each field's blocks.
    group_fields: tuple[tuple[tuple[int, int, int], ...], ...]


@lru_cache(maxsize=64)
def cache_shape(kind: ModelKind, num_lcm_blocks: int) -> CacheShape:
    """The one of such a model with so many parents."""
    plan = _layout(kind).bind(num_lcm_blocks)
    contract = CacheRuntimeContract.from_plan(plan)
    stages = [
        [layer_field_id(index, name) for name in _field_names(layer)] for index, layer in enumerate(_LAYERS[kind])
    ]
    return CacheShape(
        plan=plan,
        group_ids=tuple(contract.group_ids),
        cache_groups=tuple(pool_to_cache_groups(contract)),
        logical=describe_cache(plan, stages=stages, model_fingerprint=kind.value, weight_version=""),
        layers=_layers_of(kind, plan),
        group_fields=tuple(
            tuple(
                (item.offset_bytes, item.block_stride_bytes, item.block_bytes)
                for item in plan.fields
                if item.group_id == group_id
            )
            for group_id in contract.group_ids
        ),
    )


def _field_names(layer: CacheLayerType) -> str:
    return "s" if layer is CacheLayerType.STATE else "kv"


class Arena:
    """The bytes of a memory plan."""

    def __init__(self, plan: CacheMemoryPlan) -> None:
        self.plan = plan
        self.array = np.zeros(plan.num_arena_bytes, dtype=np.uint8)
        self.memory: memoryview = self.array.data

    @property
    def base_address(self) -> int:
        return int(self.array.ctypes.data)


Reading: TypeAlias = bytes | None
"""All bytes that attention reads for the next token of a row, None where none is wanted."""


class FakeExecutor:
    """The engine's Executor over an Arena.

    `on_time` is called before each layer and may let time pass: a pass takes as long as it takes, and other things
    happen meanwhile. `meet` is called behind the rows of each layer, where ranks wait for one another, and `gather`
    joins what this rank has read with what the others have.
    """

    def __init__(
        self,
        shape: CacheShape,
        on_time: Callable[[], None],
        gather: Callable[[tuple[Reading, ...]], tuple[Reading, ...]] = lambda readings: readings,
        meet: Callable[[], None] = lambda: None,
    ) -> None:
        self.arena = Arena(shape.plan)
        self._layers = shape.layers
        self._group_fields = shape.group_fields
        self._on_time = on_time
        self._gather = gather
        self._meet = meet

    def zero_blocks(self, plan: Plan) -> None:
        memory = self.arena.memory
        for fields, blocks in zip(self._group_fields, plan.zero_blocks, strict=True):
            for block in blocks.tolist():
                for offset, stride, num_bytes in fields:
                    begin = offset + block * stride
                    memory[begin : begin + num_bytes] = bytes(num_bytes)

    def execute(
        self, plan: Plan, sampling: Mapping[str, SamplingParams], on_stage: Callable[[int], None] | None = None
    ) -> tuple[SampledToken | None, ...]:
        readings = self._gather(self.compute(plan, on_stage))
        return tuple(
            None if reading is None else SampledToken(token_id=_pick(reading, sampling[request_id].seed))
            for request_id, reading in zip(plan.request_ids, readings, strict=True)
        )

    def compute(self, plan: Plan, on_stage: Callable[[int], None] | None = None) -> tuple[Reading, ...]:
        """Writes what the plan's rows add, and reads what their next tokens depend on."""
        batch = _Batch(plan)
        for layer in self._layers:
            self._on_time()
            for row in range(len(batch.request_ids)):
                if layer.kind is CacheLayerType.STATE:
                    self._step_state(batch, row, layer)
                else:
                    self._write_rows(batch, row, layer)
            if on_stage is not None:
                on_stage(layer.index)
            self._meet()
        return tuple(self._read(batch, row) for row in range(len(batch.request_ids)))

    def _write_rows(self, batch: _Batch, row: int, layer: _Layer) -> None:
        memory, granularity = self.arena.memory, layer.block_granularity
        key, value = layer.columns
        table = batch.tables[layer.group][row]
        position = batch.begins[row]
        previous = b"" if position == 0 else self._read_row(layer, table, position - 1)
        for token in batch.tokens[row]:
            previous = _advance(layer.index, token, position, previous)
            block, within = table[position // granularity], position % granularity * _HALF_ROW_BYTES
            if block < 1:
                raise IndexError(f"position {position} of layer {layer.index} has no block")
            begin = key.offset + block * key.stride + within
            memory[begin : begin + _HALF_ROW_BYTES] = previous[:_HALF_ROW_BYTES]
            begin = value.offset + block * value.stride + within
            memory[begin : begin + _HALF_ROW_BYTES] = previous[_HALF_ROW_BYTES:]
            position += 1

    def _read_row(self, layer: _Layer, table: Sequence[int], position: int) -> bytes:
        block, within = (
            table[position // layer.block_granularity],
            position % layer.block_granularity * _HALF_ROW_BYTES,
        )
        halves = []
        for column in layer.columns:
            begin = column.offset + block * column.stride + within
            halves.append(self.arena.memory[begin : begin + _HALF_ROW_BYTES])
        return b"".join(halves)

    def _step_state(self, batch: _Batch, row: int, layer: _Layer) -> None:
        table = batch.tables[layer.group][row]
        input_slot = batch.state_inputs[layer.group][row]
        state = b"" if input_slot < 0 else self._read_state(layer, table[input_slot])
        checkpoint = batch.checkpoints[row]
        position = batch.begins[row]
        for token in batch.tokens[row]:
            state = _advance(layer.index, token, position, state)
            position += 1
            if position == checkpoint:
                self._write_state(layer, table[(checkpoint - 1) // layer.block_granularity], state)
        self._write_state(layer, table[batch.state_outputs[layer.group][row]], state)

    def _read_state(self, layer: _Layer, block: int) -> bytes:
        begin = layer.columns[0].offset + block * layer.columns[0].stride
        return bytes(self.arena.memory[begin : begin + _STATE_BYTES])

    def _write_state(self, layer: _Layer, block: int, state: bytes) -> None:
        if block < 1:
            raise IndexError(f"the state of layer {layer.index} has no block")
        begin = layer.columns[0].offset + block * layer.columns[0].stride
        self.arena.memory[begin : begin + _STATE_BYTES] = state

    def _read(self, batch: _Batch, row: int) -> Reading:
        if not batch.logits_wanted[row]:
            return None
        num_tokens = batch.begins[row] + len(batch.tokens[row])
        parts: list[bytes | memoryview] = []
        for layer in self._layers:
            table = batch.tables[layer.group][row]
            if layer.kind is CacheLayerType.STATE:
                parts.append(self._read_state(layer, table[batch.state_outputs[layer.group][row]]))
            else:
                self._read_column(layer, table, num_tokens, parts)
        return b"".join(parts)

    def _read_column(
        self, layer: _Layer, table: Sequence[int], num_tokens: int, parts: list[bytes | memoryview]
    ) -> None:
        memory, granularity = self.arena.memory, layer.block_granularity
        first = _first_read(layer.kind, num_tokens)
        for column in layer.columns:
            position = first
            while position < num_tokens:
                within = position % granularity
                end = min(num_tokens, position - within + granularity)
                begin = column.offset + table[position // granularity] * column.stride + within * _HALF_ROW_BYTES
                parts.append(memory[begin : begin + (end - position) * _HALF_ROW_BYTES])
                position = end


class _Batch:
    """A plan's rows as plain lists."""

    def __init__(self, plan: Plan) -> None:
        self.request_ids = list(plan.request_ids)
        self.begins: list[int] = plan.begins.tolist()
        self.logits_wanted: list[int] = plan.logits_wanted.tolist()
        self.checkpoints: list[int] = plan.checkpoint_tokens.tolist()
        self.tables: list[list[list[int]]] = [table.tolist() for table in plan.block_tables]
        self.state_inputs: list[list[int]] = [slots.tolist() for slots in plan.state_input_slots]
        self.state_outputs: list[list[int]] = [slots.tolist() for slots in plan.state_output_slots]
        flat: list[int] = plan.token_ids.tolist()
        self.tokens: list[list[int]] = []
        begin = 0
        for length in plan.input_lengths.tolist():
            self.tokens.append(flat[begin : begin + length])
            begin += length


def _layers_of(kind: ModelKind, plan: CacheMemoryPlan) -> tuple[_Layer, ...]:
    groups = {spec.group_id: (index, spec) for index, spec in enumerate(plan.groups)}
    layers = []
    for index, layer_kind in enumerate(_LAYERS[kind]):
        items = [plan.field(layer_field_id(index, name)) for name in _field_names(layer_kind)]
        group, spec = groups[items[0].group_id]
        if (spec.family is CacheFamily.STATE) != (layer_kind is CacheLayerType.STATE):
            raise ValueError(f"layer {index} lies in a group of another family")
        columns = tuple(_Column(item.offset_bytes, item.block_stride_bytes) for item in items)
        layers.append(_Layer(index, layer_kind, group, spec.block_granularity, columns))
    return tuple(layers)

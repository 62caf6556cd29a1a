"""A compute core without a model: its cache rows are hashes of everything they depend on.

A row is made from its token, its position and the row before it, read back from the arena; a sampled token is made from
every row of the sequence, read back from the arena. So a block that is stale, missing, misplaced or incomplete changes
what is generated, and `expected_tokens` says what should have been.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from cache_runtime.contract import CacheRuntimeContract
from cache_runtime.recipes.dense import DenseCacheRecipe
from cache_runtime.recipes.plan import CacheMemoryPlan
from cache_runtime.recipes.rows import key_value_fields
from cache_runtime.shared_memory import SharedMemory
from cache_runtime.transfer.manifest_builder import build_manifest
from cache_runtime.transfer.memory_engine import MemoryEngine, MemoryFabric
from cache_runtime.transfer.plane_set import PlaneSet
from model_runtime.sampler import BrokenLogits, RowOutcome, SampledToken, SamplingParams

VOCAB_SIZE = 997
ROW_BYTES = 16
NUM_LAYERS = 3
FIELD_IDS = tuple(f"layers.{layer}.{name}" for layer in range(NUM_LAYERS) for name in "kv")


def make_row(field_id: str, token: int, position: int, previous: bytes) -> bytes:
    content = f"{field_id}|{token}|{position}|".encode() + previous
    return hashlib.blake2b(content, digest_size=ROW_BYTES).digest()


def pick_token(rows: Iterable[bytes], seed: int) -> int:
    digest = hashlib.blake2b(seed.to_bytes(8, "big"), digest_size=8)
    for row in rows:
        digest.update(row)
    return int.from_bytes(digest.digest(), "big") % VOCAB_SIZE


def expected_tokens(prompt: Sequence[int], num_tokens: int, seed: int = 0) -> list[int]:
    """What a node generates whose cache is right."""
    rows: dict[str, list[bytes]] = {field_id: [] for field_id in FIELD_IDS}

    def append(token: int) -> None:
        for field_id, column in rows.items():
            column.append(make_row(field_id, token, len(column), column[-1] if column else b""))

    for token in prompt:
        append(token)
    generated: list[int] = []
    while len(generated) < num_tokens:
        generated.append(pick_token((row for column in rows.values() for row in column), seed))
        append(generated[-1])
    return generated


def make_memory_plan(
    *, num_lcm_blocks: int, prefix_granularity: int = 4, block_granularity: int | None = None, dtype: str = "float32"
) -> CacheMemoryPlan:
    recipe = DenseCacheRecipe(
        prefix_granularity=prefix_granularity,
        memory_bytes=1 << 30,
        num_layers=NUM_LAYERS,
        row_fields=key_value_fields(1, ROW_BYTES // (4 if dtype == "float32" else 2)),
        dtype=dtype,
        block_granularity=block_granularity,
    )
    return recipe.setup().plan.layout.bind(num_lcm_blocks)


class FakeArena:
    """The bytes of a memory plan, with rows addressed by field, block and slot position."""

    def __init__(self, plan: CacheMemoryPlan) -> None:
        self.plan = plan
        self._shared = SharedMemory(plan.num_arena_bytes, "pdmesh-fake")
        self.memory = np.frombuffer(self._shared.mapping, dtype=np.uint8)
        self.shared_descriptor = self._shared.descriptor
        self._fields = {item.field_id: item for item in plan.fields}
        self.block_granularity = plan.groups[0].block_granularity

    @property
    def base_address(self) -> int:
        return int(self.memory.ctypes.data)

    def _span(self, field_id: str, table: Sequence[int], position: int) -> slice:
        item = self._fields[field_id]
        block = int(table[position // self.block_granularity])
        assert 1 <= block < item.num_blocks, f"position {position} lies in block {block}"
        begin = item.offset_bytes + block * item.block_stride_bytes + position % self.block_granularity * ROW_BYTES
        return slice(begin, begin + ROW_BYTES)

    def row(self, field_id: str, table: Sequence[int], position: int) -> bytes:
        return self.memory[self._span(field_id, table, position)].tobytes()

    def write_row(self, field_id: str, table: Sequence[int], position: int, token: int) -> None:
        previous = self.row(field_id, table, position - 1) if position else b""
        row = make_row(field_id, token, position, previous)
        self.memory[self._span(field_id, table, position)] = np.frombuffer(row, dtype=np.uint8)

    def block_bytes(self, field_id: str, block: int) -> np.ndarray:
        item = self._fields[field_id]
        begin = item.offset_bytes + block * item.block_stride_bytes
        return self.memory[begin : begin + item.block_bytes]


class FakeExecutor:
    """Executor over a FakeArena. `before_pass` runs at the start of every pass, on the engine thread."""

    def __init__(self, plan: CacheMemoryPlan) -> None:
        self.arena = FakeArena(plan)
        self.stages = tuple((f"layers.{layer}.k", f"layers.{layer}.v") for layer in range(NUM_LAYERS))
        self.before_pass: Callable[[object], None] = lambda plan: None
        self.before_stage: Callable[[int], None] = lambda stage: None
        self.before_zeroing: Callable[[object], None] = lambda plan: None
        self.num_input_tokens = 0
        # (seed, number of tokens): the logits of such requests are broken behind so many tokens.
        self.broken_logits: set[tuple[int, int]] = set()

    def zero_blocks(self, plan) -> None:
        self.before_zeroing(plan)
        for blocks in plan.zero_blocks:
            for block in blocks.tolist():
                for field_id in FIELD_IDS:
                    self.arena.block_bytes(field_id, block)[:] = 0

    def execute(
        self, plan, sampling: Mapping[str, SamplingParams], on_stage: Callable[[int], None] | None = None
    ) -> tuple[RowOutcome, ...]:
        self.before_pass(plan)
        self.num_input_tokens += int(plan.input_lengths.sum())
        tokens = np.split(plan.token_ids, np.cumsum(plan.input_lengths)[:-1])
        tables = plan.block_tables[0]
        for stage, field_ids in enumerate(self.stages):
            self.before_stage(stage)
            for row in range(plan.num_rows):
                for offset, token in enumerate(tokens[row].tolist()):
                    for field_id in field_ids:
                        self.arena.write_row(field_id, tables[row], int(plan.begins[row]) + offset, token)
            if on_stage is not None:
                on_stage(stage)
        return tuple(self._sample(plan, row, sampling) for row in range(plan.num_rows))

    def _sample(self, plan, row: int, sampling: Mapping[str, SamplingParams]) -> RowOutcome:
        if not plan.logits_wanted[row]:
            return None
        num_tokens = int(plan.begins[row] + plan.input_lengths[row])
        seed = sampling[plan.request_ids[row]].seed
        if (seed, num_tokens) in self.broken_logits:
            return BrokenLogits(reason=f"broken at position {num_tokens}")
        table = plan.block_tables[0][row]
        rows = (self.arena.row(field_id, table, position) for field_id in FIELD_IDS for position in range(num_tokens))
        return SampledToken(token_id=pick_token(rows, seed))


class Gate:
    """Holds a thread at a point until it is opened; tells when it got there."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def wait(self, *_: object) -> None:
        self.reached.set()
        assert self._open.wait(60), "a gate was never opened"

    def open(self) -> None:
        self._open.set()


def fake_core(
    role,
    *,
    fabric: MemoryFabric | None = None,
    planes: PlaneSet | None = None,
    num_lcm_blocks: int = 64,
    prefix_granularity: int = 4,
    token_budget: int = 16,
    max_batch_size: int = 8,
    dtype: str = "float32",
    fingerprint: str = "fake-model",
    max_ready_ungranted: int = 64,
):
    """A ComputeCore around a FakeExecutor, the real scheduler and the in-memory data plane, or `planes` of the test."""
    from cache_runtime.scheduler_bridge import pool_to_cache_groups
    from node_runtime.engine.core import ComputeCore, DataPlane, ModelFacts
    from scheduler_core import Scheduler, SchedulerConfig

    plan = make_memory_plan(num_lcm_blocks=num_lcm_blocks, prefix_granularity=prefix_granularity, dtype=dtype)
    executor = FakeExecutor(plan)
    contract = CacheRuntimeContract.from_plan(plan)
    scheduler = Scheduler(
        SchedulerConfig(
            role=role,
            prefix_granularity=prefix_granularity,
            num_lcm_blocks=num_lcm_blocks,
            max_batch_size=max_batch_size,
            token_budget=token_budget,
            cache_groups=pool_to_cache_groups(contract),
            max_ready_ungranted=max_ready_ungranted,
        )
    )
    data_plane = None
    if fabric is not None:
        planes = planes or PlaneSet((MemoryEngine(fabric),))
        arena = executor.arena
        planes.register(arena.base_address, plan.num_arena_bytes, shared_descriptor=arena.shared_descriptor)
        manifest = build_manifest(
            plan,
            stages=executor.stages,
            model_fingerprint=fingerprint,
            weight_version="",
            arena_base=executor.arena.base_address,
            data_plane=planes.engines[0].name,
            endpoint=planes.engines[0].endpoint,
            planes=planes.offers,
        )
        data_plane = DataPlane(planes=planes, manifest=manifest)
    facts = ModelFacts(
        name="fake",
        path="nowhere",
        fingerprint=fingerprint,
        vocab_size=VOCAB_SIZE,
        context_tokens=256,
        prefix_granularity=prefix_granularity,
        arena_bytes=plan.num_arena_bytes,
        num_lcm_blocks=num_lcm_blocks,
        capacity_tokens=plan.layout.token_capacity(num_lcm_blocks),
        weight_formats=("float32",),
        device="cpu",
        is_batch_invariant=True,
        weight_bytes=1024,
        float32_weight_bytes=1024,
        num_threads=1,
    )
    return ComputeCore(
        executor=executor,
        scheduler=scheduler,
        group_ids=tuple(contract.group_ids),
        facts=facts,
        data_plane=data_plane,
    )

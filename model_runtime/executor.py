"""ModelExecutor: carries out scheduler plans on one device, from block ids to sampled tokens.

Owns the arena, the model and the mapping. Keeps nothing of a request between two plans: what a request has computed is
in the arena, and where it lies there is in the plan. One thread calls it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from cache_runtime.arena import CacheArena
from cache_runtime.device import CpuDevice, Device
from cache_runtime.kernel_page_sizes import resolve_kernel_page_size
from cache_runtime.layer_binding import bind_cache_groups, check_cache_groups
from cache_runtime.mapping.batch_metadata import BatchPlan, CacheBatchMetadata
from cache_runtime.mapping.block_placement import place_blocks
from cache_runtime.mapping.router import CacheGroupRouter
from cache_runtime.pools.cache_pools import CachePools
from cache_runtime.recipes.partition import TensorRank
from cache_runtime.recipes.plan import CacheMemoryPlan
from cache_runtime.recipes.spec import CacheFamily
from cache_runtime.scheduler_bridge import SchedulerLimits
from model_runtime.checkpoint import Checkpoint
from model_runtime.config import ModelConfig
from model_runtime.family import CacheBudget
from model_runtime.forward_batch import ForwardBatch, TokenPlan
from model_runtime.forward_context import ForwardContext
from model_runtime.head_ranks import check_head_ranks
from model_runtime.layer_builder import LayerBuilder
from model_runtime.lora.adapter_set import AdapterSet
from model_runtime.lora.peft_files import LoraAdapter
from model_runtime.lora.token_groups import NO_ADAPTERS, TokenGroup, group_tokens
from model_runtime.prompt_scoring import keep_scores, scored_rows, scored_tokens
from model_runtime.rank_group import RankGroup, SingleRank, check_same_plan
from model_runtime.registry import compute_dtype, find_backend, find_family
from model_runtime.sampler import RowOutcome, SamplingParams, adapters_of, sample_row
from model_runtime.stage_fences import StageFences
from model_runtime.weight_choice import WeightChoice, WeightFacts, apply_choice, describe_weights


class ExecutablePlan(BatchPlan, TokenPlan, Protocol):
    """The part of a scheduler plan an executor carries out; `scheduler_core.Plan` is one."""

    @property
    def request_ids(self) -> Sequence[str]: ...
    @property
    def zero_blocks(self) -> Sequence[npt.NDArray[np.int32]]: ...


class ModelExecutor:
    """Recipe -> arena -> model -> binding -> router, then plans.

    `memory_bytes` is for the cache; weights come on top. `device` None takes the CPU. `kernel_page_size` None takes the
    kernel's own; `num_threads` None takes every CPU this process may use; they are the native kernels' threads, torch
    is set to one in the whole process. `context_ranks` share the blocks of groups that keep all rows: each rank has an
    executor of its own, given the same settings and the same plans, and samples the same tokens. `tensor_ranks`
    likewise, but they share the heads of every layer: each reads its own part of the weights, and its arena of
    `memory_bytes` holds its own part of every row and state. `scheduler_limits` say whom the arena will serve, for what
    it reports as its capacity. Requests go through one of the `adapters` or none. Raises CacheConfigError,
    UnsupportedDtypeError, UnsupportedWeightsError, UnsupportedRanksError or ValueError for settings that cannot work,
    before any weight or cache memory is allocated; ArenaAllocationError when the machine cannot hold the arena;
    AdapterError for an adapter of layers that cannot be changed by one.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        memory_bytes: int,
        prefix_granularity: int,
        dtype: str = "float32",
        weights: WeightChoice = WeightChoice.AUTO,
        kernel_page_size: int | None = None,
        num_threads: int | None = None,
        scheduler_limits: SchedulerLimits | None = None,
        context_ranks: RankGroup | None = None,
        tensor_ranks: RankGroup | None = None,
        device: Device | None = None,
        adapters: Sequence[LoraAdapter] = (),
    ) -> None:
        ranks: RankGroup = SingleRank() if context_ranks is None else context_ranks
        head_ranks: RankGroup = SingleRank() if tensor_ranks is None else tensor_ranks
        check_head_ranks(checkpoint.config, num_tensor_ranks=head_ranks.size, num_context_ranks=ranks.size)
        family = find_family(checkpoint.config.architecture)
        torch_dtype = compute_dtype(dtype)
        num_threads = len(os.sched_getaffinity(0)) if num_threads is None else num_threads
        self._device: Device = CpuDevice() if device is None else device
        backend = find_backend(self._device.torch_device, num_threads)
        budget = CacheBudget(
            memory_bytes=memory_bytes,
            prefix_granularity=prefix_granularity,
            dtype=dtype,
            scheduler_limits=scheduler_limits,
            shard_count=ranks.size,
            tensor_rank=TensorRank(rank=head_ranks.rank, size=head_ranks.size),
        )
        source = apply_choice(weights, checkpoint.source, backend.kernels)
        setup = family.cache_recipe(checkpoint.config, budget).setup()
        page_sizes = {
            group.group_id: resolve_kernel_page_size(
                backend.page_size_backend, block_granularity=group.block_granularity, override=kernel_page_size
            )
            for group in setup.plan.groups
            if group.family is CacheFamily.HISTORY
        }
        # Here, where nothing is allocated yet; the model's own layers are bound once they exist.
        check_cache_groups(family.cache_layers(checkpoint.config), setup.plan)
        # Torch's own threads spin between operations and would hold the cores that the native kernels' threads, and
        # other nodes on this machine, need; what is left to torch is too small to share.
        torch.set_num_threads(1)
        self._config = checkpoint.config
        self._stages = setup.producer_fields_by_step
        self._token_capacity = setup.token_capacity
        self._kernels = backend.kernels
        self._is_batch_invariant = backend.is_batch_invariant
        self._arena = CacheArena(setup.plan, self._device)
        self._pools = CachePools.of(self._arena)
        self._ranks, self._head_ranks = ranks, head_ranks
        self._placements = place_blocks(self._arena.contract, context_rank=ranks.rank, num_context_ranks=ranks.size)
        self._adapters = AdapterSet(adapters)
        self._router = CacheGroupRouter(self._arena.contract, page_sizes, self._device, placements=self._placements)
        with torch.inference_mode(), self._device.as_default():
            self._model = family.build(
                LayerBuilder(
                    config=checkpoint.config,
                    source=source,
                    dtype=torch_dtype,
                    kernels=backend.kernels,
                    ranks=head_ranks,
                    adapters=self._adapters,
                )
            )
        self._adapters.finish()
        self._weights = describe_weights(source, backend.kernels, adapter_bytes=self._adapters.num_bytes)
        bind_cache_groups(self._model.cache_layers, setup.plan)

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def arena(self) -> CacheArena:
        return self._arena

    @property
    def plan(self) -> CacheMemoryPlan:
        return self._arena.plan

    @property
    def token_capacity(self) -> int:
        """Tokens that the arena holds at most."""
        return self._token_capacity

    @property
    def weights(self) -> WeightFacts:
        return self._weights

    @property
    def adapter_digests(self) -> Mapping[str, bytes]:
        """SHA-256 of what each adapter changes, by its name."""
        return self._adapters.digests

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a request's logits have the same bits whatever shares its batch and however its prompt is cut."""
        return self._is_batch_invariant

    @property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """Field ids by stage; `on_stage(i)` means that the rows of `stages[i]` are in the arena."""
        return self._stages

    def zero_blocks(self, plan: ExecutablePlan) -> None:
        """Clears the blocks the plan has freshly acquired, as far as they are here; before the plan is executed.

        Raises BlockIdError before any byte changes when an id is outside its group.
        """
        held = {
            group_id: self._placements[group_id].held_blocks(block_ids)
            for group_id, block_ids in zip(self._arena.contract.group_ids, plan.zero_blocks, strict=True)
            if block_ids.size
        }
        for group_id, block_ids in held.items():
            self._arena.zero_blocks(group_id, block_ids)

    def execute(
        self,
        plan: ExecutablePlan,
        sampling: Mapping[str, SamplingParams],
        on_stage: Callable[[int], None] | None = None,
    ) -> tuple[RowOutcome, ...]:
        """One forward of all rows; one entry per row, None where the plan wants no logits, BrokenLogits where the model
        broke down: that is the row's own, the others are sampled as without it.

        `sampling` has an entry for every request whose logits are wanted; what a prompt is to be told is left in the
        texts there. `on_stage(i)` runs on the calling thread once layer i's rows or states of this forward are in the
        arena, on the CPU right after the layer wrote them.
        Raises BatchContractError or ValueError, before the arena is touched, for a plan that contradicts the arena's
        contract, and an adapter that is not here; RankGroupError when another rank does not take part, or carries out
        another plan.
        """
        metadata = CacheBatchMetadata.from_plan(plan, self._arena.contract)
        scored = scored_rows(plan.request_ids, metadata.begins, metadata.input_lengths, sampling)
        batch = ForwardBatch.from_plan(plan, metadata, self._device, scored_tokens=scored_tokens(scored))
        params = _sampling_by_logit_row(plan, batch, sampling)
        adapters = adapters_of(sampling)
        groups = self._token_groups(plan, metadata, adapters)
        self._check_same_plan(plan, adapters)
        logits = self._forward(metadata, batch, groups, _ignore_stage if on_stage is None else on_stage)
        positions = (metadata.begins + metadata.input_lengths)[batch.logit_rows].tolist()
        best = self._most_likely(logits[: len(params)])
        sampled: list[RowOutcome] = [None] * metadata.num_rows
        for index, row in enumerate(batch.logit_rows.tolist()):
            sampled[row] = sample_row(logits[index], params[index], positions[index], best[index])
        for row, broken in keep_scores(scored, logits[len(params) :]).items():
            sampled[row] = broken
        return tuple(sampled)

    def _most_likely(self, logits: npt.NDArray[np.float32]) -> list[int]:
        """The token of each row of logits float32[num_logits, vocab_size]."""
        tokens = torch.empty(logits.shape[0], dtype=torch.int64)
        self._kernels.find_largest(torch.from_numpy(logits), tokens)
        return tokens.tolist()

    def logits(
        self,
        plan: ExecutablePlan,
        on_stage: Callable[[int], None] | None = None,
        adapters: Mapping[str, str] = NO_ADAPTERS,
    ) -> npt.NDArray[np.float32]:
        """The forward of `execute` without its sampling: [rows that want logits, vocab_size] in the order of the rows.

        `adapters` by request id. Raises BatchContractError, ValueError or RankGroupError like `execute`.
        """
        metadata = CacheBatchMetadata.from_plan(plan, self._arena.contract)
        batch = ForwardBatch.from_plan(plan, metadata, self._device)
        groups = self._token_groups(plan, metadata, adapters)
        self._check_same_plan(plan, adapters)
        return self._forward(metadata, batch, groups, _ignore_stage if on_stage is None else on_stage)

    def _token_groups(
        self, plan: ExecutablePlan, metadata: CacheBatchMetadata, adapters: Mapping[str, str]
    ) -> tuple[TokenGroup, ...]:
        """Raises ValueError for a name that no adapter here has: the model as it is would give other tokens."""
        for name in adapters.values():
            if name not in self._adapters.digests:
                raise ValueError(f'adapter "{name}" is not loaded')
        return group_tokens(plan.request_ids, metadata.input_lengths, adapters, self._device)

    def _check_same_plan(self, plan: ExecutablePlan, adapters: Mapping[str, str]) -> None:
        digests = {request_id: self._adapters.digests[name].hex() for request_id, name in adapters.items()}
        for ranks in (self._ranks, self._head_ranks):
            check_same_plan(ranks, plan, digests)

    def _forward(
        self,
        metadata: CacheBatchMetadata,
        batch: ForwardBatch,
        groups: tuple[TokenGroup, ...],
        on_stage: Callable[[int], None],
    ) -> npt.NDArray[np.float32]:
        fences = StageFences(self._device, on_stage)
        running = self._adapters.running.of(groups, batch.num_tokens)
        with torch.inference_mode(), self._device.as_default(), running:
            context = ForwardContext(
                batch=batch,
                routed=self._router.route(metadata),
                pools=self._pools,
                kernels=self._kernels,
                on_stored=fences.stored,
                ranks=self._ranks,
            )
            logits: npt.NDArray[np.float32] = self._model.forward(batch, context).cpu().numpy()
        fences.finish()
        return logits


def _ignore_stage(_: int) -> None:
    return


def _sampling_by_logit_row(
    plan: ExecutablePlan, batch: ForwardBatch, sampling: Mapping[str, SamplingParams]
) -> list[SamplingParams]:
    request_ids = [plan.request_ids[row] for row in batch.logit_rows.tolist()]
    for request_id in request_ids:
        if request_id not in sampling:
            raise ValueError(f'request "{request_id}" has a row that wants logits, but no sampling parameters')
    return [sampling[request_id] for request_id in request_ids]

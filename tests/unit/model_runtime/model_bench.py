"""A loaded model on an arena of its own, fed by hand-written plans, that hands back logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from unit.model_runtime.paged_batches import BlockLedger, Row

from cache_runtime.arena import CacheArena
from cache_runtime.device import CpuDevice
from cache_runtime.layer_binding import bind_cache_groups
from cache_runtime.mapping.batch_metadata import CacheBatchMetadata
from cache_runtime.mapping.router import CacheGroupRouter
from cache_runtime.pools.cache_pools import CachePools
from cache_runtime.recipes.spec import CacheFamily
from model_runtime.checkpoint import Checkpoint
from model_runtime.family import CacheBudget
from model_runtime.forward_batch import ForwardBatch
from model_runtime.forward_context import ForwardContext
from model_runtime.kernels.interface import Kernels
from model_runtime.layer_builder import LayerBuilder
from model_runtime.registry import cpu_backend, find_family
from model_runtime.weight_choice import WeightChoice, apply_choice


class ModelBench:
    """`logits(rows)` runs one forward and returns the logits of the rows that want them, in row order."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        memory_bytes: int = 4 << 20,
        block_granularity: int = 8,
        kernel_page_size: int = 4,
        kernels: Kernels | None = None,
        weights: WeightChoice = WeightChoice.AUTO,
    ) -> None:
        config = checkpoint.config
        family = find_family(config.architecture)
        budget = CacheBudget(memory_bytes=memory_bytes, prefix_granularity=block_granularity, dtype="float32")
        setup = family.cache_recipe(config, budget).setup()
        self.arena = CacheArena(setup.plan, CpuDevice())
        self.on_stored: Callable[[int], None] = lambda layer: None
        self._pools = CachePools.of(self.arena)
        self._router = CacheGroupRouter(
            self.arena.contract,
            {spec.group_id: kernel_page_size for spec in setup.plan.groups if spec.family is CacheFamily.HISTORY},
        )
        self._kernels = cpu_backend(1).kernels if kernels is None else kernels
        source = apply_choice(weights, checkpoint.source, self._kernels)
        self._model = family.build(
            LayerBuilder(config=config, source=source, dtype=torch.float32, kernels=self._kernels)
        )
        bind_cache_groups(self._model.cache_layers, setup.plan)
        self._ledger = BlockLedger(self.arena.contract)

    @torch.inference_mode()
    def logits(self, *rows: Row) -> torch.Tensor:
        plan = self._ledger.plan(rows)
        for group_id, block_ids in zip(self.arena.contract.group_ids, plan.zero_blocks, strict=True):
            self.arena.zero_blocks(group_id, block_ids)
        metadata = CacheBatchMetadata.from_plan(plan, self.arena.contract)
        batch = ForwardBatch.from_plan(plan, metadata)
        context = ForwardContext(
            batch=batch,
            routed=self._router.route(metadata),
            pools=self._pools,
            kernels=self._kernels,
            on_stored=self.on_stored,
        )
        return self._model.forward(batch, context)

    def prefill(self, request_id: str, prompt: Sequence[int], chunk_tokens: int) -> torch.Tensor:
        """Logits after the prompt, float32[vocab], computed chunk by chunk."""
        for begin in range(0, len(prompt), chunk_tokens):
            chunk = prompt[begin : begin + chunk_tokens]
            is_last = begin + len(chunk) == len(prompt)
            logits = self.logits(Row(request_id=request_id, tokens=chunk, wants_logits=is_last))
        return logits[0]

    def greedy(self, request_id: str, prompt: Sequence[int], num_tokens: int, chunk_tokens: int) -> list[int]:
        """Tokens after the prompt, each decoded over the paged cache."""
        tokens = [int(self.prefill(request_id, prompt, chunk_tokens).argmax())]
        while len(tokens) < num_tokens:
            tokens.append(int(self.logits(Row(request_id=request_id, tokens=tokens[-1:]))[0].argmax()))
        return tokens

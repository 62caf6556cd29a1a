"""One rank in a process of its own: `python -m unit.model_runtime.sharded_process`, told what to do by JSON.

Standard input is `{"kind", "rank", "size", "store", "timeout_s", "checkpoint", "memory_bytes", "rounds"}`; `kind` is
"context" or "tensor", each round a dict of prompts that are generated together, the arena kept between rounds. Standard
output is what came of it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from unit.model_runtime.fused_run import FusedRun

from model_runtime.checkpoint import open_checkpoint
from model_runtime.executor import ModelExecutor
from model_runtime.gloo_rank_group import GlooRankGroup
from pdmesh_cli.parent_death import die_with_parent


def main() -> None:
    die_with_parent()
    order = json.load(sys.stdin)
    ranks = GlooRankGroup(
        rank=order["rank"], size=order["size"], store_path=Path(order["store"]), timeout_s=order["timeout_s"]
    )
    executor = ModelExecutor(
        open_checkpoint(Path(order["checkpoint"])),
        memory_bytes=order["memory_bytes"],
        prefix_granularity=order["prefix_granularity"],
        kernel_page_size=4,
        num_threads=1,
        context_ranks=ranks if order["kind"] == "context" else None,
        tensor_ranks=ranks if order["kind"] == "tensor" else None,
    )
    run = FusedRun(executor, token_budget=order["token_budget"])
    tokens = [run.generate(prompts, order["num_tokens"]) for prompts in order["rounds"]]
    run.assert_all_blocks_return()
    ranks.close()
    result = {
        "tokens": tokens,
        "hit_tokens": run.hit_tokens,
        "num_mixed_batches": run.num_mixed_batches,
        "arena_bytes": executor.arena.num_bytes,
        "token_capacity": executor.token_capacity,
    }
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()

"""What a configuration says reaches the scheduler, the arena and the manifest of a node that is built from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from unit.model_runtime import tiny_llama

from node_runtime.config import ComputeNodeConfig, load_config
from node_runtime.engine.core import ComputeCore, load_core
from scheduler_core import FinishEvent, RequestSpec, ResultEvent, Role

GRAIN = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tiny_llama.make_reference(), tmp_path_factory.mktemp("model") / "model")


@contextmanager
def built(
    model: Path, role: Role = Role.FUSED, *, max_ready_ungranted: int = 64, **values: object
) -> Iterator[ComputeCore]:
    given = {"model": str(model), "memory": "1MiB", "prefix_granularity": GRAIN, "num_threads": 1, **values}
    core = load_core(load_config(ComputeNodeConfig, given), role, max_ready_ungranted=max_ready_ungranted)
    yield core
    if core.data_plane is not None:
        core.data_plane.planes.close()


def submit(core: ComputeCore, *prompts: tuple[str, int]) -> None:
    """Prompts of so many tokens by name, each of tokens of its own."""
    core.scheduler.submit(
        [
            RequestSpec(request_id=name, tokens=np.full(num_tokens, len(name), dtype=np.int32), max_new_tokens=2)
            for name, num_tokens in prompts
        ]
    )


def hit_tokens(core: ComputeCore, name: str) -> int:
    """Of a prompt of two grains and a bit, which is computed and forgotten."""
    submit(core, (name, 2 * GRAIN + 1))
    hit = 0
    while True:
        plan = core.scheduler.next_plan()
        hit += sum(admission.device_hit_tokens for admission in plan.admissions)
        is_over = bool(plan.logits_wanted[0])
        core.scheduler.advance([ResultEvent(name, [1] if is_over else [])])
        if is_over:
            core.scheduler.advance([FinishEvent(name)])
            core.scheduler.next_plan()
            return hit


def test_rows_and_tokens_of_a_pass_are_bounded_as_configured(model: Path) -> None:
    with built(model, max_batch_size=2, token_budget=20) as core:
        submit(core, ("a", 3), ("bb", 4), ("ccc", 5))
        assert core.scheduler.next_plan().request_ids == ["a", "bb"]
    with built(model, max_batch_size=2, token_budget=20) as core:
        submit(core, ("a", 100))
        assert 0 < int(core.scheduler.next_plan().input_lengths.sum()) <= 20


def test_a_prefix_is_cached_unless_that_is_switched_off(model: Path) -> None:
    for is_enabled, expected in ((True, 2 * GRAIN), (False, 0)):
        with built(model, enable_prefix_cache=is_enabled) as core:
            assert [hit_tokens(core, name) for name in ("a", "b")] == [0, expected]


def test_the_policy_of_eviction_is_the_one_that_was_chosen(model: Path) -> None:
    dumps = set()
    for policy in ("lru", "aged_frequency"):
        with built(model, eviction_policy=policy) as core:
            hit_tokens(core, "a")
            dumps.add(core.scheduler.describe())
    assert len(dumps) == 2


def test_a_prefill_node_computes_no_more_ungranted_prompts_than_configured(model: Path) -> None:
    with built(model, Role.PREFILL, max_ready_ungranted=1) as core:
        submit(core, ("a", 3), ("bb", 4))
        assert core.scheduler.next_plan().request_ids == ["a"]
    with built(model, Role.PREFILL) as core:
        submit(core, ("a", 3), ("bb", 4))
        assert core.scheduler.next_plan().request_ids == ["a", "bb"]


def test_context_memory_and_names_are_those_of_the_configuration(model: Path) -> None:
    with built(model, Role.DECODE, max_model_len=100, served_model_name="mine", weight_version="v7") as core:
        assert (core.facts.context_tokens, core.facts.name, core.facts.prefix_granularity) == (100, "mine", GRAIN)
        assert core.facts.arena_bytes <= 1 << 20
        assert core.require_data_plane().manifest.logical.weight_version == "v7"
    with built(model, memory="2MiB") as core:
        assert 1 << 20 < core.facts.arena_bytes <= 2 << 20
        assert core.facts.name == model.name
        # What the scheduler may fill is what the arena has.
        assert (
            core.scheduler.capacity().total_lcm_blocks == core.executor.plan.num_lcm_blocks == core.facts.num_lcm_blocks
        )

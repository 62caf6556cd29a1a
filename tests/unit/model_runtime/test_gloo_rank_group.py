"""Ranks as processes that talk over gloo: the tokens of one process, and an end to waiting for the dead."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TypedDict

import pytest
from support.preloaded import PreloadedProcess, origin
from unit.model_runtime import tiny_llama

from cache_runtime.recipes.dense import DenseCacheRecipe
from cache_runtime.recipes.rows import key_value_fields
from model_runtime.gloo_rank_group import GlooRankGroup
from pdmesh_cli.parent_death import PARENT_PID_VARIABLE

TESTS = Path(__file__).resolve().parents[2]
GRAIN = 8
NUM_TOKENS = 16
PROCESS_TIMEOUT_S = 90


class Result(TypedDict):
    tokens: list[dict[str, list[int]]]
    hit_tokens: dict[str, int]
    num_mixed_batches: int
    arena_bytes: int
    token_capacity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    checkpoint: Path
    store: Path
    memory_bytes: int
    rounds: list[dict[str, list[int]]]
    kind: str = "context"
    size: int = 2
    timeout_s: float = 60.0

    def of_rank(self, rank: int) -> str:
        return json.dumps(
            {
                "kind": self.kind,
                "rank": rank,
                "size": self.size,
                "store": str(self.store),
                "timeout_s": self.timeout_s,
                "checkpoint": str(self.checkpoint),
                "memory_bytes": self.memory_bytes,
                "prefix_granularity": GRAIN,
                "token_budget": GRAIN + 1,
                "num_tokens": NUM_TOKENS,
                "rounds": self.rounds,
            }
        )


class Rank:
    """The process of a rank, and what it says."""

    def __init__(self, process: PreloadedProcess, output: IO[bytes], errors: IO[bytes]) -> None:
        self.process = process
        self._output, self._errors = output, errors

    def end(self) -> tuple[int, str, str]:
        """Waits for it: exit status, standard output and standard error."""
        status = self.process.wait(PROCESS_TIMEOUT_S)
        for file in (self._output, self._errors):
            file.seek(0)
        return status, self._output.read().decode(), self._errors.read().decode()


@contextmanager
def rank_process(order: Order, rank: int) -> Iterator[Rank]:
    """Gone when the block ends, and when this process does."""
    environment = os.environ | {
        PARENT_PID_VARIABLE: str(origin().pid),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    with TemporaryFile() as told, TemporaryFile() as output, TemporaryFile() as errors:
        told.write(order.of_rank(rank).encode())
        told.seek(0)
        process = origin().start(
            (),
            module="unit.model_runtime.sharded_process",
            environment=environment,
            stdin=told,
            stdout=output,
            stderr=errors,
            folder=TESTS,
        )
        try:
            yield Rank(process, output, errors)
        finally:
            process.kill()
            process.wait()


def result_of(rank: Rank) -> Result:
    status, output, errors = rank.end()
    assert status == 0, errors
    result: Result = json.loads(output)
    return result


def run_both(order: Order) -> list[Result]:
    with rank_process(order, 0) as first, rank_process(order, 1) as second:
        return [result_of(first), result_of(second)]


def half_memory_bytes() -> int:
    """For 15 blocks of the tiny model's keys and values, so that two ranks hold 30."""
    recipe = DenseCacheRecipe(
        prefix_granularity=GRAIN,
        memory_bytes=1 << 20,
        num_layers=2,
        row_fields=key_value_fields(2, 16),
        dtype="float32",
    )
    return recipe.setup().plan.layout.num_arena_bytes(15)


def test_two_llama_processes_with_half_of_the_memory_each_give_the_exact_tokens(tmp_path: Path) -> None:
    """Prompts in chunks beside decoding rows, then a prefix hit; more tokens than one of the arenas holds."""
    reference = tiny_llama.make_reference()
    shared = tiny_llama.random_prompt(5 * GRAIN, seed=50)
    rounds = [
        {"short": tiny_llama.random_prompt(3, seed=1), "long": [*shared, 5], "middle": tiny_llama.random_prompt(37, 2)},
        {"hit": [*shared, 9, 8, 7]},
        {"full": tiny_llama.random_prompt(28 * GRAIN, seed=3)},
    ]
    order = Order(
        checkpoint=tiny_llama.save(reference, tmp_path),
        store=tmp_path / "store",
        memory_bytes=half_memory_bytes(),
        rounds=rounds,
    )
    results = run_both(order)
    assert results[0] == results[1]
    result = results[0]
    expected = [
        {name: tiny_llama.reference_greedy(reference, prompt, NUM_TOKENS) for name, prompt in prompts.items()}
        for prompts in rounds
    ]
    assert len({token for prompts in expected for tokens in prompts.values() for token in tokens}) > 8
    assert result["tokens"] == expected
    assert result["hit_tokens"]["hit"] == 5 * GRAIN
    assert result["num_mixed_batches"] > 0
    assert (result["arena_bytes"], result["token_capacity"]) == (half_memory_bytes(), 30 * GRAIN)


def test_two_llama_processes_that_share_the_heads_give_the_exact_tokens(tmp_path: Path) -> None:
    """A key and value head that both repeat; prompts in chunks beside decoding rows, then a prefix hit."""
    reference = tiny_llama.make_reference(num_kv_heads=1)
    shared = tiny_llama.random_prompt(5 * GRAIN, seed=50)
    rounds = [{"short": tiny_llama.random_prompt(3, seed=1), "long": [*shared, 5]}, {"hit": [*shared, 9, 8, 7]}]
    order = Order(
        kind="tensor",
        checkpoint=tiny_llama.save(reference, tmp_path),
        store=tmp_path / "store",
        memory_bytes=1 << 20,
        rounds=rounds,
    )
    results = run_both(order)
    assert results[0] == results[1]
    assert results[0]["tokens"] == [
        {name: tiny_llama.reference_greedy(reference, prompt, NUM_TOKENS) for name, prompt in prompts.items()}
        for prompts in rounds
    ]
    assert results[0]["hit_tokens"]["hit"] == 5 * GRAIN


def test_a_rank_whose_peer_never_comes_gives_up(tmp_path: Path) -> None:
    # In a process of its own: one that could not join cannot be a rank any more.
    order = Order(checkpoint=tmp_path, store=tmp_path / "store", memory_bytes=1 << 20, rounds=[], timeout_s=1.0)
    with rank_process(order, 0) as alone:
        status, _, errors = alone.end()
    assert status != 0
    assert "RankGroupError: rank 0 of 2: could not join" in errors


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_ranks_is_refused(rank: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"rank {rank} is outside \[0, 2\)"):
        GlooRankGroup(rank=rank, size=2, store_path=tmp_path / "store", timeout_s=1.0)


def test_a_rank_whose_peer_dies_fails_instead_of_waiting(tmp_path: Path) -> None:
    order = Order(
        checkpoint=tiny_llama.save(tiny_llama.make_reference(), tmp_path),
        store=tmp_path / "store",
        memory_bytes=1 << 20,
        rounds=[{"a": tiny_llama.random_prompt(40, seed=1)}],
        timeout_s=20.0,
    )
    with rank_process(order, 0) as survivor:
        without_a_model = Order(
            checkpoint=tmp_path / "missing",
            store=order.store,
            memory_bytes=1 << 20,
            rounds=[],
            timeout_s=20.0,
        )
        with rank_process(without_a_model, 1) as victim:
            victim.end()
        status, _, errors = survivor.end()
    assert status != 0
    assert "RankGroupError: rank 0 of 2: " in errors

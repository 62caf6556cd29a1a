"""Every family gives a request the same bits in any company, any cut of its prompt and behind any prefix hit."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from unit.model_runtime.fused_run import FusedRun
from unit.model_runtime.reference_models import random_prompt, save
from unit.model_runtime.tiny_models import EVERY_FAMILY

from model_runtime.checkpoint import Checkpoint, open_checkpoint
from model_runtime.executor import ModelExecutor
from model_runtime.sampler import SampledToken, SamplingParams

GRAIN = 8
NUM_TOKENS = 10
SAMPLING = SamplingParams(num_logprobs=5)


@pytest.fixture(scope="module", params=EVERY_FAMILY)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(save(EVERY_FAMILY[request.param](), tmp_path_factory.mktemp("model")))


def make_executor(checkpoint: Checkpoint, num_threads: int = 1) -> ModelExecutor:
    return ModelExecutor(
        checkpoint, memory_bytes=16 << 20, prefix_granularity=GRAIN, kernel_page_size=4, num_threads=num_threads
    )


def tokens_of(run: FusedRun, prompts: Mapping[str, list[int]]) -> dict[str, list[SampledToken]]:
    run.generate(prompts, NUM_TOKENS, SAMPLING)
    return {request_id: run.tokens[request_id] for request_id in prompts}


@pytest.mark.parametrize("seed", range(3))
def test_exact_bits_in_random_batches_of_prompts_that_share_prefixes(checkpoint: Checkpoint, seed: int) -> None:
    """Log probabilities are compared as they are: every bit of a logit that decides a token is in them."""
    chance = random.Random(seed)
    trunk = random_prompt(60, seed, checkpoint.config.vocab_size)
    prompts = {
        f"{index}": [
            *trunk[: chance.choice((0, GRAIN, 20, 5 * GRAIN, 60))],
            *random_prompt(chance.randint(1, 25), 100 * seed + index, checkpoint.config.vocab_size),
        ]
        for index in range(9)
    }
    alone_in = make_executor(checkpoint)
    alone: dict[str, list[SampledToken]] = {}
    for request_id, prompt in prompts.items():
        alone |= tokens_of(FusedRun(alone_in, token_budget=128), {request_id: prompt})
    run = FusedRun(make_executor(checkpoint, num_threads=2), token_budget=chance.choice((GRAIN + 1, 19, 40)))
    ids = list(prompts)
    for batch in (ids[:4], ids[4:7], ids[7:]):
        together = tokens_of(run, {request_id: prompts[request_id] for request_id in batch})
        assert together == {request_id: alone[request_id] for request_id in batch}
    assert run.num_mixed_batches > 0
    assert max(run.hit_tokens.values()) > 0, "nobody found a prefix"

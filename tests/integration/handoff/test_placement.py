"""A router in front of real nodes places prompts where their beginnings are cached, by what the nodes tell."""

from __future__ import annotations

import numpy as np
from support.fake_compute import expected_tokens
from support.fake_mesh import FakeMesh, until
from support.fake_router import FakeRouter

from node_runtime.engine.messages import Invoke
from scheduler_core import prefix_keys

GRANULARITY = 4
NUM_TOKENS = 3


def _prompt(number: int) -> list[int]:
    return list(range(100 * number, 100 * number + 33))


async def test_prompts_come_back_to_where_they_are_cached(mesh: FakeMesh) -> None:
    prefill = [await mesh.prefill(), await mesh.prefill()]
    decode = [await mesh.decode(*prefill), await mesh.decode(*prefill)]
    await until(lambda: all(node.node.is_ready for node in decode), "the decode nodes have their peers")
    nodes = [*prefill, *decode]
    async with FakeRouter(
        prefill=prefill, decode=decode, placement_policy="cache_aware", follow_interval_s=0.01
    ) as router:
        index = router.router.observations.index
        num_computed_tokens = []
        for round_number in range(3):
            before = sum(node.executor.num_input_tokens for node in prefill)
            for number in range(4):
                answer = await router.generate(_prompt(number), seed=number, max_tokens=NUM_TOKENS)
                assert answer.token_ids == expected_tokens(_prompt(number), NUM_TOKENS, seed=number)
                # The router learns of it before the next prompt comes.
                keys = prefix_keys(np.array(_prompt(number)[:-1], dtype=np.int32), GRANULARITY, [])
                await until(
                    lambda keys=keys: (
                        len(index.find_depths(keys, [node.address for node in nodes])) >= 2
                        and all(not router.router._placer.num_in_flight(node.address) for node in nodes)
                    ),
                    "the nodes told what they have cached",
                )
            num_computed_tokens.append(sum(node.executor.num_input_tokens for node in prefill) - before)
            if round_number == 0:
                # Nothing was cached, so the work was shared out.
                assert all(node.executor.num_input_tokens for node in prefill)
        # All but the last grain of each prompt, and the token behind it, was found.
        assert num_computed_tokens == [4 * 33, 4 * 1, 4 * 1]
        assert all(index.num_keys(node.address) for node in nodes)
        for node in nodes:
            node.node.engine.post(Invoke(action=node.core.scheduler.clear_cache))
        await until(lambda: not any(index.num_keys(node.address) for node in nodes), "the caches are told to be empty")
    for node in nodes:
        await node.assert_all_blocks_return()

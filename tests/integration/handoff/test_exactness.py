"""A prompt that is prefilled elsewhere generates what a single node would: the right bytes moved, and in time."""

from __future__ import annotations

import asyncio
import random

import pytest
from pdmesh.v1 import inference_pb2
from support.fake_compute import FIELD_IDS, ROW_BYTES, expected_tokens
from support.fake_mesh import FakeMesh

PREFIX = 4
BYTES_PER_BLOCK = len(FIELD_IDS) * PREFIX * ROW_BYTES


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 15, 16, 17, 31, 50])
async def test_every_length_of_prompt_generates_what_it_should(mesh: FakeMesh, num_tokens: int) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    prompt = [(7 * index + num_tokens) % 97 for index in range(num_tokens)]
    answer = await mesh.generate(decode, prompt, max_tokens=9, prefill_address=prefill.address)
    assert answer.token_ids == expected_tokens(prompt, 9)
    assert answer.finish.reason == inference_pb2.FINISH_REASON_LENGTH
    assert answer.finish.timings.transferred_blocks == -(-num_tokens // PREFIX)
    assert answer.finish.timings.transferred_bytes == -(-num_tokens // PREFIX) * BYTES_PER_BLOCK
    for node in (prefill, decode):
        await node.assert_all_blocks_return()


async def test_a_fused_node_is_the_same_service_without_a_handoff(mesh: FakeMesh) -> None:
    fused = await mesh.fused()
    prompt = list(range(30))
    answer = await mesh.generate(fused, prompt, max_tokens=9, prefill_address="nowhere.invalid:1")
    assert answer.token_ids == expected_tokens(prompt, 9)
    assert answer.finish.timings.transferred_bytes == 0
    await fused.assert_all_blocks_return()


async def test_only_the_suffix_that_the_decode_node_lacks_is_sent(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    prefix = list(range(6 * PREFIX))
    cold = await mesh.generate(decode, [*prefix, 50, 51], prefill_address=prefill.address)
    warm = await mesh.generate(decode, [*prefix, 60], prefill_address=prefill.address)
    assert warm.token_ids == expected_tokens([*prefix, 60], 4)
    assert cold.finish.usage.cached == inference_pb2.CachedTokens()
    assert cold.finish.timings.transferred_bytes == 7 * BYTES_PER_BLOCK
    assert warm.finish.usage.cached.decode_device == 6 * PREFIX
    assert warm.finish.timings.transferred_bytes == BYTES_PER_BLOCK
    assert warm.finish.usage.prompt_tokens == 6 * PREFIX + 1


async def test_a_prompt_that_is_wholly_cached_still_sends_its_last_block(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    prompt = list(range(3 * PREFIX))
    first = await mesh.generate(decode, prompt, max_tokens=8, prefill_address=prefill.address)
    second = await mesh.generate(decode, prompt, max_tokens=8, prefill_address=prefill.address)
    assert second.token_ids == first.token_ids == expected_tokens(prompt, 8)
    assert second.finish.usage.cached.decode_device == 2 * PREFIX
    assert second.finish.timings.transferred_blocks == 1


async def test_a_prefix_that_only_the_prefill_node_has_is_counted_there_and_sent_whole(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    prompt = list(range(3 * PREFIX + 1))
    await mesh.generate(decode, prompt, prefill_address=prefill.address)
    await decode.assert_all_blocks_return()
    again = await mesh.generate(decode, prompt, prefill_address=prefill.address)
    assert again.token_ids == expected_tokens(prompt, 4)
    assert again.finish.usage.cached == inference_pb2.CachedTokens(prefill_device=3 * PREFIX)
    assert again.finish.timings.transferred_blocks == 4


@pytest.mark.parametrize("is_fused", [False, True])
async def test_a_stream_begins_with_what_was_cached_and_how_the_prefill_went(mesh: FakeMesh, is_fused: bool) -> None:
    prefill = await mesh.prefill()
    node = await mesh.fused() if is_fused else await mesh.decode(prefill)
    prompt = list(range(3 * PREFIX + 1))
    for cached_tokens in (0, 3 * PREFIX):
        answer = await mesh.generate(node, prompt, prefill_address=prefill.address)
        assert answer.kinds[0] == "admitted"
        assert answer.kinds[-1] == "finish"
        assert set(answer.kinds[1:-1]) == {"tokens"}
        assert answer.admitted.cached == answer.finish.usage.cached
        assert answer.admitted.cached.decode_device == cached_tokens
        answer.finish.timings.decode_ms = 0.0
        assert answer.admitted.timings == answer.finish.timings
        assert answer.admitted.timings.time_to_first_token_ms > 0


async def test_32_concurrent_requests_with_shared_prefixes_are_right_and_leave_nothing(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill(num_lcm_blocks=96)
    decode = await mesh.decode(prefill, num_lcm_blocks=80)
    families = [[family * 10 + index % 10 for index in range(20)] for family in range(4)]
    prompts = [[*families[index % 4], 90, index, *range(index % 5)] for index in range(32)]
    answers = await asyncio.gather(
        *(mesh.generate(decode, prompt, max_tokens=12, prefill_address=prefill.address) for prompt in prompts)
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == expected_tokens(prompt, 12)
    cached = [answer.finish.usage.cached for answer in answers]
    assert sum(entry.decode_device for entry in cached) > 0
    for answer in answers:
        usage = answer.finish.usage
        assert usage.cached.prefill_device + usage.cached.decode_device < usage.prompt_tokens
    for node in (prefill, decode):
        await node.assert_all_blocks_return()


async def test_two_decode_nodes_and_two_prefill_nodes_do_not_mix_up_their_caches(mesh: FakeMesh) -> None:
    prefills = [await mesh.prefill(), await mesh.prefill(num_lcm_blocks=40)]
    decodes = [await mesh.decode(*prefills), await mesh.decode(num_lcm_blocks=50)]
    draw = random.Random(5)
    jobs = []
    for _ in range(24):
        prompt = [draw.randrange(97) for _ in range(draw.randrange(1, 30))]
        jobs.append((draw.choice(decodes), draw.choice(prefills), prompt))
    answers = await asyncio.gather(
        *(mesh.generate(decode, prompt, prefill_address=prefill.address) for decode, prefill, prompt in jobs)
    )
    for (_, _, prompt), answer in zip(jobs, answers, strict=True):
        assert answer.token_ids == expected_tokens(prompt, 4)
    for node in (*prefills, *decodes):
        await node.assert_all_blocks_return()


async def test_a_seed_decides_the_tokens_wherever_they_are_made(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    sampling = inference_pb2.SamplingParams(temperature=1.0, seed=11)
    answer = await mesh.generate(decode, [1, 2, 3], sampling=sampling, prefill_address=prefill.address)
    assert answer.token_ids == expected_tokens([1, 2, 3], 4, seed=11)


async def test_a_stop_token_ends_the_answer_and_is_named(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    expected = expected_tokens([1, 2, 3], 10)
    for position in (0, 4):
        answer = await mesh.generate(
            decode, [1, 2, 3], max_tokens=10, stop_token_ids=[expected[position]], prefill_address=prefill.address
        )
        assert answer.token_ids == expected[: expected.index(expected[position]) + 1]
        assert answer.finish.reason == inference_pb2.FINISH_REASON_STOP
        assert answer.finish.matched_token_id == expected[position]
    for node in (prefill, decode):
        await node.assert_all_blocks_return()


async def test_isolation_keys_keep_caches_apart(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    prompt = list(range(2 * PREFIX + 1))
    await mesh.generate(decode, prompt, extra_keys=[b"tenant-a"], prefill_address=prefill.address)
    other = await mesh.generate(decode, prompt, extra_keys=[b"tenant-b"], prefill_address=prefill.address)
    same = await mesh.generate(decode, prompt, extra_keys=[b"tenant-b"], prefill_address=prefill.address)
    assert other.finish.usage.cached == inference_pb2.CachedTokens()
    assert same.finish.usage.cached.decode_device == 2 * PREFIX

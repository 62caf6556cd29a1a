"""Many streams at once, shared prefixes, stop conditions, usage: what a user of a healthy mesh relies on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from pdmesh.v1 import inference_pb2
from support import prompts
from support.mesh import NUM_LAYERS, Mesh

# Keys and values of one token, float32: layers x 2 x kv_heads x head_dim x 4 bytes.
BYTES_PER_TOKEN = NUM_LAYERS * 2 * 3 * 64 * 4
BLOCK = prompts.PREFIX_GRANULARITY


def shared_prefix_prompts(num_streams: int, salt: int) -> list[list[int]]:
    """Four families of prompts: long common prefixes, short own tails, so that most of each prompt is shared."""
    families = [prompts.token_prompt(4 * BLOCK + salt + 3 * family) for family in range(4)]
    return [families[stream % 4] + [200 + salt, 300 + stream] for stream in range(num_streams)]


def test_32_concurrent_streams_with_shared_prefixes_are_right_and_leave_nothing_behind(
    mesh: Mesh, fused_mesh: Mesh
) -> None:
    requests = shared_prefix_prompts(32, salt=1)

    def run(client, token_ids):
        return client.generate(200.0, token_ids=token_ids, max_tokens=12, ignore_eos=True)

    with ThreadPoolExecutor(32) as pool:
        # One before the others, so that there is something to hit whoever of those is admitted with whom.
        answers = [run(mesh.client, requests[0]), *pool.map(lambda ids: run(mesh.client, ids), requests[1:])]
        expected = list(pool.map(lambda ids: run(fused_mesh.client, ids), requests))
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    cached = [answer.finish.usage.cached for answer in answers]
    assert sum(entry.decode_device for entry in cached) > 0
    mesh.assert_all_blocks_return()
    fused_mesh.assert_all_blocks_return()


def test_only_the_missing_suffix_is_sent(mesh: Mesh) -> None:
    mesh.assert_all_blocks_return()
    prefix = prompts.token_prompt(6 * BLOCK + 5)
    cold = mesh.client.generate(token_ids=[*prefix, 11], max_tokens=4, ignore_eos=True).finish
    warm = mesh.client.generate(token_ids=[*prefix, 12], max_tokens=4, ignore_eos=True).finish
    assert (cold.usage.cached.prefill_device, cold.usage.cached.decode_device) == (0, 0)
    assert cold.timings.transferred_bytes == 7 * BLOCK * BYTES_PER_TOKEN
    assert cold.timings.transferred_blocks == 7
    assert warm.usage.cached.decode_device == 6 * BLOCK
    assert warm.timings.transferred_bytes == 1 * BLOCK * BYTES_PER_TOKEN
    assert warm.usage.prompt_tokens == len(prefix) + 1


def test_a_prompt_sent_twice_reuses_all_but_its_last_block_on_both_nodes(mesh: Mesh) -> None:
    mesh.assert_all_blocks_return()
    token_ids = prompts.token_prompt(3 * BLOCK)
    first = mesh.client.generate(token_ids=token_ids, max_tokens=8, ignore_eos=True)
    second = mesh.client.generate(token_ids=token_ids, max_tokens=8, ignore_eos=True)
    assert second.token_ids == first.token_ids
    # The last token is always computed, so its block is never a hit.
    assert second.finish.usage.cached.decode_device == 2 * BLOCK
    used = second.finish.usage.cached
    assert used.prefill_device + used.decode_device + used.host + used.storage < second.finish.usage.prompt_tokens


def test_different_cache_salts_share_no_cache(mesh: Mesh) -> None:
    mesh.assert_all_blocks_return()
    token_ids = prompts.token_prompt(3 * BLOCK + 1)
    mesh.client.generate(token_ids=token_ids, max_tokens=2, cache_salt=b"tenant-a")
    other = mesh.client.generate(token_ids=token_ids, max_tokens=2, cache_salt=b"tenant-b")
    same = mesh.client.generate(token_ids=token_ids, max_tokens=2, cache_salt=b"tenant-b")
    assert other.finish.usage.cached.decode_device == other.finish.usage.cached.prefill_device == 0
    assert same.finish.usage.cached.decode_device == 3 * BLOCK


def test_a_stop_string_ends_the_text_before_it(mesh: Mesh) -> None:
    full = mesh.client.generate(text="Once upon a time", max_tokens=40, ignore_eos=True)
    stop = full.text[20:24]
    stopped = mesh.client.generate(text="Once upon a time", max_tokens=40, ignore_eos=True, stop=[stop])
    assert stopped.text == full.text[: full.text.index(stop)]
    assert stopped.finish.reason == inference_pb2.FINISH_REASON_STOP
    assert stopped.finish.matched_stop == stop
    mesh.assert_all_blocks_return()


def test_a_stop_token_ends_the_text_and_is_named(mesh: Mesh) -> None:
    full = mesh.client.generate(text="Once upon a time", max_tokens=20, ignore_eos=True)
    end, stop = next(
        (index, token_id)
        for index, token_id in enumerate(full.token_ids)
        if index > 5 and token_id not in full.token_ids[:index]
    )
    stopped = mesh.client.generate(text="Once upon a time", max_tokens=20, ignore_eos=True, stop_token_ids=[stop])
    before = mesh.client.generate(text="Once upon a time", max_tokens=end, ignore_eos=True)
    assert stopped.text == before.text
    assert stopped.finish.reason == inference_pb2.FINISH_REASON_STOP
    assert stopped.finish.matched_token_id == stop


def test_an_answer_that_reaches_its_limit_says_so(mesh: Mesh) -> None:
    answer = mesh.client.generate(text="Once upon a time", max_tokens=1, ignore_eos=True)
    assert len(answer.token_ids) == 1
    assert answer.finish.reason == inference_pb2.FINISH_REASON_LENGTH
    assert answer.finish.usage.completion_tokens == 1


def test_a_chat_ends_at_the_models_own_end_token(mesh: Mesh) -> None:
    answer = mesh.client.generate(chat=[("user", "What is gravity? Answer in one sentence.")], max_tokens=200)
    assert answer.finish.reason == inference_pb2.FINISH_REASON_STOP
    assert "gravity" in answer.text.lower()
    assert "<|im_end|>" not in answer.text


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_idle_node_makes_no_steps_and_uses_no_processor(mesh: Mesh, role: str) -> None:
    mesh.assert_all_blocks_return()
    pid = mesh.nodes[role].process.pid
    steps = mesh.nodes[role].status().num_steps
    ticks = cpu_ticks_over_three_seconds(pid)
    assert mesh.nodes[role].status().num_steps == steps
    # 100 ticks a second: at most 2 % of one core.
    assert ticks <= 6


def cpu_ticks_over_three_seconds(pid: int) -> int:
    import time

    def ticks() -> int:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    before = ticks()
    time.sleep(3)
    return ticks() - before

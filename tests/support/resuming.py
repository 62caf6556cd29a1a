"""Prompts that are computed where they are decoded, and answers that go on behind what another node has generated."""

from __future__ import annotations

from collections.abc import Iterable

from pdmesh.v1 import inference_pb2

from support.fake_mesh import FakeMesh


async def assert_goes_on_anywhere(
    mesh: FakeMesh, prompt: list[int], *, max_tokens: int, nums_before: Iterable[int]
) -> None:
    """The tokens of a fused node, greedy and drawn with log-probabilities, are those of a decode node that computes the
    prompt itself, and those that follow the first `nums_before` of them with and without a prefill node.
    """
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill, config={"local_prefill": "fallback"})
    fused = await mesh.fused()
    drawn = {"sampling": inference_pb2.SamplingParams(temperature=1.0, seed=9), "num_logprobs": 2}
    for fields in ({}, drawn):
        whole = await mesh.generate(fused, prompt, max_tokens=max_tokens, **fields)
        local = await mesh.generate(decode, prompt, max_tokens=max_tokens, **fields)
        assert local.tokens == whole.tokens
        for num_before in nums_before:
            behind = [*prompt, *whole.token_ids[:num_before]]
            left = {"max_tokens": max_tokens - num_before, "num_output_tokens": num_before, **fields}
            for resumed in (
                await mesh.generate(decode, behind, prefill_address=prefill.address, **left),
                await mesh.generate(decode, behind, **left),
            ):
                assert resumed.tokens == whole.tokens[num_before:]
    for node in (prefill, decode, fused):
        await node.assert_all_blocks_return()

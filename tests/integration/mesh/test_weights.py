"""How the weights lie in memory changes no answer: nodes that differ in it are one mesh."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import prompts
from support.mesh import COMPUTE, Answer, Client, Mesh, assemble
from support.processes import NodeProcess

MIB = 2**20


@pytest.fixture(scope="module")
def mixed_mesh(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Prompts are computed with float32 weights, tokens with quantised ones."""
    folder = tmp_path_factory.mktemp("mixed")
    common = ("--model", str(model_path), "--port", "0")
    prefill = NodeProcess("prefill", [*common, *COMPUTE, "--weights", "float32"], folder)
    decode = NodeProcess("decode", [*common, *COMPUTE, "--weights", "quantized", "--prefill", prefill.address], folder)
    router = NodeProcess("router", [*common, "--prefill", prefill.address, "--decode", decode.address], folder)
    mesh = assemble(router, {"prefill": prefill, "decode": decode})
    yield mesh
    mesh.stop()


def answers(client: Client) -> list[Answer]:
    return [
        client.generate(text=text, max_tokens=24, ignore_eos=True, num_logprobs=2)
        for text in (prompts.TEXTS["short"], prompts.TEXTS["unicode"], prompts.TEXTS["several blocks"])
    ]


def test_float32_and_quantised_weights_give_the_same_tokens_and_log_probabilities(
    mixed_mesh: Mesh, fused_mesh: Mesh
) -> None:
    for mixed, fused in zip(answers(mixed_mesh.client), answers(fused_mesh.client), strict=True):
        assert len(mixed.tokens) == 24
        assert mixed.tokens == fused.tokens
        assert mixed.text == fused.text


def test_a_node_says_how_its_weights_lie_and_what_they_take(mixed_mesh: Mesh, fused_mesh: Mesh) -> None:
    float32, quantised = (mixed_mesh.nodes[role].info() for role in ("prefill", "decode"))
    assert list(float32.weight_formats) == ["float32"]
    assert 500 * MIB < float32.weight_bytes < 520 * MIB
    assert list(quantised.weight_formats) == ["Q4_1", "Q8_0"]
    assert 90 * MIB < quantised.weight_bytes < 100 * MIB
    assert fused_mesh.nodes["fused"].info().weight_formats == quantised.weight_formats, "auto keeps what the file has"
    assert "in memory as Q4_1, Q8_0, float32 would be 513MiB" in mixed_mesh.nodes["decode"].log_text()

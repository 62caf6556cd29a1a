"""What Bamba checkpoints may differ in, each against the reference; and the settings that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from unit.model_runtime.model_bench import ModelBench
from unit.model_runtime.paged_batches import Row
from unit.model_runtime.reference_models import random_prompt, reference_logits, save
from unit.model_runtime.tiny_bamba import VOCAB_SIZE, make_reference

from model_runtime.checkpoint import open_checkpoint
from model_runtime.errors import CheckpointError

VARIANTS: dict[str, dict[str, object]] = {
    "convolution without bias": {"mamba_conv_bias": False},
    "one group": {"mamba_n_groups": 1},
    "a group per head": {"mamba_n_groups": 6},
    "wider convolution": {"mamba_d_conv": 6},
    "steps within bounds": {"time_step_limit": (0.3, 0.9)},
    "tied head": {"tie_word_embeddings": True},
    "attention first": {"attn_layer_indices": [0, 3]},
    "state wider than a vector": {"mamba_d_state": 40},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_exact_mamba_logits_of_every_variant(tmp_path: Path, changes: dict[str, object]) -> None:
    reference = make_reference(**changes)
    bench = ModelBench(open_checkpoint(save(reference, tmp_path)))
    prompt = random_prompt(60, seed=1, vocab_size=VOCAB_SIZE)
    ours, theirs = bench.prefill("a", prompt, 23), reference_logits(reference, prompt)[-1]
    assert float((ours - theirs).abs().max()) < 1e-4
    assert float(theirs.std()) > 0.1


def test_the_states_matter(tmp_path: Path) -> None:
    bench = ModelBench(open_checkpoint(save(make_reference(), tmp_path)))
    prompt = random_prompt(40, seed=2, vocab_size=VOCAB_SIZE)
    expected = bench.prefill("whole", prompt, 40)
    bench.prefill("forgetful", prompt[:-1], 39)
    for layer in (0, 1, 3):
        bench.arena.field(f"layers.{layer}.recurrent_state").zero_()
    forgotten = bench.logits(Row(request_id="forgetful", tokens=prompt[-1:]))[0]
    assert float((forgotten - expected).abs().max()) > 1e-2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mamba_proj_bias": True}, 'key "mamba_proj_bias" is True, supported is False'),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, 'rope type "yarn" is not supported'),
        ({"mamba_n_groups": 4}, "mamba2.num_heads 6 is no multiple of num_groups 4"),
        ({"mamba_d_head": 8}, "mamba_n_heads 6 of mamba_d_head 8 do not make mamba_expand \\* hidden_size 96"),
        ({"mamba_d_conv": 1}, "mamba2.conv_width must be at least 2, got 1"),
        ({"time_step_limit": [2.0, 1.0]}, r"mamba2.min_step 2.0 must be in \[0, max_step 1.0\]"),
        ({"time_step_limit": [1.0]}, 'key "time_step_limit" must be an array of two numbers'),
        ({"attn_layer_indices": ["2"]}, 'key "attn_layer_indices" must be an array of integers'),
        ({"mamba_d_state": 16}, r'"model.layers.0.mamba.in_proj.weight" has shape \[246, 48\], expected \[262, 48\]'),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    save(make_reference(), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)

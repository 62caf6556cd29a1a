"""LoRA adapters against the reference with the same adapter merged into its float32 matrices: same greedy tokens.

In batches that mix adapters and none, for every family, and to the bit whoever shares the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from support.tiny_adapters import TARGETS, merged, write_adapter
from transformers import PreTrainedModel
from unit.model_runtime import tiny_gemma3, tiny_gguf, tiny_llama
from unit.model_runtime.fused_run import FusedRun
from unit.model_runtime.reference_models import assert_greedy, random_prompt, save
from unit.model_runtime.thread_ranks import run_ranks
from unit.model_runtime.tiny_models import TINY_MODELS

from cache_runtime.kernel_page_sizes import CPU_PAGED
from model_runtime.checkpoint import Checkpoint, open_checkpoint
from model_runtime.errors import RankGroupError
from model_runtime.executor import ModelExecutor
from model_runtime.kernels.interface import PackedWeight
from model_runtime.kernels.reference import ReferenceKernels
from model_runtime.layers.adapted_linear import AdaptedLinear
from model_runtime.layers.linear import Linear
from model_runtime.lora.peft_files import LoraAdapter, open_adapter
from model_runtime.rank_group import RankGroup
from model_runtime.registry import KernelBackend, torch_backend
from model_runtime.sampler import SampledToken, SamplingParams
from model_runtime.weight_choice import WeightChoice

GRAIN = 8
NUM_TOKENS = 12
MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {
    "llama": tiny_llama.make_reference,
    "gemma3": tiny_gemma3.make_reference,
    **TINY_MODELS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """A model, two adapters for it, and the references of the three by name, "" for the model as it is."""

    checkpoint: Checkpoint
    adapters: tuple[LoraAdapter, ...]
    references: Mapping[str, PreTrainedModel]

    def prompts(self) -> dict[str, list[int]]:
        """Two for each name: the name and a number."""
        vocab_size = self.checkpoint.config.vocab_size
        return {
            f"{name} {num_tokens}": random_prompt(num_tokens, num_tokens, vocab_size)
            for name in self.references
            for num_tokens in (5, 2 * GRAIN + 3)
        }


def make_adapted(family: str, folder: Path, **settings: object) -> Adapted:
    reference = MODELS[family]()
    checkpoint = open_checkpoint(save(reference, folder / "model"))
    folders = {
        name: write_adapter(folder / name, reference, TARGETS[family], seed=seed, **settings)
        for seed, name in enumerate(("red", "blue"))
    }
    return Adapted(
        checkpoint=checkpoint,
        adapters=tuple(open_adapter(name, path, checkpoint.source) for name, path in folders.items()),
        references={"": reference} | {name: merged(reference, path) for name, path in folders.items()},
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return make_adapted("llama", tmp_path_factory.mktemp("llama"))


class CountingKernels(ReferenceKernels):
    def __init__(self) -> None:
        super().__init__()
        self.num_products = 0

    def multiply(self, input: torch.Tensor, weight: PackedWeight, output: torch.Tensor) -> None:
        self.num_products += 1
        super().multiply(input, weight, output)


def adapter_of(request_id: str) -> str:
    return request_id.split(" ")[0]


def executor(
    adapted: Adapted,
    *,
    adapters: tuple[LoraAdapter, ...] | None = None,
    ranks: RankGroup | None = None,
    checkpoint: Checkpoint | None = None,
    weights: WeightChoice = WeightChoice.AUTO,
    memory_bytes: int = 2 << 20,
    num_threads: int = 1,
) -> ModelExecutor:
    return ModelExecutor(
        checkpoint or adapted.checkpoint,
        memory_bytes=memory_bytes,
        prefix_granularity=GRAIN,
        kernel_page_size=4,
        num_threads=num_threads,
        tensor_ranks=ranks,
        weights=weights,
        adapters=adapted.adapters if adapters is None else adapters,
    )


def generate(
    mine: ModelExecutor, prompts: Mapping[str, list[int]], *, token_budget: int = GRAIN + 1
) -> dict[str, list[SampledToken]]:
    """In chunks, with log-probabilities, which show every bit of the logits."""
    run = FusedRun(mine, token_budget=token_budget)
    adapters = {request_id: adapter_of(request_id) for request_id in prompts if adapter_of(request_id)}
    run.generate(prompts, NUM_TOKENS, SamplingParams(num_logprobs=3), adapters=adapters)
    run.assert_all_blocks_return()
    return run.tokens


def assert_exact(adapted: Adapted, generated: Mapping[str, list[SampledToken]]) -> None:
    for request_id, prompt in adapted.prompts().items():
        token_ids = [token.token_id for token in generated[request_id]]
        assert_greedy(adapted.references[adapter_of(request_id)], prompt, token_ids, NUM_TOKENS)


@pytest.mark.parametrize("family", MODELS)
def test_exact_in_a_batch_of_two_adapters_and_none(family: str, tmp_path: Path) -> None:
    adapted = make_adapted(family, tmp_path)
    generated = generate(executor(adapted), adapted.prompts())
    assert_exact(adapted, generated)
    answers = {tuple(token.token_id for token in tokens) for tokens in generated.values()}
    assert len(answers) == len(generated), "adapters that change no answer would prove little"


def test_exact_llama_with_rank_stabilised_scale(tmp_path: Path) -> None:
    adapted = make_adapted("llama", tmp_path, settings={"use_rslora": True}, strength=0.15)
    assert_exact(adapted, generate(executor(adapted), adapted.prompts()))


def test_exact_llama_where_an_adapter_changes_some_layers_and_some_matrices_only(tmp_path: Path) -> None:
    def keep_little(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "layers.0" not in name and "v_proj" not in name]:
            tensors[name].zero_()

    adapted = make_adapted("llama", tmp_path, change=keep_little, strength=0.5)
    sparse = {
        name: LoraAdapter(
            name=adapter.name,
            path=adapter.path,
            digest=adapter.digest,
            changes={name: change for name, change in adapter.changes.items() if bool(change.up.any())},
        )
        for name, adapter in zip(("red", "blue"), adapted.adapters, strict=True)
    }
    assert 0 < len(sparse["red"].changes) < len(adapted.adapters[0].changes)
    assert_exact(adapted, generate(executor(adapted, adapters=tuple(sparse.values())), adapted.prompts()))


def test_exact_llama_has_the_same_bits_in_any_company_any_cut_and_without_any_adapter_loaded(llama: Adapted) -> None:
    prompts = llama.prompts()
    together = generate(executor(llama), prompts)
    for request_id, prompt in list(prompts.items())[1::2]:
        assert generate(executor(llama), {request_id: prompt}) == {request_id: together[request_id]}
    assert generate(executor(llama, num_threads=3), prompts, token_budget=64) == together
    plain = {request_id: prompt for request_id, prompt in prompts.items() if not adapter_of(request_id)}
    assert generate(executor(llama, adapters=()), plain) == {request_id: together[request_id] for request_id in plain}


@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_exact_two_tensor_ranks_have_the_bits_of_one(family: str, tmp_path: Path) -> None:
    adapted = make_adapted(family, tmp_path)
    alone = generate(executor(adapted), adapted.prompts())

    def work(ranks: RankGroup) -> dict[str, list[SampledToken]]:
        return generate(executor(adapted, ranks=ranks), adapted.prompts())

    assert run_ranks(2, work) == [alone, alone]


def test_ranks_that_would_go_through_different_adapters_are_stopped(llama: Adapted) -> None:
    def work(ranks: RankGroup) -> None:
        run, name = FusedRun(executor(llama, ranks=ranks)), ("red", "blue")[ranks.rank]
        with pytest.raises(RankGroupError, match=f"rank {ranks.rank} of 2: plans differ"):
            run.generate({"a": [5, 6, 7]}, 2, adapters={"a": name})

    run_ranks(2, work)


def test_ranks_with_other_bytes_under_one_name_are_stopped(llama: Adapted) -> None:
    red, blue = llama.adapters

    def work(ranks: RankGroup) -> None:
        loaded = (red, replace(blue, name="red"))[ranks.rank]
        run = FusedRun(executor(llama, adapters=(loaded,), ranks=ranks))
        with pytest.raises(RankGroupError, match=f"rank {ranks.rank} of 2: plans differ"):
            run.generate({"a": [5, 6, 7]}, 2, adapters={"a": "red"})

    run_ranks(2, work)


def test_exact_llama_over_quantised_weights_has_the_bits_of_float32_ones(tmp_path: Path) -> None:
    """Heads whose rows a file interleaves, and three kinds of blocks in what is one layer here."""
    kinds = {
        "attn_q": GGMLQuantizationType.Q4_1,
        "attn_k": GGMLQuantizationType.Q8_0,
        "attn_v": GGMLQuantizationType.Q5_0,
        "ffn_down": GGMLQuantizationType.Q8_0,
    }
    reference = tiny_llama.make_reference(hidden_size=64, intermediate_size=96)
    checkpoint = open_checkpoint(tiny_gguf.write_gguf(tmp_path / "model.gguf", reference, quantized=kinds))
    folder = write_adapter(tmp_path / "red", reference, TARGETS["llama"])
    adapted = Adapted(
        checkpoint=checkpoint,
        adapters=(open_adapter("red", folder, checkpoint.source),),
        references={"": reference, "red": merged(reference, folder)},
    )
    kept, expanded = (
        generate(executor(adapted, weights=weights), adapted.prompts())
        for weights in (WeightChoice.AUTO, WeightChoice.FLOAT32)
    )
    assert kept == expanded
    plain = open_checkpoint(tiny_gguf.write_gguf(tmp_path / "plain.gguf", reference))
    assert_exact(adapted, generate(executor(adapted, checkpoint=plain), adapted.prompts()))


def test_exact_llama_on_the_kernels_for_other_devices(llama: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = torch_backend(torch.device("cpu"))
    monkeypatch.setattr("model_runtime.executor.find_backend", lambda *_: backend)
    assert_exact(llama, generate(executor(llama), llama.prompts()))


def test_exact_llama_though_requests_give_way_and_come_back(llama: Adapted) -> None:
    """Three requests in an arena that holds less than all of them once they have grown."""
    prompts = {f"{name} {index}": random_prompt(20, index, 131) for index, name in enumerate(("red", "blue", ""))}
    adapters = {request_id: adapter_of(request_id) for request_id in prompts if adapter_of(request_id)}
    run = FusedRun(executor(llama, memory_bytes=104 << 10))
    run.start(prompts, 48, declares_length=False, adapters=adapters)
    generated = run.finish(prompts)
    assert run.num_retractions > 0
    for request_id, prompt in prompts.items():
        assert_greedy(llama.references[adapter_of(request_id)], prompt, generated[request_id], 48)


def test_prefixes_of_one_adapter_are_hit_by_it_and_by_no_other(llama: Adapted) -> None:
    prompt = random_prompt(3 * GRAIN + 1, 3, 131)
    run = FusedRun(executor(llama))
    for request_id in ("red 1", "blue 1", " 1", "red 2", "blue 2", " 2"):
        name = adapter_of(request_id)
        token_ids = run.generate({request_id: prompt}, 6, adapters={request_id: name} if name else {})[request_id]
        assert_greedy(llama.references[name], prompt, token_ids, 6)
    assert run.hit_tokens == {
        f"{name} {turn}": hit for turn, hit in ((1, 0), (2, 3 * GRAIN)) for name in ("red", "blue", "")
    }


def test_a_model_without_adapters_is_made_of_plain_layers_and_a_batch_without_any_multiplies_no_more(
    llama: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[type[Linear]] = []
    init = Linear.__init__

    def note(layer: Linear, *rest: object) -> None:
        made.append(type(layer))
        init(layer, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Linear, "__init__", note)

    def products_of(adapters: tuple[LoraAdapter, ...], request_id: str) -> int:
        kernels = CountingKernels()
        backend = KernelBackend(page_size_backend=CPU_PAGED, kernels=kernels, is_batch_invariant=True)
        monkeypatch.setattr("model_runtime.executor.find_backend", lambda *_: backend)
        generate(executor(llama, adapters=adapters), {request_id: random_prompt(5, 5, 131)})
        return kernels.num_products

    weights = executor(llama).weights
    assert (weights.num_bytes, executor(llama, adapters=()).weights.adapter_bytes) == (
        executor(llama, adapters=()).weights.num_bytes,
        0,
    )
    assert weights.adapter_bytes > 0
    made.clear()
    without = products_of((), " 1")
    assert set(made) == {Linear}
    assert products_of(llama.adapters, " 1") == without
    assert AdaptedLinear in made
    assert products_of(llama.adapters, "red 1") > without


def test_an_adapter_that_is_not_loaded_is_refused_before_anything_is_computed(llama: Adapted) -> None:
    with pytest.raises(ValueError, match='adapter "green" is not loaded'):
        generate(executor(llama), {"green 1": random_prompt(5, 5, 131)})


def test_an_adapter_under_which_the_model_breaks_down_ends_its_own_requests_and_changes_no_bit_of_others(
    llama: Adapted, tmp_path: Path
) -> None:
    def overflow(tensors: dict[str, torch.Tensor]) -> None:
        for tensor in tensors.values():
            tensor.fill_(1e30)

    folder = write_adapter(tmp_path / "loud", llama.references[""], TARGETS["llama"], change=overflow)
    adapters = (*llama.adapters, open_adapter("loud", folder, llama.checkpoint.source))
    sound = llama.prompts()
    loud = {f"loud {num_tokens}": random_prompt(num_tokens, num_tokens, 131) for num_tokens in (4, 2 * GRAIN + 2)}
    # They are in the batches of all others, and what they computed is in the blocks that others get behind them.
    mixed = {**{name: loud[name] for name in ("loud 4",)}, **sound, **{name: loud[name] for name in ("loud 18",)}}

    def run_all(ranks: RankGroup | None) -> FusedRun:
        run = FusedRun(executor(llama, adapters=adapters, ranks=ranks), token_budget=GRAIN + 1)
        names = {request_id: adapter_of(request_id) for request_id in mixed if adapter_of(request_id)}
        run.generate(mixed, NUM_TOKENS, SamplingParams(num_logprobs=3), adapters=names)
        run.assert_all_blocks_return()
        return run

    expected = generate(executor(llama), sound)
    for run in (run_all(None), *run_ranks(2, run_all)):
        assert run.broken.keys() == loud.keys()
        assert all("have the maximum nan" in reason for reason in run.broken.values())
        assert {request_id: run.tokens[request_id] for request_id in sound} == expected

"""Requests with LoRA adapters over several nodes: the tokens of a fused node and of the reference, whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import partial

import grpc
import pytest
from pdmesh.v1 import inference_pb2
from support.fake_compute import Gate
from support.fake_mesh import Answer, FakeMesh, FakeNode, until
from support.fake_router import FakeRouter, RoutedAnswer
from support.model_core import model_core
from support.tiny_adapters import TARGETS, merged, write_adapter
from transformers import PreTrainedModel
from unit.model_runtime import tiny_llama
from unit.model_runtime.reference_models import assert_greedy, random_prompt, save
from unit.model_runtime.tiny_models import TINY_MODELS

from model_runtime.checkpoint import Checkpoint, open_checkpoint
from model_runtime.lora.peft_files import LoraAdapter, open_adapter
from node_runtime.adapters import AdapterId, isolation_keys
from node_runtime.wire.adapter import adapters_to_proto
from router_node.prompt_prefixes import PromptPrefixes

GRAIN = 8
NUM_TOKENS = 12
# That of the router's tokenizer.
VOCAB_SIZE = 257
MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: tiny_llama.make_reference(vocab_size=VOCAB_SIZE),
    "mamba": TINY_MODELS["mamba"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """A model, adapters for it by name, and the references of all by name, "" for the model as it is."""

    checkpoint: Checkpoint
    adapters: Mapping[str, LoraAdapter]
    # Other bytes under the name "red".
    other_red: LoraAdapter
    references: Mapping[str, PreTrainedModel]

    def prompt(self, num_tokens: int, seed: int) -> list[int]:
        return random_prompt(num_tokens, seed, self.checkpoint.config.vocab_size)

    def assert_exact(self, name: str, prompt: list[int], token_ids: list[int], num_tokens: int = NUM_TOKENS) -> None:
        assert_greedy(self.references[name], prompt, token_ids, num_tokens)


def make_adapted(family: str, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    reference, folder = MODELS[family](), tmp_path_factory.mktemp(family)
    checkpoint = open_checkpoint(save(reference, folder / "model"))
    folders = {
        name: write_adapter(folder / name, reference, TARGETS[family], seed=seed)
        for seed, name in enumerate(("red", "blue"))
    }
    other = write_adapter(folder / "other", reference, TARGETS[family], seed=7)
    return Adapted(
        checkpoint=checkpoint,
        adapters={name: open_adapter(name, path, checkpoint.source) for name, path in folders.items()},
        other_red=open_adapter("red", other, checkpoint.source),
        references={"": reference} | {name: merged(reference, path) for name, path in folders.items()},
    )


@pytest.fixture(scope="module", params=MODELS)
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return make_adapted(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return make_adapted("llama", tmp_path_factory)


@pytest.fixture
async def make_mesh() -> AsyncIterator[Callable[[Adapted], FakeMesh]]:
    made: list[FakeMesh] = []

    def make(adapted: Adapted) -> FakeMesh:
        """Every node has both adapters unless a test says otherwise."""
        adapters = tuple(adapted.adapters.values())
        made.append(FakeMesh(partial(_core, checkpoint=adapted.checkpoint, all_adapters=adapters)))
        return made[-1]

    yield make
    for mesh in made:
        await mesh.close()


def _core(*args: object, all_adapters: tuple[LoraAdapter, ...], **fields: object):
    return model_core(*args, **{"adapters": all_adapters, **fields})


MakeMesh = Callable[[Adapted], FakeMesh]


def named(name: str) -> dict[str, object]:
    return {"adapter": inference_pb2.Adapter(name=name)} if name else {}


def adapter_id(adapted: Adapted, name: str) -> AdapterId:
    return AdapterId(name=name, digest=adapted.adapters[name].digest)


async def answer(mesh: FakeMesh, decode: FakeNode, prompt: list[int], name: str, **fields: object) -> Answer:
    return await mesh.generate(decode, prompt, **{"max_tokens": NUM_TOKENS, **named(name), **fields})


def hold_after(node: FakeNode, *, num_steps: int) -> Gate:
    """Holds the engine of the node up once it has made so many passes."""
    gate, executor = Gate(), node.core.executor
    execute = executor.execute

    def held(*args: object):
        if node.node.engine.snapshot.num_steps >= num_steps:
            gate.wait()
        return execute(*args)

    executor.execute = held
    return gate


async def test_exact_disaggregated_equals_fused_equals_the_reference_in_mixed_batches(
    adapted: Adapted, make_mesh: MakeMesh
) -> None:
    mesh = make_mesh(adapted)
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill, config={"verify_transfers": "all"})
    fused = await mesh.fused()
    # The same prompt under each name: only the adapter keeps them apart.
    prompts = [adapted.prompt(num_tokens, seed=num_tokens) for num_tokens in (3, 2 * GRAIN + 5)]
    asked = [(name, prompt) for prompt in prompts for name in ("red", "", "blue")]
    disaggregated = await asyncio.gather(
        *(answer(mesh, decode, prompt, name, prefill_address=prefill.address) for name, prompt in asked)
    )
    alone = await asyncio.gather(*(answer(mesh, fused, prompt, name) for name, prompt in asked))
    for (name, prompt), apart, whole in zip(asked, disaggregated, alone, strict=True):
        assert apart.token_ids == whole.token_ids
        adapted.assert_exact(name, prompt, apart.token_ids)
        assert apart.finish.usage.cached == whole.finish.usage.cached == inference_pb2.CachedTokens()
    assert len({tuple(told.token_ids) for told in disaggregated}) == len(asked)
    for node in (prefill, decode, fused):
        await node.assert_all_blocks_return()


async def test_exact_llama_over_two_tensor_ranks_on_either_side(llama: Adapted, make_mesh: MakeMesh) -> None:
    mesh = make_mesh(llama)
    prefill = await mesh.prefill(num_ranks=2)
    decode = await mesh.decode(prefill, num_ranks=2)
    prompt = llama.prompt(GRAIN + 3, seed=5)
    names = ("red", "", "blue")
    told = await asyncio.gather(
        *(answer(mesh, decode, prompt, name, prefill_address=prefill.address) for name in names)
    )
    for name, each in zip(names, told, strict=True):
        llama.assert_exact(name, prompt, each.token_ids)


async def test_exact_where_the_decode_node_computes_the_prompt_and_where_it_goes_on_behind_output(
    adapted: Adapted, make_mesh: MakeMesh
) -> None:
    mesh = make_mesh(adapted)
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill, config={"local_prefill": "fallback"})
    prompt = adapted.prompt(2 * GRAIN + 3, seed=6)
    local = await answer(mesh, decode, prompt, "red")
    adapted.assert_exact("red", prompt, local.token_ids)
    behind = [*prompt, *local.token_ids[:5]]
    left = {"max_tokens": NUM_TOKENS - 5, "num_output_tokens": 5}
    for where in ({}, {"prefill_address": prefill.address}):
        resumed = await answer(mesh, decode, behind, "red", **left, **where)
        assert resumed.token_ids == local.token_ids[5:]


async def test_caches_of_both_nodes_are_hit_within_an_adapter_and_never_across(
    llama: Adapted, make_mesh: MakeMesh
) -> None:
    mesh = make_mesh(llama)
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    prompt = llama.prompt(3 * GRAIN + 1, seed=7)

    async def cached(name: str, **fields: object) -> inference_pb2.CachedTokens:
        told = await answer(mesh, decode, prompt, name, prefill_address=prefill.address, **fields)
        llama.assert_exact(name, prompt, told.token_ids)
        return told.finish.usage.cached

    none = inference_pb2.CachedTokens()
    assert [await cached(name) for name in ("", "red", "blue")] == [none] * 3
    hit = inference_pb2.CachedTokens(decode_device=3 * GRAIN)
    assert [await cached(name) for name in ("blue", "", "red")] == [hit] * 3
    await decode.assert_all_blocks_return()
    assert await cached("red") == inference_pb2.CachedTokens(prefill_device=3 * GRAIN)
    # A salt counts beside it.
    assert await cached("red", extra_keys=[b"salt"]) == none


async def test_exact_llama_keeps_its_adapter_when_its_nodes_die(llama: Adapted, make_mesh: MakeMesh) -> None:
    mesh = make_mesh(llama)
    prefill = [await mesh.prefill(), await mesh.prefill()]
    decode = [await mesh.decode(*prefill), await mesh.decode(*prefill)]
    await until(lambda: all(node.node.is_ready for node in decode), "the decode nodes have their peers")
    prompt = llama.prompt(GRAIN + 3, seed=8)
    gates = [hold_after(node, num_steps=6) for node in decode]
    async with FakeRouter(prefill=prefill, decode=decode, vocab_size=VOCAB_SIZE) as router:
        stream, told = aiter(router.call(prompt, adapter="red", max_tokens=NUM_TOKENS)), RoutedAnswer()
        while len(told.token_ids) < 3:
            told.take(await anext(stream))
        await until(lambda: any(gate.reached.is_set() for gate in gates), "the decode node stands still")
        dying = next(index for index, gate in enumerate(gates) if gate.reached.is_set())
        gates[1 - dying].open()
        killing = asyncio.ensure_future(mesh.kill(decode[dying]))
        async for response in stream:
            told.take(response)
        gates[dying].open()
        await killing
    assert told.finish is not None
    assert told.finish.num_replacements == 1
    llama.assert_exact("red", prompt, told.token_ids)


async def test_a_pair_of_nodes_with_different_bytes_under_one_name_serves_everything_but_that(
    llama: Adapted, make_mesh: MakeMesh, caplog: pytest.LogCaptureFixture
) -> None:
    mesh = make_mesh(llama)
    blue = llama.adapters["blue"]
    prefill = await mesh.prefill(adapters=(llama.other_red, blue))
    decode = await mesh.decode(prefill)
    prompt = llama.prompt(GRAIN + 3, seed=9)
    code, message = await mesh.error(decode, prompt, **named("red"), prefill_address=prefill.address)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    for adapter in (llama.adapters["red"], llama.other_red):
        assert f'"red" (sha256 {adapter.digest.hex()[:12]})' in message
        assert f'"red" (sha256 {adapter.digest.hex()[:12]})' in caplog.text
    assert "no prompt with it goes there" in caplog.text
    for name in ("blue", ""):
        told = await answer(mesh, decode, prompt, name, prefill_address=prefill.address)
        llama.assert_exact(name, prompt, told.token_ids)
    for node in (prefill, decode):
        await node.assert_all_blocks_return()


async def test_a_prefill_node_without_the_adapter_is_not_asked_and_would_not_do_without_it(
    llama: Adapted, make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is of an older release says nothing of adapters, and would compute with none."""
    mesh = make_mesh(llama)
    prefill = await mesh.prefill(adapters=())
    decode = await mesh.decode(prefill)
    prompt = llama.prompt(GRAIN + 3, seed=9)
    code, message = await mesh.error(decode, prompt, **named("red"), prefill_address=prefill.address)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "prefill=none, decode=served" in message
    assert prefill.node.engine.snapshot.num_steps == 0
    # Should a decode node ask all the same.
    monkeypatch.setattr("decode_node.bootstrap.adapters_from_proto", lambda _: decode.core.facts.adapters)
    credulous = await mesh.decode(prefill)
    code, message = await mesh.error(credulous, prompt, **named("red"), prefill_address=prefill.address)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "has no adapter of that name" in message
    assert prefill.node.engine.snapshot.num_steps == 0
    for node in (prefill, decode, credulous):
        await node.assert_all_blocks_return()


async def test_a_router_sends_requests_where_their_adapter_is(llama: Adapted, make_mesh: MakeMesh) -> None:
    mesh = make_mesh(llama)
    red, blue = (llama.adapters[name] for name in ("red", "blue"))
    prefill = [await mesh.prefill(adapters=(red,)), await mesh.prefill(adapters=(blue,))]
    decode = [await mesh.decode(*prefill, adapters=(red,)), await mesh.decode(*prefill, adapters=(blue,))]
    await until(lambda: all(node.node.is_ready for node in decode), "the decode nodes have their peers")
    prompt = llama.prompt(GRAIN + 3, seed=10)
    async with FakeRouter(prefill=prefill, decode=decode, vocab_size=VOCAB_SIZE) as router:
        names = ("red", "blue", "") * 3
        told = await asyncio.gather(*(router.generate(prompt, adapter=name, max_tokens=NUM_TOKENS) for name in names))
        for name, each in zip(names, told, strict=True):
            llama.assert_exact(name, prompt, each.token_ids)
            assert each.finish.num_replacements == 0
        by_model = await router.generate(prompt, model="blue", max_tokens=NUM_TOKENS)
        llama.assert_exact("blue", prompt, by_model.token_ids)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.generate(prompt, adapter="green")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert 'adapter: "green" is not served here, only "blue", "red"' in (caught.value.details() or "")


async def test_an_unknown_adapter_is_named_by_the_decode_node_with_those_that_it_has(
    llama: Adapted, make_mesh: MakeMesh
) -> None:
    mesh = make_mesh(llama)
    fused = await mesh.fused()
    code, message = await mesh.error(fused, [5, 6], **named("green"))
    assert (code, message) == (grpc.StatusCode.NOT_FOUND, 'adapter: "green" is not served here, only "blue", "red"')
    (green,) = adapters_to_proto(fused.core.facts.adapters[:1])
    green.digest = bytes(32)
    code, message = await mesh.error(fused, [5, 6], adapter=green)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert message.startswith('adapter: "red" (sha256 000000000000) is wanted')


async def test_a_router_finds_what_nodes_have_cached_of_one_adapter_and_takes_it_for_no_other(
    llama: Adapted, make_mesh: MakeMesh
) -> None:
    """The router's keys of a prompt are the nodes' own, salt and adapter included."""
    mesh = make_mesh(llama)
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    await until(lambda: decode.node.is_ready, "the decode node has its peer")
    prompt = llama.prompt(4 * GRAIN + 1, seed=11)
    async with FakeRouter(
        prefill=[prefill],
        decode=[decode],
        vocab_size=VOCAB_SIZE,
        placement_policy="cache_aware",
        follow_interval_s=0.01,
    ) as router:
        index, addresses = router.router.observations.index, [prefill.address, decode.address]

        def depths(adapter: AdapterId | None, salt: bytes = b"salt") -> set[int]:
            keys = PromptPrefixes(prompt, isolation_keys([salt], adapter)).keys(GRAIN)
            return set(index.find_depths(keys, addresses).values())

        red, blue = (adapter_id(llama, name) for name in ("red", "blue"))
        told = await router.generate(prompt, adapter="red", cache_salt=b"salt", max_tokens=2)
        llama.assert_exact("red", prompt, told.token_ids, 2)
        await until(lambda: depths(red) == {4}, "the nodes told what they have cached")
        assert [depths(blue), depths(None), depths(red, b"other")] == [set()] * 3

"""The engine protocol of the SMG gateway on nodes of ours: what a gateway gets is what our own protocol gives."""

from __future__ import annotations

import asyncio
import hashlib
import io
import re
import zipfile
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import grpc
import pytest
from pdmesh.v1 import inference_pb2
from support.certificates import MeshAuthority
from support.fake_compute import Gate
from support.fake_mesh import FakeMesh, FakeNode, until
from support.model_core import model_core
from support.tiny_checkpoint import CONTEXT_TOKENS, END_TOKEN, VOCAB_SIZE, write_tiny_checkpoint
from tokenizers import Tokenizer

from model_runtime.checkpoint import Checkpoint, open_checkpoint
from node_runtime.engine.messages import Invoke

pytest.importorskip("smg_grpc_proto", reason="the extra smg is not installed")

from smg_grpc_proto.generated import common_pb2, tokenspeed_scheduler_pb2
from support.engine_client import EngineClient, stored_tokens

SMG = {"engine_protocol": "smg"}
PROMPT = list(b"a prompt of some tokens")
GRANULARITY = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
async def mesh(checkpoint: Checkpoint) -> AsyncIterator[FakeMesh]:
    mesh = FakeMesh(partial(model_core, checkpoint=checkpoint))
    yield mesh
    await mesh.close()


@pytest.fixture
async def fused(mesh: FakeMesh) -> FakeNode:
    return await mesh.fused(config=SMG)


@pytest.fixture
async def client(fused: FakeNode) -> AsyncIterator[EngineClient]:
    client = EngineClient(fused.address)
    yield client
    await client.close()


async def test_streamed_or_not_it_gives_the_tokens_and_counts_of_our_own_protocol(
    mesh: FakeMesh, fused: FakeNode, client: EngineClient
) -> None:
    sampling = inference_pb2.SamplingParams(
        temperature=0.9,
        top_k=40,
        top_p=0.95,
        seed=7,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={65: 4.0},
    )
    own = await mesh.generate(fused, PROMPT, sampling=sampling, max_tokens=20, num_logprobs=2)
    assert own.finish is not None
    asked = {
        "temperature": 0.9,
        "top_k": 40,
        "top_p": 0.95,
        "sampling_seed": 7,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "logit_bias": {"65": 4.0},
        "max_new_tokens": 20,
        "ignore_eos": True,
    }
    for is_streamed in (False, True):
        answer = await client.generate(PROMPT, asked, stream=is_streamed, return_logprob=True, top_logprobs_num=2)
        complete = answer.complete
        assert complete is not None
        assert list(complete.output_ids) == own.token_ids
        assert answer.token_ids == (own.token_ids if is_streamed else [])
        logprobs = answer.logprobs if is_streamed else list(complete.output_logprobs.token_logprobs)
        assert logprobs == [token.logprob for token in own.tokens]
        assert complete.finish_reason == "length"
        assert (complete.prompt_tokens, complete.completion_tokens) == (len(PROMPT), 20)
        # What the request before it left.
        assert complete.cached_tokens == len(PROMPT) // GRANULARITY * GRANULARITY
        if not is_streamed:
            assert [list(item.token_ids) for item in complete.output_logprobs.top_logprobs] == [
                [pair.token_id for pair in token.top_logprobs] for token in own.tokens
            ]
    await fused.assert_all_blocks_return()


async def test_an_answer_that_fits_no_message_is_refused_whole_and_comes_streamed(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode_node.generation._MAX_BATCH_TOKENS", 8)
    fused = await mesh.fused(config={**SMG, "max_message_bytes": 4096})
    client = EngineClient(fused.address)
    sampling = {"max_new_tokens": 100, "ignore_eos": True}
    asked = {"return_logprob": True, "top_logprobs_num": 20}
    code, message = await client.refusal(PROMPT, sampling, **asked)
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert re.search(r"message larger than max \(\d+ vs\. 4096\)", message)
    answer = await client.generate(PROMPT, sampling, stream=True, **asked)
    assert len(answer.token_ids) == len(answer.logprobs) == 100
    await client.close()
    await fused.assert_all_blocks_return()


async def test_samples_are_what_requests_of_their_own_would_get(
    mesh: FakeMesh, fused: FakeNode, client: EngineClient
) -> None:
    answers = await client.samples(
        PROMPT,
        {"n": 3, "temperature": 1.0, "sampling_seed": 2**64 - 1, "max_new_tokens": 9, "ignore_eos": True},
        stream=True,
    )
    for answer, seed in zip(answers, (2**64 - 1, 0, 1), strict=True):
        sampling = inference_pb2.SamplingParams(temperature=1.0, seed=seed)
        own = await mesh.generate(fused, PROMPT, sampling=sampling, max_tokens=9)
        assert answer.token_ids == own.token_ids
        assert answer.complete is not None
        assert answer.complete.cached_tokens == 0
    await fused.assert_all_blocks_return()


async def test_forms_are_kept_and_end_tokens_shown_on_request_only(client: EngineClient) -> None:
    asked = {"regex": "[a-c]{5}", "temperature": 1.0, "sampling_seed": 1}
    for keeps in (False, True):
        answer = await client.generate(PROMPT, {**asked, "no_stop_trim": keeps}, stream=True)
        assert answer.complete is not None
        assert answer.token_ids == list(answer.complete.output_ids)
        text = bytes(token for token in answer.token_ids if token != END_TOKEN)
        assert len(text) == 5
        assert set(text) <= set(b"abc")
        assert (END_TOKEN in answer.token_ids) == keeps
        assert answer.complete.finish_reason == "stop"
        assert answer.complete.matched_token_id == END_TOKEN
        assert answer.complete.completion_tokens == 6
    schema = '{"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}'
    answer = await client.generate(PROMPT, {"json_schema": schema, "max_new_tokens": 200})
    assert answer.complete is not None
    assert bytes(answer.complete.output_ids).decode().strip().startswith("[")


async def test_a_stop_string_ends_the_generation_with_the_token_that_completes_it(
    fused: FakeNode, client: EngineClient
) -> None:
    asked = {"regex": "[a-z]{90}", "temperature": 1.0, "sampling_seed": 5, "max_new_tokens": 60}
    whole = await client.generate(PROMPT, asked)
    assert whole.complete is not None
    text = bytes(whole.complete.output_ids).decode()
    stop = text[6:9]
    end = text.index(stop) + len(stop)
    for is_streamed in (False, True):
        answer = await client.generate(PROMPT, {**asked, "stop": ["QQ", stop]}, stream=is_streamed)
        assert answer.complete is not None
        assert bytes(answer.complete.output_ids).decode() == text[:end]
        assert (answer.complete.finish_reason, answer.complete.matched_stop_str) == ("stop", stop)
        assert answer.complete.completion_tokens == end
    await fused.assert_all_blocks_return()


async def test_an_abort_ends_the_request_and_frees_what_it_had(fused: FakeNode, client: EngineClient) -> None:
    asked = {"n": 2, "max_new_tokens": CONTEXT_TOKENS // 2, "ignore_eos": True}
    call = client.call(PROMPT, asked, request_id="long", stream=True)
    first = await call.read()
    assert first.HasField("chunk")
    twice = await client.refusal(PROMPT, request_id="long")
    assert twice[0] is grpc.StatusCode.ALREADY_EXISTS
    abort = tokenspeed_scheduler_pb2.AbortRequest(request_id="long", reason="a better idea")
    assert (await client.stub.Abort(abort)).success
    await until(lambda: fused.node.engine.snapshot.num_live_requests == 0, "nothing of it runs")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await _read_to_the_end(call)
    assert error.value.code() is grpc.StatusCode.CANCELLED
    assert "a better idea" in (error.value.details() or "")
    assert not (await client.stub.Abort(abort)).success
    await fused.assert_all_blocks_return()


async def test_a_gateway_that_leaves_takes_its_request_with_it(fused: FakeNode, client: EngineClient) -> None:
    call = client.call(PROMPT, {"max_new_tokens": CONTEXT_TOKENS // 2, "ignore_eos": True}, stream=True)
    await call.read()
    call.cancel()
    await fused.assert_all_blocks_return()


async def _read_to_the_end(call) -> None:
    while await call.read() is not grpc.aio.EOF:
        continue


REFUSED: tuple[tuple[dict[str, object], dict[str, object], str], ...] = (
    ({"tokenized": tokenspeed_scheduler_pb2.TokenizedInput()}, {}, "tokenized.input_ids: empty"),
    (
        {"tokenized": tokenspeed_scheduler_pb2.TokenizedInput(input_ids=[VOCAB_SIZE])},
        {},
        f"tokenized.input_ids: token {VOCAB_SIZE} is outside",
    ),
    ({"request_id": ""}, {}, "request_id: "),
    ({}, {"temperature": -1.0}, "sampling_params.temperature: -1 given"),
    ({}, {"top_k": 0}, "sampling_params.top_k: 0 given"),
    ({}, {"top_p": 0.0}, "sampling_params.top_p: 0 given"),
    ({}, {"presence_penalty": 3.0}, "sampling_params.presence_penalty: 3 given"),
    ({}, {"logit_bias": {"x": 1.0}}, "sampling_params.logit_bias: 'x' is no token id"),
    ({}, {"logit_bias": {str(VOCAB_SIZE): 1.0}}, f"sampling_params.logit_bias: token {VOCAB_SIZE}"),
    ({}, {"logit_bias": {"7": 1.0, "07": 2.0}}, "sampling_params.logit_bias: one token is given twice"),
    ({}, {"min_p": 0.1}, "sampling_params.min_p: 0.1 given"),
    ({}, {"min_new_tokens": 1}, "sampling_params.min_new_tokens: 1 given"),
    ({}, {"max_new_tokens": 0}, "sampling_params.max_new_tokens: 0 given"),
    ({}, {"max_new_tokens": CONTEXT_TOKENS}, f"sampling_params.max_new_tokens: {CONTEXT_TOKENS} given"),
    ({}, {"n": 65}, "sampling_params.n: 65 given"),
    ({}, {"stop": [""]}, "sampling_params.stop[0]: "),
    ({}, {"stop_token_ids": [VOCAB_SIZE]}, "sampling_params.stop_token_ids: "),
    ({}, {"regex": "("}, "sampling_params.regex: "),
    ({}, {"regex": "a", "ignore_eos": True}, "sampling_params.ignore_eos: "),
    ({}, {"ebnf_grammar": "root ::= 'a'"}, "sampling_params.ebnf_grammar: "),
    ({}, {"structural_tag": "{}"}, "sampling_params.structural_tag: "),
    ({}, {"custom_params": {"speed": 1.0}}, "sampling_params.custom_params: 'speed'"),
    ({"return_logprob": True, "top_logprobs_num": 21}, {}, "top_logprobs_num: 21 given"),
    ({"top_logprobs_num": 1}, {}, "top_logprobs_num: 1 given"),
    ({"return_logprob": True, "logprob_start_len": 0}, {}, "logprob_start_len: 0 given"),
    ({"token_ids_logprob": [1]}, {}, "token_ids_logprob: "),
    ({"data_parallel_rank": 1}, {}, "data_parallel_rank: 1 given"),
    ({"mm_inputs": tokenspeed_scheduler_pb2.MultimodalInputs()}, {}, "mm_inputs: "),
    ({"encode_bootstrap_info": tokenspeed_scheduler_pb2.EncodeBootstrapInfo()}, {}, "encode_bootstrap_info: "),
    ({"kv_bootstrap_info": tokenspeed_scheduler_pb2.KvBootstrapInfo()}, {}, "kv_bootstrap_info: "),
)


async def test_what_cannot_be_done_is_refused_by_the_gateways_own_name_for_it(
    fused: FakeNode, client: EngineClient
) -> None:
    for fields, sampling, words in REFUSED:
        code, message = await client.refusal(PROMPT, sampling, **fields)
        assert (code, message[: len(words)]) == (grpc.StatusCode.INVALID_ARGUMENT, words), message
    await fused.assert_all_blocks_return()


async def test_a_node_describes_itself_truly(fused: FakeNode, client: EngineClient) -> None:
    stub = client.stub
    assert (await stub.HealthCheck(tokenspeed_scheduler_pb2.HealthCheckRequest())).healthy
    model = await stub.GetModelInfo(tokenspeed_scheduler_pb2.GetModelInfoRequest())
    assert (model.served_model_name, model.vocab_size, model.max_context_length) == ("tiny", VOCAB_SIZE, CONTEXT_TOKENS)
    assert (list(model.architectures), list(model.eos_token_ids)) == (["LlamaForCausalLM"], [END_TOKEN])
    server = await stub.GetServerInfo(tokenspeed_scheduler_pb2.GetServerInfoRequest())
    assert (server.server_args["role"], server.server_args["tp_size"]) == ("fused", 1)
    assert server.server_args["batch_invariant"] is True
    assert server.active_requests == 0
    await client.generate(PROMPT, {"max_new_tokens": 4})
    await client.generate(PROMPT, {"max_new_tokens": 4})
    call = client.call(PROMPT, {"max_new_tokens": CONTEXT_TOKENS // 2, "ignore_eos": True}, stream=True)
    await call.read()
    asked = tokenspeed_scheduler_pb2.GetLoadsRequest(include=["core", "memory", "disagg"])
    (load,) = (await stub.GetLoads(asked)).loads
    assert (load.num_running_reqs, load.num_waiting_reqs) == (1, 0)
    assert not load.HasField("queues")
    assert load.max_total_num_tokens == load.memory.token_capacity == fused.core.facts.capacity_tokens
    assert 0 < load.active_token_usage <= load.token_usage < 1
    # Of two prompts that are over, the second one found all of its full grains.
    assert load.cache_hit_rate == pytest.approx(len(PROMPT) // GRANULARITY * GRANULARITY / (2 * len(PROMPT)))
    call.cancel()
    await until(fused.is_quiet, "it is quiet")
    (load,) = (await stub.GetLoads(asked)).loads
    assert (load.num_total_reqs, load.active_token_usage) == (0, 0.0)
    assert load.token_usage > 0
    nobody = await stub.GetLoads(tokenspeed_scheduler_pb2.GetLoadsRequest(dp_rank=1))
    assert (nobody.dp_rank_count, len(nobody.loads)) == (0, 0)


async def test_the_cache_is_flushed_only_while_nothing_uses_it(fused: FakeNode, client: EngineClient) -> None:
    call = client.call(PROMPT, {"max_new_tokens": CONTEXT_TOKENS // 2, "ignore_eos": True}, stream=True)
    await call.read()
    assert not (await client.stub.FlushCache(common_pb2.FlushCacheRequest())).success
    waiting = asyncio.ensure_future(client.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=60.0)))
    call.cancel()
    assert (await waiting).success
    capacity = fused.core.scheduler.capacity()
    assert capacity.empty_lcm_blocks == capacity.total_lcm_blocks
    with pytest.raises(grpc.aio.AioRpcError, match="timeout_s: -1 given"):
        await client.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=-1.0))


async def test_the_tokenizer_comes_as_an_archive_that_others_can_load(client: EngineClient) -> None:
    chunks = [chunk async for chunk in client.stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(data).hexdigest()]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert set(archive.namelist()) == {"tokenizer.json", "config.json"}
        tokenizer = Tokenizer.from_str(archive.read("tokenizer.json").decode())
    assert tokenizer.decode(PROMPT) == bytes(PROMPT).decode()


async def test_subscribers_hear_which_prompts_are_cached_and_go_on_where_they_stopped(
    mesh: FakeMesh, fused: FakeNode, client: EngineClient
) -> None:
    grains = [PROMPT[begin : begin + GRANULARITY] for begin in range(0, len(PROMPT) - GRANULARITY + 1, GRANULARITY)]
    call = client.events()
    state = await call.read()
    assert (state.snapshot.count, state.snapshot.blocks) == (1, 0)
    assert [event.WhichOneof("data") for event in state.events] == ["cleared"]
    # What tenants ask is for nobody else to hear.
    await mesh.generate(fused, list(b"between us and you alone"), max_tokens=1, extra_keys=[b"tenant"])
    await client.generate(PROMPT, {"max_new_tokens": 1})
    heard: list[common_pb2.KvEventBatch] = []
    while len(stored_tokens(heard)) < len(grains):
        batch = await call.read()
        if not batch.load.load_only:
            heard.append(batch)
    assert stored_tokens(heard) == grains
    assert [batch.sequence_number for batch in heard] == [
        state.sequence_number + 1 + number for number in range(len(heard))
    ]
    blocks = [block for batch in heard for event in batch.events for block in event.stored.blocks]
    assert {block.block_size for block in blocks} == {GRANULARITY}
    call.cancel()
    # One that was away hears what it missed, and one that is new the whole state.
    missed = await client.events(state.sequence_number).read()
    assert (missed.sequence_number, missed.events) == (heard[0].sequence_number, heard[0].events)
    whole = await client.events().read()
    assert (whole.snapshot.blocks, stored_tokens([whole])) == (len(grains), grains)
    assert whole.sequence_number == heard[-1].sequence_number
    # One that knows everything hears at once that it is heard.
    repeat = await client.events(whole.sequence_number).read()
    assert (repeat.sequence_number, len(repeat.events)) == (whole.sequence_number, 0)
    assert (await client.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=10.0))).success
    gone = await client.events(whole.sequence_number).read()
    assert gone.events[0].HasField("cleared")


async def test_subscribers_hear_the_load_as_it_changes_and_while_nothing_happens(
    fused: FakeNode, client: EngineClient
) -> None:
    subscription = client.events()
    idle = await subscription.read()
    assert (idle.load.running_requests, idle.load.max_total_num_tokens) == (0, fused.core.facts.capacity_tokens)
    call = client.call(PROMPT, {"max_new_tokens": CONTEXT_TOKENS // 2, "ignore_eos": True}, stream=True)
    await call.read()
    fused.node.engine.post(Invoke(action=(gate := Gate()).wait))
    heard = [idle, await subscription.read()]
    while heard[-1].load.running_requests != 1:
        heard.append(await subscription.read())
    gate.open()
    call.cancel()
    while heard[-1].load.running_requests != 0:
        heard.append(await subscription.read())
    heard.append(await subscription.read())
    while not heard[-1].load.load_only:  # what the request left in the prefix cache is told behind its end
        heard.append(await subscription.read())
    assert (heard[-1].sequence_number, len(heard[-1].events)) == (heard[-2].sequence_number, 0)
    assert [batch.load.sample for batch in heard] == list(range(1, len(heard) + 1))
    await fused.assert_all_blocks_return()


async def test_a_stream_of_events_ends_by_itself_before_its_deadline_would_fail_it(mesh: FakeMesh) -> None:
    fused = await mesh.fused(config={**SMG, "default_deadline_s": 1.2})
    client = EngineClient(fused.address)
    call = client.events()
    last = await call.read()
    while (batch := await call.read()) is not grpc.aio.EOF:
        assert batch.load.load_only
    assert await call.code() is grpc.StatusCode.OK
    assert (await client.events(last.sequence_number).read()).sequence_number == last.sequence_number
    await client.close()


async def test_subscribers_do_not_hold_up_a_drain(mesh: FakeMesh) -> None:
    fused = await mesh.fused(config={**SMG, "drain_grace_s": 100.0})
    client = EngineClient(fused.address)
    call = client.events()
    await call.read()
    server = fused.node._server
    assert server.num_running_calls == 0
    await server.begin_drain()
    health = await client.stub.HealthCheck(tokenspeed_scheduler_pb2.HealthCheckRequest())
    assert (health.healthy, "draining" in health.message) == (False, True)
    assert (await client.refusal(PROMPT))[0] is grpc.StatusCode.UNAVAILABLE
    await asyncio.wait_for(fused.node.stop(), 30)
    await client.close()


async def test_a_decode_node_has_prompts_computed_by_a_prefill_node_of_its_own_choice(mesh: FakeMesh) -> None:
    prefill = [await mesh.prefill(), await mesh.prefill()]
    decode = await mesh.decode(*prefill, config=SMG)
    fused = await mesh.fused()
    client = EngineClient(decode.address)
    await until(lambda: len(decode.node._receiving.peers.ready) == 2, "both prefill nodes are peers")
    own = await mesh.generate(fused, PROMPT, max_tokens=6)
    for _ in range(2):
        answer = await client.generate(PROMPT, {"max_new_tokens": 6, "ignore_eos": True})
        assert answer.complete is not None
        assert list(answer.complete.output_ids) == own.token_ids
    assert answer.complete.cached_tokens == len(PROMPT) // GRANULARITY * GRANULARITY
    assert (await mesh.status(decode)).num_local_prefills == 0
    # Prompts that begin alike went to one node; when it is gone, the other one computes them.
    chosen = [node for node in prefill if node.node.engine.snapshot.cached_lcm_blocks]
    assert len(chosen) == 1
    await mesh.kill(chosen[0])
    longer = [*PROMPT, *PROMPT]
    own = await mesh.generate(fused, longer, max_tokens=6)
    answer = await client.generate(longer, {"max_new_tokens": 6, "ignore_eos": True})
    assert answer.complete is not None
    assert list(answer.complete.output_ids) == own.token_ids
    await decode.assert_all_blocks_return()
    await client.close()


async def test_a_prompt_whose_prefill_node_is_gone_is_computed_here_where_that_is_allowed(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill, config={**SMG, "local_prefill": "fallback"})
    await until(lambda: bool(decode.node._receiving.peers.ready), "the prefill node is a peer")
    client = EngineClient(decode.address)
    asked = {"max_new_tokens": 6, "ignore_eos": True}
    handed = await client.generate(PROMPT, asked)
    assert (await mesh.status(decode)).num_local_prefills == 0
    await mesh.kill(prefill)
    assert decode.core.scheduler.clear_cache()
    local = await client.generate(PROMPT, asked)
    assert handed.complete is not None
    assert local.complete is not None
    assert local.complete.output_ids == handed.complete.output_ids
    assert (await mesh.status(decode)).num_local_prefills == 1
    await decode.assert_all_blocks_return()
    await client.close()


async def test_what_prefill_nodes_refuse_for_load_is_refused_and_not_computed_here(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill(config={"max_waiting_requests": 1})
    decode = await mesh.decode(prefill, config={**SMG, "local_prefill": "fallback"})
    await until(lambda: bool(decode.node._receiving.peers.ready), "the prefill node is a peer")
    client = EngineClient(decode.address)
    prefill.node.engine.post(Invoke(action=(gate := Gate()).wait))
    calls = [client.generate([*PROMPT, number], {"max_new_tokens": 1}) for number in range(6)]
    running = [asyncio.ensure_future(call) for call in calls]
    done, _ = await asyncio.wait(running, timeout=30, return_when=asyncio.FIRST_COMPLETED)
    gate.open()
    outcomes = await asyncio.gather(*running, return_exceptions=True)
    errors = [outcome for outcome in outcomes if isinstance(outcome, grpc.aio.AioRpcError)]
    assert done
    assert {error.code() for error in errors} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert 0 < len(errors) < len(calls)
    assert (await mesh.status(decode)).num_local_prefills == 0
    await decode.assert_all_blocks_return()
    await client.close()


@pytest.mark.parametrize("local_prefill", ["never", "fallback"])
async def test_a_decode_node_without_prefill_nodes_does_what_its_policy_says(
    mesh: FakeMesh, local_prefill: str
) -> None:
    decode = await mesh.decode(config={**SMG, "local_prefill": local_prefill})
    client = EngineClient(decode.address)
    if local_prefill == "never":
        code, message = await client.refusal(PROMPT)
        assert code is grpc.StatusCode.UNAVAILABLE
        assert message.endswith("none is listed")
    else:
        own = await mesh.generate(decode, PROMPT, max_tokens=6)
        answer = await client.generate(PROMPT, {"max_new_tokens": 6, "ignore_eos": True})
        assert answer.complete is not None
        assert list(answer.complete.output_ids) == own.token_ids
    await decode.assert_all_blocks_return()
    await client.close()


async def test_with_certificates_it_is_for_those_of_gateways(mesh: FakeMesh, tmp_path: Path) -> None:
    authority = MeshAuthority(tmp_path)
    fused = await mesh.fused(config={**SMG, **authority.settings("fused")})
    for role, is_welcome in (("gateway", True), ("router", False)):
        certificate, key = authority.issue(role)
        credentials = grpc.ssl_channel_credentials(
            authority.path.read_bytes(), key.read_bytes(), certificate.read_bytes()
        )
        client = EngineClient(fused.address, credentials)
        if is_welcome:
            assert (await client.generate(PROMPT, {"max_new_tokens": 1})).complete is not None
        else:
            code, message = await client.refusal(PROMPT)
            assert code is grpc.StatusCode.PERMISSION_DENIED
            assert "is for gateway" in message
        await client.close()


async def test_without_the_option_the_protocol_is_not_served(mesh: FakeMesh) -> None:
    fused = await mesh.fused()
    client = EngineClient(fused.address)
    assert (await client.refusal(PROMPT))[0] is grpc.StatusCode.UNIMPLEMENTED
    await client.close()

"""The Python clients against an in-process router that follows a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
from pdmesh.v1 import inference_pb2, inference_pb2_grpc

from node_runtime.config import NodeConfig
from node_runtime.errors import BadConfig, InvalidRequest, QueueFull
from node_runtime.rpc.context import RpcContext
from node_runtime.rpc.server import RpcServer
from pdmesh_cli.client import AsyncPdmeshClient, PdmeshClient
from pdmesh_cli.client_types import (
    CachedTokens,
    ChatMessage,
    Delta,
    Finish,
    FinishReason,
    GenerateOptions,
    ModelCard,
    PdmeshError,
    Placement,
    Token,
    TokenLogprob,
    request_message,
)
from pdmesh_cli.generate import schema_text

_PLACEMENT = inference_pb2.GenerateResponse(
    placement=inference_pb2.Placement(request_id="r1", decode_node="decode-0", prefill_node="prefill-0", trace_id="ab")
)
_FINISH = inference_pb2.GenerateResponse(
    finish=inference_pb2.Finish(
        reason=inference_pb2.FINISH_REASON_STOP,
        matched_stop="END",
        usage=inference_pb2.Usage(
            prompt_tokens=9, completion_tokens=2, cached=inference_pb2.CachedTokens(prefill_device=3, decode_device=4)
        ),
        timings=inference_pb2.Timings(transferred_bytes=4096, transferred_runs=2, decode_ms=7.5),
    )
)


def _delta(text: str, token_id: int) -> inference_pb2.GenerateResponse:
    top = inference_pb2.TokenLogprob(token_id=5, logprob=-2.0)
    token = inference_pb2.SampledToken(token_id=token_id, logprob=-0.5, top_logprobs=[top])
    return inference_pb2.GenerateResponse(delta=inference_pb2.Delta(text=text, tokens=[token]))


class ScriptedRouter:
    """Answers by the text of the prompt."""

    def __init__(self) -> None:
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.num_refusals = 0
        self.refuses_late = False
        self.retry_after_s: float | None = 0.01
        self.cancelled = asyncio.Event()

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: RpcContext
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        if request.text == "busy" and len(self.requests) <= self.num_refusals:
            if self.refuses_late:
                yield _PLACEMENT
            refusal = QueueFull("the queue is full")
            refusal.retry_after_s = self.retry_after_s
            raise refusal
        if request.text == "refuse":
            raise InvalidRequest("temperature: must be >= 0, got -1")
        try:
            yield _PLACEMENT
            if request.HasField("num_prompt_logprobs"):
                tokens = [inference_pb2.SampledToken(token_id=1), inference_pb2.SampledToken(token_id=2, logprob=-3.0)]
                yield inference_pb2.GenerateResponse(prompt_logprobs=inference_pb2.PromptLogprobs(tokens=tokens))
            yield _delta("Hello", 11)
            if request.text == "break":
                raise QueueFull("the queue is full")
            if request.text == "no finish":
                return
            if request.text == "hang":
                await asyncio.Event().wait()
            yield _delta(" world", 12)
            if request.num_samples:
                for event in (_PLACEMENT, _delta("Bye", 13), _FINISH):
                    second = inference_pb2.GenerateResponse(index=request.num_samples - 1)
                    second.MergeFrom(event)
                    yield second
            yield _FINISH
        finally:
            # A client that leaves early may do so before the handler hangs.
            if request.text == "hang":
                self.cancelled.set()

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: RpcContext
    ) -> inference_pb2.ListModelsResponse:
        card = inference_pb2.ModelCard(name="smollm2", context_tokens=8192, vocab_size=49152)
        return inference_pb2.ListModelsResponse(models=[card])


@pytest.fixture
async def router() -> AsyncIterator[tuple[ScriptedRouter, str]]:
    servicer = ScriptedRouter()
    server = RpcServer(NodeConfig(node_id="router"))
    server.add(inference_pb2_grpc.add_InferenceServicer_to_server, servicer)
    port = await server.start()
    yield servicer, f"127.0.0.1:{port}"
    await server.stop(grace_s=0)


async def test_an_answer_streams_as_typed_events_in_order(router: tuple[ScriptedRouter, str]) -> None:
    _, address = router
    async with AsyncPdmeshClient(address) as client:
        events = [event async for event in client.generate("hi")]
    token = Token(token_id=11, logprob=-0.5, top_logprobs=(TokenLogprob(token_id=5, logprob=-2.0),))
    assert events[0] == Placement(request_id="r1", decode_node="decode-0", prefill_node="prefill-0", trace_id="ab")
    assert events[1] == Delta(text="Hello", tokens=(token,))
    finish = events[3]
    assert isinstance(finish, Finish)
    assert (finish.reason, finish.matched_stop, finish.matched_token_id) == (FinishReason.STOP, "END", None)
    assert (finish.usage.prompt_tokens, finish.usage.cached) == (9, CachedTokens(prefill_device=3, decode_device=4))
    assert (finish.timings.transferred_bytes, finish.timings.decode_ms) == (4096, 7.5)
    assert len(events) == 4


@pytest.mark.parametrize("refuses_late", [False, True])
async def test_a_busy_mesh_is_asked_again_after_the_time_it_names(
    router: tuple[ScriptedRouter, str], refuses_late: bool
) -> None:
    servicer, address = router
    servicer.num_refusals, servicer.refuses_late, servicer.retry_after_s = 2, refuses_late, 0.05
    began_s = asyncio.get_running_loop().time()
    async with AsyncPdmeshClient(address) as client:
        completion = await client.complete("busy")
    assert completion.text == "Hello world"
    assert len(servicer.requests) == 3
    assert asyncio.get_running_loop().time() - began_s >= 0.05 + 0.1


async def test_a_mesh_that_stays_busy_is_left_alone_after_the_last_retry(router: tuple[ScriptedRouter, str]) -> None:
    servicer, address = router
    servicer.num_refusals = 100
    async with AsyncPdmeshClient(address, max_retries=2) as client:
        with pytest.raises(PdmeshError) as failure:
            await client.complete("busy")
    assert (failure.value.code, failure.value.retry_after_s) == ("RESOURCE_EXHAUSTED", 0.01)
    assert len(servicer.requests) == 3


@pytest.mark.parametrize(("text", "retry_after_s"), [("busy", None), ("busy", 30.0), ("break", 0.01)])
async def test_nothing_is_asked_again_without_a_hint_nor_behind_the_deadline_nor_behind_the_first_text(
    router: tuple[ScriptedRouter, str], text: str, retry_after_s: float | None
) -> None:
    servicer, address = router
    servicer.num_refusals, servicer.retry_after_s = 100, retry_after_s
    async with AsyncPdmeshClient(address) as client:
        with pytest.raises(PdmeshError, match="RESOURCE_EXHAUSTED"):
            await client.complete(text, timeout_s=20.0)
    assert len(servicer.requests) == 1


async def test_complete_puts_the_answer_together(router: tuple[ScriptedRouter, str]) -> None:
    _, address = router
    async with AsyncPdmeshClient(address) as client:
        completion = await client.complete("hi")
    assert completion.text == "Hello world"
    assert [token.token_id for token in completion.tokens] == [11, 12]
    assert completion.placement.decode_node == "decode-0"


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("refuse", "INVALID_ARGUMENT", "temperature: must be >= 0, got -1"),
        ("break", "RESOURCE_EXHAUSTED", "the queue is full"),
        ("no finish", "INTERNAL", "the stream ended without a Finish"),
    ],
)
async def test_a_failure_is_one_error_with_status_and_message(
    router: tuple[ScriptedRouter, str], text: str, code: str, message: str
) -> None:
    _, address = router
    async with AsyncPdmeshClient(address) as client:
        with pytest.raises(PdmeshError) as failure:
            await client.complete(text)
    assert (failure.value.code, failure.value.message) == (code, message)
    assert str(failure.value) == f"{code}: {message}"


async def test_the_deadline_ends_an_answer_that_takes_too_long(router: tuple[ScriptedRouter, str]) -> None:
    servicer, address = router
    async with AsyncPdmeshClient(address) as client:
        with pytest.raises(PdmeshError) as failure:
            await client.complete("hang", timeout_s=0.2)
    assert failure.value.code == "DEADLINE_EXCEEDED"
    await asyncio.wait_for(servicer.cancelled.wait(), 10)


async def test_leaving_a_stream_early_cancels_the_work(router: tuple[ScriptedRouter, str]) -> None:
    servicer, address = router
    async with AsyncPdmeshClient(address) as client, aclosing(client.generate("hang")) as events:
        async for event in events:
            if isinstance(event, Delta):
                break
    await asyncio.wait_for(servicer.cancelled.wait(), 10)


async def test_a_router_that_is_not_there_is_unavailable_and_named() -> None:
    async with AsyncPdmeshClient("127.0.0.1:1") as client:
        with pytest.raises(PdmeshError, match=r"127\.0\.0\.1:1") as failure:
            await client.list_models(timeout_s=5)
    assert failure.value.code == "UNAVAILABLE"


@pytest.mark.parametrize("client_class", [AsyncPdmeshClient, PdmeshClient])
async def test_a_malformed_address_is_refused(client_class: type[AsyncPdmeshClient] | type[PdmeshClient]) -> None:
    with pytest.raises(PdmeshError, match="nowhere") as failure:
        client_class("nowhere")
    assert failure.value.code == "INVALID_ARGUMENT"


async def test_models_are_listed_with_their_limits(router: tuple[ScriptedRouter, str]) -> None:
    _, address = router
    async with AsyncPdmeshClient(address) as client:
        assert await client.list_models() == (ModelCard(name="smollm2", context_tokens=8192, vocab_size=49152),)


async def test_the_plain_client_streams_completes_lists_and_fails_alike(router: tuple[ScriptedRouter, str]) -> None:
    _, address = router

    def use() -> None:
        with PdmeshClient(address) as client:
            texts = [event.text for event in client.generate("hi") if isinstance(event, Delta)]
            assert texts == ["Hello", " world"]
            assert client.complete("hi").text == "Hello world"
            assert client.list_models()[0].name == "smollm2"
            with pytest.raises(PdmeshError, match="INVALID_ARGUMENT"):
                list(client.generate("refuse"))

    await asyncio.to_thread(use)


async def test_closing_a_plain_stream_cancels_the_work_and_ends_it(router: tuple[ScriptedRouter, str]) -> None:
    servicer, address = router

    def use() -> None:
        with PdmeshClient(address) as client:
            with client.generate("hang") as events:
                assert isinstance(next(events), Placement)
            assert list(events) == []

    await asyncio.to_thread(use)
    await asyncio.wait_for(servicer.cancelled.wait(), 10)


async def test_the_example_of_the_readme_prints_the_answer(
    router: tuple[ScriptedRouter, str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, address = router
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    example = readme.split("```python\n")[1].split("```")[0]
    assert "127.0.0.1:7700" in example
    await asyncio.to_thread(exec, example.replace("127.0.0.1:7700", address), {})
    assert capsys.readouterr().out == "Hello world"


async def test_every_option_and_kind_of_prompt_reaches_the_wire(router: tuple[ScriptedRouter, str]) -> None:
    servicer, address = router
    options = GenerateOptions(
        model="m",
        adapter="red",
        request_id="r",
        max_tokens=3,
        temperature=0.0,
        top_k=4,
        top_p=0.5,
        seed=0,
        stop=("a", "b"),
        stop_token_ids=(7,),
        ignore_eos=True,
        num_logprobs=0,
        cache_salt=b"s",
        logit_bias={5: -1.5},
        presence_penalty=0.5,
        frequency_penalty=0.0,
        repetition_penalty=1.25,
        num_prompt_logprobs=2,
    )
    async with AsyncPdmeshClient(address) as client:
        await client.complete([ChatMessage(role="user", content="hi")], options)
        await client.complete([1, 2, 3])
    chat, tokens = servicer.requests
    assert (chat.model, chat.request_id, chat.max_tokens, list(chat.stop), list(chat.stop_token_ids)) == (
        "m", "r", 3, ["a", "b"], [7],
    )  # fmt: skip
    assert (chat.adapter, tokens.adapter) == ("red", "")
    assert (chat.ignore_eos, chat.num_logprobs, chat.HasField("num_logprobs"), chat.cache_salt) == (True, 0, True, b"s")
    assert chat.sampling.HasField("temperature")
    assert chat.sampling.HasField("seed")
    assert (chat.sampling.top_k, chat.sampling.top_p) == (4, 0.5)
    assert chat.chat.messages[0].content == "hi"
    assert (dict(chat.sampling.logit_bias), chat.num_prompt_logprobs) == ({5: -1.5}, 2)
    assert (chat.sampling.presence_penalty, chat.sampling.repetition_penalty) == (0.5, 1.25)
    assert chat.sampling.HasField("frequency_penalty")
    assert not tokens.sampling.HasField("presence_penalty")
    assert not tokens.HasField("num_prompt_logprobs")
    assert list(tokens.tokens.token_ids) == [1, 2, 3]
    assert not tokens.sampling.HasField("temperature")
    assert not tokens.HasField("max_tokens")


async def test_what_the_prompt_was_worth_is_part_of_the_answer(router: tuple[ScriptedRouter, str]) -> None:
    async with AsyncPdmeshClient(router[1]) as client:
        told = await client.complete("hi", GenerateOptions(num_prompt_logprobs=0))
        assert [(token.token_id, token.logprob) for token in told.prompt_tokens] == [(1, None), (2, -3.0)]
        assert (await client.complete("hi")).prompt_tokens == ()


async def test_samples_are_put_together_each_for_itself(router: tuple[ScriptedRouter, str]) -> None:
    servicer, address = router
    async with AsyncPdmeshClient(address) as client:
        completions = await client.complete_all("hi", GenerateOptions(num_samples=2))
        assert [completion.text for completion in completions] == ["Hello world", "Bye"]
        assert servicer.requests[-1].num_samples == 2
        with pytest.raises(ValueError, match="num_samples: 2 given"):
            await client.complete("hi", GenerateOptions(num_samples=2))
        # One of three never comes to its end.
        with pytest.raises(PdmeshError, match="without a Finish"):
            await client.complete_all("hi", GenerateOptions(num_samples=3))
    with PdmeshClient(address) as plain:
        assert (await asyncio.to_thread(plain.complete_all, "hi"))[0].text == "Hello world"


def test_a_prompt_that_mixes_messages_and_ids_is_refused() -> None:
    with pytest.raises(ValueError, match="either chat messages or token ids"):
        request_message([ChatMessage(role="user", content="x"), 3], GenerateOptions())  # type: ignore[arg-type]


def test_an_empty_prompt_is_left_to_the_router_to_refuse() -> None:
    assert request_message("", GenerateOptions()).WhichOneof("prompt") == "text"
    assert request_message([], GenerateOptions()).WhichOneof("prompt") == "tokens"


def test_the_form_of_an_answer_is_part_of_the_request(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "integer"}')
    options = GenerateOptions(json_schema=schema_text(file, None))
    assert request_message("x", options).sampling.structured_output.json_schema == '{"type": "integer"}'
    assert request_message("x", GenerateOptions(regex="a+")).sampling.structured_output.regex == "a+"
    assert not request_message("x", GenerateOptions()).sampling.HasField("structured_output")
    with pytest.raises(ValueError, match="json_schema, regex: give one of them"):
        request_message("x", GenerateOptions(regex="a", json_schema="{}"))
    with pytest.raises(BadConfig, match="json_schema, regex: give one of them"):
        schema_text(file, "a")
    with pytest.raises(BadConfig, match="json_schema: cannot read"):
        schema_text(tmp_path / "nowhere", None)

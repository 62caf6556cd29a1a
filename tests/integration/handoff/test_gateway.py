"""The real SMG gateway in front of our nodes: OpenAI-style HTTP in, the text of our own protocol out."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest
from pdmesh.v1 import inference_pb2
from support.fake_mesh import FakeMesh, FakeNode
from support.model_core import model_core
from support.tiny_checkpoint import END_TOKEN, write_tiny_checkpoint

from model_runtime.checkpoint import Checkpoint, open_checkpoint

for package in ("smg_grpc_proto", "smg"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the package {package.replace('_', '-')} is not installed", allow_module_level=True)

PROMPT = "a prompt of some tokens"
TEMPLATE = "{{ messages[0].content }}"
# Of a model whose tokens are single bytes: text that every tokenizer spells alike.
FORM = "[a-z]{20}"
TIMEOUT_S = 60.0
# It dies with the tests, however they end.
LAUNCH = "import ctypes, runpy; ctypes.CDLL(None).prctl(1, 9); runpy.run_module('smg', run_name='__main__')"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")
    texts = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(texts))
    return open_checkpoint(folder)


@pytest.fixture
async def mesh(checkpoint: Checkpoint) -> AsyncIterator[FakeMesh]:
    mesh = FakeMesh(partial(model_core, checkpoint=checkpoint))
    yield mesh
    await mesh.close()


class Gateway:
    """One `smg launch` process."""

    def __init__(self, folder: Path, *nodes: FakeNode, options: Sequence[str] = ()) -> None:
        self._log_path = folder / "smg.log"
        self._port = _free_port()
        command = ["launch", "--host", "127.0.0.1", "--port", str(self._port)]
        # The metrics have a port of their own, and one default for all.
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(_free_port())]
        command += ["--load-monitor-interval", "1", *options]
        command += ["--worker-urls", *(f"grpc://{node.address}" for node in nodes)]
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", LAUNCH, *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )
        self.url = f"http://127.0.0.1:{self._port}"

    async def wait_until_ready(self) -> None:
        """It serves a model."""
        await self.ask("/v1/models", "data")

    async def ask(self, path: str, key: str) -> list[dict[str, object]]:
        """What is listed at `path` under `key`, once something is."""
        deadline = asyncio.get_running_loop().time() + TIMEOUT_S
        async with httpx.AsyncClient(base_url=self.url, timeout=5.0) as http:
            while asyncio.get_running_loop().time() < deadline:
                assert self._process.poll() is None, self.log_text()
                with contextlib.suppress(httpx.HTTPError, ValueError):
                    listed: list[dict[str, object]] = (await http.get(path)).json().get(key)
                    if listed:
                        return listed
                await asyncio.sleep(0.05)
        raise AssertionError(f"the gateway lists nothing at {path} after {TIMEOUT_S} s:\n{self.log_text()}")

    async def wait_until_known(self, nodes: Sequence[FakeNode]) -> None:
        """It has been told what the nodes have cached."""
        while self.log_text().count("KV event relay snapshot applied") < len(nodes):
            assert self._process.poll() is None, self.log_text()
            await asyncio.sleep(0.05)

    def log_text(self) -> str:
        return self._log_path.read_text(errors="replace")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait(timeout=10)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def test_text_chats_streams_and_samples_through_the_gateway_are_those_of_our_own_protocol(
    mesh: FakeMesh, tmp_path: Path
) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill, config={"engine_protocol": "smg"})
    oracle = await mesh.fused()
    gateway = Gateway(tmp_path, decode)
    try:
        await gateway.wait_until_ready()
        async with openai.AsyncOpenAI(
            base_url=f"{gateway.url}/v1", api_key="any", max_retries=0, timeout=30.0
        ) as client:
            sampling = inference_pb2.SamplingParams(structured_output=inference_pb2.StructuredOutput(regex=FORM))
            own = await mesh.generate(
                oracle, PROMPT.encode(), sampling=sampling, max_tokens=40, stop_token_ids=[END_TOKEN]
            )
            text = bytes(own.token_ids[:-1]).decode()
            asked = {"model": "tiny", "max_tokens": 40, "temperature": 0.0, "extra_body": {"regex": FORM}}
            whole = await client.completions.create(prompt=PROMPT, **asked)
            assert whole.choices[0].text == text
            assert whole.choices[0].finish_reason == "stop"
            assert whole.usage is not None
            assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(PROMPT), len(own.token_ids))
            stream = await client.completions.create(prompt=PROMPT, stream=True, **asked)
            assert "".join([chunk.choices[0].text async for chunk in stream if chunk.choices]) == text
            messages = [{"role": "user", "content": PROMPT}]
            chat = await client.chat.completions.create(messages=messages, n=2, **asked)
            assert [choice.message.content for choice in chat.choices] == [text, text]
            stop = text[3:5]
            stopped = await client.completions.create(prompt=PROMPT, stop=[stop], **asked)
            assert stopped.choices[0].text == text[: text.index(stop)]
            (load,) = await gateway.ask("/get_loads", "loads")
            assert load["max_total_num_tokens"] == decode.core.facts.capacity_tokens, load
            with pytest.raises(openai.APIStatusError, match=r"sampling_params\.min_p: 0\.5 given"):
                await client.completions.create(prompt=PROMPT, model="tiny", extra_body={"min_p": 0.5})
        await decode.assert_all_blocks_return()
        assert (await mesh.status(decode)).num_local_prefills == 0
    finally:
        gateway.stop()


async def test_prompts_go_where_the_events_of_the_cache_say_that_they_are_known(mesh: FakeMesh, tmp_path: Path) -> None:
    nodes = [await mesh.fused(config={"engine_protocol": "smg"}) for _ in range(2)]
    prompts = [f"{number} " + "and so on, " * 20 for number in range(6)]
    # Known to one node each, in no order that taking turns would give.
    homes = [nodes[number] for number in (0, 0, 1, 1, 1, 0)]
    for prompt, home in zip(prompts, homes, strict=True):
        await mesh.generate(home, prompt.encode(), max_tokens=1)
    gateway = Gateway(tmp_path, *nodes, options=["--policy", "cache_aware"])
    try:
        await gateway.wait_until_ready()
        await gateway.wait_until_known(nodes)
        async with openai.AsyncOpenAI(
            base_url=f"{gateway.url}/v1", api_key="any", max_retries=0, timeout=30.0
        ) as client:
            for prompt in prompts:
                answer = await client.completions.create(model="tiny", prompt=prompt, max_tokens=1, temperature=0.0)
                assert answer.usage is not None
                details = answer.usage.prompt_tokens_details
                assert details is not None
                assert details.cached_tokens == len(prompt) // 8 * 8, gateway.log_text()
    finally:
        gateway.stop()

"""The command line as a user meets it: one line and a status for every mistake, answers on standard output."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from pdmesh.v1 import inference_pb2, inference_pb2_grpc, mesh_pb2, mesh_pb2_grpc
from support.certificates import make_tls_files
from typer.testing import CliRunner, Result

from node_runtime.config import NodeConfig
from node_runtime.errors import InvalidRequest
from node_runtime.rpc import NodeService, RpcContext, RpcServer
from pdmesh_cli.main import app


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"PDMESH_ROUTER": "", "COLUMNS": "100"})


class EchoRouter:
    """Answers with the prompt in two pieces and tells what it was asked."""

    def __init__(self) -> None:
        self.request = inference_pb2.GenerateRequest()

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: RpcContext
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.request = request
        if request.sampling.temperature < 0:
            raise InvalidRequest("temperature: must be >= 0, got -1")
        text = request.text or request.chat.messages[-1].content
        for index in range(request.num_samples or 1):
            for response in self._sample(text, tells_prompt=request.HasField("num_prompt_logprobs") and not index):
                response.index = index
                yield response

    def _sample(self, text: str, *, tells_prompt: bool) -> Iterator[inference_pb2.GenerateResponse]:
        placement = inference_pb2.Placement(request_id="r", decode_node="decode-0", prefill_node="prefill-0")
        yield inference_pb2.GenerateResponse(placement=placement)
        if tells_prompt:
            told = inference_pb2.PromptLogprobs(tokens=[inference_pb2.SampledToken(token_id=8, logprob=-1.5)])
            yield inference_pb2.GenerateResponse(prompt_logprobs=told)
        for piece in (text[:2], text[2:]):
            token = inference_pb2.SampledToken(token_id=5, logprob=-0.25)
            yield inference_pb2.GenerateResponse(delta=inference_pb2.Delta(text=piece, tokens=[token]))
        usage = inference_pb2.Usage(prompt_tokens=3, completion_tokens=2)
        yield inference_pb2.GenerateResponse(
            finish=inference_pb2.Finish(reason=inference_pb2.FINISH_REASON_LENGTH, usage=usage)
        )

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: RpcContext
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse()


class Reporter:
    """A router with one peer that does not answer."""

    def info(self) -> mesh_pb2.NodeInfo:
        return mesh_pb2.NodeInfo(node_id="router-7", role=mesh_pb2.NODE_ROLE_ROUTER)

    async def status(self) -> mesh_pb2.NodeStatus:
        arena = mesh_pb2.ArenaStatus(total_lcm_blocks=9, active_lcm_blocks=2, quarantined_lcm_blocks=1)
        peer = mesh_pb2.PeerStatus(node_id="decode-0", address="127.0.0.1:1")
        return mesh_pb2.NodeStatus(serving=True, num_steps=1234, arena=arena, peers=[peer])

    async def clear_cache(self) -> bool:
        return True


@pytest.fixture
async def router() -> AsyncIterator[tuple[EchoRouter, str]]:
    servicer = EchoRouter()
    server = RpcServer(NodeConfig(node_id="router-7"))
    server.add(inference_pb2_grpc.add_InferenceServicer_to_server, servicer)
    server.add(mesh_pb2_grpc.add_NodeServicer_to_server, NodeService(Reporter(), server, [].append))
    port = await server.start()
    yield servicer, f"127.0.0.1:{port}"
    await server.stop(grace_s=0)


async def test_generate_prints_the_answer_on_stdout_and_its_cost_on_stderr(router: tuple[EchoRouter, str]) -> None:
    servicer, address = router
    arguments = ("generate", "Hello there", "--router", address, "--max-tokens", "3", "--seed", "4", "--stop", "x")
    result = await asyncio.to_thread(_run, *arguments, "--temperature", "0.5", "--top-k", "2", "--top-p", "0.9")
    assert (result.exit_code, result.stdout) == (0, "Hello there\n")
    assert "prefill on prefill-0, decode on decode-0" in result.stderr
    assert "3 prompt, 2 completion (ended at the length limit)" in result.stderr
    sampling = servicer.request.sampling
    assert (servicer.request.max_tokens, list(servicer.request.stop), sampling.seed) == (3, ["x"], 4)
    assert (sampling.temperature, sampling.top_k, round(sampling.top_p, 3)) == (0.5, 2, 0.9)


async def test_generate_sends_a_chat_with_its_system_message(router: tuple[EchoRouter, str]) -> None:
    servicer, address = router
    result = await asyncio.to_thread(_run, "generate", "Hi", "--system", "Be kind.", "--router", address)
    assert result.stdout == "Hi\n"
    assert [(turn.role, turn.content) for turn in servicer.request.chat.messages] == [
        ("system", "Be kind."),
        ("user", "Hi"),
    ]


async def test_generate_prints_one_json_object_when_asked(router: tuple[EchoRouter, str]) -> None:
    _, address = router
    result = await asyncio.to_thread(_run, "generate", "Hello", "--json", "--logprobs", "0", "--router", address)
    answer = json.loads(result.stdout)
    assert (answer["text"], answer["finish"]["reason"], answer["tokens"][0]["logprob"]) == ("Hello", "length", -0.25)


async def test_generate_prints_each_sample_behind_its_number(router: tuple[EchoRouter, str]) -> None:
    servicer, address = router
    wishes = ("--presence-penalty", "0.5", "--frequency-penalty", "-1", "--repetition-penalty", "1.25")
    biases = ("--logit-bias", "5=-1.5", "--logit-bias", "7=2")
    command = ("generate", "Hello", "--router", address, "--num-samples", "2", *wishes, *biases)
    result = await asyncio.to_thread(_run, *command, "--prompt-logprobs", "0")
    assert (result.exit_code, result.stdout) == (0, "[0]\nHello\n[1]\nHello\n")
    assert result.stderr.count("prompt      8    -1.5000") == 1
    assert result.stderr.count("ended at the length limit") == 2
    sampling = servicer.request.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -1.0, 1.25)
    assert dict(sampling.logit_bias) == {5: -1.5, 7: 2.0}
    told = await asyncio.to_thread(_run, *command, "--json")
    assert [json.loads(line)["finish"]["index"] for line in told.stdout.splitlines()] == [0, 1]


@pytest.mark.parametrize("given", [("5",), ("x=1",), ("5=",), ("-1=2",), ("5=1", "5=2")])
def test_generate_refuses_a_bias_that_is_none(given: tuple[str, ...]) -> None:
    flags = [part for item in given for part in ("--logit-bias", item)]
    result = _run("generate", "x", "--router", "127.0.0.1:1", *flags)
    assert result.exit_code == 2
    assert "logit_bias: " in result.stderr


async def test_generate_ends_in_one_line_when_the_router_refuses(router: tuple[EchoRouter, str]) -> None:
    _, address = router
    result = await asyncio.to_thread(_run, "generate", "x", "--temperature", "-1", "--router", address)
    assert result.exit_code == 1
    assert result.stderr == "pdmesh: INVALID_ARGUMENT: temperature: must be >= 0, got -1\n"


async def test_status_shows_the_node_and_that_its_peer_does_not_answer(router: tuple[EchoRouter, str]) -> None:
    _, address = router
    result = await asyncio.to_thread(_run, "status", "--router", address)
    _, first, second = result.stdout.splitlines()
    assert first.split() == ["router-7", "router", address, "serving", "-", "0", "0", "1,234", "3", "0", "9"]
    assert second.split() == ["-", "-", "127.0.0.1:1", "no", "answer"]
    assert result.stderr == "pdmesh: UNAVAILABLE: cannot connect to 127.0.0.1:1: Connection refused\n"
    assert result.exit_code == 1


async def test_a_full_disk_is_named_in_one_line(router: tuple[EchoRouter, str]) -> None:
    _, address = router
    command = (sys.executable, "-m", "pdmesh_cli.main", "generate", "Hello", "--router", address)
    with Path("/dev/full").open("w") as full:
        result = await asyncio.to_thread(subprocess.run, command, stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert result.returncode == 1
    assert result.stderr.decode() == "pdmesh: cannot write the output: No space left on device\n"


async def test_the_port_of_an_http_server_is_not_taken_for_a_router() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1024)
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    result = await asyncio.to_thread(_run, "generate", "x", "--router", f"127.0.0.1:{port}")
    server.close()
    assert result.stderr == (
        f"pdmesh: UNAVAILABLE: cannot connect to 127.0.0.1:{port}: an HTTP server answers there, no gRPC server; "
        "the other port of a router is meant, 7700 by default\n"
    )


async def test_an_authority_is_not_shown_to_a_router_without_certificates(
    router: tuple[EchoRouter, str], tmp_path: Path
) -> None:
    files = make_tls_files(tmp_path)
    trusting = ("generate", "x", "--router", router[1], "--tls-ca", str(files.authority))
    result = await asyncio.to_thread(_run, *trusting)
    assert result.exit_code == 1
    assert "the TLS handshake failed; --tls-ca is for routers with certificates" in result.stderr
    result = _run("generate", "x", "--router", router[1], "--tls-ca", str(tmp_path / "none.crt"))
    assert (result.exit_code, result.stderr) == (
        2,
        f"pdmesh: tls: cannot read {tmp_path / 'none.crt'}: No such file or directory\n",
    )


def test_nobody_is_asked_for_a_question_that_no_router_would_hear() -> None:
    result = CliRunner().invoke(app, ["chat", "--router", "127.0.0.1:1"], input="What is gravity?\n")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("pdmesh: UNAVAILABLE: cannot connect to 127.0.0.1:1: Connection refused; start a")


def test_status_says_how_to_get_a_router() -> None:
    result = _run("status", "--router", "127.0.0.1:1")
    assert result.exit_code == 1
    assert "Connection refused; start a mesh with `pdmesh up`" in result.stderr


def test_generate_names_a_router_that_is_not_there() -> None:
    result = _run("generate", "x", "--router", "127.0.0.1:1")
    assert result.exit_code == 1
    assert result.stderr == (
        "pdmesh: UNAVAILABLE: cannot connect to 127.0.0.1:1: Connection refused; start a mesh with `pdmesh up`, "
        "or name its router with --router or PDMESH_ROUTER\n"
    )


@pytest.mark.parametrize(("option", "others"), [("--port", ()), ("--http-port", ("--port", "0"))])
def test_up_says_at_once_that_a_port_is_taken(tmp_path: Path, option: str, others: tuple[str, ...]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        result = _run("up", "--model", str(tmp_path), option, str(port), *others)
    assert result.exit_code == 1
    assert result.stderr == (
        f"pdmesh: cannot listen on 127.0.0.1:{port}: the port is already in use; choose another with {option}, "
        "or 0 for a free one\n"
    )


def test_up_does_not_start_with_one_port_for_both_of_its_faces(tmp_path: Path) -> None:
    result = _run("up", "--model", str(tmp_path), "--port", "7780")
    assert result.exit_code == 2
    assert result.stderr.startswith("pdmesh: port, http_port: both are 7780; choose another")


@pytest.mark.parametrize(("given", "typed"), [("-", b"caf\xe9"), ("caf\udce9", b"")])
def test_a_prompt_that_is_no_text_is_refused(given: str, typed: bytes) -> None:
    result = CliRunner().invoke(app, ["generate", given, "--router", "127.0.0.1:1"], input=typed)
    assert result.exit_code == 2
    assert result.stderr.startswith("pdmesh: prompt: is no text in UTF-8")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("router", "--model", "m"), "give at least one prefill and one decode node, or one fused node"),
        (("prefill", "--model", "m", "--port", "70000"), "port"),
        (("decode", "--model", "m", "--memory", "lots"), "expected a size such as 512MiB or 1GiB, got 'lots'"),
        (("fused",), "model: required"),
        (("fused", "--config", "/nowhere.yaml"), "/nowhere.yaml"),
        (("up", "--log-level", "loud"), "log_level"),
        (("up", "--max-num-seqs", "0"), "max_batch_size is also called max_num_seqs"),
        (("up", "--memory", "lots"), "expected a size such as 512MiB or 1GiB, got 'lots'"),
    ],
)
def test_a_wrong_configuration_is_one_line_and_status_two(arguments: tuple[str, ...], complaint: str) -> None:
    result = _run(*arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert result.stderr.startswith("pdmesh: ")
    assert len(result.stderr.splitlines()) == 1


def test_an_unknown_key_of_a_file_is_named_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "node.yaml"
    file.write_text("model: m\nmemroy: 1GiB\n")
    result = _run("fused", "--config", str(file))
    assert result.exit_code == 2
    assert result.stderr == f'pdmesh: config file {file}: key "memroy" is unknown, did you mean "memory"?\n'


@pytest.mark.parametrize("command", ["up", "demo"])
def test_a_model_that_does_not_exist_is_refused_before_anything_starts(command: str) -> None:
    result = _run(command, "--model", "smollm3")
    assert result.exit_code == 1
    assert 'model "smollm3" is neither an existing path nor an alias; aliases: smollm2' in result.stderr


def test_the_version_is_that_of_the_package() -> None:
    assert _run("version").stdout == f"pdmesh {importlib.metadata.version('pdmesh')}\n"


def test_the_command_line_starts_without_torch() -> None:
    script = "import sys, pdmesh_cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0

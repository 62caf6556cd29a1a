"""The command `generate`: reads options, calls the module that does the work."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pdmesh_cli.defaults import DEFAULT_ROUTER
from pdmesh_cli.failures import reported_failures
from pdmesh_cli.options import Adapter, Router, TlsCa, TlsCert, TlsKey, TlsServerName, TokenFile


def generate(
    prompt: Annotated[str, typer.Argument(help='The prompt, or "-" to read it from standard input.')],
    router: Router = DEFAULT_ROUTER,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a chat message.")] = False,
    system: Annotated[str | None, typer.Option(help="System message in front of the chat message.")] = None,
    model: Annotated[str, typer.Option(help="Name of the model. Default: the only one served.")] = "",
    adapter: Adapter = "",
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate. Default: 256.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. Default: 0.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep only the k most likely tokens. Default: all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the smallest set with this mass. Default: 1.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text. Default: drawn by the server.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="<str>", help="End before this text. May be repeated.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at the model's end tokens.")] = False,
    num_samples: Annotated[
        int | None, typer.Option(help="Answers, which differ in their seeds: seed, seed + 1, ... Default: 1.")
    ] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Against tokens of the answer. Default: 0.")] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="Against tokens of the answer, by their number. Default: 0.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Against tokens of prompt and answer; divides their logits. Default: 1.")
    ] = None,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(metavar="<token=bias>", help="Add this to the logit of a token. May be repeated."),
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="Print log-probabilities of each token and of this many alternatives.")
    ] = None,
    prompt_logprobs: Annotated[
        int | None, typer.Option(help="Likewise of each token of the prompt, which is then computed whole.")
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(metavar="<file>", help="Answer in JSON that the schema in this file allows.")
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="Answer in text that matches this regular expression as a whole.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole answer as one JSON object, each sample on a line.")
    ] = False,
    timeout_s: Annotated[
        float, typer.Option(min=0.001, metavar="<float>", help="Deadline of the answer. Seconds.")
    ] = 600,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_server_name: TlsServerName = None,
) -> None:
    """Generate text for one prompt: the answer goes to standard output, what it cost to standard error."""
    from pdmesh_cli.client_types import GenerateOptions
    from pdmesh_cli.generate import biases_of, prompt_of, prompt_text, run_generate, schema_text
    from pdmesh_cli.identity import identity_of

    out, err = Console(), Console(stderr=True, highlight=False)
    with reported_failures():
        options = GenerateOptions(
            model=model,
            adapter=adapter,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=tuple(stop or ()),
            ignore_eos=ignore_eos,
            num_samples=num_samples,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            repetition_penalty=repetition_penalty,
            logit_bias=biases_of(logit_bias or ()),
            num_logprobs=logprobs,
            num_prompt_logprobs=prompt_logprobs,
            json_schema=schema_text(json_schema, regex),
            regex=regex,
        )
        identity = identity_of(
            token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, tls_server_name=tls_server_name
        )
        work = run_generate(
            router,
            prompt_of(prompt_text(prompt), chat=chat or system is not None, system=system),
            options,
            timeout_s=timeout_s,
            identity=identity,
            as_json=as_json,
            out=out,
            err=err,
        )
        asyncio.run(work)

"""The commands `chat` and `bench`: read options, call the module that does the work."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from pdmesh_cli.defaults import DEFAULT_ROUTER
from pdmesh_cli.failures import EXIT_FAILURE, reported_failures
from pdmesh_cli.options import Adapter, Router, Timeout, TlsCa, TlsCert, TlsKey, TlsServerName, TokenFile


def chat(
    router: Router = DEFAULT_ROUTER,
    system: Annotated[str | None, typer.Option(help="System message in front of the conversation.")] = None,
    model: Annotated[str, typer.Option(help="Name of the model. Default: the only one served.")] = "",
    adapter: Adapter = "",
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of each answer. Default: 256.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. Default: 0.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text. Default: drawn by the server.")] = None,
    timeout_s: Timeout = 600,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_server_name: TlsServerName = None,
) -> None:
    """Talk with the model. Every turn finds the conversation before it in the cache."""
    from pdmesh_cli.chat import PROMPT, Conversation, run_chat
    from pdmesh_cli.client import AsyncPdmeshClient
    from pdmesh_cli.client_types import GenerateOptions
    from pdmesh_cli.identity import Identity, identity_of

    out, err = Console(), Console(stderr=True, highlight=False)
    options = GenerateOptions(model=model, adapter=adapter, max_tokens=max_tokens, temperature=temperature, seed=seed)

    async def talk(identity: Identity) -> None:
        async with AsyncPdmeshClient(router, identity=identity) as client:
            # Whoever is to type a question should know beforehand that nobody would hear it.
            await client.list_models()
            conversation = Conversation(client, options, system=system, timeout_s=timeout_s, out=out, err=err)
            await run_chat(conversation, read_line=lambda: input(PROMPT if sys.stdin.isatty() else ""), err=err)

    with reported_failures():
        identity = identity_of(
            token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, tls_server_name=tls_server_name
        )
        asyncio.run(talk(identity))


def bench(
    router: Router = DEFAULT_ROUTER,
    num_requests: Annotated[int, typer.Option(min=1, metavar="<int>", help="Requests to send.")] = 64,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, metavar="<int>", help="Requests at a time.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, metavar="<int>", help="Tokens of each prompt.")] = 256,
    shared_tokens: Annotated[
        int, typer.Option(min=0, metavar="<int>", help="Tokens at the beginning that all prompts have in common.")
    ] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, metavar="<int>", help="Tokens of each answer.")] = 64,
    seed: Annotated[int, typer.Option(metavar="<int>", help="Same seed, same prompts.")] = 0,
    adapter: Adapter = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")] = False,
    timeout_s: Timeout = 600,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_server_name: TlsServerName = None,
) -> None:
    """Send random prompts and show throughput and latencies. Fails if any request did."""
    from pdmesh_cli.client import AsyncPdmeshClient
    from pdmesh_cli.identity import Identity, identity_of
    from pdmesh_cli.load import Load, Outcomes, describe_failures, describe_rates, figures, load_table, run_load

    err = Console(stderr=True, highlight=False)

    async def send(load: Load, identity: Identity) -> Outcomes:
        async with AsyncPdmeshClient(router, identity=identity) as client:
            # Where nobody watches it shows nothing.
            with err.status(f"0 of {load.num_requests} requests have ended") as status:

                def show(outcomes: Outcomes) -> None:
                    failed = f", {outcomes.failures.total()} failed" if outcomes.failures else ""
                    status.update(f"{outcomes.num_ended} of {load.num_requests} requests have ended{failed}")

                return await run_load(client, load, progress=show)

    with reported_failures():
        identity = identity_of(
            token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, tls_server_name=tls_server_name
        )
        load = Load(
            num_requests=num_requests,
            concurrency=concurrency,
            prompt_tokens=prompt_tokens,
            shared_tokens=shared_tokens,
            max_tokens=max_tokens,
            seed=seed,
            adapter=adapter,
            timeout_s=timeout_s,
        )
        outcomes = asyncio.run(send(load, identity))
    if as_json:
        typer.echo(json.dumps(figures(outcomes)))
    else:
        console = Console(highlight=False, soft_wrap=True)
        console.print(describe_rates(outcomes))
        console.print(load_table(outcomes))
    for line in describe_failures(outcomes.failures):
        typer.echo(line, err=True)
    if outcomes.failures:
        sys.exit(EXIT_FAILURE)

"""Clients of the HTTP API of a router under test."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
from pdmesh.v1 import decode_pb2, inference_pb2
from unit.router_node.fakes import (
    RunningRouter,
)

HI = [{"role": "user", "content": "hi"}]
BAD_SCHEMA = {"type": "colour"}


def client_of(router: RunningRouter) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://{router.router.http_address}/v1", api_key="any", max_retries=0)


async def ask_raw(router: RunningRouter, request: bytes) -> tuple[int, dict[str, Any]]:
    """Status and JSON body of the answer to these bytes."""
    host, port = router.router.http_address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body) if body.startswith(b"{") else {}


def post(path: str, body: bytes, *headers: str) -> bytes:
    fields = ("host: x", "connection: close", f"content-length: {len(body)}", *headers)
    return "\r\n".join((f"POST {path} HTTP/1.1", *fields, "", "")).encode() + body


def tokens_with_logprobs(text: str) -> decode_pb2.DecodeResponse:
    tokens = [
        inference_pb2.SampledToken(
            token_id=byte,
            logprob=-0.5,
            top_logprobs=[
                inference_pb2.TokenLogprob(token_id=byte, logprob=-0.5),
                inference_pb2.TokenLogprob(token_id=0x7A, logprob=float("-inf")),
            ],
        )
        for byte in text.encode()
    ]
    return decode_pb2.DecodeResponse(tokens=decode_pb2.DecodeTokens(tokens=tokens))

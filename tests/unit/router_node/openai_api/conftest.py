"""A router with an HTTP API in front of one pair of nodes, and the official client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest
from pdmesh.v1 import inference_pb2
from unit.router_node.fakes import (
    EOS,
    FakeNode,
    RunningRouter,
    StartRouter,
    admitted_event,
    finish_event,
    tokens_event,
)
from unit.router_node.openai_api.clients import client_of

STOP = inference_pb2.FINISH_REASON_STOP


@pytest.fixture
async def router(start_router: StartRouter, prefill: FakeNode, decode: FakeNode) -> RunningRouter:
    decode.script = [admitted_event(), tokens_event("ab"), tokens_event("c"), finish_event(STOP, EOS)]
    return await start_router(prefill, decode, http="127.0.0.1:0", served_model_name="tiny", max_attempts=1)


@pytest.fixture
async def client(router: RunningRouter) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(router) as client:
        yield client

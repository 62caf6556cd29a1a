"""Puts the engine protocol of one node together. Imported, and with it the package it needs, where it is asked for."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pdmesh.v1 import mesh_pb2

from decode_node.config import GeneratingNodeConfig
from decode_node.engine_protocol.kv_feed import KvFeed
from decode_node.peers import PrefillPeers
from decode_node.service import DecodeService
from node_runtime.clock import Clock
from node_runtime.engine.core import ComputeCore
from node_runtime.engine.loop import EngineLoop
from node_runtime.errors import BadConfig
from node_runtime.rpc import RpcServer

_PACKAGE = "smg_grpc_proto"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeParts:
    """What a node has that the protocol is served from.

    `peers` is None on a fused node; `why_unhealthy` answers "" while the node serves.
    """

    config: GeneratingNodeConfig
    core: ComputeCore
    info: mesh_pb2.NodeInfo
    decode: DecodeService
    peers: PrefillPeers | None
    prefills_locally: bool
    engine: EngineLoop
    kv_feed: KvFeed
    clear_cache: Callable[[], Awaitable[bool]]
    why_unhealthy: Callable[[], str]
    clock: Clock


def check_installed(config: GeneratingNodeConfig) -> None:
    """Raises BadConfig when the configuration asks for the protocol and its package is missing."""
    if config.engine_protocol != "off" and importlib.util.find_spec(_PACKAGE) is None:
        raise BadConfig(
            f"engine_protocol: {config.engine_protocol} needs the package smg-grpc-proto, which is not installed; "
            "install it with: pip install 'pdmesh[smg]'"
        )


async def add_engine_protocol(parts: NodeParts, server: RpcServer) -> None:
    """Adds the service to a server that does not listen yet. Requires `check_installed`.

    Reads the tokenizer off the event loop. Raises BadConfig when the model has none.
    """
    from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc

    from decode_node.engine_protocol.descriptions import NodeDescription
    from decode_node.engine_protocol.requests import RequestLimits
    from decode_node.engine_protocol.served_model import ServedModel
    from decode_node.engine_protocol.service import EngineProtocolService
    from decode_node.engine_protocol.whole_engine import WholeEngine

    facts, clock = parts.core.facts, parts.clock
    model = await asyncio.to_thread(ServedModel.load, facts.path)
    service = EngineProtocolService(
        engine=WholeEngine(
            parts.decode,
            node_id=parts.config.node_id,
            peers=parts.peers,
            prefills_locally=parts.prefills_locally,
            prefix_granularity=facts.prefix_granularity,
        ),
        limits=RequestLimits(
            vocab_size=facts.vocab_size,
            context_tokens=facts.context_tokens,
            max_request_tokens=parts.core.scheduler.max_request_tokens,
            eos_token_ids=model.tokenizer.eos_token_ids,
        ),
        model=model,
        description=NodeDescription(
            config=parts.config,
            facts=facts,
            info=parts.info,
            model=model,
            snapshot=lambda: parts.engine.snapshot,
            started_unix_s=clock.unix_ns_at(clock.now_s()) / 1e9,
        ),
        kv_feed=parts.kv_feed,
        clear_cache=parts.clear_cache,
        why_unhealthy=parts.why_unhealthy,
        clock=clock,
    )
    server.add(tokenspeed_scheduler_pb2_grpc.add_TokenSpeedSchedulerServicer_to_server, service)

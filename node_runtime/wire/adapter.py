"""Codec of adapters in requests and in what nodes tell of themselves."""

from __future__ import annotations

from collections.abc import Iterable

from pdmesh.v1 import inference_pb2

from node_runtime.adapters import AdapterId
from node_runtime.request_rules import require

MAX_ADAPTERS = 1024


def adapter_to_proto(adapter: AdapterId | None) -> inference_pb2.Adapter | None:
    return None if adapter is None else inference_pb2.Adapter(name=adapter.name, digest=adapter.digest)


def adapter_from_proto(message: inference_pb2.Adapter) -> AdapterId:
    """Raises InvalidRequest naming the field."""
    return AdapterId(name=message.name, digest=message.digest)


def adapters_to_proto(adapters: Iterable[AdapterId]) -> list[inference_pb2.Adapter]:
    return [inference_pb2.Adapter(name=adapter.name, digest=adapter.digest) for adapter in adapters]


def adapters_from_proto(messages: Iterable[inference_pb2.Adapter]) -> tuple[AdapterId, ...]:
    """What a node has. Raises InvalidRequest when that makes no sense."""
    adapters = tuple(map(adapter_from_proto, messages))
    require(len(adapters) <= MAX_ADAPTERS, f"adapters: {len(adapters)} given, at most {MAX_ADAPTERS} allowed")
    for adapter in adapters:
        require(bool(adapter.digest), f'adapters: "{adapter.name}" is told of without its digest')
    require(len({adapter.name for adapter in adapters}) == len(adapters), "adapters: one name is given twice")
    return adapters

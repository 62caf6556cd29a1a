"""Codec of the events about cached prefixes, as gateways place requests by them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from smg_grpc_proto.generated import common_pb2

from decode_node.engine_protocol.kv_feed import KvBatch
from scheduler_core import PrefixCleared, PrefixEvent, PrefixRemoved, PrefixStored

_SIGN_BIT: Final = 1 << 63
_MODULUS: Final = 1 << 64


def batch_to_proto(batch: KvBatch) -> common_pb2.KvEventBatch:
    """A part of the state begins, if it is the first one, with what voids everything before it."""
    message = common_pb2.KvEventBatch(sequence_number=batch.sequence, timestamp=batch.unix_s)
    if batch.part is not None:
        message.snapshot.index = batch.part.index
        message.snapshot.count = batch.part.num_parts
        message.snapshot.blocks = batch.part.num_grains
        if batch.part.index == 0:
            message.events.add().cleared.SetInParent()
    message.events.extend(_events(batch))
    return message


def repeat_of(sequence: int, unix_s: float) -> common_pb2.KvEventBatch:
    """A batch without events, under the number of the last one: the stream stands, and there is nothing new."""
    return common_pb2.KvEventBatch(sequence_number=sequence, timestamp=unix_s)


def _events(batch: KvBatch) -> Iterator[common_pb2.KvCacheEvent]:
    """Grains that continue one another are told in one event."""
    line: list[PrefixStored] = []
    for event in batch.events:
        if isinstance(event, PrefixStored) and line and event.parent_hash == line[-1].hash:
            line.append(event)
            continue
        if line:
            yield _stored(line)
            line = []
        if isinstance(event, PrefixStored):
            line.append(event)
        else:
            yield _gone(event)
    if line:
        yield _stored(line)


def _gone(event: PrefixEvent) -> common_pb2.KvCacheEvent:
    match event:
        case PrefixRemoved():
            removed = common_pb2.KvBlocksRemoved(block_hashes=[_signed(event.hash)])
            return common_pb2.KvCacheEvent(removed=removed)
        case PrefixCleared():
            return common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())
        case _:
            raise ValueError(f"{event!r} tells of something stored")


def _stored(line: list[PrefixStored]) -> common_pb2.KvCacheEvent:
    parent = line[0].parent_hash
    blocks = [
        common_pb2.KvBlock(
            block_hash=_signed(grain.hash), token_ids=grain.tokens.tolist(), block_size=grain.prefix_granularity
        )
        for grain in line
    ]
    stored = common_pb2.KvBlocksStored(blocks=blocks, parent_block_hash=None if parent is None else _signed(parent))
    return common_pb2.KvCacheEvent(stored=stored)


def _signed(number: int) -> int:
    """The same 64 bits as a signed number."""
    return number - _MODULUS if number & _SIGN_BIT else number

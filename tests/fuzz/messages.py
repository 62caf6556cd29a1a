"""Messages that nobody sends by accident, made from descriptors: any of a type, and good ones that were spoilt.

A good message with a wrong field gets further into a node than one of noise. Knows the shape of messages and nothing of
what they mean, but for fields that would have a node ask the network for a name.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]

_DEPTH = 4
_EITHER = st.booleans()
_UP_TO = {limit: st.integers(0, limit) for limit in (2, 4, 6, 9)}
_HOW_MANY = st.sampled_from((0, 1, 2, 40, 9_000))

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
# On both sides of what fields allow, and of what fits somewhere inside.
_EDGES = (-1, 0, 1, 2, 3, 7, 8, 16, 20, 64, 255, 256, 257, 400, 4095, 4096, 60_000, 65_536, 2**31 - 1, 2**32 - 1, 2**62)
_TEXTS = (
    "",
    "\0",
    "\n\r\x1b[31m",
    "x" * 129,
    "\N{FAMILY}" * 70,
    "y" * 70_000,
    "%s%n{}{0}",
    "{{ 7 * 7 }}",
    "../../etc/passwd",
    "\N{RIGHT-TO-LEFT OVERRIDE}\N{ZERO WIDTH JOINER}\ufeff\ufffe\N{COMBINING ACUTE ACCENT}",
    "(" * 3000,
    "(a{1,999}){1,999}",
    "[" * 3000,
    '{"a":' * 3000,
    '{"$ref": "#"}',
    '{"type": "string", "pattern": "(?=a)b"}',
    '{"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#/$defs/a"}}}',
    '{"minItems": 1e308, "maximum": -1e400, "type": ["array", "number"]}',
    "NaN",
    "9" * 5000,
    "user",
    "assistant",
    "tool",
)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e-38, 3.4e38, float("nan"), float("inf"), float("-inf"), 2.0, 100.0)
_NAMES_OF_HOSTS = (
    "",
    "127.0.0.1:1",
    "[::1]:1",
    "127.0.0.1:65536",
    ":7001",
    "http://127.0.0.1:1",
    "unix:/tmp/x",
    "\0:1",
)
# A made-up name would be looked up.
_OWN_VALUES: Mapping[str, st.SearchStrategy[Any]] = {
    "pdmesh.v1.DecodeRequest.prefill_address": st.sampled_from(_NAMES_OF_HOSTS)
}


def message_of(descriptor: Descriptor) -> Message:
    """An empty one."""
    return GetMessageClass(descriptor)()


def encoded(message: Message) -> bytes:
    return message.SerializeToString()


# Strategies are kept: making one takes longer than drawing from it.


@cache
def any_message(descriptor: Descriptor, depth: int = _DEPTH) -> st.SearchStrategy[Message]:
    """Messages of which about half of the fields are set, to whatever their types allow."""
    return _any_message(descriptor, depth)


@st.composite
def _any_message(draw: Draw, descriptor: Descriptor, depth: int) -> Message:
    message = message_of(descriptor)
    for field in descriptor.fields:
        if draw(_EITHER):
            _set(draw, message, field, depth)
    return message


@st.composite
def spoilt(draw: Draw, good: Message) -> Message:
    """`good` with one to three of its fields, at any depth, made wrong, lost, repeated or put out of order."""
    message = type(good)()
    message.CopyFrom(good)
    for _ in range(1 + draw(_UP_TO[2])):
        places = list(_places(message))
        if places:
            place, field = places[draw(st.integers(0, len(places) - 1))]
            _spoil(draw, place, field)
    return message


@st.composite
def hostile(draw: Draw, descriptor: Descriptor, good: tuple[Message, ...]) -> Message:
    """Mostly a spoilt one of `good`, now and then one of them as it is, or anything."""
    choice = draw(_UP_TO[9])
    if choice == 0 or not good:
        return draw(any_message(descriptor))
    chosen = draw(st.sampled_from(range(len(good))))
    return good[chosen] if choice == 1 else draw(spoilt(good[chosen]))


@st.composite
def raw_bytes(draw: Draw, good: tuple[Message, ...]) -> bytes:
    """What may come over a connection where a message should: noise, messages that were cut off, flipped or glued."""
    encoded = draw(st.sampled_from(good)).SerializeToString() if good else b""
    match draw(_UP_TO[6]):
        case 0:
            return draw(st.binary(max_size=200))
        case 1:
            return encoded[: draw(st.integers(0, len(encoded)))]
        case 2:
            place = draw(st.integers(0, max(0, len(encoded) - 1)))
            return encoded[:place] + draw(st.binary(min_size=1, max_size=4)) + encoded[place + 1 :]
        case 3:
            # A length that promises more than there is.
            return encoded + b"\x0a" + b"\xff" * 9 + b"\x01"
        case 4:
            # Groups inside groups, deeper than any parser follows.
            return encoded + b"\x0b" * draw(st.sampled_from((1, 99, 101, 20_000)))
        case 5:
            # A field of a later release.
            return encoded + b"\xfa\xff\x03" + bytes([5]) + b"later"
        case _:
            return encoded * draw(st.integers(2, 40))


def _set(draw: Draw, message: Message, field: FieldDescriptor, depth: int) -> None:
    if _is_map(field):
        _fill_map(draw, message, field)
    elif field.is_repeated and field.message_type is not None:
        if depth:
            inner = draw(any_message(field.message_type, depth - 1))
            getattr(message, field.name).extend([inner] * draw(st.sampled_from((0, 1, 2, 300))))
    elif field.is_repeated:
        values = draw(st.lists(_values(field), max_size=4))
        getattr(message, field.name).extend(values * draw(_HOW_MANY) if len(values) == 1 else values)
    elif field.message_type is not None:
        inner = getattr(message, field.name)
        inner.SetInParent()
        if depth:
            inner.CopyFrom(draw(any_message(field.message_type, depth - 1)))
    else:
        setattr(message, field.name, draw(_values(field)))


def _fill_map(draw: Draw, message: Message, field: FieldDescriptor) -> None:
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    filled = getattr(message, field.name)
    keys = draw(st.lists(_values(key), max_size=3))
    if draw(_UP_TO[9]) == 0:
        keys = [type(each)(number) for each in keys[:1] for number in range(2000)]
    for each in keys:
        if value.message_type is None:
            filled[each] = draw(_values(value)) if len(keys) < 9 else value.default_value
        else:
            filled[each].CopyFrom(draw(any_message(value.message_type, 1)) if len(keys) < 9 else filled[each])


def _spoil(draw: Draw, message: Message, field: FieldDescriptor) -> None:
    values = getattr(message, field.name)
    if _is_map(field) or not field.is_repeated or not values:
        if draw(_UP_TO[4]) == 0:
            message.ClearField(field.name)
        else:
            _set(draw, message, field, depth=2)
        return
    index = draw(st.integers(0, len(values) - 1))
    match draw(_UP_TO[4]):
        case 0:
            message.ClearField(field.name)
        case 1:
            del values[index]
        case 2:
            values.extend([values[index]] * draw(st.sampled_from((1, 2, 5_000))))
        case 3:
            reordered = list(values)[::-1]
            message.ClearField(field.name)
            getattr(message, field.name).extend(reordered)
        case _ if field.message_type is None:
            values[index] = draw(_values(field))
        case _:
            values[index].CopyFrom(draw(any_message(field.message_type, 2)))


def _places(message: Message) -> Iterator[tuple[Message, FieldDescriptor]]:
    """Every field of the message and of those in it."""
    for field in message.DESCRIPTOR.fields:
        yield message, field
        if field.message_type is None or _is_map(field):
            continue
        if field.is_repeated:
            for inner in getattr(message, field.name)[:3]:
                yield from _places(inner)
        elif message.HasField(field.name):
            yield from _places(getattr(message, field.name))


@cache
def _values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    """Of one value of a field that is no message."""
    if field.full_name in _OWN_VALUES:
        return _OWN_VALUES[field.full_name]
    if field.cpp_type in _INTEGERS:
        low, high = _INTEGERS[field.cpp_type]
        return st.sampled_from([low, *(edge for edge in _EDGES if low < edge < high), high]) | st.integers(low, high)
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.CPPTYPE_ENUM:
            return st.sampled_from([value.number for value in field.enum_type.values] + [-1, 99, 2**31 - 1])
        case FieldDescriptor.CPPTYPE_FLOAT:
            return st.sampled_from([_as_float32(value) for value in _FLOATS]) | st.floats(width=32)
        case FieldDescriptor.CPPTYPE_DOUBLE:
            return st.sampled_from([*_FLOATS, 1e308]) | st.floats()
        case _ if field.type == FieldDescriptor.TYPE_BYTES:
            return st.sampled_from([b"", b"\0" * 16, b"k" * 65, b"\xff" * 32, b"b" * 70_000]) | st.binary(max_size=40)
        case _:
            return st.sampled_from(_TEXTS) | st.text(max_size=12)


def _as_float32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry

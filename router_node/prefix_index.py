"""Which node has which prefixes cached, as far as the nodes told and as this router's own placements promise.

Pure bookkeeping, without I/O and clock. What a node tells is a hint, so it is believed, but bounded: no node can make
this index grow beyond its share. Owned by the router's event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

from node_runtime.prefix_feed import PrefixChange

_log = logging.getLogger("pdmesh.router.prefixes")


@dataclass(slots=True)
class _Node:
    """`bit` is a power of two of its own."""

    address: str
    bit: int
    incarnation: int = 0
    sequence: int = 0
    keys: set[int] = field(default_factory=set)
    # Prompts under way whose prefixes will be there when they are computed: how many have each key.
    expected: dict[int, int] = field(default_factory=dict)
    is_full: bool = False
    num_expecting: int = 0
    # It goes with the last prompt that is expected.
    is_forgotten: bool = False


class PrefixIndex:
    """Keys of prefixes by node."""

    def __init__(self, *, max_keys_per_node: int) -> None:
        """Raises ValueError naming the field, its value and the limit."""
        if max_keys_per_node < 0:
            raise ValueError(f"max_keys_per_node: {max_keys_per_node} given, at least 0 required")
        self._max_keys_per_node = max_keys_per_node
        self._nodes: dict[str, _Node] = {}
        # Sets of nodes as sums of their bits: one look-up per grain answers for all nodes.
        self._holders: dict[int, int] = {}
        self._free_bits: list[int] = []

    def num_keys(self, address: str) -> int:
        """How many keys are kept for a node."""
        node = self._nodes.get(address)
        return 0 if node is None else len(node.keys)

    def position(self, address: str) -> tuple[int, int]:
        """Incarnation and sequence up to which everything is known of a node; both 0 where nothing is."""
        node = self._nodes.get(address)
        return (0, 0) if node is None else (node.incarnation, node.sequence)

    def apply(self, address: str, incarnation: int, change: PrefixChange) -> bool:
        """What a node told. False when something before it is missing: then nothing is known of the node any more."""
        node = self._node(address)
        node.is_forgotten = False
        if change.is_snapshot or node.incarnation != incarnation:
            self._drop_keys(node)
            node.incarnation = incarnation
        if change.base_sequence != node.sequence:
            self._drop_keys(node)
            return False
        for key in change.removed:
            if key in node.keys:
                node.keys.remove(key)
                self._clear_bit(node, key)
        for key in change.stored:
            self._store(node, key)
        node.sequence = change.sequence
        return True

    def forget(self, address: str) -> None:
        """Drops everything about a node."""
        node = self._nodes.get(address)
        if node is None:
            return
        self._drop_keys(node)
        node.incarnation, node.is_forgotten = 0, True
        self._remove_forgotten(node)

    @contextmanager
    def expecting(self, keys: Sequence[int], addresses: Iterable[str]) -> Iterator[None]:
        """Inside the block these nodes count as having these prefixes: a prompt with them is on its way there."""
        nodes = [self._node(address) for address in addresses] if keys else []
        for node in nodes:
            node.num_expecting += 1
            for key in keys:
                node.expected[key] = node.expected.get(key, 0) + 1
                self._holders[key] = self._holders.get(key, 0) | node.bit
        try:
            yield
        finally:
            for node in nodes:
                self._stop_expecting(node, keys)
                node.num_expecting -= 1
                self._remove_forgotten(node)

    def find_depths(self, keys: Sequence[int], addresses: Iterable[str]) -> Mapping[str, int]:
        """For each of these nodes that has some of a prompt: with how many of its grains the longest hit would end.

        `keys` are those of the prompt, front first.
        """
        wanted = {node.bit: address for address in addresses if (node := self._nodes.get(address)) is not None}
        mask = sum(wanted)
        depths: dict[str, int] = {}
        holders = self._holders
        for depth in range(len(keys), 0, -1):
            if not mask:
                break
            found = holders.get(keys[depth - 1], 0) & mask
            mask &= ~found
            while found:
                bit = found & -found
                depths[wanted[bit]] = depth
                found &= found - 1
        return MappingProxyType(depths)

    def _node(self, address: str) -> _Node:
        node = self._nodes.get(address)
        if node is None:
            bit = self._free_bits.pop() if self._free_bits else 1 << len(self._nodes)
            node = self._nodes[address] = _Node(address, bit)
        return node

    def _store(self, node: _Node, key: int) -> None:
        if len(node.keys) >= self._max_keys_per_node and key not in node.keys:
            if not node.is_full:
                node.is_full = True
                _log.warning("%s tells of more than %d prefixes; no more are kept", node.address, len(node.keys))
            return
        node.keys.add(key)
        self._holders[key] = self._holders.get(key, 0) | node.bit

    def _stop_expecting(self, node: _Node, keys: Sequence[int]) -> None:
        for key in keys:
            num_left = node.expected[key] - 1
            if num_left:
                node.expected[key] = num_left
            else:
                del node.expected[key]
                self._clear_bit(node, key)

    def _clear_bit(self, node: _Node, key: int) -> None:
        """Unless there is another reason for it."""
        if key in node.keys or key in node.expected:
            return
        left = self._holders.get(key, 0) & ~node.bit
        if left:
            self._holders[key] = left
        else:
            self._holders.pop(key, None)

    def _remove_forgotten(self, node: _Node) -> None:
        if node.is_forgotten and node.num_expecting == 0:
            del self._nodes[node.address]
            self._free_bits.append(node.bit)

    def _drop_keys(self, node: _Node) -> None:
        keys, node.keys = node.keys, set()
        for key in keys:
            self._clear_bit(node, key)
        node.sequence, node.is_full = 0, False

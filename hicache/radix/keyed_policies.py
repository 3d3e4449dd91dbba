"""Orders of eviction by a key: few uses, age, recency, priority."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache.radix.node import RadixNode

__all__ = ["FifoPolicy", "KeyedPolicy", "LfuPolicy", "MruPolicy", "PriorityPolicy"]

_SPARE_ENTRIES = 64
"""Entries of departed nodes that are always allowed, so that small heaps are not rebuilt."""


class KeyedPolicy:
    """The smallest key first, at the cost of a logarithm.

    A key may grow while its node stands in the queue, without a call: `pop` looks at it again and
    puts the node back where it belongs. It may not shrink unnoticed. An entry whose node left is
    dropped when it surfaces, or by a rebuild when such entries are the majority.
    """

    def __init__(self) -> None:
        self._keys: dict[RadixNode, tuple[int, ...]] = {}
        self._heap: list[tuple[tuple[int, ...], int, RadixNode]] = []

    def key(self, node: RadixNode) -> tuple[int, ...]:
        """Return what orders `node` among the others; the older node goes first among equals."""
        return (node.last_access,)

    def add(self, node: RadixNode) -> None:
        """See `EvictionPolicy.add`."""
        self._keys[node] = key = self.key(node)
        if len(self._heap) > 2 * len(self._keys) + _SPARE_ENTRIES:
            self._heap = [(key, kept.id, kept) for kept, key in self._keys.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (key, node.id, node))

    def discard(self, node: RadixNode) -> None:
        """See `EvictionPolicy.discard`."""
        del self._keys[node]

    def touch(self, node: RadixNode) -> None:
        """See `EvictionPolicy.touch`; `pop` finds keys that grew."""

    def pop(self) -> RadixNode | None:
        """See `EvictionPolicy.pop`."""
        heap, keys = self._heap, self._keys
        while heap:
            key, _, node = heapq.heappop(heap)
            if keys.get(node) != key:
                continue
            del keys[node]
            if self.key(node) <= key:
                return node
            self.add(node)
        return None

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[RadixNode]:
        return iter(self._keys)


class LfuPolicy(KeyedPolicy):
    """Fewest requests first, then least recently used. A run counts anew once it was deleted."""

    def key(self, node: RadixNode) -> tuple[int, ...]:
        """See `KeyedPolicy.key`."""
        return node.hit_count, node.last_access


class FifoPolicy(KeyedPolicy):
    """In the order in which runs came into the tree."""

    def key(self, node: RadixNode) -> tuple[int, ...]:
        """See `KeyedPolicy.key`."""
        return (node.created,)


class MruPolicy(KeyedPolicy):
    """Most recently used first: for scans in a circle that are longer than the memory.

    A node that was used only by way of nodes below it keeps its place.
    """

    def key(self, node: RadixNode) -> tuple[int, ...]:
        """See `KeyedPolicy.key`."""
        return (-node.last_access,)

    def touch(self, node: RadixNode) -> None:
        """See `EvictionPolicy.touch`."""
        if self.key(node) != self._keys[node]:
            self.add(node)


class PriorityPolicy(KeyedPolicy):
    """Lowest priority first, see `RadixTree.prioritize`; then least recently used."""

    def key(self, node: RadixNode) -> tuple[int, ...]:
        """See `KeyedPolicy.key`."""
        return node.priority, node.last_access

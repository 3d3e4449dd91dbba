"""In which order evictable nodes go."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache.radix.node import RadixNode
    from hicache.radix.run_history import RunHistory

__all__ = ["EvictionPolicy", "LearningPolicy", "LruPolicy"]


class EvictionPolicy(Protocol):
    """A queue of the nodes that may be evicted now.

    The tree says which nodes those are; the policy only orders them. Every method costs the same
    whatever the number of nodes, up to a logarithm, amortised.
    """

    def add(self, node: RadixNode) -> None:
        """Take `node`, which is not in the queue; `node.last_access` says when it was used."""

    def discard(self, node: RadixNode) -> None:
        """Take `node`, which is in the queue, out of it."""

    def touch(self, node: RadixNode) -> None:
        """Note that `node`, which is in the queue, was just used.

        A hint: a node deeper on the path may have been used without a call. `pop` looks at
        `last_access` before it answers.
        """

    def pop(self) -> RadixNode | None:
        """Take the next node to evict out of the queue; None when it is empty."""

    def __len__(self) -> int:
        """Return the number of nodes in the queue."""

    def __iter__(self) -> Iterator[RadixNode]:
        """Return the nodes in any order (for checks)."""


@runtime_checkable
class LearningPolicy(EvictionPolicy, Protocol):
    """A policy that wants to know when runs were used.

    For such a one the tree keeps a `RunHistory`, one for all its queues.
    """

    def learn_from(self, history: RunHistory) -> None:
        """Take the history of the tree; called once, before any node comes."""


class LruPolicy:
    """Least recently used first, at constant cost in the common case.

    Nodes usually become evictable right after they were used, so they arrive in the order of their
    last use and an ordered dictionary is enough. A node that arrives out of order (a parent whose
    last child went, a lock given back late) waits in a heap beside it, and the older of both heads
    goes first. A heap entry whose node left is dropped when it surfaces, or by a rebuild when such
    entries are the majority.
    """

    def __init__(self) -> None:
        self._ordered: OrderedDict[RadixNode, int] = OrderedDict()
        self._late: dict[RadixNode, int] = {}
        self._heap: list[tuple[int, int, RadixNode]] = []
        self._newest = 0

    def add(self, node: RadixNode) -> None:
        """See `EvictionPolicy.add`."""
        tick = node.last_access
        if tick >= self._newest:
            self._ordered[node] = self._newest = tick
            return
        self._late[node] = tick
        if len(self._heap) > 2 * len(self._late) + 64:
            self._heap = [(tick, late.id, late) for late, tick in self._late.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (tick, node.id, node))

    def discard(self, node: RadixNode) -> None:
        """See `EvictionPolicy.discard`."""
        if self._ordered.pop(node, None) is None:
            del self._late[node]

    def touch(self, node: RadixNode) -> None:
        """See `EvictionPolicy.touch`."""
        if node in self._ordered:
            self._ordered.move_to_end(node)
        else:
            del self._late[node]
        self._ordered[node] = self._newest = node.last_access

    def pop(self) -> RadixNode | None:
        """See `EvictionPolicy.pop`."""
        node = self.peek()
        if node is not None:
            self.discard(node)
        return node

    def peek(self) -> RadixNode | None:
        """Return the node that `pop` would take; None when the queue is empty."""
        while True:
            node, tick = self._oldest()
            if node is None or node.last_access == tick:
                return node
            self.discard(node)
            self.add(node)

    def _oldest(self) -> tuple[RadixNode | None, int]:
        heap, late = self._heap, self._late
        while heap and late.get(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        for node, tick in self._ordered.items():
            if not heap or tick <= heap[0][0]:
                return node, tick
            break
        return (heap[0][2], heap[0][0]) if heap else (None, 0)

    def __len__(self) -> int:
        return len(self._ordered) + len(self._late)

    def __iter__(self) -> Iterator[RadixNode]:
        yield from self._ordered
        yield from self._late

"""Pinned runs go last, for as long as they are pinned."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from hicache.radix.eviction import LearningPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicache.radix.eviction import EvictionPolicy
    from hicache.radix.node import RadixNode

__all__ = ["PinningPolicy"]


class PinningPolicy:
    """Another policy, which gets a node only when no pin protects it; see `RadixTree.pin`.

    When nothing else is left, the node whose pin ends first goes.

        create = partial(PinningPolicy, create_policy("adaptive"), clock=seconds)

    Args:
        create_policy: makes the other policy.
        clock: the time that pins are given in. With several ranks it must read the same on each of
            them at the same call, for instance a count of the scheduler's steps.
    """

    def __init__(
        self, create_policy: Callable[[], EvictionPolicy], *, clock: Callable[[], float]
    ) -> None:
        self._policy = create_policy()
        self._clock = clock
        self._pinned: dict[RadixNode, float] = {}
        self._heap: list[tuple[float, int, RadixNode]] = []
        if isinstance(self._policy, LearningPolicy):
            self.learn_from = self._policy.learn_from

    def add(self, node: RadixNode) -> None:
        """See `EvictionPolicy.add`."""
        if node.pinned_until <= self._clock():
            self._policy.add(node)
            return
        self._pinned[node] = node.pinned_until
        heapq.heappush(self._heap, (node.pinned_until, node.id, node))
        if len(self._heap) > 2 * len(self._pinned) + 64:
            self._heap = [(until, kept.id, kept) for kept, until in self._pinned.items()]
            heapq.heapify(self._heap)

    def discard(self, node: RadixNode) -> None:
        """See `EvictionPolicy.discard`."""
        if self._pinned.pop(node, None) is None:
            self._policy.discard(node)

    def touch(self, node: RadixNode) -> None:
        """See `EvictionPolicy.touch`."""
        if node.pinned_until > self._clock():
            self.discard(node)
            self.add(node)
        elif node not in self._pinned:
            self._policy.touch(node)

    def pop(self) -> RadixNode | None:
        """See `EvictionPolicy.pop`."""
        node = self.pop_unpinned()
        while node is None and self._heap:
            node = self._pop_pinned()
        return node

    def pop_unpinned(self) -> RadixNode | None:
        """Take the next node that no pin protects; None when there is none."""
        now = self._clock()
        while self._heap and self._heap[0][0] <= now:
            released = self._pop_pinned()
            if released is not None:
                self._policy.add(released)
        return self._policy.pop()

    def _pop_pinned(self) -> RadixNode | None:
        """Take the first entry; None when it is of a node that left or was pinned anew."""
        until, _, node = heapq.heappop(self._heap)
        if self._pinned.get(node) != until:
            return None
        del self._pinned[node]
        return node

    def __len__(self) -> int:
        return len(self._policy) + len(self._pinned)

    def __iter__(self) -> Iterator[RadixNode]:
        yield from self._policy
        yield from self._pinned

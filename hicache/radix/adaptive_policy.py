"""Eviction of what is worth least, by what the workload has shown so far."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hicache.radix.eviction import LruPolicy
from hicache.radix.reuse_statistics import NUM_AGES, NUM_CELLS, cell_of
from hicache.radix.run_history import RunHistory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache.radix.node import RadixNode

__all__ = ["AdaptivePolicy"]

_MAX_MOVES: Final = 16
"""Nodes that one call moves on; more than the octaves that a node has to pass in its life."""


class AdaptivePolicy:
    """The node whose pages are worth least goes first; see `ReuseStatistics` for what worth is.

    Nodes of equal class of uses and octave of age are worth the same, so they stand in one queue,
    the least recently used first, and only the queues are ordered. With nothing learnt yet worth
    falls with age, which is LRU. Nodes move on between the queues as they age, once per octave, a
    few with each call, so that no call has to move many.
    """

    def __init__(self) -> None:
        self._queues = [LruPolicy() for _ in range(NUM_CELLS)]
        self._cells: dict[RadixNode, int] = {}
        self._sweep = self._swept()
        self.learn_from(RunHistory())

    def learn_from(self, history: RunHistory) -> None:
        """See `LearningPolicy.learn_from`."""
        self._statistics = history.statistics
        self._rank()

    def add(self, node: RadixNode) -> None:
        """See `EvictionPolicy.add`."""
        self._move_on()
        self._enqueue(node)

    def _enqueue(self, node: RadixNode) -> None:
        cell = self._cell_of(node)
        self._queues[cell].add(node)
        self._cells[node] = cell
        self._filled |= 1 << self._ranks[cell]

    def discard(self, node: RadixNode) -> None:
        """See `EvictionPolicy.discard`."""
        cell = self._cells.pop(node)
        queue = self._queues[cell]
        queue.discard(node)
        if not queue:
            self._filled &= ~(1 << self._ranks[cell])

    def touch(self, node: RadixNode) -> None:
        """See `EvictionPolicy.touch`."""
        if self._cells[node] == self._cell_of(node):
            self._queues[self._cells[node]].touch(node)
        else:
            self.discard(node)
            self._enqueue(node)

    def pop(self) -> RadixNode | None:
        """See `EvictionPolicy.pop`."""
        self._move_on()
        if self._version != self._statistics.version:
            self._rank()
        num_moves = 0
        while self._filled:
            # The lowest bit stands for the filled queue that is worth least.
            rank = (self._filled & -self._filled).bit_length() - 1
            cell = self._order[rank]
            node = self._queues[cell].peek()
            assert node is not None
            self.discard(node)
            if self._cell_of(node) == cell or num_moves == _MAX_MOVES:
                return node
            self._enqueue(node)
            num_moves += 1
        return None

    def _cell_of(self, node: RadixNode) -> int:
        return cell_of(node.num_uses, self._statistics.now - node.last_use)

    def _move_on(self) -> None:
        for _ in range(_MAX_MOVES):
            if next(self._sweep):
                break

    def _swept(self) -> Iterator[bool]:
        """Move on what has aged into another octave; yields whether nothing is left to do now.

        A queue is looked at again when its octave is an eighth further, so that each node costs
        about as much as it has octaves behind it.
        """
        before = 0
        while True:
            now = self._statistics.now
            for age in range(NUM_AGES - 1):
                period_shift = max(age - 3, 0)
                if now >> period_shift == before >> period_shift:
                    break
                for cell in range(age, NUM_CELLS, NUM_AGES):
                    while (node := self._queues[cell].peek()) and self._cell_of(node) != cell:
                        self.discard(node)
                        self._enqueue(node)
                        yield False
            before = now
            yield True

    def _rank(self) -> None:
        """Order the queues anew; of equal ones the older goes first."""
        worth = self._statistics.worth
        self._version = self._statistics.version
        self._order = sorted(
            range(NUM_CELLS), key=lambda cell: (worth[cell], -(cell % NUM_AGES), cell)
        )
        self._ranks = [0] * NUM_CELLS
        self._filled = 0
        for rank, cell in enumerate(self._order):
            self._ranks[cell] = rank
            if self._queues[cell]:
                self._filled |= 1 << rank

    def __len__(self) -> int:
        return len(self._cells)

    def __iter__(self) -> Iterator[RadixNode]:
        return iter(self._cells)

"""What goes from the host to storage, and when it is tried again."""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hicache.types import StorageAdmission

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator

    from hicache.config import StorageConfig
    from hicache.controller import HiCacheController
    from hicache.controller.operations import StorageOperation
    from hicache.radix import RadixNode, RadixTree, Ticket

__all__ = ["Persister"]

_MAX_LEFT_OUT = 4096
"""Runs that are remembered; beyond, the oldest waits until it is next inserted or written."""

_RETRIES_A_STEP = 16
_FIRST_PAUSE_STEPS = 64
_LONGEST_PAUSE_STEPS = 8192


class Persister:
    """Persists runs once they have a host copy: all, or those that may well be used again.

    A run that storage did not take, or for which there was no room in the queue, is remembered and
    tried again after a pause, which doubles while storage goes on to fail and ends when it takes
    something; and at once when it is next inserted or written. Pauses are counted in scheduler
    steps, as all ranks take equally many.

    What storage holds it can give up, or lose, without a word. So a run that is used again is
    offered again when storage last said so `storage.refresh_seconds` ago: a store that holds it
    learns that it is in use, and one that does not gets it back.
    """

    def __init__(
        self, tree: RadixTree, controller: HiCacheController, counters: Counter[str]
    ) -> None:
        self._tree = tree
        self._controller = controller
        self._counters = counters
        self._nodes: dict[Ticket, RadixNode] = {}
        self._left_out: deque[RadixNode] = deque(maxlen=_MAX_LEFT_OUT)
        self._pause_steps = _FIRST_PAUSE_STEPS
        self._steps_left = 0
        self._stores_all = False

    @contextmanager
    def storing_all(self) -> Iterator[None]:
        """Leave nothing out inside, whatever `storage.admission` says."""
        self._stores_all = True
        try:
            yield
        finally:
            self._stores_all = False

    def offer(self, node: RadixNode) -> None:
        """Persist `node`, or what of its prefix `storage.admission` lets pass."""
        storage = self._controller.storage
        if storage is None or node.host_pages is None or node.persist_ticket:
            return
        if node.persisted and node.stored_at >= self._held_since(storage):
            return
        admits_some = storage.admission is StorageAdmission.ADAPTIVE and not self._stores_all
        if admits_some and not node.persisted:
            admitted = self._tree.keep_history().admit_to_storage(node)
            self._counters["refused_persist_pages"] += node.end - admitted.end
            node = admitted
        self.persist(node)

    def persist(self, node: RadixNode) -> None:
        """Queue `node` and its ancestors that storage does not hold; nothing without a store."""
        storage = self._controller.storage
        if storage is None:
            return
        was_held = node.persisted
        ticket = self._tree.begin_persist(node, since=self._held_since(storage))
        if ticket is None:
            return
        parent_hash, hashes = self._tree.ticket_hashes(ticket)
        operation = self._controller.store_queue.persist(
            self._tree.ticket_host_pages(ticket),
            ticket=ticket,
            hashes=hashes,
            parent_hash=parent_hash,
            max_operations=storage.max_inflight_persist_operations,
        )
        if operation is None:
            self._tree.commit_persist(ticket, 0)
            self._counters["persist_queue_full"] += 1
            self._leave_out(node)
        else:
            self._nodes[ticket] = node
            self._counters["persist_refreshes"] += was_held

    def finish(self, operation: StorageOperation, num_good: int) -> None:
        """Give the outcome of a persist to the tree; what failed is tried again."""
        node = self._nodes.pop(operation.ticket)
        self._tree.commit_persist(operation.ticket, num_good, now=self._controller.now)
        if num_good == len(operation.hashes):
            self._pause_steps, self._steps_left = _FIRST_PAUSE_STEPS, 0
        elif operation.ticket.generation == self._tree.generation:
            self._leave_out(node)

    def step(self) -> None:
        """Try what was left out again, some of it, when the pause is over."""
        if not self._left_out or self._controller.storage is None:
            return
        self._steps_left -= 1
        if self._steps_left > 0:
            return
        self._pause_steps = min(2 * self._pause_steps, _LONGEST_PAUSE_STEPS)
        self._steps_left = self._pause_steps
        for _ in range(min(_RETRIES_A_STEP, len(self._left_out))):
            node = self._left_out.popleft()
            if node.parent is not None:
                self._counters["persist_retries"] += 1
                self.persist(node)

    def forget(self) -> None:
        """Try nothing again: the tree has been reset, or the store has changed."""
        self._left_out.clear()
        self._pause_steps = _FIRST_PAUSE_STEPS

    def _held_since(self, storage: StorageConfig) -> float:
        """Return since when storage must have said that it holds a run, to be believed."""
        return self._controller.now - storage.refresh_seconds

    def _leave_out(self, node: RadixNode) -> None:
        if not self._left_out:
            self._steps_left = self._pause_steps
        self._left_out.append(node)

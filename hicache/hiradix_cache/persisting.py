"""What goes from the host to storage, and when it is tried again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections import Counter

    from hicache.controller import HiCacheController
    from hicache.radix import RadixNode, RadixTree

__all__ = ["Persister"]


class Persister:
    """Persists each run once it has a host copy.

    A run that storage refused, or for which there was no room in the queue, is tried again when
    it is next inserted or written: nothing is kept for it meanwhile.
    """

    def __init__(
        self, tree: RadixTree, controller: HiCacheController, counters: Counter[str]
    ) -> None:
        self._tree = tree
        self._controller = controller
        self._counters = counters

    def persist(self, node: RadixNode) -> None:
        """Queue `node` and its ancestors that storage does not hold; nothing without a store."""
        if self._controller.storage is None:
            return
        ticket = self._tree.begin_persist(node)
        if ticket is None:
            return
        parent_hash, hashes = self._tree.ticket_hashes(ticket)
        operation = self._controller.write_storage(
            self._tree.ticket_host_pages(ticket),
            ticket=ticket,
            hashes=hashes,
            parent_hash=parent_hash,
        )
        if operation is None:
            self._tree.commit_persist(ticket, 0)
            self._counters["persist_queue_full"] += 1

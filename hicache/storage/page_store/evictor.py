"""Gives up pages in the order of a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.storage.page_store.blocks import Extent, merge
from hicache.storage.page_store.catalogue import LEAF_KEY, Catalogue, Freed, Leaf
from hicache.storage.page_store.counters import EVICTED

if TYPE_CHECKING:
    from collections.abc import Collection

    from hicache.storage.page_store.departed import Departed
    from hicache.storage.page_store.eviction_policies import Stage, StoragePolicy
    from hicache.storage.page_store.index import WriteTransaction

__all__ = ["evict"]

_LAST_TICK = (1 << 64) - 1


def evict(
    write: WriteTransaction,
    policy: StoragePolicy,
    departed: Departed,
    *,
    num_blocks: int,
    max_pages: int,
    protected: Collection[int],
) -> Freed:
    """Give up pages that no stored page is chained from, in the order of a policy.

    Ends when that many blocks are free, that many pages are gone, or nothing more can go. The
    cost of a page does not depend on how many are stored.

    Args:
        write: the transaction in which it happens.
        policy: the order.
        departed: remembers what goes.
        num_blocks: blocks of payloads to free.
        max_pages: bounds the transaction.
        protected: groups that must stay as they are.
    """
    work = _Eviction(write, departed, num_blocks, max_pages, protected)
    stages = policy.stages(write.history)
    num_before = -1
    # What a leaf hung below may have come into an earlier stage.
    while num_before < work.num_pages and not work.is_done():
        num_before = work.num_pages
        for stage in stages:
            work.evict_from(stage)
            if work.is_done():
                break
    if work.num_pages:
        Catalogue(write).add_to(EVICTED, work.num_pages)
    return Freed(work.num_pages, merge(work.payload), work.headers)


class _Eviction:
    """What has been given up within a transaction, and what is still to go."""

    def __init__(
        self,
        write: WriteTransaction,
        departed: Departed,
        num_blocks: int,
        max_pages: int,
        protected: Collection[int],
    ) -> None:
        self.num_pages = 0
        self.payload: list[Extent] = []
        self.headers: list[Extent] = []
        self._write = write
        self._departed = departed
        self._catalogue = Catalogue(write)
        self._num_blocks = num_blocks
        self._max_pages = max_pages
        self._protected = protected

    def is_done(self) -> bool:
        """Whether as much is gone as was wanted."""
        return self._num_blocks <= 0 or self.num_pages >= self._max_pages

    def evict_from(self, stage: Stage) -> None:
        """Give up leaves of a stage, the longest unused first, until none is left or wanted."""
        history = self._write.history
        oldest = 0 if stage.oldest is None else max(history.now - stage.oldest, 0)
        newest = history.now - stage.youngest if stage.youngest else _LAST_TICK
        if newest < 0:
            return
        # For each class the first leaf that may go, and where to look for the next one.
        heads: dict[int, Leaf] = {}
        starts: dict[int, bytes] = {}
        for use_class in stage.use_classes:
            starts[use_class] = LEAF_KEY.pack(use_class, oldest, 0)
            self._find_head(heads, use_class, starts[use_class], newest)
        while heads and not self.is_done():
            leaf = min(heads.values(), key=_age_order)
            use_class = leaf.use_class
            freed = Freed(0, [], [])
            if leaf.group_id in self._protected:
                starts[use_class] = LEAF_KEY.pack(*leaf) + b"\x00"
            else:
                freed = self._give_up(leaf)
            self._find_head(heads, use_class, starts[use_class], newest)
            for one in freed.leaves:
                if one.use_class in starts and oldest <= one.last_use <= newest:
                    heads[one.use_class] = min(heads.get(one.use_class, one), one)

    def _find_head(self, heads: dict[int, Leaf], use_class: int, start: bytes, newest: int) -> None:
        leaf = self._catalogue.first_leaf(start)
        if leaf is None or leaf.use_class != use_class or leaf.last_use > newest:
            heads.pop(use_class, None)
        else:
            heads[use_class] = leaf

    def _give_up(self, leaf: Leaf) -> Freed:
        """Give up as much of a leaf as may go and is wanted."""
        freed = self._catalogue.evict(
            leaf,
            self._departed,
            num_blocks=self._num_blocks,
            max_pages=self._max_pages - self.num_pages,
        )
        self.num_pages += freed.num_pages
        self.payload += freed.payload
        self.headers += freed.headers
        self._num_blocks -= sum(extent.num_blocks for extent in freed.payload)
        return freed


def _age_order(leaf: Leaf) -> tuple[int, int]:
    return leaf.last_use, leaf.group_id

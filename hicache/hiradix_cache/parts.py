"""What a cache consists of, put together once."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hicache.hiradix_cache.loading import HostLoader
from hicache.hiradix_cache.persisting import Persister
from hicache.hiradix_cache.prefetching import Prefetcher
from hicache.hiradix_cache.returning import PageReturns
from hicache.hiradix_cache.writing import HostWriter

if TYPE_CHECKING:
    from collections import Counter

    from hicache.controller import HiCacheController
    from hicache.radix import RadixTree

__all__ = ["CacheParts"]


@dataclasses.dataclass(frozen=True)
class CacheParts:
    """The tree, the controller, and what joins them for each movement."""

    tree: RadixTree
    controller: HiCacheController
    counters: Counter[str]
    returns: PageReturns
    persister: Persister
    writer: HostWriter
    loader: HostLoader
    prefetcher: Prefetcher

    @classmethod
    def create(
        cls, tree: RadixTree, controller: HiCacheController, counters: Counter[str]
    ) -> CacheParts:
        """Return the parts over `tree` and `controller`; they count in `counters`."""
        returns = PageReturns(controller.device_allocator, controller.host_allocator)
        persister = Persister(tree, controller, counters)
        writer = HostWriter(
            tree, controller, persister=persister, returns=returns, counters=counters
        )
        return cls(
            tree,
            controller,
            counters,
            returns,
            persister,
            writer,
            HostLoader(tree, controller, writer=writer, returns=returns, counters=counters),
            Prefetcher(tree, controller, writer=writer, counters=counters),
        )

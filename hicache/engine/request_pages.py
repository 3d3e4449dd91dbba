"""Which device pages a request owns: it gets them, gives them to the tree, gives them back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hicache.engine.request import Request
    from hicache.hiradix_cache import HiRadixCache
    from hicache.pools import Allocator

__all__ = ["RequestPages"]


class RequestPages:
    """The page tables of an engine's requests.

    Args:
        allocator: free device pages, shared with the cache.
        cache: None when requests keep all their pages to themselves.
        page_size: tokens in a page.
    """

    def __init__(self, allocator: Allocator, cache: HiRadixCache | None, page_size: int) -> None:
        self._allocator = allocator
        self._cache = cache
        self._page_size = page_size

    def count_for(self, num_tokens: int) -> int:
        """Return how many pages `num_tokens` tokens need."""
        return -(-num_tokens // self._page_size)

    def make_room(self, num_pages: int) -> bool:
        """Evict until `num_pages` are free; False when that takes longer than this step."""
        if self._allocator.num_available < num_pages and self._cache is not None:
            self._cache.evict(num_pages - self._allocator.num_available)
        return self._allocator.num_available >= num_pages

    def grow(self, request: Request, num_guesses: int = 0) -> bool:
        """Give `request` pages for all its tokens and guesses; False when there are too few."""
        missing = self.count_for(request.num_tokens + num_guesses) - len(request.pages)
        if missing > 0:
            if not self.make_room(missing):
                return False
            pages = self._allocator.alloc(missing)
            assert pages is not None
            request.pages = np.concatenate([request.pages, pages])
        return True

    def reserve_write(self, request: Request, num_tokens: int) -> None:
        """Let the pages that a pass over the next `num_tokens` tokens completes be written in it.

        `insert` or `abandon_write` has to follow.
        """
        if self._cache is None or not request.cacheable:
            return
        # The host may have pages that are computed all the same, as that is faster than a load.
        first = max(request.num_tree_pages, request.num_host_pages)
        last = (request.num_computed + num_tokens) // self._page_size
        self._cache.reserve_write(request.request_id, request.pages[first:last])

    def insert(self, request: Request, *, chunked: bool) -> None:
        """Give the tree what is computed, and let the page table point at the tree's pages.

        Without a cache, or for a request that must not be cached, the pages stay the request's.
        """
        cache = self._cache
        if cache is None or not request.cacheable:
            return
        key = request.computed_key()
        result = cache.insert(
            key,
            request.pages,
            request_id=request.request_id,
            chunked=chunked,
            priority=request.priority,
        )
        first, present = request.num_tree_pages, result.already_present_pages
        if present > first:
            self._allocator.free(request.pages[first:present])
            request.pages[first:present] = result.present_pages[first:]
        if result.end_page > first:
            cache.inc_lock_ref(result.node)
            if request.node is not None:
                cache.dec_lock_ref(request.node)
            request.node, request.num_tree_pages = result.node, result.end_page

    def release(self, request: Request) -> None:
        """Give back the request's own pages and its lock."""
        self._allocator.free(request.pages[request.num_tree_pages :])
        if request.node is not None:
            assert self._cache is not None
            self._cache.dec_lock_ref(request.node)
        request.release()

"""What becomes of a request's pages when they are inserted."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache.hiradix_cache.parts import CacheParts
    from hicache.hiradix_cache.pins import Pins
    from hicache.hiradix_cache.publishing import Publisher
    from hicache.radix import InsertResult, RadixKey
    from hicache.types import IntArray, RequestId

__all__ = ["Inserter"]


class Inserter:
    """Inserts for requests, which may come in chunks, and tells everybody who wants to know.

    Args:
        parts: of the cache.
        pins: prefixes that are to stay.
        publisher: knows whether L2 and L3 are off.
    """

    def __init__(self, parts: CacheParts, *, pins: Pins, publisher: Publisher) -> None:
        self._parts = parts
        self._pins = pins
        self._publisher = publisher
        self._counted_pages: dict[RequestId, int] = {}
        self._has_priorities = False

    def insert(
        self,
        key: RadixKey,
        device_pages: IntArray,
        request_id: RequestId,
        priority: int,
        *,
        chunked: bool,
    ) -> InsertResult:
        """See `HiRadixCache.insert`."""
        parts = self._parts
        tree = parts.tree
        counted = self._counted_pages.pop(request_id, 0)
        result = tree.insert(key, device_pages, count_from_page=counted)
        self._has_priorities |= priority != 0
        if self._has_priorities:
            tree.prioritize(result.node, priority)
        if self._publisher.is_off:
            nodes = tree.path(result.node)
            parts.returns.adopted(
                [one.device_pages for one in nodes if one.device_pages is not None]
            )
        if chunked:
            self._counted_pages[request_id] = max(counted, result.end_page)
        else:
            # Whoever did not ask for it before its end does not want it.
            parts.prefetcher.pop_loaded_tokens(request_id)
        parts.writer.after_insert(result, request_id)
        self._pins.after_insert(key, result)
        return result

    def forget(self, request_id: RequestId) -> None:
        """Forget a request that inserts nothing more."""
        self._counted_pages.pop(request_id, None)

    def reset(self) -> None:
        """Forget all requests."""
        self._counted_pages.clear()

"""Runs that were used again are protected, within bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hicache.errors import ConfigError
from hicache.radix.eviction import LruPolicy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache.radix.node import RadixNode

__all__ = ["SlruPolicy"]

_PROTECTED_SHARE: Final = 0.2


class SlruPolicy:
    """Segmented LRU: runs that were used once go first, unless too many others are protected.

    Protected runs hold at most a share of the pages in the queue; beyond it the least recently used
    of them stand with the others again until they are used. Without that bound, everything that was
    ever used twice would stay for good.

    Args:
        protected_share: the share, 0 to 1.

    Raises:
        ConfigError: the share is none.
    """

    def __init__(self, *, protected_share: float = _PROTECTED_SHARE) -> None:
        if not 0 <= protected_share <= 1:
            raise ConfigError(f"protected_share is a share, 0 to 1, not {protected_share}")
        self._share = protected_share
        self._probation = LruPolicy()
        self._protected = LruPolicy()
        self._protected_pages: dict[RadixNode, int] = {}
        self._num_protected_pages = 0
        self._pages: dict[RadixNode, int] = {}
        self._num_pages = 0

    def add(self, node: RadixNode) -> None:
        """See `EvictionPolicy.add`."""
        # A split shortens a run where it stands, so what was counted is remembered.
        self._pages[node] = num_pages = node.end - node.start
        self._num_pages += num_pages
        if node.hit_count < 2:
            self._probation.add(node)
            return
        self._protected.add(node)
        self._protected_pages[node] = num_pages
        self._num_protected_pages += num_pages
        self._bound()

    def discard(self, node: RadixNode) -> None:
        """See `EvictionPolicy.discard`."""
        self._num_pages -= self._pages.pop(node)
        num_pages = self._protected_pages.pop(node, None)
        if num_pages is None:
            self._probation.discard(node)
        else:
            self._num_protected_pages -= num_pages
            self._protected.discard(node)

    def touch(self, node: RadixNode) -> None:
        """See `EvictionPolicy.touch`."""
        self.discard(node)
        self.add(node)

    def pop(self) -> RadixNode | None:
        """See `EvictionPolicy.pop`."""
        self._bound()
        node = self._probation.peek() or self._protected.peek()
        if node is not None:
            self.discard(node)
        return node

    def _bound(self) -> None:
        while self._num_protected_pages > self._share * self._num_pages:
            node = self._protected.pop()
            assert node is not None
            self._num_protected_pages -= self._protected_pages.pop(node)
            self._probation.add(node)

    def __len__(self) -> int:
        return len(self._pages)

    def __iter__(self) -> Iterator[RadixNode]:
        return iter(self._pages)
